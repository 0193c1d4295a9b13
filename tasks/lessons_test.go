package tasks_test

import (
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// TestOnlyItsOwnDeadlineEndsATask keeps many agents busy for longer than any
// lease lasts, and one longer than its task may take. The one is ended a minute
// after its own timeout, however many others run; those run on, once each.
//
// Cases Q3, R2, R3, R13.
func TestOnlyItsOwnDeadlineEndsATask(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const many = 300
		r := newRig(t, many+1)
		long := 10 * tasks.LeaseTerm
		var ids []tasks.ID
		for i := range many {
			r.script(i, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: long} })
			ids = append(ids, r.submit(i, func(s *tasks.Submission) { s.Kind, s.Args = kinds.Sleep, []byte(`{"seconds":3600}`) }).ID)
		}
		r.script(many, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true, Deaf: true} })
		stuck := r.submit(many, func(s *tasks.Submission) { s.Timeout = 10 * time.Second }).ID
		r.pass(10*time.Second + tasks.DefaultForcedGrace - time.Second)
		r.is(stuck, tasks.StateWaiting, 1, "", "")
		r.pass(3 * time.Second)
		r.is(stuck, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonNoWord)
		for _, id := range ids {
			r.is(id, tasks.StateWaiting, 1, "", "")
		}
		r.pass(long)
		for i, id := range ids {
			r.isDone(id)
			if n := len(r.runner.Starts(r.agents[i].Num)); n != 1 {
				t.Errorf("task %d ran %d times", id, n)
			}
		}
		r.check()
	})
}

// TestTheAgentsVerdictComesFirst: the agent ends a task by its timeout, and
// the controller asks only some seconds later, so that a task is told as timed
// out and not as cancelled.
//
// Cases R7.
func TestTheAgentsVerdictComesFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		timeout := 30 * time.Second
		r.script(0, func(x tasks.Assignment) tasktest.Answer {
			if x.Timeout != timeout {
				t.Errorf("the agent is told %s", x.Timeout)
			}
			return tasktest.Answer{After: x.Timeout, Ending: tasks.Ending{Outcome: tasks.TimedOut, Reason: "deadline_exceeded"}}
		})
		id := r.submit(0, func(s *tasks.Submission) {
			s.Kind, s.Args, s.Timeout = kinds.Sleep, []byte(`{"seconds":3600}`), timeout
		}).ID
		r.pass(timeout - time.Millisecond)
		r.is(id, tasks.StateWaiting, 1, "", "")
		r.pass(time.Second)
		r.is(id, tasks.StateCompleted, 1, tasks.TimedOut, "deadline_exceeded")
		if n := len(r.runner.Cancels()); n != 0 {
			t.Errorf("the controller asked %d times for the end", n)
		}
		r.check()
	})
}

// TestWhatHasEndedStaysEnded: tasks that have expired, were cancelled or are
// done do not come back when agents are renamed, paused and resumed, or come
// late, nor with the next start.
//
// Cases P14, R6.
func TestWhatHasEndedStaysEnded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		num := r.agents[0].Num
		done := r.submit(1).ID
		r.runner.AutoConnect(false)
		r.runner.Disconnect(num, "switched off")
		synctest.Wait()
		expired := r.submit(0, func(s *tasks.Submission) { s.ExpiresAt = time.Now().Add(time.Minute) }).ID
		open := r.submit(0, func(s *tasks.Submission) { s.ExpiresAt = time.Now().Add(time.Hour) }).ID
		cancelled := r.submit(0).ID
		if _, err := r.service.Cancel(t.Context(), cancelled, "user:eve"); err != nil {
			t.Fatal(err)
		}
		r.pass(30 * time.Second)
		r.stop()
		r.pass(time.Minute) // its time passes while nobody looks
		r.make()
		r.start()
		r.runner.Connect(num)
		r.runner.Connect(r.agents[1].Num)
		for _, change := range []func(*tasks.Agent){
			func(a *tasks.Agent) { a.Paused = true },
			func(a *tasks.Agent) { a.Paused, a.Name = false, "renamed" },
		} {
			r.runner.Change(num, change)
			r.runner.Change(r.agents[1].Num, change)
			r.pass(5 * time.Second)
		}
		r.isDone(done)
		r.isDone(open)
		r.is(expired, tasks.StateCompleted, 0, tasks.Expired, tasks.ReasonExpired)
		r.is(cancelled, tasks.StateCompleted, 0, tasks.Cancelled, tasks.ReasonCancelled)
		if got := r.runner.Starts(num); len(got) != 1 || got[0].ID != open {
			t.Errorf("the agent was given %v, want %d alone", got, open)
		}
		r.check()
	})
}

// TestABacklogOfOneAgentIsNobodyElses fills the queue of an agent that is
// away; another one is served at once.
//
// Cases Q15.
func TestABacklogOfOneAgentIsNobodyElses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.runner.Disconnect(r.agents[0].Num, "switched off")
		synctest.Wait()
		batch := make([]tasks.Submission, tasks.DefaultAgentDepth)
		for i := range batch {
			batch[i] = echo(0)
		}
		if _, err := r.service.SubmitBatch(t.Context(), batch, "user:test", tasks.Idempotency{}); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		r.isDone(r.submit(1).ID)
		if took := time.Since(begin); took != 0 {
			t.Errorf("the other agent was served after %s", took)
		}
		r.check()
	})
}

// TestABackOffHoldsNobody interrupts a repeatable task: it is given again after
// a growing pause, which is shown, and the agent's other tasks go on meanwhile.
//
// Cases R4, Q40.
func TestABackOffHoldsNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		num := r.agents[0].Num
		r.script(0, func(x tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: x.Kind == kinds.Sleep} })
		id := r.submit(0, func(s *tasks.Submission) { s.Kind, s.Args = kinds.Sleep, []byte(`{"seconds":3600}`) }).ID
		least := 800 * time.Millisecond
		for attempt := 1; attempt < tasks.MaxAttempts; attempt++ {
			r.runner.Restart(num)
			r.runner.Connect(num)
			synctest.Wait()
			got := r.is(id, tasks.StateNew, attempt, "", "")
			if w := got.Waiting; w.Cause != tasks.CauseBackingOff {
				t.Fatalf("attempt %d waits because of %+v", attempt, w)
			}
			if pause := time.Until(got.NotBefore); pause < least || pause > least*3/2 {
				t.Errorf("the pause after attempt %d is %s, want %s and up to half as much more", attempt, pause, least)
			}
			r.isDone(r.submit(0).ID)
			r.pass(time.Until(got.NotBefore) + 2*time.Second)
			r.is(id, tasks.StateWaiting, attempt+1, "", "")
			least *= 5
		}
		r.runner.Restart(num)
		r.runner.Connect(num)
		r.pass(time.Hour)
		r.is(id, tasks.StateCompleted, tasks.MaxAttempts, tasks.Failed, tasks.ReasonAttempts)
		r.check()
	})
}
