package store

import (
	"context"
	"time"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"
)

// The index by the time of removal finds the few that are new, whatever the
// number of agents that were ever removed.
const sqlRemoved = `
SELECT a.num, a.id, a.name
FROM agent a
WHERE a.status = 'removed' AND a.shard = ANY ($1::smallint[])
  AND a.removed_at >= CASE WHEN $2::bigint = 0 THEN '-infinity' ELSE now() - $2::bigint * interval '1 microsecond' END
  AND (EXISTS (SELECT 1 FROM agent_queue q WHERE q.agent_num = a.num)
    OR EXISTS (SELECT 1 FROM agent_later l WHERE l.agent_num = a.num))
ORDER BY a.num`

// Removed implements tasks.Queue.
func (d *DB) Removed(ctx context.Context, shards []tasks.Shard, within time.Duration) ([]tasks.Agent, error) {
	var rows []struct {
		Num  int32  `db:"num"`
		ID   uid    `db:"id"`
		Name string `db:"name"`
	}
	numbers := ints(shards, func(s tasks.Shard) int64 { return int64(s) })
	if err := d.loops.SelectContext(ctx, &rows, sqlRemoved, numbers, within.Microseconds()); err != nil {
		return nil, asFault(ctx, err, "look for removed agents")
	}
	var out []tasks.Agent
	for _, r := range rows {
		out = append(out, tasks.Agent{Num: tasks.AgentNum(r.Num), ID: uuid.UUID(r.ID), Name: r.Name, Removed: true})
	}
	return out, nil
}

const sqlAbandoned = `
(SELECT q.agent_num, q.priority, q.task_id, q.attempt, false AS later
 FROM unnest($1::integer[]) v (agent_num)
 CROSS JOIN LATERAL (
    SELECT q.* FROM agent_queue q WHERE q.agent_num = v.agent_num AND q.started_at IS NULL
    ORDER BY q.priority, q.task_id LIMIT $2) q
 LIMIT $2)
UNION ALL
(SELECT l.agent_num, l.priority, l.task_id, l.attempt, true
 FROM unnest($1::integer[]) v (agent_num)
 CROSS JOIN LATERAL (
    SELECT l.* FROM (SELECT * FROM agent_later WHERE agent_num = v.agent_num OFFSET 0) l ORDER BY l.task_id LIMIT $2) l
 LIMIT $2)
LIMIT $2`

// Abandoned implements tasks.Queue.
func (d *DB) Abandoned(ctx context.Context, agents []tasks.AgentNum, limit int) ([]tasks.Finish, error) {
	var rows []struct {
		Agent    int32 `db:"agent_num"`
		Priority int   `db:"priority"`
		ID       int64 `db:"task_id"`
		Attempt  int   `db:"attempt"`
		Later    bool  `db:"later"`
	}
	numbers := ints(agents, func(n tasks.AgentNum) int64 { return int64(n) })
	if err := d.loops.SelectContext(ctx, &rows, sqlAbandoned, numbers, limit); err != nil {
		return nil, asFault(ctx, err, "read the tasks of removed agents")
	}
	var out []tasks.Finish
	for _, r := range rows {
		out = append(out, tasks.Finish{
			Agent: tasks.AgentNum(r.Agent), Priority: r.Priority,
			Ref: tasks.Ref{ID: tasks.ID(r.ID), Attempt: r.Attempt}, Later: r.Later,
		})
	}
	return out, nil
}

// The order of the agent's queue bounds what is read to its own tasks; when they
// expire is looked at outside, so that no other index seems better.
const sqlAlike = `
SELECT v.place - 1 AS place, q.task_id, q.attempt, q.behind
FROM unnest($1::integer[], $2::smallint[], $3::text[], $4::text[], $5::boolean[], $6::bigint[], $7::bigint[])
     WITH ORDINALITY v (agent_num, priority, kind, args, repeatable, timeout_ms, expires, place)
CROSS JOIN LATERAL (
    SELECT q.task_id, q.attempt, q.expires_at, row_number() OVER (ORDER BY q.task_id DESC) - 1 AS behind FROM agent_queue q
    WHERE q.agent_num = v.agent_num AND q.priority = v.priority AND q.started_at IS NULL
    ORDER BY q.agent_num, q.priority, q.task_id OFFSET 0) q
CROSS JOIN LATERAL (
    SELECT 1 FROM agent_task t
    WHERE t.id = q.task_id AND t.kind = v.kind AND t.repeatable = v.repeatable AND t.timeout_ms = v.timeout_ms
      AND t.args::text = v.args
    LIMIT 1) t
WHERE q.expires_at <= to_timestamp(v.expires / 1000000::float8)
ORDER BY v.place, q.task_id`

// Alike implements tasks.Queue.
func (d *DB) Alike(ctx context.Context, inserts []tasks.Insert) ([][]tasks.Like, error) {
	var rows []struct {
		Place   int   `db:"place"`
		ID      int64 `db:"task_id"`
		Attempt int   `db:"attempt"`
		Behind  int   `db:"behind"`
	}
	a := &turnArgs{}
	addInts(a, inserts, func(x *tasks.Insert) int64 { return int64(x.Agent) })
	addInts(a, inserts, func(x *tasks.Insert) int64 { return int64(x.Priority) })
	addTexts(a, inserts, func(x *tasks.Insert) string { return x.Kind })
	addTexts(a, inserts, func(x *tasks.Insert) string { return x.Args })
	addBools(a, inserts, func(x *tasks.Insert) bool { return x.Delivery == kinds.DeliveryRepeatable })
	addInts(a, inserts, func(x *tasks.Insert) int64 { return x.Timeout.Milliseconds() })
	addInts(a, inserts, func(x *tasks.Insert) int64 { return micros(x.ExpiresAt) })
	a.seal()
	if err := d.loops.SelectContext(ctx, &rows, sqlAlike, a.args...); err != nil {
		return nil, asFault(ctx, err, "look for tasks that are replaced")
	}
	out := make([][]tasks.Like, len(inserts))
	for _, r := range rows {
		out[r.Place] = append(out[r.Place], tasks.Like{Ref: tasks.Ref{ID: tasks.ID(r.ID), Attempt: r.Attempt}, Behind: r.Behind})
	}
	return out, nil
}
