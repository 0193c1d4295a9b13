package tasks_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// wire is the way between controllers of one test. Its hooks break it.
type wire struct {
	services map[uuid.UUID]*tasks.Service
	unsent   func(to uuid.UUID) bool // the call does not reach the other one
	lost     func(to uuid.UUID) bool // it does, but the answer is lost
	calls    int
}

var errCut = errors.New("the connection was cut")

func (w *wire) call(to tasks.Lease, do func(*tasks.Service) error) error {
	w.calls++
	s := w.services[to.Owner]
	if s == nil || w.unsent != nil && w.unsent(to.Owner) {
		return &tasks.UnsentError{Err: errCut}
	}
	err := do(s)
	if w.lost != nil && w.lost(to.Owner) {
		return errCut
	}
	return err
}

func (w *wire) Store(ctx context.Context, to tasks.Lease, list []tasks.PeerInsert) (got []tasks.PeerStored, err error) {
	err = w.call(to, func(s *tasks.Service) (err error) { got, err = s.StoreForPeer(ctx, list); return err })
	return got, err
}

func (w *wire) Cancel(ctx context.Context, to tasks.Lease, id tasks.ID, actor string) error {
	return w.call(to, func(s *tasks.Service) error { return s.CancelForPeer(ctx, id, actor) })
}

func (w *wire) Explain(_ context.Context, to tasks.Lease, list []tasks.PeerTask) (got []*tasks.Waiting, err error) {
	err = w.call(to, func(s *tasks.Service) error { got = s.ExplainForPeer(list); return nil })
	return got, err
}

// newPair makes two controllers on one store: one owns the shards below 8, two
// the others. Agent n is in shard n.
func newPair(t *testing.T, agents int) (one, two *rig, w *wire) {
	t.Helper()
	w = &wire{services: map[uuid.UUID]*tasks.Service{}}
	ids := []uuid.UUID{uuid.NewV4(), uuid.NewV4()}
	as := func(n int) option {
		return func(c *tasks.Config) {
			c.Peers, c.Owner = w, tasks.Owner{ID: ids[n], Addr: "192.0.2.1:7441", Name: []string{"one", "two"}[n]}
		}
	}
	one = buildRig(t, agents, as(0))
	two = &rig{T: t, store: one.store, faults: tasktest.NewFaults(one.store), runner: tasktest.NewScriptedRunner(), agents: one.agents}
	for _, a := range two.agents {
		two.runner.Add(a, nil)
	}
	two.make(as(1))
	w.services[ids[0]], w.services[ids[1]] = one.service, two.service
	one.start()
	two.store.SetAlive(ids...)
	two.start()
	for range 20 {
		one.pass(time.Second)
	}
	if a, b := len(one.manager.Held()), len(two.manager.Held()); a != 8 || b != 8 {
		t.Fatalf("%d and %d shards, want 8 each", a, b)
	}
	return one, two, w
}

// ownedBy gives an agent of one of the pair.
func ownedBy(r *rig) int {
	r.Helper()
	for i, a := range r.agents {
		for _, l := range r.manager.Held() {
			if l.Shard == tasks.ShardOf(a.ID) {
				return i
			}
		}
	}
	r.Fatal("it owns no agent")
	return 0
}

// vanish lets a controller end without a word: what it holds runs out.
func (w *wire) vanish(r *rig) {
	r.faults.Down(true)
	r.faults.FailRenews(true)
	for id, s := range w.services {
		if s == r.service {
			delete(w.services, id)
		}
	}
	r.store.SetAlive()
}

// Cases Q10, R16.
func TestShardsAreSharedOutAndHandedOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, _ := newPair(t, 16)
		held := map[tasks.Shard]int{}
		for _, r := range []*rig{one, two} {
			for _, l := range r.manager.Held() {
				held[l.Shard]++
			}
		}
		if len(held) != tasks.NumShards {
			t.Errorf("held: %v", held)
		}
		// A clean stop hands over at once: the hint is lost here, the next look sees it.
		one.store.SetAlive(uuid.NewV4()) // two alone
		one.manager.HandOver()
		one.pass(tasks.RenewEvery)
		if n := len(two.manager.Held()); n != tasks.NumShards {
			t.Errorf("two holds %d shards after one handed over", n)
		}
		id := one.submit(0).ID // one passes it on
		two.isDone(id)
		one.check()
		two.check()
	})
}

func TestOwnersOfBatchesAreAskedAndOrderStays(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, _ := newPair(t, 16)
		var subs []tasks.Submission
		for i := range 64 {
			subs = append(subs, echo(i%16))
		}
		list, err := one.service.SubmitBatch(t.Context(), subs, "user:test", tasks.Idempotency{})
		if err != nil {
			t.Fatal(err)
		}
		one.pass(time.Second)
		for i := range list {
			if list[i].Agent.ID != one.agents[i%16].ID {
				t.Errorf("item %d is for agent %s", i, list[i].Agent.Name)
			}
			two.isDone(list[i].ID)
		}
		one.check()
		two.check()
	})
}

// Cases R18.
// What may have been stored is never sent again without a key, and settled by
// one.
func TestALostAnswerIsUnknownUnlessThereIsAKey(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, w := newPair(t, 16)
		far := ownedBy(two)
		lose := 1
		w.lost = func(uuid.UUID) bool { lose--; return lose >= 0 }
		w.calls = 0
		_, err := one.service.Submit(t.Context(), echo(far), "user:test", tasks.Idempotency{})
		wantFault(t, err, "commit_unknown")
		if w.calls != 1 {
			t.Errorf("%d calls, want one", w.calls)
		}
		before := len(list(one))
		lose = 2
		key := tasks.Idempotency{Principal: "p", Route: "r", Key: "k"}
		task, err := one.service.Submit(t.Context(), echo(far), "user:test", key)
		if err != nil {
			t.Fatalf("with a key: %v", err)
		}
		again, err := two.service.Submit(t.Context(), echo(far), "user:test", key)
		if err != nil || again.ID != task.ID {
			t.Errorf("the same key at the owner: %+v, %v, want task %d", again, err, task.ID)
		}
		if n := len(list(one)) - before; n != 1 {
			t.Errorf("%d tasks of one key", n)
		}
		w.lost = nil
		one.check()
		two.check()
	})
}

func list(r *rig) []tasks.Task {
	r.Helper()
	page, err := r.service.List(r.Context(), tasks.Filter{Limit: tasks.MaxPage})
	if err != nil {
		r.Fatal(err)
	}
	return page.Items
}

// Cases R8, Q19.
// Who submits while an owner is gone waits for the next one, and others are told
// why their tasks wait.
func TestASubmissionWaitsForTheTakeOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, w := newPair(t, 16)
		far := ownedBy(two)
		two.script(far, silent)
		waits := one.submit(far).ID
		w.vanish(two)
		begun := time.Now()
		got, err := one.service.Get(t.Context(), waits)
		if err != nil || got.Waiting.Cause != tasks.CauseOwnerSilent {
			t.Errorf("of a silent owner: %+v, %v", got.Waiting, err)
		}
		task, err := one.service.Submit(t.Context(), echo(far), "user:test", tasks.Idempotency{})
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took > 20*time.Second || took < tasks.LeaseTerm-tasks.RenewEvery-2*time.Second {
			t.Errorf("the take-over took %s", took)
		}
		one.pass(time.Second)
		one.isDone(task.ID)
		two.cancel()
		<-two.done
		one.check()
	})
}

// Cases R8.
func TestNoOwnerIsAnErrorAfterTheTimeOfATakeOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, w := newPair(t, 16)
		far := ownedBy(two)
		w.unsent = func(uuid.UUID) bool { return true } // both live, and cannot call each other
		begun := time.Now()
		_, err := one.service.Submit(t.Context(), echo(far), "user:test", tasks.Idempotency{})
		wantFault(t, err, "owner_unreachable")
		if took := time.Since(begun); took < 19*time.Second || took > 22*time.Second {
			t.Errorf("refused after %s", took)
		}
		if n := len(list(one)); n != 0 {
			t.Errorf("%d tasks were stored", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		begun = time.Now()
		if _, err := one.service.Submit(ctx, echo(far), "user:test", tasks.Idempotency{}); err == nil || time.Since(begun) > 3*time.Second {
			t.Errorf("the caller's own limit: %v after %s", err, time.Since(begun))
		}
		_, err = one.service.Cancel(t.Context(), 4711, "user:test")
		wantFault(t, err, "unknown_task")
		w.unsent = nil
		one.check()
		two.check()
	})
}

// What was passed on is never passed on again.
func TestAPeerPassesNothingOn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, w := newPair(t, 16)
		far := one.agents[ownedBy(two)]
		w.calls = 0
		in := tasks.PeerInsert{
			Agent: far.Num, AgentID: far.ID, Kind: "core.echo", Args: "{}", Delivery: "repeatable", Priority: 5, Timeout: time.Second,
			CreatedAt: time.Now(), ExpiresAt: time.Now().Add(time.Hour), Actor: "user:test",
		}
		got, err := one.service.StoreForPeer(t.Context(), []tasks.PeerInsert{in})
		if err != nil || got[0].Err == nil || got[0].Err.Code != "owner_unreachable" {
			t.Errorf("%+v, %v", got, err)
		}
		id := two.submit(ownedBy(two)).ID
		if err := one.service.CancelForPeer(t.Context(), id, "user:test"); err == nil || fault.CodeOf(err) == "internal" {
			t.Errorf("cancel: %v", err)
		}
		if w.calls != 0 {
			t.Errorf("%d calls went on", w.calls)
		}
		in.AgentID = uuid.NewV4()
		if got, err := two.service.StoreForPeer(t.Context(), []tasks.PeerInsert{in}); err != nil || got[0].Err == nil {
			t.Errorf("an agent of another id: %+v, %v", got, err)
		}
		one.check()
		two.check()
	})
}

// Cases Q5.
// A cancellation whose answer was lost is asked for again, and counts when it
// was ours.
func TestACancellationElsewhereSurvivesALostAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one, two, w := newPair(t, 16)
		far := ownedBy(two)
		two.script(far, silent)
		one.submit(far)
		waiting := one.submit(far).ID
		lose := 1
		w.lost = func(uuid.UUID) bool { lose--; return lose >= 0 }
		got, err := one.service.Cancel(t.Context(), waiting, "user:test")
		if err != nil || got.Ending.Outcome != tasks.Cancelled {
			t.Errorf("%+v, %v", got, err)
		}
		_, err = one.service.Cancel(t.Context(), waiting, "user:other")
		wantFault(t, err, "already_completed")
		w.lost = nil
		synctest.Wait()
		one.check()
		two.check()
	})
}
