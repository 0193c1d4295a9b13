package store

import (
	"context"
	"database/sql/driver"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"headgate/tasks"
)

// planNode is what we read of EXPLAIN's answer.
type planNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Rows     float64    `json:"Actual Rows"`
	Loops    float64    `json:"Actual Loops"`
	Removed  float64    `json:"Rows Removed by Filter"`
	JoinLost float64    `json:"Rows Removed by Join Filter"`
	Recheck  float64    `json:"Rows Removed by Index Recheck"`
	Children []planNode `json:"Plans"`
}

// walk calls fn for a node and all below it.
func (n planNode) walk(fn func(planNode)) {
	fn(n)
	for _, c := range n.Children {
		c.walk(fn)
	}
}

// explain runs a turn's statement as the loops do, as a prepared statement
// with a generic plan, and gives its plan with real counts. Nothing is kept.
func explain(t *testing.T, r *rig, turn *tasks.Turn) planNode {
	t.Helper()
	turn.Owner, turn.Leases = r.me.ID, r.leases
	args, err := makeTurnArgs(turn)
	if err != nil {
		t.Fatal(err)
	}
	literals := make([]string, len(args.args))
	for i, a := range args.args {
		if v, ok := a.(driver.Valuer); ok {
			if a, err = v.Value(); err != nil {
				t.Fatal(err)
			}
		}
		literals[i] = pq.QuoteLiteral(fmt.Sprint(a))
	}
	ctx := context.WithoutCancel(t.Context())
	tx, err := r.loops.BeginTxx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("PREPARE turn AS " + args.shape.sql()); err != nil {
		t.Fatal(err)
	}
	defer tx.Exec("DEALLOCATE turn")
	var text string
	if err := tx.Get(&text, "EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE turn ("+strings.Join(literals, ", ")+")"); err != nil {
		t.Fatal(err)
	}
	var plans []struct {
		Plan planNode `json:"Plan"`
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan
}

// TestTurnTouchesAFewRowsWhateverTheStatistics runs the whole turn with every
// combination of size and statistics that made plans flip elsewhere.
//
// Cases Q21.
func TestTurnTouchesAFewRowsWhateverTheStatistics(t *testing.T) {
	t.Parallel()
	r := newRig(t, 50)
	const big = 200_000
	grow := func(n int) {
		for _, q := range []string{
			`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
			 SELECT 1000000 + g, now(), now() + interval '1 day', 1000, 1 + g % 50, 5, false, 'core.echo', 'x', '{}' FROM generate_series(1, $1::int) g ON CONFLICT DO NOTHING`,
			`INSERT INTO agent_queue (task_id, expires_at, agent_num, priority)
			 SELECT 1000000 + g, now() + interval '1 day', 1 + g % 50, 5 FROM generate_series(1, $1::int) g ON CONFLICT DO NOTHING`,
		} {
			if _, err := r.admin.Exec(q, n); err != nil {
				t.Fatal(err)
			}
		}
	}
	sql := func(q string) {
		if _, err := r.admin.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	steps := []struct {
		name string
		do   func()
	}{
		{"empty, analyzed empty", func() { sql(`ANALYZE`) }},
		{"tiny, analyzed empty", func() { grow(5) }},
		{"tiny, analyzed tiny", func() { sql(`ANALYZE`) }},
		{"big, analyzed tiny", func() { grow(big) }},
		{"big, analyzed big", func() { sql(`ANALYZE`) }},
		{"empty, analyzed big", func() { sql(`DELETE FROM agent_queue WHERE task_id > 1000000`); sql(`VACUUM agent_queue`) }},
		{"big, analyzed empty", func() { sql(`ANALYZE agent_queue`); grow(big) }},
	}
	for _, s := range steps {
		s.do()
		turn, items := busyTurn(r)
		plan := explain(t, r, turn)
		touched := 0.0
		plan.walk(func(n planNode) {
			loops := max(n.Loops, 1)
			touched += (n.Rows + n.Removed + n.JoinLost + n.Recheck) * loops
			if n.Type == "Seq Scan" && n.Loops > 0 {
				t.Errorf("%s: the turn scans %s", s.name, n.Relation)
			}
		})
		// Each item is counted once in each of the nodes it passes.
		if limit := float64(40*items + 400); touched > limit {
			t.Errorf("%s: %d items touched %.0f rows, want at most %.0f", s.name, items, touched, limit)
		}
	}
}

// busyTurn has every part. It probes rows that are there when the queue is
// filled and are not when it is empty.
func busyTurn(r *rig) (*tasks.Turn, int) {
	turn := &tasks.Turn{}
	now := time.Now()
	for i, a := range r.agents {
		id := tasks.ID(1_000_000 + 100 + i)
		switch i % 5 {
		case 0:
			f := r.finish(r.insert(a, false), 0)
			f.ID, f.CancelActor = id, "user:x"
			turn.Finishes = append(turn.Finishes, f)
		case 1:
			turn.Claims = append(turn.Claims, tasks.Claim{Agent: a.Num, Priority: 5, ID: id, Epoch: r.epoch(a), Attempt: 1})
		case 2:
			turn.Requeues = append(turn.Requeues, tasks.Requeue{Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: id, Attempt: 1}, Epoch: r.epoch(a), NotBefore: now.Add(time.Hour)})
		case 3:
			turn.Due = append(turn.Due, tasks.DueTask{Agent: a.Num, Priority: 5, ID: id, RunAt: now})
		case 4:
			turn.Cancels = append(turn.Cancels, tasks.CancelMark{Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: id, Attempt: 1}, Actor: "user:x"})
		}
		in := r.insert(a, i%2 == 0)
		in.Key = &tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: fmt.Sprint(in.ID)}
		if i%3 == 0 {
			in.Key = &tasks.Idempotency{Route: tasks.RetryRoute, Key: fmt.Sprint(in.ID), Lasting: true}
		}
		turn.Inserts = append(turn.Inserts, in)
		turn.Output = append(turn.Output, tasks.OutputRow{Agent: a.Num, OutputChunk: tasks.OutputChunk{Ref: tasks.Ref{ID: in.ID, Attempt: 1}, Stream: "stdout"}})
	}
	return turn, 3 * len(r.agents)
}

// TestLooksOfTheLoopReadTheirOwnRows pins what the write loop asks beside its
// turns: each look reads the rows of the agents that it names, however many
// tasks others have and however many agents were ever removed.
//
// Cases Q16.
func TestLooksOfTheLoopReadTheirOwnRows(t *testing.T) {
	t.Parallel()
	r := newRig(t, 5)
	for _, q := range []string{
		`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
		 SELECT 1000000 + g, now(), now() + interval '1 day', 30000, CASE WHEN g % 1000 = 0 THEN 2 ELSE 1 END, 5, true, 'core.echo', 'x', '{}' FROM generate_series(1, 50000) g`,
		`INSERT INTO agent_queue (task_id, expires_at, agent_num, priority)
		 SELECT id, expires_at, agent_num, priority FROM agent_task`,
		`INSERT INTO agent_later (run_at, task_id, expires_at, agent_num, priority)
		 SELECT now() + interval '1 hour', 2000000 + g, now() + interval '1 day', 1, 5 FROM generate_series(1, 50000) g`,
		`INSERT INTO agent (id, name, status, spki, removed_at)
		 SELECT gen_random_uuid(), 'old', 'removed', decode(repeat(md5(g::text), 2), 'hex'), now() - interval '1 day' FROM generate_series(1, 20000) g`,
		`UPDATE agent SET status = 'removed', removed_at = now() WHERE num = 2`,
		`ANALYZE`,
	} {
		if _, err := r.admin.Exec(q); err != nil {
			t.Fatal(err)
		}
	}
	looks := map[string]struct {
		sql  string
		args []string
		most float64
	}{
		"removed":   {sqlRemoved, []string{"'{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}'", "60000000"}, 50},
		"abandoned": {sqlAbandoned, []string{"'{2}'", "1000"}, 500},
		"due":       {sqlDue, []string{"'{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}'", "1000"}, 50},
		"overdue":   {sqlOverdue, []string{"'{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}'", "1000"}, 50},
		"alike":     {sqlAlike, []string{"'{2}'", "'{5}'", "'{core.echo}'", "'{x}'", "'{true}'", "'{30000}'", "'{4000000000000000}'"}, 500},
	}
	for name, look := range looks {
		plan := explainQuery(t, r, look.sql, look.args)
		touched := 0.0
		plan.walk(func(n planNode) {
			touched += (n.Rows + n.Removed + n.JoinLost + n.Recheck) * max(n.Loops, 1)
			if n.Type == "Seq Scan" && n.Loops > 0 {
				t.Errorf("%s scans %s", name, n.Relation)
			}
		})
		if touched > look.most {
			t.Errorf("%s touches %.0f rows, want at most %.0f", name, touched, look.most)
		}
	}
}

// explainQuery is explain for a query with literal arguments.
func explainQuery(t *testing.T, r *rig, query string, literals []string) planNode {
	t.Helper()
	tx, err := r.loops.BeginTxx(context.WithoutCancel(t.Context()), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("PREPARE look AS " + query); err != nil {
		t.Fatal(err)
	}
	defer tx.Exec("DEALLOCATE look")
	var text string
	if err := tx.Get(&text, "EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE look ("+strings.Join(literals, ", ")+")"); err != nil {
		t.Fatal(err)
	}
	var plans []struct {
		Plan planNode `json:"Plan"`
	}
	if err := json.Unmarshal([]byte(text), &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan
}
