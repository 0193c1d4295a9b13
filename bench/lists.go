package main

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"time"
)

const (
	// listTasks is how many completed tasks there are for the lists.
	listTasks = 1_000_000
	// listOpen is how many are not completed: those of agents that are paused.
	listOpen = 10_000
	// listPaused and listLabelled are how many agents are paused, and how many
	// have the label that is asked for.
	listPaused, listLabelled = 100, 50
	// listCalls of each list are timed.
	listCalls = 40
)

// lists measures the first pages of lists at a large history. It leaves
// open tasks behind, so that nothing can be measured after it.
func (r *rig) lists(ctx context.Context) error {
	began := time.Now()
	if err := r.fillLists(ctx); err != nil {
		return err
	}
	r.bench.note("%d completed and %d open tasks of %d agents stored in %.0f s", listTasks, listOpen, len(r.ids), time.Since(began).Seconds())
	err := r.timeLists(ctx, "list_tasks_p95_ms", "/api/v1/tasks", []string{
		"", "state=new", "state=waiting-for-agent-response", "state=completed", "outcome=failed",
		"agent=" + r.ids[1], "kind=core.echo", "kind=core.inventory", "label.site=lab",
	})
	if err != nil {
		return err
	}
	return r.timeLists(ctx, "list_agents_p95_ms", "/api/v1/agents", []string{"", "q=sim-01", "health=connected", "label.site=lab"})
}

// timeLists prints the worst p95 of the queries of one list.
func (r *rig) timeLists(ctx context.Context, figure, path string, queries []string) error {
	worst := 0.0
	for _, q := range queries {
		var times []time.Duration
		items := 0
		for range listCalls {
			var page struct {
				Items []struct{} `json:"items"`
			}
			began := time.Now()
			if err := r.api.call(ctx, "GET", path+"?"+q, nil, &page); err != nil {
				return err
			}
			times = append(times, time.Since(began))
			items = len(page.Items)
		}
		p95 := quantile(times, 0.95)
		worst = max(worst, p95)
		r.bench.note("GET %s?%s: %d items, p50 %.1f ms, p95 %.1f ms", path, q, items, quantile(times, 0.5), p95)
	}
	r.bench.figure(figure, worst, "ms")
	return nil
}

// fillLists makes the history: completed tasks by SQL, since nobody wants to
// wait for them, open ones by submitting them.
func (r *rig) fillLists(ctx context.Context) error {
	db, err := openDB(r.run.DatabaseURL)
	if err != nil {
		return err
	}
	defer release(db)
	if err := fillHistory(ctx, db); err != nil {
		return fmt.Errorf("store a history: %w", err)
	}
	for i, id := range r.ids[:max(listPaused, listLabelled)] {
		change := map[string]any{}
		if i < listPaused {
			change["paused"] = true
		}
		if i < listLabelled {
			change["labels"] = map[string]string{"site": "lab"}
		}
		if err := r.api.call(ctx, "PATCH", "/api/v1/agents/"+id, change, nil); err != nil {
			return err
		}
	}
	return r.submitOpen(ctx)
}

// submitOpen submits what stays open to the agents that are paused.
func (r *rig) submitOpen(ctx context.Context) error {
	host, err := r.api.host()
	if err != nil {
		return err
	}
	w, err := dialWire(host)
	if err != nil {
		return err
	}
	defer w.close()
	var body bytes.Buffer
	body.WriteString(`{"tasks":[`)
	for i := range listOpen {
		if i > 0 {
			body.WriteByte(',')
		}
		fmt.Fprintf(&body, `{"agent":%q,"kind":"core.echo","args":%s}`, r.ids[i%listPaused], echoArgs)
	}
	body.WriteString(`]}`)
	status, answer, err := w.do(request(host, "/api/v1/tasks/batch", r.api.token, body.Bytes()))
	if err == nil && status != 202 {
		err = fmt.Errorf("POST /tasks/batch answered %d: %.300s", status, answer)
	}
	if err != nil {
		return err
	}
	return ctx.Err()
}

// fillHistory stores completed tasks over the last day, of all agents in turn:
// one in a hundred has failed, one in a thousand is of a rare kind.
func fillHistory(ctx context.Context, db *sql.DB) error {
	var first int64
	err := db.QueryRowContext(ctx, `SELECT setval('agent_task_id_seq', nextval('agent_task_id_seq') + $1) - $1`, listTasks).Scan(&first)
	if err != nil {
		return err
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	for _, text := range []string{
		`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
		 SELECT $1 + i, now() - ($2 - i) * interval '80 ms', now() + interval '1 day', 10000, a.nums[1 + i % array_length(a.nums, 1)], 5, true,
		     CASE WHEN i % 1000 = 0 THEN 'core.inventory' WHEN i % 2 = 0 THEN 'core.echo' ELSE 'core.ping' END, 'token:bench', '{"text":"some words"}'
		 FROM generate_series(0, $2 - 1) i, (SELECT array_agg(num ORDER BY num) AS nums FROM agent) a`,
		`INSERT INTO agent_result (task_id, started_at, completed_at, agent_num, attempt, epoch, outcome, reason, result)
		 SELECT t.id, t.created_at, t.created_at + interval '2 ms', t.agent_num, 1, 1,
		     CASE WHEN (t.id - $1) % 100 = 7 THEN 'failed' ELSE 'succeeded' END, CASE WHEN (t.id - $1) % 100 = 7 THEN 'exit_code' ELSE '' END, '{"ok":true}'
		 FROM agent_task t WHERE t.id >= $1 AND t.id < $1 + $2`,
	} {
		if _, err := tx.ExecContext(ctx, text, first, listTasks); err != nil {
			return fmt.Errorf("%w (and %w)", err, tx.Rollback())
		}
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	for _, table := range []string{"agent_task", "agent_result"} { // as autovacuum would within a minute
		if _, err := db.ExecContext(ctx, "VACUUM (ANALYZE) "+table); err != nil {
			return err
		}
	}
	return nil
}
