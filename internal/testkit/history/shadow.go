package history

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
)

// ShadowSQL makes the shadow table and the triggers that write each change of
// the queue's tables into it. Only harnesses run it, after the migrations and
// before the first task; it may be run again.
const ShadowSQL = `
CREATE TABLE IF NOT EXISTS history_shadow (
    seq bigserial PRIMARY KEY, tx bigint NOT NULL, task_id bigint NOT NULL, tab text NOT NULL, act text NOT NULL,
    attempt integer NOT NULL, epoch bigint NOT NULL, state text NOT NULL, outcome text NOT NULL
);
CREATE OR REPLACE FUNCTION history_note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    r record;
    n integer := 0;
    e bigint := 0;
    s text := '';
    o text := '';
BEGIN
    IF TG_OP = 'DELETE' THEN r := OLD; ELSE r := NEW; END IF;
    IF TG_ARGV[0] = 'agent_task' THEN
        INSERT INTO history_shadow (tx, task_id, tab, act, attempt, epoch, state, outcome)
        VALUES (pg_current_xact_id()::text::bigint, r.id, TG_ARGV[0], TG_OP, 0, 0, '', '');
        RETURN NULL;
    END IF;
    n := r.attempt;
    IF TG_ARGV[0] = 'agent_queue' THEN
        e := coalesce(r.epoch, 0);
        s := CASE WHEN r.started_at IS NULL THEN 'new' ELSE 'started' END;
    ELSIF TG_ARGV[0] = 'agent_result' THEN
        e := r.epoch;
        o := r.outcome;
    END IF;
    INSERT INTO history_shadow (tx, task_id, tab, act, attempt, epoch, state, outcome)
    VALUES (pg_current_xact_id()::text::bigint, r.task_id, TG_ARGV[0], TG_OP, n, e, s, o);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER history_note AFTER INSERT OR DELETE ON agent_task FOR EACH ROW EXECUTE FUNCTION history_note('agent_task');
CREATE OR REPLACE TRIGGER history_note AFTER INSERT OR UPDATE OR DELETE ON agent_queue FOR EACH ROW EXECUTE FUNCTION history_note('agent_queue');
CREATE OR REPLACE TRIGGER history_note AFTER INSERT OR UPDATE OR DELETE ON agent_later FOR EACH ROW EXECUTE FUNCTION history_note('agent_later');
CREATE OR REPLACE TRIGGER history_note AFTER INSERT OR UPDATE OR DELETE ON agent_result FOR EACH ROW EXECUTE FUNCTION history_note('agent_result');
`

// shadowDump gives the shadow table task by task.
const shadowDump = `SELECT seq, tx, task_id, tab, act, attempt, epoch, state, outcome FROM history_shadow ORDER BY task_id, seq`

// finalDump gives every task with its one place, and rows of the queue that
// have no task. A key is that of the caller; in a batch it carries the index.
const finalDump = `
SELECT t.id, a.id::text,
    CASE WHEN r.task_id IS NOT NULL THEN 'completed' WHEN q.started_at IS NOT NULL THEN 'waiting-for-agent-response' ELSE 'new' END,
    coalesce(r.outcome, ''), coalesce(r.attempt, q.attempt, l.attempt, 0),
    CASE WHEN d.route = 'retry' THEN ''
         WHEN d.route LIKE '%/batch' THEN d.key || '#' || d.idx
         ELSE coalesce(d.key, t.idem_key, '') END,
    (r.task_id IS NOT NULL)::int + (q.task_id IS NOT NULL)::int + (l.task_id IS NOT NULL)::int
FROM agent_task t
JOIN agent a ON a.num = t.agent_num
LEFT JOIN agent_result r ON r.task_id = t.id
LEFT JOIN agent_queue q ON q.task_id = t.id
LEFT JOIN agent_later l ON l.task_id = t.id
LEFT JOIN task_dedup d ON d.task_id = t.id
UNION ALL
SELECT x.task_id, '', 'new', '', 0, '', 0
FROM (SELECT task_id FROM agent_queue UNION ALL SELECT task_id FROM agent_later UNION ALL SELECT task_id FROM agent_result) x
WHERE NOT EXISTS (SELECT FROM agent_task t WHERE t.id = x.task_id)`

// Dump writes every task of the database, and the shadow table if there is
// one. Agents are named by their UUID.
func Dump(ctx context.Context, db *sql.DB, w *Writer) error {
	err := each(ctx, db, finalDump, func(rows *sql.Rows) (e Event, err error) {
		e.Kind = KindFinal
		err = rows.Scan(&e.ID, &e.Agent, &e.State, &e.Outcome, &e.Attempt, &e.Key, &e.Places)
		return e, err
	}, w)
	if err != nil {
		return fmt.Errorf("dump the tasks: %w", err)
	}
	var shadow bool
	if err := db.QueryRowContext(ctx, `SELECT to_regclass('history_shadow') IS NOT NULL`).Scan(&shadow); err != nil || !shadow {
		return err
	}
	err = each(ctx, db, shadowDump, func(rows *sql.Rows) (e Event, err error) {
		e.Kind = KindRow
		err = rows.Scan(&e.T, &e.Op, &e.ID, &e.Table, &e.Action, &e.Attempt, &e.Epoch, &e.State, &e.Outcome)
		return e, err
	}, w)
	if err != nil {
		return fmt.Errorf("dump the shadow table: %w", err)
	}
	return nil
}

// each writes the rows of a query, some hundred a write.
func each(ctx context.Context, db *sql.DB, query string, scan func(*sql.Rows) (Event, error), w *Writer) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	const page = 500
	events := make([]Event, 0, page)
	for rows.Next() {
		e, err := scan(rows)
		if err != nil {
			return err
		}
		if events = append(events, e); len(events) == page {
			w.Write(events...)
			events = events[:0]
		}
	}
	if len(events) > 0 {
		w.Write(events...)
	}
	return rows.Err()
}

// shadow follows each task through the changes of its rows, one transaction
// after the other.
type shadow struct{ tasks map[int64]*shadowed }

// shadowed is a task as its rows tell it after each transaction.
type shadowed struct {
	task, queue, later, result int8
	tx                         int64
	attempt                    int
	before, last               place // of the change before, and of the last one
}

// row takes one change. Those of one task come in the order of their numbers.
func (c *Checker) row(e *Event, at place) {
	s := c.shadow.tasks[e.ID]
	if s == nil {
		s = &shadowed{tx: e.Op}
		c.shadow.tasks[e.ID] = s
	}
	if e.Op != s.tx {
		c.judgeRows(e.ID, s)
		s.tx = e.Op
		if s.result > 0 {
			c.violate("final", []place{s.last, at}, "a row of task %d changed (%s of %s) after it was completed", e.ID, e.Action, e.Table)
		}
	}
	s.before, s.last = s.last, at
	n := map[string]int8{"INSERT": 1, "DELETE": -1}[e.Action]
	switch e.Table {
	case "agent_task":
		s.task += n
	case "agent_queue":
		s.queue += n
	case "agent_later":
		s.later += n
	case "agent_result":
		s.result += n
		if e.Action != "INSERT" {
			c.violate("final", []place{s.before, at}, "the result of task %d was changed (%s)", e.ID, e.Action)
		}
	}
	if e.Action == "DELETE" || e.Table == "agent_task" {
		return
	}
	if e.Attempt < s.attempt || e.Attempt > s.attempt+1 {
		c.violate("final", []place{s.before, at}, "the attempt of task %d went from %d to %d", e.ID, s.attempt, e.Attempt)
	}
	s.attempt = e.Attempt
	if e.Table == "agent_later" && e.Attempt > 0 {
		c.task(e.ID).free = true // a pause after an attempt that was interrupted: others pass it by
	}
}

// judgeRows: after each transaction a task has exactly one place.
func (c *Checker) judgeRows(id int64, s *shadowed) {
	if s.task != 1 || s.queue+s.later+s.result != 1 {
		c.violate("final", []place{s.before, s.last}, "after transaction %d task %d has %d rows of its own, %d in the queue, %d for later and %d results",
			s.tx, id, s.task, s.queue, s.later, s.result)
	}
}

func (c *Checker) judgeShadow() {
	for _, id := range slices.Sorted(maps.Keys(c.shadow.tasks)) {
		c.judgeRows(id, c.shadow.tasks[id])
	}
}
