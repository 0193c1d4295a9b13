package tasks_test

import (
	"encoding/json"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func (r *rig) retry(id tasks.ID, replayed bool) *tasks.Task {
	r.Helper()
	t, again, err := r.service.Retry(r.Context(), id, "user:eve")
	if err != nil || again != replayed {
		r.Fatalf("retry of %d: replayed %v, %v; want %v", id, again, err, replayed)
	}
	synctest.Wait()
	return t
}

func TestRetryRepeatsATaskOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		three, begin := 3, time.Now()
		old := r.submit(0, func(s *tasks.Submission) {
			s.Args, s.Timeout, s.Priority, s.Delivery = json.RawMessage(`{"big": 9007199254740993}`), 20*time.Second, &three, kinds.DeliveryOnce
			s.NotBefore, s.ExpiresAt = begin.Add(time.Minute), begin.Add(3*time.Minute)
		})
		_, _, err := r.service.Retry(t.Context(), old.ID, "user:eve")
		wantFault(t, err, "task_not_completed")
		r.pass(2 * time.Minute)
		r.isDone(old.ID)

		again := r.retry(old.ID, false)
		if again.ID == old.ID || again.RetryOf != old.ID || again.Actor != "user:eve" || again.Kind != old.Kind ||
			string(again.Args) != `{"big": 9007199254740993}` || again.Timeout != 20*time.Second || again.Priority != 3 ||
			again.Delivery != kinds.DeliveryOnce || again.Agent != old.Agent {
			t.Errorf("the retry of %+v is %+v", old, again)
		}
		if got := again.ExpiresAt.Sub(again.CreatedAt); got != 2*time.Minute || !again.NotBefore.IsZero() {
			t.Errorf("it has %v to start, not before %v; want the 2 min that the first one had, at once", got, again.NotBefore)
		}
		if got := r.isDone(again.ID); got.RetryOf != old.ID || got.Ending.Result == nil {
			t.Errorf("the retry as it is stored: %+v", got)
		}
		if got := r.get(old.ID); got.RetriedAs != again.ID {
			t.Errorf("the first one was retried as %d, want %d", got.RetriedAs, again.ID)
		}
		for _, wait := range []string{"at once", "days later"} {
			if same := r.retry(old.ID, true); same.ID != again.ID || same.State != tasks.StateCompleted {
				t.Errorf("%s another retry gives %+v", wait, same)
			}
			r.store.ExpireKeys()
		}
		if third := r.retry(again.ID, false); third.RetryOf != again.ID {
			t.Errorf("the retry of a retry: %+v", third)
		}
		_, _, err = r.service.Retry(t.Context(), 99999, "user:eve")
		wantFault(t, err, "unknown_task")
		_, _, err = r.service.Retry(t.Context(), old.ID, "a\x00b")
		wantFault(t, err, "invalid_actor")
		r.check()
	})
}

// TestRetriesAtTheSameMomentAreOne lets many callers pass the look before the
// write together, while commits are lost on their way.
func TestRetriesAtTheSameMomentAreOne(t *testing.T) {
	for name, fault := range map[string]tasktest.Fault{
		"all well": tasktest.None, "nothing written": tasktest.Broken,
		"unknown, written": tasktest.UnknownDone, "unknown, not written": tasktest.UnknownUndone,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { retryTogether(t, fault) })
		})
	}
}

func retryTogether(t *testing.T, fault tasktest.Fault) {
	r := newRig(t, 1)
	old := r.submit(0)
	r.isDone(old.ID)
	first := true
	r.faults.OnTurn(func(turn *tasks.Turn) tasktest.Fault {
		if len(turn.Inserts) > 0 && first {
			first = false
			return fault
		}
		return tasktest.None
	})
	// Two faces of one queue stand for two controllers' callers.
	services := []*tasks.Service{r.service, tasks.NewService(tasks.ServiceConfig{Manager: r.manager, Kinds: kinds.Default()})}
	var mu sync.Mutex
	var wg sync.WaitGroup
	ids, fresh := map[tasks.ID]int{}, 0
	for i := range 40 {
		wg.Go(func() {
			got, replayed, err := services[i%2].Retry(t.Context(), old.ID, "user:eve")
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Errorf("retry: %v", err)
				return
			}
			ids[got.ID]++
			if !replayed {
				fresh++
			}
		})
	}
	wg.Wait()
	synctest.Wait()
	list, err := r.service.List(t.Context(), tasks.Filter{})
	if err != nil || len(ids) != 1 || fresh != 1 || len(list.Items) != 2 {
		t.Errorf("40 retries at once gave the tasks %v, %d of them new; %d tasks in all, %v", ids, fresh, len(list.Items), err)
	}
	r.check()
}

func TestRetryAfterARestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		old := r.submit(0)
		again := r.retry(old.ID, false)
		r.stop()
		r.make()
		r.start()
		r.store.ExpireKeys()
		if same := r.retry(old.ID, true); same.ID != again.ID {
			t.Errorf("the next start retries %d as %d, not %d", old.ID, same.ID, again.ID)
		}
		r.check()
	})
}

func TestRetryOfARemovedAgentIsExplained(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		before, old := r.submit(0), r.submit(0)
		again := r.retry(before.ID, false)
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Removed = true })
		synctest.Wait()
		_, _, err := r.service.Retry(t.Context(), old.ID, "user:eve")
		wantFault(t, err, "agent_removed")
		if same := r.retry(before.ID, true); same.ID != again.ID {
			t.Errorf("what was retried before the removal: %d, want %d", same.ID, again.ID)
		}
		// The same id, paired again, may be another machine.
		anew := tasks.Agent{ID: r.agents[0].ID, Name: "anew"}
		anew.Num = r.store.NewAgent(anew.ID, anew.Name, nil)
		r.runner.Add(anew, nil)
		_, _, err = r.service.Retry(t.Context(), old.ID, "user:eve")
		wantFault(t, err, "agent_removed")
		r.check()
	})
}

func TestRetryThatExistsNeedsNoRoom(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1, func(c *tasks.Config) { c.Limits.AgentDepth = 2 })
		old := r.submit(0)
		r.isDone(old.ID)
		other := r.submit(0)
		again := r.retry(old.ID, false)
		r.script(0, silent)
		for range 3 {
			r.submit(0)
		}
		_, _, err := r.service.Retry(t.Context(), other.ID, "user:eve")
		wantFault(t, err, "queue_full")
		if same := r.retry(old.ID, true); same.ID != again.ID {
			t.Errorf("got %d, want %d", same.ID, again.ID)
		}
		r.check()
	})
}

// TestWhoCancelledStaysKnown compares the task that a waiter is told with the
// one that is stored, and both with who asked first.
func TestWhoCancelledStaysKnown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		running, waiting := r.submit(0).ID, r.submit(0).ID
		told := make(chan *tasks.Task, 2)
		for _, id := range []tasks.ID{running, waiting} {
			go func() {
				got, err := r.service.Wait(t.Context(), id, time.Minute)
				r.toldAsStored(got, err)
				told <- got
			}()
		}
		r.pass(time.Second)
		asked := time.Now()
		for _, id := range []tasks.ID{waiting, running} {
			if _, err := r.service.Cancel(t.Context(), id, "user:eve"); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			got := <-told
			if got.Ending.Outcome != tasks.Cancelled || got.CancelActor != "user:eve" || !got.CancelRequestedAt.Equal(asked) {
				t.Errorf("task %d: %+v, want it cancelled by user:eve at %v", got.ID, got, asked)
			}
		}
		plain := r.submit(0)
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		synctest.Wait()
		if got := r.isDone(plain.ID); !got.CancelRequestedAt.IsZero() || got.CancelActor != "" {
			t.Errorf("nobody cancelled %+v", got)
		}
		r.check()
	})
}

// TestFirstToAskForTheEndIsKept lets two ask before either mark is on disk.
func TestFirstToAskForTheEndIsKept(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true, Deaf: true} })
		id := r.submit(0).ID
		tries := 0
		r.faults.OnTurn(func(turn *tasks.Turn) tasktest.Fault {
			if len(turn.Cancels) > 0 && tries < 3 {
				tries++
				return tasktest.Broken
			}
			return tasktest.None
		})
		var wg sync.WaitGroup
		for _, actor := range []string{"user:eve", "user:bob"} {
			wg.Go(func() {
				if _, err := r.service.Cancel(t.Context(), id, actor); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		first := r.get(id).CancelActor
		wg.Go(func() {
			got, err := r.service.Wait(t.Context(), id, time.Minute)
			r.toldAsStored(got, err)
		})
		r.pass(time.Second)
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		wg.Wait()
		if got := r.isDone(id); first == "" || got.CancelActor != first {
			t.Errorf("first %q had asked, in the end %q", first, got.CancelActor)
		}
		r.check()
	})
}

// TestMarkSurvivesARestart ends a task under another owner than the one who
// was asked to cancel it.
//
// Cases Q5.
func TestMarkSurvivesARestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true, Deaf: true} })
		id := r.submit(0).ID
		asked, err := r.service.Cancel(t.Context(), id, "user:eve")
		if err != nil || asked.State != tasks.StateWaiting || asked.CancelActor != "user:eve" {
			t.Fatalf("cancel: %+v, %v", asked, err)
		}
		r.stop()
		r.make()
		r.start()
		go func() {
			got, err := r.service.Wait(t.Context(), id, time.Minute)
			r.toldAsStored(got, err)
		}()
		synctest.Wait()
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		synctest.Wait()
		if got := r.isDone(id); got.CancelActor != "user:eve" || !got.CancelRequestedAt.Equal(asked.CancelRequestedAt) {
			t.Errorf("the end has lost who asked: %+v", got)
		}
		r.check()
	})
}
