package tasks_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// Cases Q30.
func TestUnknownCommitsAreSettledFirst(t *testing.T) {
	for name, f := range map[string]tasktest.Fault{"written": tasktest.UnknownDone, "not written": tasktest.UnknownUndone, "broken": tasktest.Broken} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, 1)
				left := 3
				r.faults.FailSettles(4)
				r.faults.OnTurn(func(*tasks.Turn) tasktest.Fault {
					if left--; left >= 0 {
						return f
					}
					return tasktest.None
				})
				got, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
				if err != nil {
					t.Fatal(err)
				}
				r.pass(10 * time.Second)
				r.isDone(got.ID)
				if n := len(r.runner.Starts(r.agents[0].Num)); n != 1 {
					t.Errorf("started %d times", n)
				}
				r.check()
			})
		})
	}
}

func TestSubmitterIsToldOfAnUnknownCommit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.faults.FailSettles(1000)
		r.faults.OnTurn(func(x *tasks.Turn) tasktest.Fault {
			if len(x.Inserts) > 0 {
				return tasktest.UnknownDone
			}
			return tasktest.None
		})
		begin := time.Now()
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "commit_unknown")
		if d := time.Since(begin); d != 10*time.Second {
			t.Errorf("told after %s", d)
		}
		if !strings.Contains(err.Error(), "task 1 ") {
			t.Errorf("the id is not named: %v", err)
		}
		r.faults.OnTurn(nil)
		r.faults.FailSettles(0)
		r.pass(5 * time.Second)
		r.isDone(1)
		r.check()
	})
}

func TestDatabaseOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 50 * time.Second} })
		long := func(s *tasks.Submission) { s.Timeout = time.Minute }
		run, next := r.submit(0, long).ID, r.submit(0, long).ID
		r.faults.Down(true)
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "database_unavailable")
		r.pass(10 * time.Minute) // beyond the lease and beyond the forced deadline
		if len(r.manager.Ready()) == 0 {
			t.Error("ready although the leases cannot be renewed")
		}
		r.faults.Down(false)
		r.pass(6 * time.Second)
		r.isDone(run)
		r.is(next, tasks.StateWaiting, 1, "", "")
		r.pass(2 * time.Minute)
		r.isDone(next)
		if n := r.store.Open(); n != 0 {
			t.Errorf("%d tasks are open: a refused submission was stored", n)
		}
		r.check()
	})
}

// Cases Q31, Q33, R14, R28.
func TestFencedOwnerWritesNothingMore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.script(0, silent)
		run := r.submit(0).ID
		two := tasks.Owner{ID: uuid.NewV4(), Name: "two"}
		var all []tasks.Shard
		for s := range tasks.Shard(tasks.NumShards) {
			all = append(all, s)
		}
		r.store.ExpireLeases()
		if got, err := r.store.Acquire(t.Context(), two, nil, all); err != nil || len(got) != tasks.NumShards {
			t.Fatalf("take-over: %v, %v", got, err)
		}
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		r.pass(time.Second)
		r.is(run, tasks.StateWaiting, 1, "", "")
		_, err := r.service.Submit(t.Context(), echo(1), "user:test", tasks.Idempotency{})
		wantFault(t, err, "owner_unreachable")
		// The other one falls silent; we take over and ask the agent.
		r.pass(25 * time.Second)
		r.isDone(run)
		r.check()
	})
}

func TestNextStartTakesOverAtOnceFromAFormerOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 3)
		r.script(0, silent)
		run, queued := r.submit(0).ID, r.submit(0).ID
		old := uuid.NewV4()
		r.stop()
		// A killed start left its leases behind.
		if _, err := r.store.Acquire(t.Context(), tasks.Owner{ID: old}, nil, []tasks.Shard{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}); err != nil {
			t.Fatal(err)
		}
		for i := range r.agents {
			r.runner.Disconnect(r.agents[i].Num, "the controller died")
		}
		r.make(func(c *tasks.Config) { c.Former = []uuid.UUID{old} })
		r.start()
		if u := r.manager.Ready(); len(u) != 0 {
			t.Fatalf("not ready: %v", u)
		}
		r.is(run, tasks.StateWaiting, 1, "", "")
		r.isNew(queued)
		r.script(0, nil2())
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		synctest.Wait()
		r.isDone(run)
		r.isDone(queued)
		r.check()
	})
}

func TestCleanStopGivesShardsBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.stop()
		if owners, err := r.store.Owners(t.Context()); err != nil || len(owners.Leases) != 0 {
			t.Errorf("owners after a clean stop: %v, %v", owners, err)
		}
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		if err == nil {
			t.Error("a stopped manager took a task")
		}
	})
}

// Cases Q32, Q33.
func TestDiskAndMemoryThatPartAreBroughtTogether(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		run, next := r.submit(0).ID, r.submit(0).ID
		// Somebody else completes the row behind our back.
		f := tasks.Finish{
			Agent: r.agents[0].Num, Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: run, Attempt: 1}, Epoch: 1,
			Ending: tasks.Ending{Outcome: tasks.Failed, Reason: "by_hand"},
		}
		owners, err := r.store.Owners(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.store.Turn(t.Context(), &tasks.Turn{Owner: owners.Leases[0].Owner, Leases: owners.Leases, Finishes: []tasks.Finish{f}}); err != nil {
			t.Fatal(err)
		}
		r.script(0, nil2())
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		r.pass(2 * time.Second)
		r.is(run, tasks.StateCompleted, 1, tasks.Failed, "by_hand")
		r.isDone(next)
		if r.manager.Mismatches() == 0 {
			t.Error("no alarm was raised")
		}
		r.stop()
		for _, v := range r.runner.Violations() {
			t.Error(v)
		}
	})
}

func TestNoTurnAfterTrustHasEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.faults.FailRenews(true)
		r.pass(tasks.RenewEvery + tasks.LeaseTerm - tasks.LeaseMargin)
		turns := r.faults.Turns()
		errs := make(chan error, 1)
		go func() {
			_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
			errs <- err
		}()
		r.pass(2 * time.Second)
		if n := r.faults.Turns(); n != turns {
			t.Errorf("%d turns were made although the leases could not be renewed", n-turns)
		}
		if u := r.manager.Ready(); len(u) != 1 || u[0].Name != "shards" {
			t.Errorf("unmet conditions %v", u)
		}
		r.faults.FailRenews(false)
		if err := <-errs; err != nil {
			t.Error(err)
		}
		r.pass(time.Second)
		r.check()
	})
}

func TestIDsStayInOrderWhenAShardComesBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Paused = true })
		first := r.submit(0).ID
		// Another controller holds the shards, takes ids of its own and inserts.
		var all []tasks.Shard
		for s := range tasks.Shard(tasks.NumShards) {
			all = append(all, s)
		}
		two := tasks.Owner{ID: uuid.NewV4(), Name: "two"}
		r.store.ExpireLeases()
		leases, err := r.store.Acquire(t.Context(), two, nil, all)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := r.store.TakeIDs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		x := tasks.Insert{
			ID: theirs, Agent: r.agents[0].Num, Epoch: leases[r.agents[0].Shard()].Epoch, Kind: kinds.Echo, Args: "{}",
			Priority: tasks.DefaultPriority, Timeout: time.Second, CreatedAt: time.Now(), ExpiresAt: time.Now().Add(time.Hour),
		}
		if _, err := r.store.Turn(t.Context(), &tasks.Turn{Owner: two.ID, Leases: leases, Inserts: []tasks.Insert{x}}); err != nil {
			t.Fatal(err)
		}
		r.pass(5 * time.Second)
		if err := r.store.Release(t.Context(), two, leases); err != nil {
			t.Fatal(err)
		}
		r.pass(5 * time.Second)
		last := r.submit(0).ID
		if first >= theirs || theirs >= last {
			t.Errorf("ids %d, %d, %d are not in the order of submission", first, theirs, last)
		}
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Paused = false })
		r.pass(time.Second)
		var got []tasks.ID
		for _, ref := range r.runner.Starts(r.agents[0].Num) {
			got = append(got, ref.ID)
		}
		if want := []tasks.ID{first, theirs, last}; !slices.Equal(got, want) {
			t.Errorf("started %v, want %v", got, want)
		}
		r.check()
	})
}

// TestOldIDsAreGivenUp: a store drops the room for ids that were passed by long
// ago, so those that a quiet loop has left must not be used any more.
func TestOldIDsAreGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		first := r.submit(0).ID
		r.pass(tasks.IDLife / 2)
		if second := r.submit(0).ID; second != first+1 {
			t.Errorf("the ids are %d and %d, want one block", first, second)
		}
		r.pass(tasks.IDLife/2 + time.Second)
		if third := r.submit(0).ID; third < first+tasks.IDBlock {
			t.Errorf("%s later the id is %d, of the block of %d", tasks.IDLife, third, first)
		}
	})
}
