package store

import (
	"context"
	"encoding/json"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
)

// MissedFact is the result of an inventory that is newer than the facts that
// its agent has.
type MissedFact struct {
	Agent tasks.AgentNum
	Facts json.RawMessage
	At    time.Time
}

// missedIDs is how far back MissedFacts looks, in ids: some minutes of a very
// busy fleet, days of an ordinary one.
const missedIDs = 1_000_000

// The index by kind leads to the inventories alone.
const sqlMissedFacts = `
SELECT DISTINCT ON (t.agent_num) t.agent_num, r.result, r.completed_at
FROM agent_task t
JOIN agent_result r ON r.task_id = t.id
JOIN agent a ON a.num = t.agent_num
WHERE t.kind = $1 AND t.id > (SELECT coalesce(max(id), 0) - $2::bigint FROM agent_task)
  AND r.outcome = 'succeeded' AND r.result IS NOT NULL
  AND a.status <> 'removed' AND (a.facts_at IS NULL OR a.facts_at < r.completed_at)
ORDER BY t.agent_num, r.completed_at DESC`

// MissedFacts gives, for each agent, the newest inventory that was completed
// and has not become its facts.
func (d *DB) MissedFacts(ctx context.Context) ([]MissedFact, error) {
	var rows []struct {
		Agent int32     `db:"agent_num"`
		Facts string    `db:"result"`
		At    time.Time `db:"completed_at"`
	}
	if err := d.general.SelectContext(ctx, &rows, sqlMissedFacts, kinds.Inventory, missedIDs); err != nil {
		return nil, asFault(ctx, err, "look for facts that were missed")
	}
	var out []MissedFact
	for _, r := range rows {
		out = append(out, MissedFact{Agent: tasks.AgentNum(r.Agent), Facts: json.RawMessage(r.Facts), At: r.At.UTC()})
	}
	return out, nil
}
