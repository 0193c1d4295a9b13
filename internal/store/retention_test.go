package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"headgate/internal/fault"
	"headgate/tasks"
)

const day = 24 * time.Hour

// history stores completed tasks of an age in the partition that is in use.
func (r *rig) history(n int, age time.Duration) []tasks.ID {
	r.tb.Helper()
	at := time.Now().Add(-age)
	var ids []tasks.ID
	for range n {
		id := r.id()
		ids = append(ids, id)
		for _, q := range []string{
			`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
VALUES ($1, $2, $2, 1000, $3, 5, false, 'core.echo', 'token:test', '{}')`,
			`INSERT INTO agent_result (task_id, completed_at, agent_num, outcome) VALUES ($1, $2, $3, 'succeeded')`,
			`INSERT INTO task_output (task_id, off, at, agent_num, seq, attempt, stream, bytes) VALUES ($1, 0, $2, $3, 1, 1, 'stdout', 'hello')`,
		} {
			if _, err := r.general.Exec(q, int64(id), at, int32(r.agents[0].Num)); err != nil {
				r.tb.Fatal(err)
			}
		}
	}
	return ids
}

// nextPartition lets the ids go on in the next partition.
func (r *rig) nextPartition() {
	r.tb.Helper()
	first := (int64(r.next)/partitionSpan + 1) * partitionSpan
	if did, err := r.skipTo(r.tb.Context(), first); err != nil || !did {
		r.tb.Fatalf("skip to %d: %v, %v", first, did, err)
	}
	r.left = 0
	if id := r.id(); int64(id) < first || int64(id) > first+2*tasks.IDBlock {
		r.tb.Fatalf("the first id is %d, want one just behind %d", id, first)
	}
}

func (r *rig) retain(limits Retention) RetentionReport {
	r.tb.Helper()
	rep, err := r.ApplyRetention(r.tb.Context(), limits)
	if err != nil {
		r.tb.Fatalf("retention: %v", err)
	}
	return rep
}

// tables counts the tables that hold tasks, attached or not.
func (r *rig) tables() int {
	return r.count(`SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '_p[0-9]+$'`)
}

// Cases Q23, Q38.
func TestRetentionDropsWholePartitionsAndSaysSo(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	old := r.history(20, 100*day)
	r.nextPartition()
	kept := r.history(5, 2*day)
	r.nextPartition()
	r.history(1, 2*time.Hour)
	before := r.tables()

	rep := r.retain(Retention{Age: 90 * day})
	if len(rep.Dropped) != 1 || rep.Dropped[0].Number != 0 || rep.Dropped[0].Tasks != 20 || rep.Closed {
		t.Fatalf("report %+v", rep)
	}
	if got := before - r.tables(); got != 4 {
		t.Errorf("%d tables are gone, want 4", got)
	}
	_, err := r.Task(t.Context(), old[3])
	if !errors.Is(err, tasks.ErrNoTask) || !errors.Is(err, tasks.ErrDropped) {
		t.Errorf("a dropped task: %v", err)
	}
	for _, id := range []tasks.ID{kept[0] + 50, r.next + 10*partitionSpan} {
		if _, err := r.Task(t.Context(), id); !errors.Is(err, tasks.ErrNoTask) || errors.Is(err, tasks.ErrDropped) {
			t.Errorf("task %d, which never was: %v", id, err)
		}
	}
	if x, err := r.Task(t.Context(), kept[0]); err != nil || x.State != tasks.StateCompleted {
		t.Errorf("a kept task: %+v, %v", x, err)
	}
	list, err := r.Tasks(t.Context(), tasks.Filter{Limit: 100})
	if err != nil || len(list) != 6 {
		t.Errorf("%d tasks are listed (%v), want 6", len(list), err)
	}

	// An answer to a dropped task harms nobody, and the partition stays away.
	f := r.finish(tasks.Insert{ID: old[0], Agent: r.agents[0].Num, Priority: 5, Epoch: 1}, 1)
	if _, err := r.RecordLate(t.Context(), []tasks.Finish{f}); err != nil {
		t.Errorf("a late answer to a dropped task: %v", err)
	}
	r.nextPartition()
	in := r.insert(r.agents[0], true)
	if res := r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}}); len(res.Inserted) != 1 {
		t.Errorf("inserted %v", res.Inserted)
	}
	if n := r.count(`SELECT count(*) FROM pg_class WHERE relname = 'agent_task_p0'`); n != 0 {
		t.Error("the dropped partition was made again")
	}
	if rep := r.retain(Retention{Age: 90 * day}); len(rep.Dropped) != 0 {
		t.Errorf("the second run dropped %+v", rep.Dropped)
	}
}

func TestRetentionKeepsWhatIsStillNeeded(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	open := r.insert(r.agents[0], true)
	later := r.insert(r.agents[1], false)
	open.CreatedAt, later.CreatedAt = time.Now().Add(-200*day), time.Now().Add(-200*day)
	later.NotBefore = time.Now().Add(time.Hour)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{open, later}})
	plan := func() Partition {
		t.Helper()
		p, err := r.PlanRetention(t.Context(), Retention{Age: 2 * day})
		if err != nil {
			t.Fatal(err)
		}
		return p[0]
	}
	if p := plan(); p.Drop || p.Why != "new tasks may still get its ids" {
		t.Errorf("while it is in use: %+v", p)
	}
	r.nextPartition()
	r.history(1, 2*time.Hour)
	if p := plan(); p.Drop || p.Open != 2 || p.Why != "2 of its tasks are not completed" {
		t.Errorf("with open tasks: %+v", p)
	}
	lf := r.finish(later, 0)
	lf.Later = true
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(open, 1), lf}})
	if p := plan(); p.Drop || p.Open != 0 || p.Ended.IsZero() {
		t.Errorf("just after its last result: %+v", p)
	}
	if rep := r.retain(Retention{}); len(rep.Dropped) != 0 || rep.Closed {
		t.Errorf("without limits: %+v", rep)
	}
}

// TestNobodyWaitsForRetention holds a long report open, which keeps a drop from
// coming through, and looks that turns and new partitions go on meanwhile.
func TestNobodyWaitsForRetention(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.history(3, 100*day)
	r.nextPartition()
	r.history(1, 2*time.Hour)
	before := r.tables()
	report, err := r.general.Beginx()
	if err != nil {
		t.Fatal(err)
	}
	defer report.Rollback()
	var n int
	if err := report.Get(&n, `SELECT count(*) FROM agent_task`); err != nil {
		t.Fatal(err)
	}
	// If turns waited for a drop, each try would let one through at most.
	const enough = 5
	turns := 0
	for tries := 0; turns < enough; tries++ {
		if tries == 10 {
			t.Fatalf("only %d turns came through beside a drop", turns)
		}
		turns = r.turnsBesideRetention()
	}
	if _, err := r.Tasks(t.Context(), tasks.Filter{Limit: 10}); err != nil {
		t.Errorf("a list with a drop under way: %v", err)
	}
	r.nextPartition() // makes partitions with a drop under way
	if err := report.Rollback(); err != nil {
		t.Fatal(err)
	}
	r.retain(Retention{}) // what was begun is finished whatever the limits are now
	if n := r.count(`SELECT count(*) FROM pg_class WHERE relname ~ '_p0$'`); n != 0 {
		t.Errorf("%d tables of the partition are left, of %d before", n, before)
	}
	checkInvariant(t, r.DB)
}

// turnsBesideRetention counts the turns that come through while a retention
// waits, which gives up in the end.
func (r *rig) turnsBesideRetention() (turns int) {
	r.tb.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := r.ApplyRetention(r.tb.Context(), Retention{Age: 90 * day})
		done <- err
	}()
	for {
		select {
		case err := <-done:
			if fault.KindOf(err) != fault.Unavailable {
				r.tb.Fatalf("retention beside a long report: %v", err)
			}
			return turns
		default:
		}
		in := r.insert(r.agents[0], true)
		r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}})
		r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(in, 1)}})
		turns++
	}
}

// TestRetentionGoesOnWhereItWasCut kills a run behind each of its steps.
func TestRetentionGoesOnWhereItWasCut(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	for _, cut := range []string{
		``, // marked alone
		`ALTER TABLE agent_task DETACH PARTITION agent_task_p%[1]d CONCURRENTLY`,
		`DROP TABLE agent_task_p%[1]d`,
	} {
		part := int64(r.next) / partitionSpan
		r.history(2, 100*day)
		r.nextPartition()
		r.history(1, 2*time.Hour)
		for _, parent := range partitioned() {
			if _, err := r.upkeep.Exec(fmt.Sprintf(`COMMENT ON TABLE %s_p%d IS '%s'`, parent, part, dropMark)); err != nil {
				t.Fatal(err)
			}
		}
		if cut != "" {
			if _, err := r.upkeep.Exec(fmt.Sprintf(cut, part)); err != nil {
				t.Fatal(err)
			}
		}
		r.retain(Retention{})
		if n := r.count(`SELECT count(*) FROM pg_class WHERE relname ~ $1`, fmt.Sprintf("_p%d$", part)); n != 0 {
			t.Errorf("after %q %d tables are left", cut, n)
		}
	}
	// A table that an operator has taken out to keep it is left alone.
	if _, err := r.upkeep.Exec(fmt.Sprintf(`ALTER TABLE agent_task DETACH PARTITION agent_task_p%d CONCURRENTLY`, int64(r.next)/partitionSpan)); err != nil {
		t.Fatal(err)
	}
	before := r.tables()
	r.retain(Retention{Age: 90 * day})
	if r.tables() != before {
		t.Error("a table that an operator has detached was dropped")
	}
}

func TestTwoRetentionsAtOnceDropOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	for range 3 {
		r.history(2, 100*day)
		r.nextPartition()
	}
	r.history(1, 2*time.Hour)
	other := openDSN(t, r.cfg.DSN)
	errs := make(chan error, 2)
	for _, d := range []*DB{r.DB, other} {
		go func() {
			_, err := d.ApplyRetention(t.Context(), Retention{Age: 90 * day})
			errs <- err
		}()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Logf("one of the two gave way: %v", err)
		}
	}
	r.retain(Retention{Age: 90 * day})
	if n := r.count(`SELECT count(*) FROM pg_class WHERE relname ~ '_p[012]$'`); n != 0 {
		t.Errorf("%d tables are left", n)
	}
	if n := r.count(`SELECT count(*) FROM agent_task`); n != 1 {
		t.Errorf("%d tasks are left, want 1", n)
	}
}

// TestAPartitionIsClosedInTime shows that an installation of few tasks gets
// rid of them too.
func TestAPartitionIsClosedInTime(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.history(2, 12*day)
	if rep := r.retain(Retention{Age: 100 * day}); rep.Closed {
		t.Error("it was closed before an eighth of the age")
	}
	first := r.next
	// Others take ids at the same time; nobody may get an id twice.
	const takers = 4
	got := make(chan []tasks.ID, takers)
	for range takers {
		go func() {
			var all []tasks.ID
			for range 20 {
				id, err := r.TakeIDs(t.Context())
				if err != nil {
					t.Error(err)
				}
				all = append(all, id)
			}
			got <- all
		}()
	}
	if rep := r.retain(Retention{Age: 90 * day}); !rep.Closed {
		t.Error("it was not closed")
	}
	var all []tasks.ID
	for range takers {
		all = append(all, <-got...)
	}
	slices.Sort(all)
	if n := len(slices.Compact(slices.Clone(all))); n != len(all) || all[0] <= first {
		t.Errorf("%d of %d blocks are distinct, the first is %d", n, len(all), all[0])
	}
	r.left = 0
	if id := r.id(); id < partitionSpan {
		t.Errorf("the next id is %d", id)
	}
	if rep := r.retain(Retention{Age: 90 * day}); rep.Closed {
		t.Error("the new one was closed at once")
	}
}

func TestIDsAreGivenWhileThereIsRoomForThem(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.id()
	busy := openDSN(t, r.cfg.DSN, func(c *Config) { c.LockTimeout = 50 * time.Millisecond })
	if err := busy.ensurePartitions(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	tx, err := r.general.Beginx()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	// What ANALYZE of all tasks holds for as long as it takes.
	if _, err := tx.Exec(`LOCK TABLE agent_task IN SHARE UPDATE EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	if err := busy.ensurePartitions(t.Context(), partitionSpan+1); err != nil {
		t.Errorf("with a whole partition ahead: %v", err)
	}
	if err := busy.ensurePartitions(t.Context(), 2*partitionSpan+1); err == nil {
		t.Error("ids without a partition were given")
	}
}

func TestWhatRetentionDecides(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	part := func(n int64, oldest, newest time.Duration, open int64) Partition {
		return Partition{Number: n, Tasks: 100, Bytes: 1000, Open: open, Oldest: now.Add(-oldest), Newest: now.Add(-newest)}
	}
	// Oldest first; the last one is still empty.
	all := []Partition{
		part(0, 40*day, 30*day, 0), part(1, 30*day, 20*day, 0), part(2, 20*day, 10*day, 1), part(3, 10*day, 12*time.Hour, 0),
		part(4, 12*time.Hour, time.Minute, 5),
		{Number: 5},
	}
	for name, c := range map[string]struct {
		limits Retention
		want   []int64
	}{
		"none":             {Retention{}, nil},
		"age":              {Retention{Age: 25 * day}, []int64{0}},
		"age, one is open": {Retention{Age: 5 * day}, []int64{0, 1}},
		"tasks":            {Retention{Tasks: 400}, []int64{0}},
		"tasks, partly":    {Retention{Tasks: 301}, []int64{0}},
		"tasks, young":     {Retention{Tasks: 1}, []int64{0, 1}},
		"bytes":            {Retention{Bytes: 4500}, []int64{0}},
		"bytes, all":       {Retention{Bytes: 1}, []int64{0, 1}},
		"the strictest":    {Retention{Age: 100 * day, Tasks: 10_000, Bytes: 3500}, []int64{0, 1}},
	} {
		parts := slices.Clone(all)
		judge(parts, c.limits, now)
		var got []int64
		for _, p := range parts {
			if p.Drop {
				got = append(got, p.Number)
			}
			if p.Why == "" {
				t.Errorf("%s: partition %d without a reason", name, p.Number)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: dropped %v, want %v", name, got, c.want)
		}
	}
}

// TestRetentionStopsWithItsCaller keeps a stop of the controller short.
func TestRetentionStopsWithItsCaller(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.ApplyRetention(ctx, Retention{Age: day}); err == nil {
		t.Error("it went on")
	}
}
