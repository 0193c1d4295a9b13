package store

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/lib/pq"

	"headgate/tasks"
)

// How much of the history one check looks at: the newest tasks each time, and
// all others a piece at a time, so that it costs the same however many are kept.
const (
	checkNewest = 20_000
	checkPiece  = 20_000
	checkNamed  = 20 // of what is wrong, by number
)

// Consistency is what a check of the queue found wrong; normally nothing. A
// finding means that a promise was broken, by us or by somebody who wrote into
// the tables by hand.
type Consistency struct {
	Crowded []tasks.AgentNum // agents with more than one started task
	Torn    []tasks.ID       // tasks without exactly one of queue row, later row and result
	Lost    []tasks.ID       // started rows of the queue whose task does not exist
	Looked  int              // tasks looked at
}

// OK says whether nothing is wrong.
func (c Consistency) OK() bool { return len(c.Crowded)+len(c.Torn)+len(c.Lost) == 0 }

// consistency remembers how far the check has come.
type consistency struct {
	mu    sync.Mutex // guards after; held during a check
	after int64      // the tasks up to this one were looked at
}

// The started rows are few, at most one for each agent, but finding them means
// reading the queue: 46 ms with 1,000,000 rows waiting.
const sqlCrowded = `
SELECT agent_num FROM agent_queue WHERE started_at IS NOT NULL
GROUP BY agent_num HAVING count(*) > 1
ORDER BY agent_num LIMIT $1`

const sqlLost = `
SELECT q.task_id FROM agent_queue q
WHERE q.started_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM agent_task t WHERE t.id = q.task_id)
ORDER BY q.task_id LIMIT $1`

// One statement is one snapshot, in which a turn has moved its rows or not. A
// count in the select list probes one row after the other by key, whatever the
// planner believes.
const sqlTorn = `
SELECT count(*) AS looked, coalesce(max(id), 0) AS last,
       coalesce(array_agg(id ORDER BY id) FILTER (WHERE places <> 1), '{}') AS torn
FROM (
    SELECT t.id,
        (SELECT count(*) FROM agent_queue q WHERE q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id) +
        (SELECT count(*) FROM agent_later l WHERE l.task_id = t.id) +
        (SELECT count(*) FROM agent_result r WHERE r.task_id = t.id) AS places
    FROM (SELECT id, agent_num, priority FROM agent_task WHERE id > $1 ORDER BY id LIMIT $2) t
) t`

const sqlNewestTask = `SELECT coalesce(max(id), 0) FROM agent_task`

// CheckConsistency looks whether the tables say the same; call it once a
// minute, at one controller. It also sets the metrics.
func (d *DB) CheckConsistency(ctx context.Context) (Consistency, error) {
	c := &d.consistency
	c.mu.Lock()
	defer c.mu.Unlock()
	began := time.Now()
	found, err := d.checkConsistency(ctx, c)
	if err != nil {
		return found, asFault(ctx, err, "compare the tables of the queue")
	}
	d.metrics.upkeep.broken(found)
	d.cfg.Log.Debug("compared the tables of the queue", "tasks", found.Looked, "took", time.Since(began))
	return found, nil
}

func (d *DB) checkConsistency(ctx context.Context, c *consistency) (Consistency, error) {
	var found Consistency
	var crowded []int32
	var lost []int64
	if err := d.upkeep.SelectContext(ctx, &crowded, sqlCrowded, checkNamed); err != nil {
		return found, err
	}
	if err := d.upkeep.SelectContext(ctx, &lost, sqlLost, checkNamed); err != nil {
		return found, err
	}
	for _, n := range crowded {
		found.Crowded = append(found.Crowded, tasks.AgentNum(n))
	}
	for _, id := range lost {
		found.Lost = append(found.Lost, tasks.ID(id))
	}
	var newest int64
	if err := d.upkeep.GetContext(ctx, &newest, sqlNewestTask); err != nil {
		return found, err
	}
	from := max(newest-checkNewest, 0)
	if _, err := d.checkTasks(ctx, &found, from, 2*checkNewest); err != nil {
		return found, err
	}
	if from == 0 {
		return found, nil // that was all of them
	}
	end, err := d.checkTasks(ctx, &found, c.after, checkPiece)
	if err != nil {
		return found, err
	}
	if c.after = end; end >= from || end == 0 {
		c.after = 0 // from the oldest again
	}
	return found, nil
}

// checkTasks looks at the next tasks after one and gives the last of them; 0 =
// there was none.
func (d *DB) checkTasks(ctx context.Context, found *Consistency, after int64, limit int) (int64, error) {
	var seen struct {
		Looked int           `db:"looked"`
		Last   int64         `db:"last"`
		Torn   pq.Int64Array `db:"torn"`
	}
	if err := d.upkeep.GetContext(ctx, &seen, sqlTorn, after, limit); err != nil {
		return 0, err
	}
	found.Looked += seen.Looked
	for _, id := range seen.Torn[:min(len(seen.Torn), checkNamed-len(found.Torn))] {
		found.Torn = append(found.Torn, tasks.ID(id))
	}
	return seen.Last, nil
}

// LeaveConsistency says that another controller compares the tables.
func (d *DB) LeaveConsistency() {
	d.metrics.upkeep.broken(Consistency{})
}

// Notes says in sentences what is wrong.
func (c Consistency) Notes() []string {
	var notes []string
	if len(c.Crowded) > 0 {
		notes = append(notes, fmt.Sprintf("agents have more than one started task (agent numbers %v): stop all controllers but one, and report it", c.Crowded))
	}
	if len(c.Torn) > 0 {
		notes = append(notes, fmt.Sprintf("tasks do not have exactly one of queue row, later row and result (%v): report it", c.Torn))
	}
	if len(c.Lost) > 0 {
		notes = append(notes, fmt.Sprintf("started tasks do not exist (%v): report it", c.Lost))
	}
	return notes
}
