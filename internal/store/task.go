package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"time"
	"uuid"

	"headgate/tasks"
)

type taskRow struct {
	ID        int64          `db:"id"`
	AgentNum  int32          `db:"agent_num"`
	AgentID   uid            `db:"agent_id"`
	AgentName sql.NullString `db:"agent_name"`
	Kind      string         `db:"kind"`
	Args      string         `db:"args"`
	Repeat    bool           `db:"repeatable"`
	Priority  int            `db:"priority"`
	TimeoutMS int64          `db:"timeout_ms"`
	CreatedAt time.Time      `db:"created_at"`
	NotBefore sql.NullTime   `db:"not_before"`
	ExpiresAt time.Time      `db:"expires_at"`
	Actor     string         `db:"actor"`
	RetryOf   sql.NullInt64  `db:"retry_of"`
	RunID     uid            `db:"run_id"`

	Attempt     int          `db:"attempt"`
	StartedAt   sql.NullTime `db:"started_at"`
	CancelledAt sql.NullTime `db:"cancel_requested_at"`
	Canceller   string       `db:"cancel_actor"`
	RetriedAs   int64        `db:"retried_as"`

	endingRow

	CompletedAt sql.NullTime `db:"completed_at"`
}

// One statement sees one snapshot, and in every snapshot a task has exactly one
// of queue row, later row and result row: its state is never torn.
const sqlTasksByID = `
SELECT t.id, t.agent_num, a.id AS agent_id, a.name AS agent_name, t.kind, t.args, t.repeatable, t.priority, t.timeout_ms,
       t.created_at, coalesce(l.run_at, t.not_before) AS not_before, t.expires_at, t.actor, t.retry_of, t.run_id,
       coalesce(r.attempt, q.attempt, l.attempt, 0) AS attempt, coalesce(r.started_at, q.started_at) AS started_at,
       coalesce(r.cancel_requested_at, q.cancel_requested_at) AS cancel_requested_at,
       coalesce(r.cancel_actor, q.cancel_actor, '') AS cancel_actor, coalesce(d.task_id, 0) AS retried_as,
       r.outcome, r.reason, r.detail, r.exit, r.result, r.result_bytes, r.output_bytes, r.completed_at
FROM unnest($1::bigint[]) WITH ORDINALITY v (id, place)
CROSS JOIN LATERAL (SELECT * FROM agent_task t WHERE t.id = v.id LIMIT 1) t
LEFT JOIN LATERAL (SELECT a.id, a.name FROM agent a WHERE a.num = t.agent_num LIMIT 1) a ON true
LEFT JOIN LATERAL (SELECT * FROM agent_result r WHERE r.task_id = v.id LIMIT 1) r ON true
LEFT JOIN LATERAL (SELECT * FROM agent_queue q
    WHERE q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = v.id LIMIT 1) q ON true
LEFT JOIN LATERAL (SELECT * FROM agent_later l WHERE l.task_id = v.id LIMIT 1) l ON true
LEFT JOIN LATERAL (SELECT d.task_id FROM task_dedup d
    WHERE d.principal = '' AND d.route = 'retry' AND d.key = v.id::text AND d.idx = 0 AND r.task_id IS NOT NULL LIMIT 1) d ON true
ORDER BY v.place`

func (r taskRow) task() (tasks.Task, error) {
	t := tasks.Task{
		ID: tasks.ID(r.ID), Agent: tasks.AgentRef{Num: tasks.AgentNum(r.AgentNum), ID: uuid.UUID(r.AgentID), Name: r.AgentName.String},
		Kind: r.Kind, Args: json.RawMessage(r.Args), Delivery: delivery(r.Repeat), Priority: r.Priority,
		Timeout: time.Duration(r.TimeoutMS) * time.Millisecond, Attempt: r.Attempt,
		State: tasks.StateNew, CreatedAt: r.CreatedAt.UTC(), NotBefore: instant(r.NotBefore), ExpiresAt: r.ExpiresAt.UTC(),
		StartedAt: instant(r.StartedAt), CompletedAt: instant(r.CompletedAt), CancelRequestedAt: instant(r.CancelledAt),
		CancelActor: r.Canceller, Actor: r.Actor, RetryOf: tasks.ID(r.RetryOf.Int64), RetriedAs: tasks.ID(r.RetriedAs), RunID: uuid.UUID(r.RunID),
	}
	if r.StartedAt.Valid {
		t.State = tasks.StateWaiting
	}
	if !r.Outcome.Valid {
		return t, nil
	}
	t.State = tasks.StateCompleted
	var err error
	t.Ending, err = r.ending(r.ID)
	return t, err
}

// endingRow is how a task ended, in the columns of results and of late ones.
type endingRow struct {
	Outcome     sql.NullString `db:"outcome"`
	Reason      sql.NullString `db:"reason"`
	Detail      sql.NullString `db:"detail"`
	Exit        sql.NullString `db:"exit"`
	Result      sql.NullString `db:"result"`
	ResultBytes []byte         `db:"result_bytes"`
	OutputBytes sql.NullInt64  `db:"output_bytes"`
}

func (r *endingRow) ending(id int64) (tasks.Ending, error) {
	e := tasks.Ending{
		Outcome: tasks.Outcome(r.Outcome.String), Reason: r.Reason.String, Detail: r.Detail.String,
		ResultBytes: r.ResultBytes, OutputBytes: r.OutputBytes.Int64,
	}
	if r.Result.Valid {
		e.Result = json.RawMessage(r.Result.String)
	}
	if r.Exit.Valid {
		e.Exit = new(tasks.Exit)
		if err := json.Unmarshal([]byte(r.Exit.String), e.Exit); err != nil {
			return e, fmt.Errorf("decode the exit of task %d: %w", id, err)
		}
	}
	return e, nil
}

const sqlLateResults = `
SELECT attempt, started_at, received_at, outcome, reason, detail, exit, result, result_bytes, output_bytes
FROM late_result
WHERE task_id = $1
ORDER BY received_at, attempt
LIMIT $2`

// LateResults implements tasks.Reader.
func (d *DB) LateResults(ctx context.Context, id tasks.ID) ([]tasks.LateResult, error) {
	var rows []struct {
		endingRow

		Attempt    int          `db:"attempt"`
		StartedAt  sql.NullTime `db:"started_at"`
		ReceivedAt time.Time    `db:"received_at"`
	}
	if err := d.pages.SelectContext(ctx, &rows, sqlLateResults, int64(id), tasks.MaxLateShown); err != nil {
		return nil, asFault(ctx, err, "read late answers")
	}
	var out []tasks.LateResult
	for i := range rows {
		r := &rows[i]
		e, err := r.ending(int64(id))
		if err != nil {
			return nil, err
		}
		out = append(out, tasks.LateResult{
			Attempt: r.Attempt, StartedAt: instant(r.StartedAt), ReceivedAt: r.ReceivedAt.UTC(), Ending: e,
		})
	}
	return out, nil
}

// tasksByID reads tasks in the order of their ids in the list; ids that do not
// exist are left out.
func (d *DB) tasksByID(ctx context.Context, list []int64) ([]tasks.Task, error) {
	var rows []taskRow
	if err := d.pages.SelectContext(ctx, &rows, sqlTasksByID, ints(list, func(i int64) int64 { return i })); err != nil {
		return nil, asFault(ctx, err, "read tasks")
	}
	out := make([]tasks.Task, 0, len(rows))
	for _, r := range rows {
		t, err := r.task()
		if err != nil {
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// byIDChunk bounds one read of TasksByID, so that each stays far below the
// time limit of pages.
const byIDChunk = 1000

// TasksByID implements tasks.Reader.
func (d *DB) TasksByID(ctx context.Context, ids []tasks.ID) ([]tasks.Task, error) {
	out := make([]tasks.Task, 0, len(ids))
	for chunk := range slices.Chunk(ids, byIDChunk) {
		list := make([]int64, len(chunk))
		for i, id := range chunk {
			list[i] = int64(id)
		}
		found, err := d.tasksByID(ctx, list)
		if err != nil {
			return nil, err
		}
		out = append(out, found...)
	}
	return out, nil
}

// Task implements tasks.Reader.
func (d *DB) Task(ctx context.Context, id tasks.ID) (*tasks.Task, error) {
	list, err := d.tasksByID(ctx, []int64{int64(id)})
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		gone, err := d.isDropped(ctx, int64(id))
		switch {
		case err != nil:
			return nil, err
		case gone:
			return nil, fmt.Errorf("task %d: %w: %w", id, tasks.ErrNoTask, tasks.ErrDropped)
		}
		return nil, fmt.Errorf("task %d: %w", id, tasks.ErrNoTask)
	}
	return &list[0], nil
}

// Agents have at most some ten thousand tasks that wait, so that counting those
// of one costs a few milliseconds.
const sqlPosition = `
SELECT count(*) FROM agent_queue q
WHERE q.agent_num = $1 AND (q.priority, q.task_id) <= ($2::smallint, $3::bigint) AND q.started_at IS NULL
  AND EXISTS (SELECT 1 FROM agent_queue o
    WHERE o.agent_num = $1 AND o.priority = $2 AND o.task_id = $3 AND o.started_at IS NULL)`

// Position implements tasks.Reader.
func (d *DB) Position(ctx context.Context, agent tasks.AgentNum, priority int, id tasks.ID) (int, error) {
	var n int
	if err := d.pages.GetContext(ctx, &n, sqlPosition, int32(agent), priority, int64(id)); err != nil {
		return 0, asFault(ctx, err, "look for a task's place")
	}
	return n, nil
}

const sqlReplay = `
SELECT idx, task_id, hash FROM task_dedup
WHERE principal = $1 AND route = $2 AND key = $3 AND expires_at > now()
ORDER BY idx`

// Replay implements tasks.Reader.
func (d *DB) Replay(ctx context.Context, key tasks.Idempotency) ([]tasks.DedupRow, error) {
	var rows []struct {
		Index int    `db:"idx"`
		ID    int64  `db:"task_id"`
		Hash  []byte `db:"hash"`
	}
	if err := d.general.SelectContext(ctx, &rows, sqlReplay, key.Principal, key.Route, key.Key); err != nil {
		return nil, asFault(ctx, err, "look for the idempotency key")
	}
	var out []tasks.DedupRow
	for _, r := range rows {
		h, err := hash32(r.Hash)
		if err != nil {
			return nil, err
		}
		out = append(out, tasks.DedupRow{Index: r.Index, ID: tasks.ID(r.ID), Hash: h})
	}
	return out, nil
}

const sqlSavePoints = `
INSERT INTO series (name, at, value)
SELECT v.name, to_timestamp(v.at / 1000000::float8), v.value::json
FROM unnest($1::text[], $2::bigint[], $3::text[]) v (name, at, value)
ORDER BY v.name, v.at
ON CONFLICT (name, at) DO UPDATE SET value = EXCLUDED.value`

// SavePoints implements tasks.Reader; a point that is there is replaced.
func (d *DB) SavePoints(ctx context.Context, points []tasks.Point) error {
	points = lastOfEach(points)
	if len(points) == 0 {
		return nil
	}
	return d.write(ctx, "store the dashboard's series", func(tx *Tx) error {
		_, err := tx.exec(sqlSavePoints,
			texts(points, func(p tasks.Point) string { return p.Name }),
			ints(points, func(p tasks.Point) int64 { return micros(p.At) }),
			texts(points, func(p tasks.Point) string { return string(p.Value) }))
		return err
	})
}

// lastOfEach keeps the last of several points of one name and time, because
// one statement may not replace a row twice.
func lastOfEach(points []tasks.Point) []tasks.Point {
	type place struct {
		name string
		at   int64
	}
	where := map[place]int{}
	var out []tasks.Point
	for _, p := range points {
		k := place{p.Name, micros(p.At)}
		if i, ok := where[k]; ok {
			out[i] = p
			continue
		}
		where[k] = len(out)
		out = append(out, p)
	}
	return out
}

const sqlPoints = `
SELECT name, at, value FROM series
WHERE (name = $1 OR starts_with(name, $1 || '/')) AND at >= $2
ORDER BY at, name LIMIT $3`

// maxPoints bounds one answer: a day of minutes of 20 controllers, or of as many
// starts.
const maxPoints = 20 * 24 * 60

// Points implements tasks.Reader.
func (d *DB) Points(ctx context.Context, name string, since time.Time) ([]tasks.Point, error) {
	var rows []struct {
		Name  string    `db:"name"`
		At    time.Time `db:"at"`
		Value string    `db:"value"`
	}
	if err := d.pages.SelectContext(ctx, &rows, sqlPoints, name, since, maxPoints); err != nil {
		return nil, asFault(ctx, err, "read the dashboard's series")
	}
	var out []tasks.Point
	for _, r := range rows {
		out = append(out, tasks.Point{Name: r.Name, At: r.At.UTC(), Value: json.RawMessage(r.Value)})
	}
	return out, nil
}
