package tasks_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// openTasks gives an agent something of everything: a running task, many that
// wait, and one that is not due.
func (r *rig) openTasks(agent, many int) (running tasks.ID, waiting []tasks.ID) {
	r.Helper()
	r.script(agent, silent)
	running = r.submit(agent).ID
	for range many {
		waiting = append(waiting, r.submit(agent).ID)
	}
	later := r.submit(agent, func(s *tasks.Submission) {
		s.NotBefore, s.ExpiresAt = time.Now().Add(20*24*time.Hour), time.Now().Add(25*24*time.Hour)
	})
	return running, append(waiting, later.ID)
}

func (r *rig) areRemoved(ids []tasks.ID) {
	r.Helper()
	for _, id := range ids {
		if got := r.is(id, tasks.StateCompleted, 0, tasks.Cancelled, tasks.ReasonAgentRemoved); got.CancelActor != "" {
			r.Errorf("task %d: nobody cancelled it, yet %q did", id, got.CancelActor)
		}
	}
}

// endsUnknown checks what is said of the running task of a removed agent, and
// that it ends soon, whatever its timeout is.
func (r *rig) endsUnknown(id tasks.ID) {
	r.Helper()
	w := r.get(id).Waiting
	if w == nil || w.Cause != tasks.CauseRemoved || !strings.Contains(w.Sentence, "removed") || !strings.Contains(w.NextStep, "unknown") {
		r.Fatalf("the running task waits because of %+v", w)
	}
	r.pass(tasks.RemovedGrace + 2*time.Second)
	got := r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonAgentRemoved)
	if !strings.Contains(got.Ending.Detail, "removed") || strings.Contains(got.Ending.Detail, "asked to end") {
		r.Errorf("its end is told as %q", got.Ending.Detail)
	}
}

func TestRemovalEndsEverythingThatIsOpen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		num := r.agents[0].Num
		running, rest := r.openTasks(0, 2500)
		other := r.submit(1, func(s *tasks.Submission) { s.NotBefore = time.Now().Add(time.Minute) })
		r.runner.Disconnect(num, "it was removed")
		r.runner.Change(num, func(a *tasks.Agent) { a.Removed = true })
		synctest.Wait() // at once, without a sweep
		r.areRemoved(rest)
		r.endsUnknown(running)
		r.pass(time.Minute)
		r.isDone(other.ID)
		if n, counted := r.store.Open(), r.manager.Stats().New; n != 0 || counted != 0 {
			t.Errorf("%d tasks are still open, %d are counted", n, counted)
		}
		r.check()
	})
}

func TestRemovalAtAnotherControllerIsNoticed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.pass(2 * time.Minute) // the look reaches back a minute only by now
		running, rest := r.openTasks(0, 70)
		r.runner.Disconnect(r.agents[0].Num, "it was removed")
		r.store.RemoveAgent(r.agents[0].Num)
		r.pass(1500 * time.Millisecond)
		r.areRemoved(rest)
		// The fleet here still knows the agent; the owner knows better.
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "agent_removed")
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Name = "renamed" }) // news of before the removal
		_, err = r.service.Submit(t.Context(), tasks.Submission{Agent: "renamed", Kind: kinds.Ping}, "user:test", tasks.Idempotency{})
		wantFault(t, err, "agent_removed")
		r.endsUnknown(running)
		r.check()
	})
}

func TestRemovalOfBeforeTheStartIsNoticed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		running, rest := r.openTasks(0, 3)
		r.stop()
		r.store.RemoveAgent(r.agents[0].Num)
		r.pass(5 * time.Second)
		r.runner = tasktest.NewScriptedRunner() // a fleet that has never heard of the agent
		r.make()
		r.start()
		r.pass(2 * time.Second)
		r.areRemoved(rest)
		r.endsUnknown(running)
		r.check()
	})
}

// TestRemovalOfAQuarantinedAgent: it is no approval, and nobody waits for an
// operator's decision any more.
func TestRemovalOfAQuarantinedAgent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		num := r.agents[0].Num
		running, rest := r.openTasks(0, 2)
		r.runner.LoseLedger(num)
		r.runner.Connect(num)
		synctest.Wait()
		if w := r.get(running).Waiting; w == nil || w.Cause != tasks.CauseQuarantined {
			t.Fatalf("before the removal it waits because of %+v", w)
		}
		r.runner.Disconnect(num, "it was removed")
		r.runner.Change(num, func(a *tasks.Agent) { a.Quarantined, a.Removed = false, true })
		synctest.Wait()
		r.areRemoved(rest)
		r.endsUnknown(running)
		r.check()
	})
}

func TestRemovalThroughAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		_, rest := r.openTasks(0, 3)
		r.faults.Down(true)
		r.store.RemoveAgent(r.agents[0].Num)
		r.pass(5 * time.Second)
		for _, id := range rest {
			if w := r.get(id); w.State != tasks.StateNew {
				t.Fatalf("task %d is %s while the store is down", id, w.State)
			}
		}
		r.faults.Down(false)
		r.pass(4 * time.Second)
		r.areRemoved(rest)
		r.check()
	})
}
