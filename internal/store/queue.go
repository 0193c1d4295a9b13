package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
)

type queuedRow struct {
	Agent     int32     `db:"agent_num"`
	Priority  int       `db:"priority"`
	ID        int64     `db:"task_id"`
	Attempt   int       `db:"attempt"`
	Kind      string    `db:"kind"`
	Args      string    `db:"args"`
	Repeat    bool      `db:"repeatable"`
	TimeoutMS int64     `db:"timeout_ms"`
	CreatedAt time.Time `db:"created_at"`
	ExpiresAt time.Time `db:"expires_at"`
}

func (r queuedRow) queued() tasks.Queued {
	return tasks.Queued{
		Agent: tasks.AgentNum(r.Agent), Priority: r.Priority, ID: tasks.ID(r.ID), Attempt: r.Attempt,
		Kind: r.Kind, Args: r.Args, Delivery: delivery(r.Repeat), Timeout: time.Duration(r.TimeoutMS) * time.Millisecond,
		CreatedAt: r.CreatedAt.UTC(), ExpiresAt: r.ExpiresAt.UTC(),
	}
}

func delivery(repeatable bool) kinds.Delivery {
	if repeatable {
		return kinds.DeliveryRepeatable
	}
	return kinds.DeliveryOnce
}

type startedRow struct {
	queuedRow
	Epoch     int64        `db:"epoch"`
	StartedAt time.Time    `db:"started_at"`
	Cancelled sql.NullTime `db:"cancel_requested_at"`
	Canceller string       `db:"cancel_actor"`
}

// The started rows of a shard are found by one scan of the queue: 46 ms with
// 1,000,000 rows waiting. An index on them would cost every claim its HOT
// update.
const sqlLoadStarted = `
WITH started AS MATERIALIZED (
    SELECT q.agent_num, q.priority, q.task_id, q.attempt, q.expires_at, q.epoch, q.started_at, q.cancel_requested_at, q.cancel_actor
    FROM agent_queue q WHERE q.started_at IS NOT NULL
)
SELECT q.agent_num, q.priority, q.task_id, q.attempt, t.kind, t.args, t.repeatable, t.timeout_ms, t.created_at,
       q.expires_at, q.epoch, q.started_at, q.cancel_requested_at, coalesce(q.cancel_actor, '') AS cancel_actor
FROM started q
JOIN agent a ON a.num = q.agent_num AND a.shard = ANY ($1::smallint[])
CROSS JOIN LATERAL (
    SELECT t.kind, t.args, t.repeatable, t.timeout_ms, t.created_at FROM agent_task t WHERE t.id = q.task_id LIMIT 1) t
ORDER BY q.agent_num, q.priority, q.task_id`

const sqlLoadDepth = `
SELECT q.agent_num, count(*) AS depth
FROM agent_queue q
JOIN agent a ON a.num = q.agent_num AND a.shard = ANY ($1::smallint[])
WHERE q.started_at IS NULL
GROUP BY q.agent_num
ORDER BY q.agent_num`

const sqlLoadLater = `
SELECT count(*) FROM agent_later l
JOIN agent a ON a.num = l.agent_num AND a.shard = ANY ($1::smallint[])`

// Load implements tasks.Queue. It reads everything in one snapshot; the caller
// owns the shards, so that nothing changes meanwhile.
func (d *DB) Load(ctx context.Context, shards []tasks.Shard) (*tasks.Loaded, error) {
	numbers := ints(shards, func(s tasks.Shard) int64 { return int64(s) })
	var started []startedRow
	if err := d.general.SelectContext(ctx, &started, sqlLoadStarted, numbers); err != nil {
		return nil, asFault(ctx, err, "read the started tasks")
	}
	var depth []struct {
		Agent int32 `db:"agent_num"`
		Depth int   `db:"depth"`
	}
	if err := d.general.SelectContext(ctx, &depth, sqlLoadDepth, numbers); err != nil {
		return nil, asFault(ctx, err, "count the waiting tasks")
	}
	l := &tasks.Loaded{Depth: make(map[tasks.AgentNum]int, len(depth))}
	if err := d.general.GetContext(ctx, &l.Later, sqlLoadLater, numbers); err != nil {
		return nil, asFault(ctx, err, "count the tasks that wait for their time")
	}
	for _, r := range started {
		l.Started = append(l.Started, tasks.Started{
			Queued: r.queued(), Epoch: r.Epoch,
			StartedAt: r.StartedAt.UTC(), CancelRequestedAt: instant(r.Cancelled), CancelActor: r.Canceller,
		})
	}
	for _, r := range depth {
		l.Depth[tasks.AgentNum(r.Agent)] = r.Depth
	}
	return l, nil
}

// One probe per agent from a place in its order: 0.04 ms whatever the backlog.
const sqlRefill = `
SELECT q.agent_num, q.priority, q.task_id, q.attempt, t.kind, t.args, t.repeatable, t.timeout_ms, t.created_at, q.expires_at
FROM unnest($1::integer[], $2::smallint[], $3::bigint[], $4::integer[]) WITH ORDINALITY v (agent_num, priority, task_id, most, place)
CROSS JOIN LATERAL (
    SELECT q.agent_num, q.priority, q.task_id, q.attempt, q.expires_at FROM agent_queue q
    WHERE q.agent_num = v.agent_num AND (q.priority, q.task_id) > (v.priority, v.task_id) AND q.started_at IS NULL
    ORDER BY q.priority, q.task_id
    LIMIT v.most) q
CROSS JOIN LATERAL (
    SELECT t.kind, t.args, t.repeatable, t.timeout_ms, t.created_at FROM agent_task t WHERE t.id = q.task_id LIMIT 1) t
ORDER BY v.place, q.priority, q.task_id`

// Refill implements tasks.Queue.
func (d *DB) Refill(ctx context.Context, reqs []tasks.RefillRequest) ([]tasks.Queued, error) {
	var rows []queuedRow
	err := d.loops.SelectContext(ctx, &rows, sqlRefill,
		ints(reqs, func(r tasks.RefillRequest) int64 { return int64(r.Agent) }),
		ints(reqs, func(r tasks.RefillRequest) int64 { return int64(r.AfterPriority) }),
		ints(reqs, func(r tasks.RefillRequest) int64 { return int64(r.AfterID) }),
		ints(reqs, func(r tasks.RefillRequest) int64 { return int64(r.Limit) }))
	if err != nil {
		return nil, asFault(ctx, err, "read the next tasks")
	}
	out := make([]tasks.Queued, len(rows))
	for i, r := range rows {
		out[i] = r.queued()
	}
	return out, nil
}

// The time is now(), the start of the statement: clock_timestamp() may change
// from row to row, so that no index can be bounded by it, and each look would read
// every task that waits.
const sqlDue = `
SELECT l.agent_num, l.priority, l.task_id, l.run_at
FROM agent_later l
JOIN agent a ON a.num = l.agent_num
WHERE l.run_at <= now() AND a.shard = ANY ($1::smallint[])
ORDER BY l.run_at, l.task_id
LIMIT $2`

// Due implements tasks.Queue.
func (d *DB) Due(ctx context.Context, shards []tasks.Shard, limit int) ([]tasks.DueTask, error) {
	var rows []struct {
		Agent    int32     `db:"agent_num"`
		Priority int       `db:"priority"`
		ID       int64     `db:"task_id"`
		RunAt    time.Time `db:"run_at"`
	}
	numbers := ints(shards, func(s tasks.Shard) int64 { return int64(s) })
	if err := d.loops.SelectContext(ctx, &rows, sqlDue, numbers, limit); err != nil {
		return nil, asFault(ctx, err, "read the tasks that are due")
	}
	var out []tasks.DueTask
	for _, r := range rows {
		out = append(out, tasks.DueTask{Agent: tasks.AgentNum(r.Agent), Priority: r.Priority, ID: tasks.ID(r.ID), RunAt: r.RunAt.UTC()})
	}
	return out, nil
}

const sqlOverdue = `
(SELECT q.agent_num, q.priority, q.task_id, q.attempt, q.expires_at, false AS later
 FROM agent_queue q
 JOIN agent a ON a.num = q.agent_num
 WHERE q.expires_at <= now() AND q.started_at IS NULL AND a.shard = ANY ($1::smallint[])
 ORDER BY q.expires_at LIMIT $2)
UNION ALL
(SELECT l.agent_num, l.priority, l.task_id, l.attempt, l.expires_at, true
 FROM agent_later l
 JOIN agent a ON a.num = l.agent_num
 WHERE l.expires_at <= now() AND a.shard = ANY ($1::smallint[])
 ORDER BY l.expires_at LIMIT $2)
ORDER BY expires_at, task_id
LIMIT $2`

// Overdue implements tasks.Queue.
func (d *DB) Overdue(ctx context.Context, shards []tasks.Shard, limit int) ([]tasks.Finish, error) {
	var rows []struct {
		Agent    int32     `db:"agent_num"`
		Priority int       `db:"priority"`
		ID       int64     `db:"task_id"`
		Attempt  int       `db:"attempt"`
		Expires  time.Time `db:"expires_at"`
		Later    bool      `db:"later"`
	}
	numbers := ints(shards, func(s tasks.Shard) int64 { return int64(s) })
	if err := d.loops.SelectContext(ctx, &rows, sqlOverdue, numbers, limit); err != nil {
		return nil, asFault(ctx, err, "read the tasks that have expired")
	}
	var out []tasks.Finish
	for _, r := range rows {
		out = append(out, tasks.Finish{
			Agent: tasks.AgentNum(r.Agent), Priority: r.Priority,
			Ref: tasks.Ref{ID: tasks.ID(r.ID), Attempt: r.Attempt}, Later: r.Later,
			Ending: tasks.Ending{
				Outcome: tasks.Expired, Reason: tasks.ReasonExpired,
				Detail: "it had not started by " + r.Expires.UTC().Format(time.RFC3339),
			},
		})
	}
	return out, nil
}

// An answer to the very attempt whose own answer was stored is a repetition
// and not late; an outcome that the controller had to give itself (unknown, or
// of a task that never started) leaves room for what the agent says later.
const sqlRecordLate = `
INSERT INTO late_result (task_id, attempt, epoch, agent_num, outcome, reason, detail, exit, result, result_bytes,
    output_bytes, started_at)
SELECT v.task_id, v.attempt, v.epoch, v.agent_num, v.outcome, v.reason, v.detail, nullif(v.exit, '')::json,
    nullif(v.result, '')::json, nullif(v.result_bytes, ''), v.output_bytes,
    CASE WHEN v.started <> 0 THEN to_timestamp(v.started / 1000000::float8) END
FROM unnest($1::bigint[], $2::smallint[], $3::bigint[], $4::integer[], $5::bigint[],
            $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::bytea[], $12::bigint[])
     v (task_id, attempt, epoch, agent_num, started, outcome, reason, detail, exit, result, result_bytes, output_bytes)
JOIN agent_result r ON r.task_id = v.task_id AND r.agent_num = v.agent_num
WHERE NOT (r.attempt = v.attempt AND r.epoch = v.epoch AND r.started_at IS NOT NULL AND r.outcome <> 'unknown')
ORDER BY v.task_id, v.attempt, v.epoch
ON CONFLICT (task_id, attempt, epoch) DO NOTHING
RETURNING task_id`

// RecordLate implements tasks.Queue.
func (d *DB) RecordLate(ctx context.Context, late []tasks.Finish) ([]tasks.ID, error) {
	if len(late) == 0 {
		return nil, nil
	}
	a := &turnArgs{}
	addInts(a, late, func(f *tasks.Finish) int64 { return int64(f.ID) })
	addInts(a, late, func(f *tasks.Finish) int64 { return int64(f.Attempt) })
	addInts(a, late, func(f *tasks.Finish) int64 { return f.Epoch })
	addInts(a, late, func(f *tasks.Finish) int64 { return int64(f.Agent) })
	addInts(a, late, func(f *tasks.Finish) int64 { return micros(f.StartedAt) })
	if err := addEndings(a, late, func(f *tasks.Finish) *tasks.Ending { return &f.Ending }); err != nil {
		return nil, err
	}
	a.seal()
	var kept []tasks.ID
	err := d.write(ctx, "keep a late answer", func(tx *Tx) error {
		kept = nil
		return tx.list(&kept, sqlRecordLate, a.args...)
	})
	if poison(err) {
		return nil, &tasks.PoisonError{Err: err}
	}
	return kept, err
}

const sqlFind = `
SELECT t.agent_num, t.priority, t.id AS task_id, coalesce(q.attempt, l.attempt) AS attempt, coalesce(q.epoch, 0) AS epoch,
       q.started_at, l.task_id IS NOT NULL AS later
FROM agent_task t
LEFT JOIN agent_queue q ON q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id
LEFT JOIN agent_later l ON l.task_id = t.id
WHERE t.id = $1 AND (q.task_id IS NOT NULL OR l.task_id IS NOT NULL)`

// Find implements tasks.Queue.
func (d *DB) Find(ctx context.Context, id tasks.ID) (*tasks.QueueRow, error) {
	var r struct {
		Agent    int32        `db:"agent_num"`
		Priority int          `db:"priority"`
		ID       int64        `db:"task_id"`
		Attempt  int          `db:"attempt"`
		Epoch    int64        `db:"epoch"`
		Started  sql.NullTime `db:"started_at"`
		Later    bool         `db:"later"`
	}
	err := d.loops.GetContext(ctx, &r, sqlFind, int64(id))
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("task %d: %w", id, tasks.ErrNoTask)
	}
	if err != nil {
		return nil, asFault(ctx, err, "find a task in the queue")
	}
	return &tasks.QueueRow{
		Agent: tasks.AgentNum(r.Agent), Priority: r.Priority, Ref: tasks.Ref{ID: tasks.ID(r.ID), Attempt: r.Attempt},
		Epoch: r.Epoch, StartedAt: instant(r.Started), Later: r.Later,
	}, nil
}
