package store

import (
	"testing"
	"time"

	"headgate/tasks"
)

// churn passes n tasks of every agent through the queue.
func (r *rig) churn(n int) {
	r.tb.Helper()
	for range n {
		var ins []tasks.Insert
		var ends []tasks.Finish
		for _, a := range r.agents {
			in := r.insert(a, true)
			ins, ends = append(ins, in), append(ends, r.finish(in, 1))
		}
		r.turn(&tasks.Turn{Inserts: ins})
		if res := r.turn(&tasks.Turn{Finishes: ends}); len(res.Finished) != len(ends) {
			r.tb.Fatalf("finished %d of %d", len(res.Finished), len(ends))
		}
	}
}

// alone keeps autovacuum away from the queue.
func (r *rig) alone() {
	r.tb.Helper()
	if _, err := r.general.Exec(`ALTER TABLE agent_queue SET (autovacuum_enabled = off)`); err != nil {
		r.tb.Fatal(err)
	}
}

// dead waits until the server counts at least so many dead rows, which it does
// a moment later.
func (r *rig) dead(least int64) queueRows {
	r.tb.Helper()
	var rows queueRows
	for end := time.Now().Add(30 * time.Second); ; {
		if err := r.upkeep.Get(&rows, sqlQueueRows); err != nil {
			r.tb.Fatal(err)
		}
		if rows.Dead >= least {
			return rows
		}
		if time.Now().After(end) {
			r.tb.Fatalf("%d dead rows are counted, want %d", rows.Dead, least)
		}
		r.churn(1)
	}
}

// vacuumed vacuums until the server counts that nothing lives in the queue.
func (r *rig) vacuumed() {
	r.tb.Helper()
	for end := time.Now().Add(30 * time.Second); ; {
		if _, err := r.upkeep.Exec(vacuumQueue); err != nil {
			r.tb.Fatal(err)
		}
		var rows queueRows
		if err := r.upkeep.Get(&rows, sqlQueueRows); err != nil {
			r.tb.Fatal(err)
		}
		if rows.Live < 100 {
			return
		}
		if time.Now().After(end) {
			r.tb.Fatalf("the server still counts %d rows", rows.Live)
		}
	}
}

func TestTheQueueStaysSmallWithoutAutovacuum(t *testing.T) {
	t.Parallel()
	r := newRig(t, 100)
	r.alone()
	lim := tendLimits{dead: 2000, rebuildFrom: 1 << 30}
	size := func() int { return r.count(`SELECT pg_relation_size('agent_queue') + pg_indexes_size('agent_queue')`) }
	r.churn(30)
	r.dead(2001)
	if err := r.tendQueue(t.Context(), lim); err != nil {
		t.Fatal(err)
	}
	first := size()
	for range 5 {
		r.churn(30)
		r.dead(2001)
		r.tending.nextVacuum = time.Time{} // the server may have counted late, so that the last one seemed in vain
		if err := r.tendQueue(t.Context(), lim); err != nil {
			t.Fatal(err)
		}
	}
	if last := size(); last > 2*first+(1<<20) {
		t.Errorf("the queue grew from %d to %d bytes", first, last)
	}
}

// Cases Q22.
func TestVacuumGivesWayToASnapshot(t *testing.T) {
	t.Parallel()
	r := newRig(t, 100)
	r.alone()
	tx, err := r.general.Beginx()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec(`SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.Get(&n, `SELECT count(*) FROM agent_queue`); err != nil {
		t.Fatal(err)
	}
	lim := tendLimits{dead: 500, rebuildFrom: 1 << 30}
	r.churn(10)
	r.dead(600)
	for i, want := range []time.Duration{firstVacuumPause, 2 * firstVacuumPause, 4 * firstVacuumPause} {
		r.tending.nextVacuum = time.Time{}
		if err := r.tendQueue(t.Context(), lim); err != nil {
			t.Fatal(err)
		}
		if r.tending.pause != want || time.Until(r.tending.nextVacuum) < want/2 {
			t.Errorf("vacuum %d that frees nothing: the pause is %s, want %s", i, r.tending.pause, want)
		}
	}
	before := r.tending.nextVacuum
	if err := r.tendQueue(t.Context(), lim); err != nil || r.tending.nextVacuum != before {
		t.Errorf("it did not wait: %v", err)
	}
}

func TestASwollenIndexIsBuiltAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, 50)
	var ins []tasks.Insert
	var ends []tasks.Finish
	for i := range 20_000 {
		in := r.insert(r.agents[i%50], false)
		ins, ends = append(ins, in), append(ends, r.finish(in, 0))
	}
	for i := 0; i < len(ins); i += 1000 {
		r.turn(&tasks.Turn{Inserts: ins[i : i+1000]})
	}
	for i := 0; i < len(ins); i += 1000 {
		r.turn(&tasks.Turn{Finishes: ends[i : i+1000]})
	}
	r.vacuumed()
	size := func(name string) int { return r.count(`SELECT pg_relation_size($1::regclass)`, name) }
	swollen := size("agent_queue_pkey")
	lim := tendLimits{dead: 1 << 40, rebuildFrom: 100 << 10, rebuildPause: time.Hour}

	// A rebuild that was cut short has left this.
	if _, err := r.general.Exec(`CREATE INDEX agent_queue_pkey_ccnew ON agent_queue (agent_num)`); err != nil {
		t.Fatal(err)
	}
	if _, err := r.general.Exec(`UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'agent_queue_pkey_ccnew'::regclass`); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if err := r.tendQueue(t.Context(), lim); err != nil {
			t.Fatal(err)
		}
	}
	if now := size("agent_queue_pkey"); now > swollen/4 {
		t.Errorf("the index has %d bytes, %d before", now, swollen)
	}
	if n := r.count(`SELECT count(*) FROM pg_index WHERE indrelid = 'agent_queue'::regclass`); n != 2 {
		t.Errorf("%d indexes, want 2", n)
	}
	r.churn(2)
	checkInvariant(t, r.DB)

	// A rebuild that a long transaction holds up leaves nothing behind.
	tx, err := r.general.Beginx()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec(`LOCK TABLE agent_queue IN ROW EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	if err := r.rebuildIndex(t.Context(), "agent_queue_pkey", 0); err == nil {
		t.Error("it came through")
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := r.tendQueue(t.Context(), lim); err != nil {
		t.Fatal(err)
	}
	if n := r.count(`SELECT count(*) FROM pg_index WHERE indrelid = 'agent_queue'::regclass`); n != 2 {
		t.Errorf("%d indexes after a rebuild that was held up, want 2", n)
	}
}
