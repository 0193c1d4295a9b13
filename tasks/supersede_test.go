package tasks_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func inventory(s *tasks.Submission) { s.Kind, s.Args = kinds.Inventory, nil }

// busy gives agent 0 something that it does not end by itself.
func (r *rig) busy() {
	r.Helper()
	r.script(0, func(x tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: x.Kind == kinds.Sleep} })
	r.submit(0, func(s *tasks.Submission) { s.Kind, s.Args = kinds.Sleep, []byte(`{"seconds":3600}`) })
}

func (r *rig) idle() {
	r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
	synctest.Wait()
}

func (r *rig) isReplaced(old, by tasks.ID) {
	r.Helper()
	got := r.is(old, tasks.StateCompleted, 0, tasks.Cancelled, tasks.ReasonSuperseded)
	if !strings.Contains(got.Ending.Detail, by.String()) || got.CancelActor != "" {
		r.Errorf("task %d ended by %q with %q, want task %d named", old, got.CancelActor, got.Ending.Detail, by)
	}
}

func TestANewerTaskReplacesOlderOnes(t *testing.T) {
	for name, many := range map[string]int{"known from memory": 0, "looked for in the table": 1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { replaceOlder(t, many) })
		})
	}
}

func replaceOlder(t *testing.T, many int) {
	r := newRig(t, 2)
	r.busy()
	replaced := map[tasks.ID]tasks.ID{} // by the inserts of the same turn
	r.faults.OnTurn(func(turn *tasks.Turn) tasktest.Fault {
		for _, f := range turn.Finishes {
			if f.Ending.Reason == tasks.ReasonSuperseded && len(turn.Inserts) == 1 {
				replaced[f.ID] = turn.Inserts[0].ID
			}
		}
		return tasktest.None
	})
	for range nextItemsForTests * many { // more than memory holds
		r.submit(0)
	}
	first := r.submit(0, inventory).ID
	second := r.submit(0, inventory).ID
	r.isReplaced(first, second)
	third := r.submit(0, inventory).ID
	r.isReplaced(second, third)
	ping := r.submit(0, func(s *tasks.Submission) { s.Kind, s.Args = kinds.Ping, nil }).ID
	fourth := r.submit(0, inventory).ID
	r.isNew(third) // it would lose its place to the ping
	fifth := r.submit(0, inventory).ID
	r.isReplaced(fourth, fifth)
	r.isNew(third)
	for old, by := range map[tasks.ID]tasks.ID{first: second, second: third, fourth: fifth} {
		if replaced[old] != by {
			t.Errorf("task %d was not ended in the turn that stored %d: %v", old, by, replaced)
		}
	}
	if w := r.get(fifth).Waiting; w == nil || w.Cause != tasks.CauseBusy {
		t.Errorf("the newest waits because of %+v", w)
	}
	r.idle()
	for _, id := range []tasks.ID{third, ping, fifth} {
		r.isDone(id)
	}
	if n, depth := r.store.Open(), r.manager.Stats().New; n != 0 || depth != 0 {
		t.Errorf("%d tasks are open, %d are counted", n, depth)
	}
	r.check()
}

// TestAskedForAgainAndAgainItStillRuns keeps an agent busy, and asks for an
// inventory after each of the other tasks: the first one asked for must run
// in its place, and at most two may ever wait.
func TestAskedForAgainAndAgainItStillRuns(t *testing.T) {
	for name, batch := range map[string]bool{"one by one": false, "together": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { askAgainAndAgain(t, batch) })
		})
	}
}

func askAgainAndAgain(t *testing.T, batch bool) {
	r := newRig(t, 1)
	r.busy()
	before := r.submit(0).ID
	var subs []tasks.Submission
	for range 200 {
		inv := echo(0)
		inventory(&inv)
		subs = append(subs, inv, inv, echo(0))
	}
	var got []tasks.Task
	if batch {
		var err error
		if got, err = r.service.SubmitBatch(t.Context(), subs, "user:test", tasks.Idempotency{}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
	} else {
		for i := range subs {
			got = append(got, *r.submit(0, func(s *tasks.Submission) { *s = subs[i] }))
		}
	}
	var wait []tasks.ID
	for i := range got {
		if got[i].Kind == kinds.Inventory && r.get(got[i].ID).State == tasks.StateNew {
			wait = append(wait, got[i].ID)
		}
	}
	if last := got[len(got)-2].ID; len(wait) != 2 || wait[1] != last || wait[0] != got[1].ID {
		t.Fatalf("the inventories %v wait, want %d and %d", wait, got[1].ID, last)
	}
	r.idle()
	var order []tasks.ID
	for _, s := range r.runner.Starts(r.agents[0].Num)[1:] {
		order = append(order, s.ID)
	}
	if len(order) < 3 || order[0] != before || order[1] != wait[0] || order[2] != got[2].ID {
		t.Errorf("started %v, want the inventory %d in its place", order[:3], wait[0])
	}
	r.isDone(wait[1])
	r.check()
}

const nextItemsForTests = 80

func TestOnlyTheLikeAreReplaced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.busy()
		now, low := time.Now(), 9
		kept := map[string]tasks.ID{
			"longer":  r.submit(0, inventory, func(s *tasks.Submission) { s.ExpiresAt = now.Add(48 * time.Hour) }).ID,
			"later":   r.submit(0, inventory, func(s *tasks.Submission) { s.NotBefore = now.Add(time.Hour) }).ID,
			"low":     r.submit(0, inventory, func(s *tasks.Submission) { s.Priority = &low }).ID,
			"timeout": r.submit(0, inventory, func(s *tasks.Submission) { s.Timeout = 9 * time.Second }).ID,
			"once":    r.submit(0, inventory, func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }).ID,
			"echo":    r.submit(0).ID,
			"echo 2":  r.submit(0).ID, // its kind does not replace
		}
		r.script(1, silent)
		kept["other agent, running"] = r.submit(1, inventory).ID
		kept["other agent"] = r.submit(1, inventory).ID
		r.submit(0, inventory)
		r.submit(0, inventory, func(s *tasks.Submission) { s.NotBefore = now.Add(2 * time.Hour) }) // replaces nothing
		for name, id := range kept {
			if got := r.get(id); got.State == tasks.StateCompleted {
				t.Errorf("the task %q was ended: %+v", name, got.Ending)
			}
		}
		r.check()
	})
}

func TestReplacingThroughFaults(t *testing.T) {
	for name, fault := range map[string]tasktest.Fault{
		"nothing written": tasktest.Broken, "unknown, written": tasktest.UnknownDone, "unknown, not written": tasktest.UnknownUndone,
	} {
		for _, many := range []int{0, nextItemsForTests} {
			t.Run(fmt.Sprintf("%s, %d before", name, many), func(t *testing.T) {
				bubble(t, func(t *testing.T) { replaceThrough(t, fault, many) })
			})
		}
	}
}

func replaceThrough(t *testing.T, fault tasktest.Fault, many int) {
	r := newRig(t, 1)
	r.busy()
	for range many {
		r.submit(0)
	}
	old := r.submit(0, inventory).ID
	failures := 0
	r.faults.OnTurn(func(turn *tasks.Turn) tasktest.Fault {
		if len(turn.Inserts) > 0 && len(turn.Finishes) > 0 && failures < 3 {
			failures++
			return fault
		}
		return tasktest.None
	})
	by := r.submit(0, inventory).ID
	if failures == 0 {
		t.Error("no turn has met the fault")
	}
	r.isReplaced(old, by)
	r.idle()
	r.isDone(by)
	r.check()
}

// TestRefusedTaskReplacesNothing: the database refuses the newer one alone.
func TestRefusedTaskReplacesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.busy()
		old := r.submit(0, inventory).ID
		r.poison(func(turn *tasks.Turn) bool {
			for i := range turn.Inserts {
				if turn.Inserts[i].Kind == kinds.Inventory {
					return true
				}
			}
			return false
		})
		s := echo(0)
		inventory(&s)
		_, err := r.service.Submit(t.Context(), s, "user:test", tasks.Idempotency{})
		wantFault(t, err, "not_storable")
		r.isNew(old)
		r.check()
	})
}

// TestManyAtOnceLeaveOne: those of one turn cannot see each other in the
// table, and end a turn later.
func TestManyAtOnceLeaveOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.busy()
		old := r.submit(0, inventory).ID
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				s := echo(0)
				inventory(&s)
				if _, err := r.service.Submit(t.Context(), s, "user:test", tasks.Idempotency{}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		var subs []tasks.Submission
		for range 200 {
			s := echo(0)
			inventory(&s)
			subs = append(subs, s)
		}
		_, err := r.service.SubmitBatch(t.Context(), subs, "user:test", tasks.Idempotency{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := r.get(old); got.Ending.Reason != tasks.ReasonSuperseded {
			t.Errorf("the oldest is %s, %+v", got.State, got.Ending)
		}
		if n := r.store.Open(); n != 2 {
			t.Errorf("%d tasks are open, want the running one and the newest", n)
		}
		r.check()
	})
}

// TestReplayReplacesNothing sends one key through two faces of the queue, so
// that both pass the look before the write: the second must not end the task
// of its own key.
func TestReplayReplacesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.busy()
		key := tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k", Hash: [32]byte{1}}
		tries := 0
		r.faults.OnTurn(func(turn *tasks.Turn) tasktest.Fault {
			if tries++; len(turn.Inserts) > 0 && tries <= 3 { // until both are on their way
				return tasktest.Broken
			}
			return tasktest.None
		})
		other := tasks.NewService(tasks.ServiceConfig{Manager: r.manager, Kinds: kinds.Default()})
		ids := make(chan tasks.ID, 2)
		for _, service := range []*tasks.Service{r.service, other} {
			go func() {
				s := echo(0)
				inventory(&s)
				got, err := service.Submit(t.Context(), s, "user:test", key)
				if err != nil {
					t.Error(err)
					ids <- 0
					return
				}
				ids <- got.ID
			}()
		}
		a, b := <-ids, <-ids
		if a != b {
			t.Fatalf("one key gave the tasks %d and %d", a, b)
		}
		synctest.Wait()
		r.isNew(a)
		r.idle()
		r.isDone(a)
		r.check()
	})
}

// replays counts how often a key is looked for.
type replays struct {
	tasks.Store

	n *atomic.Int64
}

func (s replays) Replay(ctx context.Context, key tasks.Idempotency) ([]tasks.DedupRow, error) {
	s.n.Add(1)
	return s.Store.Replay(ctx, key)
}

// TestABatchLooksForItsKeyOnce: all that comes behind a batch would wait if its
// key were looked for again for each task that replaces one.
func TestABatchLooksForItsKeyOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const agents = 50
		var looks atomic.Int64
		r := newRig(t, agents, func(c *tasks.Config) { c.Store = replays{c.Store, &looks} })
		r.runner.AutoConnect(false)
		batch := make([]tasks.Submission, agents)
		for i := range batch {
			r.runner.Disconnect(r.agents[i].Num, "it is away")
			batch[i] = echo(i)
			inventory(&batch[i])
		}
		synctest.Wait()
		var last []tasks.Task
		for _, key := range []string{"yesterday", "today"} {
			looks.Store(0)
			got, err := r.service.SubmitBatch(t.Context(), batch, "user:test", tasks.Idempotency{Principal: "token:a", Route: "POST /tasks/batch", Key: key})
			if err != nil {
				t.Fatal(err)
			}
			for i := range last {
				r.isReplaced(last[i].ID, got[i].ID)
			}
			last = got
		}
		if n := looks.Load(); n > 5 {
			t.Errorf("the key was looked for %d times, for %d tasks", n, agents)
		}
		r.check()
	})
}

// TestWhatStartsIsNotReplaced lets the older task be claimed in the turn in
// which the newer one arrives.
func TestWhatStartsIsNotReplaced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.busy()
		old := r.submit(0, inventory).ID
		r.script(0, silent)
		done := make(chan tasks.ID, 1)
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		go func() {
			s := echo(0)
			inventory(&s)
			got, err := r.service.Submit(t.Context(), s, "user:test", tasks.Idempotency{})
			if err != nil {
				t.Error(err)
				done <- 0
				return
			}
			done <- got.ID
		}()
		newer := <-done
		synctest.Wait()
		started, last := r.get(old), r.get(newer)
		replaced := started.Ending.Reason == tasks.ReasonSuperseded && last.State == tasks.StateWaiting
		inTurn := started.State == tasks.StateWaiting && last.State == tasks.StateNew
		if !replaced && !inTurn {
			t.Errorf("the older is %s (%s), the newer %s", started.State, started.Ending.Reason, last.State)
		}
		r.check()
	})
}
