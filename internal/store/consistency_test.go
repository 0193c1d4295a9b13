package store

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/tasks"
)

// TestTheTablesAreCompared breaks each rule by hand.
//
// Cases R17.
func TestTheTablesAreCompared(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := rigOn(t, openDSN(t, open(t).cfg.DSN, func(c *Config) { c.Metrics = reg }), 2)
	a := r.agents[0]
	first, second, done, later := r.insert(a, true), r.insert(a, false), r.insert(r.agents[1], true), r.insert(a, false)
	later.NotBefore = later.CreatedAt.Add(tasks.IDLife)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{first, second, done, later}})
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(done, 1)}})
	check := func(want Consistency) {
		t.Helper()
		got, err := r.CheckConsistency(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got.Crowded, want.Crowded) || !slices.Equal(got.Torn, want.Torn) || !slices.Equal(got.Lost, want.Lost) || got.Looked != 4 {
			t.Errorf("found %+v, want %+v", got, want)
		}
		kinds := len(want.Crowded) + len(want.Torn) + len(want.Lost)
		if got.OK() != (kinds == 0) || len(got.Notes()) == 0 != got.OK() {
			t.Errorf("OK is %v, notes are %v", got.OK(), got.Notes())
		}
		if sum := gaugeSum(t, reg, "headgate_store_inconsistent"); sum != float64(kinds) {
			t.Errorf("the metrics say %v, want %d", sum, kinds)
		}
	}
	sql := func(q string, args ...any) {
		t.Helper()
		if _, err := r.general.Exec(q, args...); err != nil {
			t.Fatal(err)
		}
	}
	check(Consistency{})

	sql(`UPDATE agent_queue SET started_at = now(), epoch = 1, attempt = 1 WHERE task_id = $1`, int64(second.ID))
	check(Consistency{Crowded: []tasks.AgentNum{a.Num}})
	sql(`UPDATE agent_queue SET started_at = NULL, epoch = NULL, attempt = 0 WHERE task_id = $1`, int64(second.ID))

	sql(`INSERT INTO agent_result (task_id, completed_at, agent_num, outcome) VALUES ($1, now(), $2, 'failed')`, int64(first.ID), int32(a.Num))
	sql(`DELETE FROM agent_later WHERE task_id = $1`, int64(later.ID))
	check(Consistency{Torn: []tasks.ID{first.ID, later.ID}})
	sql(`INSERT INTO agent_queue (task_id, agent_num, priority, started_at, epoch, attempt, expires_at) VALUES (999, $1, 5, now(), 1, 1, now())`, int32(r.agents[1].Num))
	check(Consistency{Torn: []tasks.ID{first.ID, later.ID}, Lost: []tasks.ID{999}})

	r.LeaveConsistency()
	if sum := gaugeSum(t, reg, "headgate_store_inconsistent"); sum != 0 {
		t.Errorf("a controller that leaves it to another one still says %v", sum)
	}
}

// TestOldTasksAreComparedAPieceAtATime finds what is wrong far back, and comes
// round again.
func TestOldTasksAreComparedAPieceAtATime(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	const all = checkNewest + 2*checkPiece + 100
	for _, q := range []string{
		`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
		 SELECT g, now(), now(), 1000, $2, 5, false, 'core.echo', 'x', '{}' FROM generate_series(1, $1::int) g`,
		`INSERT INTO agent_result (task_id, completed_at, agent_num, outcome) SELECT g, now(), $2, 'succeeded' FROM generate_series(1, $1::int) g WHERE g <> 30000`,
	} {
		if _, err := r.general.Exec(q, all, int32(r.agents[0].Num)); err != nil {
			t.Fatal(err)
		}
	}
	var found []bool
	for range 6 {
		c, err := r.CheckConsistency(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, slices.Contains(c.Torn, 30_000))
		if c.Looked > 2*(checkNewest+checkPiece) {
			t.Errorf("one check looked at %d tasks", c.Looked)
		}
	}
	if want := []bool{false, true, false, false, true, false}; !slices.Equal(found, want) {
		t.Errorf("found in the rounds %v, want %v", found, want)
	}
}

// gaugeSum adds up a metric over its labels.
func gaugeSum(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range all {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetGauge().GetValue()
			}
		}
	}
	return sum
}
