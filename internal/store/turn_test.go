package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/tasks"
)

func TestTurnCarriesATaskThroughItsLife(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	a, b := r.agents[0], r.agents[1]
	first, second, other := r.insert(a, true), r.insert(a, false), r.insert(b, true)
	res := r.turn(&tasks.Turn{Inserts: []tasks.Insert{first, second, other}})
	if diff := cmp.Diff([]tasks.ID{first.ID, second.ID, other.ID}, res.Inserted); diff != "" {
		t.Fatalf("inserted (-want +got):\n%s", diff)
	}
	// A finish and the claim of the same agent's next task ride together.
	res = r.turn(&tasks.Turn{
		Finishes: []tasks.Finish{r.finish(first, 1)},
		Claims:   []tasks.Claim{{Agent: a.Num, Priority: 5, ID: second.ID, Epoch: r.epoch(a), Attempt: 1}},
		Output: []tasks.OutputRow{{Agent: b.Num, OutputChunk: tasks.OutputChunk{
			Ref: tasks.Ref{ID: other.ID, Attempt: 1}, Stream: "stdout",
			At: time.Now(), Data: []byte("a\x00\xff"),
		}}},
	})
	if diff := cmp.Diff([]tasks.ID{first.ID}, res.Finished); diff != "" {
		t.Fatalf("finished (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]tasks.ID{second.ID}, res.Claimed); diff != "" {
		t.Fatalf("claimed (-want +got):\n%s", diff)
	}
	got, err := r.Task(t.Context(), first.ID)
	if err != nil {
		t.Fatal(err)
	}
	if got.State != tasks.StateCompleted || got.Ending.Outcome != tasks.Succeeded || string(got.Ending.Result) != `{"ok":true}` || got.Attempt != 1 {
		t.Errorf("first task is %+v", got)
	}
	if !got.CreatedAt.Equal(first.CreatedAt.Truncate(time.Microsecond)) {
		t.Errorf("created at %v, want %v", got.CreatedAt, first.CreatedAt)
	}
	if got, err = r.Task(t.Context(), second.ID); err != nil || got.State != tasks.StateWaiting || got.Attempt != 1 {
		t.Errorf("second task is %+v, %v", got, err)
	}
	// Back to new, in its old place, then into back-off, due again, ended.
	res = r.turn(&tasks.Turn{Requeues: []tasks.Requeue{{Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: second.ID, Attempt: 1}, Epoch: r.epoch(a)}}})
	if len(res.Requeued) != 1 {
		t.Fatalf("requeued %v", res.Requeued)
	}
	if got, err = r.Task(t.Context(), second.ID); err != nil || got.State != tasks.StateNew || got.Attempt != 1 {
		t.Errorf("requeued task is %+v, %v", got, err)
	}
	r.turn(&tasks.Turn{Claims: []tasks.Claim{{Agent: a.Num, Priority: 5, ID: second.ID, Epoch: r.epoch(a), Attempt: 2}}})
	res = r.turn(&tasks.Turn{Requeues: []tasks.Requeue{{
		Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: second.ID, Attempt: 2}, Epoch: r.epoch(a),
		NotBefore: time.Now().Add(time.Hour),
	}}})
	if len(res.Requeued) != 1 {
		t.Fatalf("requeued %v", res.Requeued)
	}
	row, err := r.Find(t.Context(), second.ID)
	if err != nil || !row.Later || row.Attempt != 2 || row.Epoch != 0 {
		t.Fatalf("later row is %+v, %v", row, err)
	}
	f := r.finish(second, 2)
	f.Later, f.Epoch, f.Ending = true, 0, tasks.Ending{Outcome: tasks.Cancelled, Reason: tasks.ReasonCancelled}
	if res = r.turn(&tasks.Turn{Finishes: []tasks.Finish{f}}); len(res.Finished) != 1 {
		t.Fatalf("finished in later: %v", res.Finished)
	}
	if _, err := r.Find(t.Context(), second.ID); !errors.Is(err, tasks.ErrNoTask) {
		t.Errorf("find a completed task: %v, want ErrNoTask", err)
	}
	checkInvariant(t, r.DB)
}

// checkInvariant looks whether the tables say the same.
func checkInvariant(tb testing.TB, d *DB) {
	tb.Helper()
	found, err := d.CheckConsistency(context.WithoutCancel(tb.Context()))
	if err != nil {
		tb.Errorf("compare the tables: %v", err)
	}
	for _, note := range found.Notes() {
		tb.Error(note)
	}
}

func TestTurnLeavesAloneWhatItDidNotSee(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	a := r.agents[0]
	in := r.insert(a, true)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}})
	wrongAttempt, wrongEpoch, unstarted := r.finish(in, 2), r.finish(in, 1), r.finish(in, 1)
	wrongEpoch.Epoch += 7
	unstarted.Epoch = 0
	for name, turn := range map[string]*tasks.Turn{
		"attempt": {Finishes: []tasks.Finish{wrongAttempt}},
		"epoch":   {Finishes: []tasks.Finish{wrongEpoch}},
		"fresh":   {Finishes: []tasks.Finish{unstarted}},
		"claim":   {Claims: []tasks.Claim{{Agent: a.Num, Priority: 5, ID: in.ID, Epoch: r.epoch(a), Attempt: 2}}},
		"requeue": {Requeues: []tasks.Requeue{{Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: in.ID, Attempt: 3}, Epoch: r.epoch(a)}}},
		"cancel":  {Cancels: []tasks.CancelMark{{Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: in.ID, Attempt: 2}, Actor: "user:x"}}},
	} {
		res := r.turn(turn)
		if n := len(res.Finished) + len(res.Claimed) + len(res.Requeued) + len(res.Marked); n != 0 {
			t.Errorf("%s: a turn that saw another row changed %d rows", name, n)
		}
	}
	res := r.turn(&tasks.Turn{Cancels: []tasks.CancelMark{{Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: in.ID, Attempt: 1}, Actor: "user:x"}}})
	if len(res.Marked) != 1 {
		t.Errorf("marked %v", res.Marked)
	}
	loaded, err := r.Load(t.Context(), allShards())
	if err != nil || len(loaded.Started) != 1 || loaded.Started[0].CancelRequestedAt.IsZero() {
		t.Errorf("loaded %+v, %v", loaded, err)
	}
	checkInvariant(t, r.DB)
}

func TestTurnSplitsPoisonFromOtherErrors(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	a := r.agents[0]
	good, bad := r.insert(a, false), r.insert(a, false)
	bad.Args = `{"not":"closed"`
	_, err := r.tryTurn(&tasks.Turn{Inserts: []tasks.Insert{good, bad}})
	if _, ok := errors.AsType[*tasks.PoisonError](err); !ok {
		t.Fatalf("broken JSON: %v, want a PoisonError", err)
	}
	if n := r.count(`SELECT count(*) FROM agent_task`); n != 0 {
		t.Errorf("%d tasks were stored by a refused turn", n)
	}
	nul := r.insert(a, true)
	nul.Args = `{"text":"a\u0000b\ud800"}`
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{nul}})
	f := r.finish(nul, 1)
	f.Ending.Result, f.Ending.ResultBytes = nil, []byte("\xff\x00not json")
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{f}})
	got, err := r.Task(t.Context(), nul.ID)
	if err != nil {
		t.Fatal(err)
	}
	if string(got.Args) != nul.Args || string(got.Ending.ResultBytes) != "\xff\x00not json" || got.Ending.Result != nil {
		t.Errorf("stored args %q, result %q, bytes %q", got.Args, got.Ending.Result, got.Ending.ResultBytes)
	}
}

func TestDedupInsertsOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	const racers = 4
	key := &tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k", Hash: [32]byte{1}}
	results := make(chan int, racers)
	for range racers {
		in := r.insert(r.agents[0], false)
		in.Key = key
		twin := r.insert(r.agents[0], false)
		twin.Key = key // the same key twice in one turn: the second is a replay
		go func() {
			res, err := r.tryTurn(&tasks.Turn{Inserts: []tasks.Insert{in, twin}})
			if err != nil {
				t.Error(err)
				results <- 0
				return
			}
			results <- len(res.Inserted)
		}()
	}
	total := 0
	for range racers {
		total += <-results
	}
	if total != 1 {
		t.Errorf("%d inserts of one key, want 1", total)
	}
	rows, err := r.Replay(t.Context(), *key)
	if err != nil || len(rows) != 1 || rows[0].Hash != key.Hash {
		t.Fatalf("replay: %+v, %v", rows, err)
	}
	if _, err := r.Task(t.Context(), rows[0].ID); err != nil {
		t.Errorf("the task of the key: %v", err)
	}
	checkInvariant(t, r.DB)
}

func TestExpiredKeyIsFree(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	key := &tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k"}
	for round := range 2 {
		in := r.insert(r.agents[0], false)
		in.Key = key
		if res := r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}}); len(res.Inserted) != 1 {
			t.Fatalf("round %d: inserted %v", round, res.Inserted)
		}
		if _, err := r.general.Exec(`UPDATE task_dedup SET expires_at = now() - interval '1 second'`); err != nil {
			t.Fatal(err)
		}
		if rows, err := r.Replay(t.Context(), *key); err != nil || len(rows) != 0 {
			t.Fatalf("replay of an expired key: %v, %v", rows, err)
		}
	}
}

func TestOldOwnerWritesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	in := r.insert(r.agents[0], true)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}})
	old := *r
	successor := tasks.Owner{ID: newOwner(), Addr: "127.0.0.1:2"}
	if got := r.acquire(successor); len(got) != 0 {
		t.Fatalf("took %d shards that are held", len(got))
	}
	taken := r.acquire(successor, r.me.ID)
	if len(taken) != tasks.NumShards {
		t.Fatalf("took %d shards of a former owner, want all", len(taken))
	}
	for name, turn := range map[string]*tasks.Turn{
		"insert": {Inserts: []tasks.Insert{r.insert(r.agents[0], false)}},
		"finish": {Finishes: []tasks.Finish{r.finish(in, 1)}},
		"all": {
			Inserts: []tasks.Insert{r.insert(r.agents[0], false)}, Finishes: []tasks.Finish{r.finish(in, 1)},
			Due: []tasks.DueTask{{ID: 1}}, Output: []tasks.OutputRow{{OutputChunk: tasks.OutputChunk{Stream: "stdout"}}},
		},
	} {
		if _, err := old.tryTurn(turn); !errors.Is(err, tasks.ErrFenced) {
			t.Errorf("%s: the old owner's turn gave %v, want ErrFenced", name, err)
		}
	}
	if n := r.count(`SELECT (SELECT count(*) FROM agent_task) * 1000 + (SELECT count(*) FROM agent_result) + (SELECT count(*) FROM task_output)`); n != 1000 {
		t.Errorf("the old owner wrote something: %d", n)
	}
	held, err := r.Renew(t.Context(), old.me, old.leases)
	if err != nil || len(held) != 0 {
		t.Errorf("the old owner renewed %v, %v", held, err)
	}
	if err := r.Release(t.Context(), old.me, old.leases); err != nil {
		t.Error(err)
	}
	owners, err := r.Owners(t.Context())
	if held := owners.Leases; err != nil || len(held) != tasks.NumShards || held[3].Owner != successor.ID || held[3].Addr != successor.Addr {
		t.Errorf("owners: %v, %v", owners, err)
	}
}

// Cases Q18.
func TestTakeOverWaitsForTheRunningTurn(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	in := r.insert(r.agents[0], false)
	args, err := makeTurnArgs(&tasks.Turn{Owner: r.me.ID, Leases: r.leases, Inserts: []tasks.Insert{in}})
	if err != nil {
		t.Fatal(err)
	}
	tx, err := r.loops.BeginTxx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var a turnAnswer
	if err := tx.QueryRow(args.shape.sql(), args.args...).Scan(a.dest(args.shape)...); err != nil || !a.ok.Bool {
		t.Fatalf("turn: %v, ok %v", err, a.ok)
	}
	taken := make(chan error, 1)
	go func() {
		l, err := r.Acquire(t.Context(), tasks.Owner{ID: newOwner()}, idsOf(r.me), allShards())
		if err == nil && len(l) != tasks.NumShards {
			err = fmt.Errorf("took %d shards", len(l))
		}
		taken <- err
	}()
	waitFor(t, r.DB, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
		AND wait_event_type = 'Lock' AND query LIKE '%shard_lease%'`, 1)
	select {
	case err := <-taken:
		t.Fatalf("the take-over did not wait: %v", err)
	default:
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := <-taken; err != nil {
		t.Fatal(err)
	}
	if n := r.count(`SELECT count(*) FROM agent_task WHERE id = $1`, int64(in.ID)); n != 1 {
		t.Errorf("the running turn's task: %d rows", n)
	}
}

// TestFourSessionsNeverDeadlock has four sessions write the same rows under one
// lease, which the one write loop of a shard never does. A turn that waited for
// a row which another has changed meanwhile does not see the new version; it
// finds fewer rows than it had locked and is refused as a whole.
//
// Cases Q13.
func TestFourSessionsNeverDeadlock(t *testing.T) {
	t.Parallel()
	r := newRig(t, 40)
	var ins []tasks.Insert
	for _, a := range r.agents {
		ins = append(ins, r.insert(a, true))
	}
	r.turn(&tasks.Turn{Inserts: ins})
	const sessions, rounds = 4, 40
	done := make(chan error, sessions)
	var written atomic.Int64
	for s := range sessions {
		go func() {
			for n := range rounds {
				// The same rows, listed in another order by each session.
				turn := &tasks.Turn{Owner: r.me.ID, Leases: r.leases}
				for i := range ins {
					x := ins[(i*7+s*13+n)%len(ins)]
					if (i+s)%2 == 0 {
						turn.Requeues = append(turn.Requeues, tasks.Requeue{Agent: x.Agent, Priority: 5, Ref: tasks.Ref{ID: x.ID, Attempt: 1}, Epoch: x.Epoch})
					} else {
						turn.Cancels = append(turn.Cancels, tasks.CancelMark{Agent: x.Agent, Priority: 5, Ref: tasks.Ref{ID: x.ID, Attempt: 1}, Actor: "user:x"})
					}
				}
				switch _, err := r.Turn(t.Context(), turn); {
				case err == nil:
					written.Add(1)
				case !strings.Contains(err.Error(), "but had locked"):
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range sessions {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if written.Load() == 0 {
		t.Error("no turn was written")
	}
	if n := r.count(`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

func TestDueOverdueAndRefill(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	a, b := r.agents[0], r.agents[1]
	soon, low, high, old := r.insert(a, false), r.insert(a, false), r.insert(a, false), r.insert(b, false)
	soon.NotBefore = soon.CreatedAt.Add(time.Millisecond)
	high.Priority = 1
	old.ExpiresAt = old.CreatedAt
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{soon, low, high, old}})
	waitFor(t, r.DB, `SELECT count(*) FROM agent_later WHERE run_at <= clock_timestamp()`, 1)
	due, err := r.Due(t.Context(), allShards(), 10)
	if err != nil || len(due) != 1 || due[0].ID != soon.ID {
		t.Fatalf("due: %v, %v", due, err)
	}
	if res := r.turn(&tasks.Turn{Due: due}); len(res.Moved) != 1 {
		t.Fatalf("moved %v", res.Moved)
	}
	if res := r.turn(&tasks.Turn{Due: due}); len(res.Moved) != 0 {
		t.Errorf("moved twice: %v", res.Moved)
	}
	q, err := r.Refill(t.Context(), []tasks.RefillRequest{{Agent: a.Num, AfterPriority: -1, Limit: 2}, {Agent: b.Num, AfterPriority: 5, AfterID: old.ID, Limit: 9}})
	if err != nil || len(q) != 2 || q[0].ID != high.ID || q[1].ID != soon.ID || q[0].Args != high.Args {
		t.Errorf("refill: %+v, %v", q, err)
	}
	over, err := r.Overdue(t.Context(), allShards(), 10)
	if err != nil || len(over) != 1 || over[0].ID != old.ID {
		t.Fatalf("overdue: %v, %v", over, err)
	}
	if res := r.turn(&tasks.Turn{Finishes: over}); len(res.Finished) != 1 {
		t.Errorf("ended %v", res.Finished)
	}
	l, err := r.Load(t.Context(), allShards())
	if err != nil || l.Depth[a.Num] != 3 || len(l.Depth) != 1 || l.Later != 0 {
		t.Errorf("loaded %+v, %v", l, err)
	}
	checkInvariant(t, r.DB)
}

// Cases Q26.
func TestHistoryNeverChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	in := r.insert(r.agents[0], true)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}})
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(in, 1)}})
	for _, q := range []string{
		`UPDATE agent_task SET kind = 'x'`, `DELETE FROM agent_task`,
		`UPDATE agent_result SET outcome = 'failed'`, `DELETE FROM agent_result`, `DELETE FROM agent_result_p0`,
	} {
		if _, err := r.general.Exec(q); err == nil {
			t.Errorf("%s was allowed", q)
		}
	}
}

// TestRetriesOfManySessionsAreOne sends the same retry from several sessions
// at once, as controllers would whose callers retry together.
func TestRetriesOfManySessionsAreOne(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	old := r.insert(r.agents[0], true)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{old}})
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(old, 1)}})
	const sessions = 8
	inserted := make(chan []tasks.ID, sessions)
	var wg sync.WaitGroup
	for range sessions {
		in := r.insert(r.agents[0], false)
		in.RetryOf, in.Key = old.ID, &tasks.Idempotency{Route: tasks.RetryRoute, Key: old.ID.String(), Lasting: true}
		wg.Go(func() {
			res, err := r.tryTurn(&tasks.Turn{Inserts: []tasks.Insert{in}})
			if err != nil {
				t.Errorf("turn: %v", err)
				inserted <- nil
				return
			}
			inserted <- res.Inserted
		})
	}
	wg.Wait()
	close(inserted)
	var all []tasks.ID
	for ids := range inserted {
		all = append(all, ids...)
	}
	got, err := r.Task(t.Context(), old.ID)
	if err != nil || len(all) != 1 || got.RetriedAs != all[0] {
		t.Fatalf("%d sessions stored the retries %v; the task says %+v, %v", sessions, all, got, err)
	}
	if n := r.count(`SELECT count(*) FROM agent_task WHERE retry_of IS NOT NULL AND idem_key IS NULL`); n != 1 {
		t.Errorf("%d retries are stored", n)
	}
	// Its key has no end, but goes when the task that was retried has gone.
	if _, err := r.general.Exec(`INSERT INTO task_dedup (principal, route, key, idx, task_id, expires_at, hash) VALUES ('', 'retry', '0', 0, 7, 'infinity', '')`); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Upkeep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := r.count(`SELECT count(*) FROM task_dedup WHERE task_id = $1`, int64(all[0])); n != 1 || r.count(`SELECT count(*) FROM task_dedup`) != 1 {
		t.Errorf("upkeep left %d keys of the retry, %d in all; want that one", n, r.count(`SELECT count(*) FROM task_dedup`))
	}
	checkInvariant(t, r.DB)
}
