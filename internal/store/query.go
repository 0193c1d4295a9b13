package store

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"headgate/tasks"
)

// queryMeaning is what the text of a search may stand for.
type queryMeaning struct {
	agents   []int64
	kinds    []string
	idRanges [][2]int64 // of ids that begin with the text
	idPrefix string     // LIKE pattern
}

const sqlAgentsByLabels = `SELECT num FROM agent WHERE labels @> $1::jsonb ORDER BY num LIMIT $2`

const sqlAgentsByName = `SELECT num FROM agent WHERE name LIKE $1 ORDER BY num LIMIT $2`

// Kinds are few; this jumps from one to the next in the index.
const sqlKindsInUse = `
WITH RECURSIVE k AS (
    (SELECT kind FROM agent_task ORDER BY kind LIMIT 1)
    UNION ALL
    SELECT (SELECT t.kind FROM agent_task t WHERE t.kind > k.kind ORDER BY t.kind LIMIT 1)
    FROM k WHERE k.kind IS NOT NULL
)
SELECT kind FROM k WHERE kind IS NOT NULL`

// resolve turns labels and query text into agents and kinds. It says none when
// nothing can match.
func (l *list) resolve(ctx context.Context) (none bool, err error) {
	if l.f.Agents != nil {
		l.agents = ints(l.f.Agents, func(n tasks.AgentNum) int64 { return int64(n) })
	}
	if len(l.f.Labels) > 0 {
		labels, err := json.Marshal(l.f.Labels)
		if err != nil {
			return false, err
		}
		var nums []int64
		if err := l.db.pages.SelectContext(ctx, &nums, sqlAgentsByLabels, string(labels), maxQueryAgents); err != nil {
			return false, err
		}
		if l.f.Agents == nil {
			l.agents = append([]int64{}, nums...)
		} else {
			l.agents = slices.DeleteFunc(l.agents, func(n int64) bool { return !slices.Contains(nums, n) })
		}
	}
	if l.agents != nil && len(l.agents) == 0 {
		return true, nil
	}
	if l.f.Query == "" {
		return false, nil
	}
	l.byQuery, err = l.db.meaning(ctx, l.f.Query)
	return false, err
}

func (d *DB) meaning(ctx context.Context, q string) (*queryMeaning, error) {
	q = plain(q)
	m := &queryMeaning{idPrefix: likePrefix(q), idRanges: idRanges(q)}
	if err := d.pages.SelectContext(ctx, &m.agents, sqlAgentsByName, likePrefix(q), maxQueryAgents); err != nil {
		return nil, err
	}
	var kinds []string
	if err := d.pages.SelectContext(ctx, &kinds, sqlKindsInUse); err != nil {
		return nil, err
	}
	m.kinds = slices.DeleteFunc(kinds, func(k string) bool { return !strings.HasPrefix(k, q) })
	return m, nil
}

func likePrefix(s string) string {
	return strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`).Replace(s) + "%"
}

// idRanges gives the ranges of ids whose decimal form begins with q.
func idRanges(q string) [][2]int64 {
	first, err := strconv.ParseInt(q, 10, 64)
	if err != nil || first <= 0 || q != strconv.FormatInt(first, 10) {
		return nil
	}
	const maxID = 1 << 62
	var out [][2]int64
	last := first
	for {
		out = append(out, [2]int64{first, last})
		if last > (maxID-9)/10 {
			return out
		}
		first, last = first*10, last*10+9
	}
}
