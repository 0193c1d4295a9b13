package tasks_test

import (
	"encoding/json"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// Cases Q18.
//
// Cases R7.
func TestReconcileByWhatTheAgentSays(t *testing.T) {
	bubble(t, func(t *testing.T) {
		once := func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }
		r := newRig(t, 5)
		for i := range r.agents {
			r.script(i, silent)
		}
		// 0 goes on running, 1 ends while it is away, 2 and 3 restart, 4 is idle.
		attach, done := r.submit(0).ID, r.submit(1).ID
		again, never := r.submit(2).ID, r.submit(3, once).ID
		for i := range 4 {
			r.runner.Disconnect(r.agents[i].Num, "cable")
		}
		r.runner.Finish(r.agents[1].Num, tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`7`)})
		r.runner.Restart(r.agents[2].Num)
		r.runner.Restart(r.agents[3].Num)
		r.runner.Disconnect(r.agents[4].Num, "cable")
		r.script(2, nil2())
		for i := range 5 {
			r.runner.Connect(r.agents[i].Num)
		}
		synctest.Wait()
		r.is(attach, tasks.StateWaiting, 1, "", "")
		if got := r.isDone(done); string(got.Ending.Result) != "7" {
			t.Errorf("result %s", got.Ending.Result)
		}
		r.is(never, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonAgentRestart)
		r.is(again, tasks.StateNew, 1, "", "")
		r.pass(3 * time.Second)
		if got := r.isDone(again); got.Attempt != 2 {
			t.Errorf("attempt %d, want 2", got.Attempt)
		}
		r.runner.Finish(r.agents[0].Num, tasks.Ending{Outcome: tasks.Succeeded})
		synctest.Wait()
		r.isDone(attach)
		for i := range r.agents {
			if n := r.runner.Remembered(r.agents[i].Num); n != 0 {
				t.Errorf("agent %d still remembers %d tasks", i, n)
			}
		}
		r.check()
	})
}

func TestNeverSeenGoesBackToItsPlace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.runner.AutoConnect(false)
		num := r.agents[0].Num
		// The session ends between commit and Execute: the agent never sees it.
		r.faults.OnTurn(func(x *tasks.Turn) tasktest.Fault {
			for _, i := range x.Inserts {
				if i.Started {
					r.runner.Disconnect(num, "cable")
				}
			}
			return tasktest.None
		})
		first := r.submit(0).ID
		second := r.submit(0).ID
		r.is(first, tasks.StateWaiting, 1, "", "")
		if w := r.get(first).Waiting; w.Cause != tasks.CauseUnreachable {
			t.Errorf("waits because of %+v", w)
		}
		r.faults.OnTurn(nil)
		r.runner.Connect(num)
		r.pass(time.Second)
		r.isDone(first)
		r.isDone(second)
		want := []tasks.Ref{{ID: first, Attempt: 2}, {ID: second, Attempt: 1}}
		if got := r.runner.Starts(num); !slices.Equal(got, want) {
			t.Errorf("started %v, want %v", got, want)
		}
		r.check()
	})
}

// Cases R4.
func TestInterruptedRepeatableEndsAfterItsAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		num := r.agents[0].Num
		id := r.submit(0, func(s *tasks.Submission) { s.Timeout = time.Minute }).ID
		begin := time.Now()
		var pauses []time.Duration
		for attempt := 1; attempt <= tasks.MaxAttempts; attempt++ {
			r.is(id, tasks.StateWaiting, attempt, "", "")
			r.runner.Restart(num)
			r.runner.Connect(num)
			synctest.Wait()
			if attempt == tasks.MaxAttempts {
				break
			}
			r.is(id, tasks.StateNew, attempt, "", "")
			from := time.Now()
			for r.get(id).State == tasks.StateNew && time.Since(from) < 10*time.Minute {
				r.pass(100 * time.Millisecond)
			}
			pauses = append(pauses, time.Since(from))
		}
		r.is(id, tasks.StateCompleted, tasks.MaxAttempts, tasks.Failed, tasks.ReasonAttempts)
		for i, want := range []time.Duration{time.Second, 5 * time.Second, 25 * time.Second, 125 * time.Second} {
			if lo, hi := want*8/10, want*12/10+2*time.Second; pauses[i] < lo || pauses[i] > hi {
				t.Errorf("pause %d was %s, want %s to %s", i+1, pauses[i], lo, hi)
			}
		}
		if d := time.Since(begin); d > 5*time.Minute {
			t.Errorf("took %s", d)
		}
		r.check()
	})
}

func TestOtherLedgerWaitsForTheOperator(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.script(0, silent)
		num := r.agents[0].Num
		once := r.submit(0, func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }).ID
		next := r.submit(0).ID
		r.runner.LoseLedger(num)
		r.script(0, nil2())
		r.runner.Connect(num)
		r.pass(24*time.Hour - time.Minute)
		r.is(once, tasks.StateWaiting, 1, "", "")
		r.isNew(next)
		if w := r.get(next).Waiting; w.Cause != tasks.CauseQuarantined {
			t.Errorf("waits because of %+v", w)
		}
		r.runner.Approve(num)
		r.pass(2 * time.Second)
		r.is(once, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonLedgerChanged)
		r.isDone(next)
		r.check()
	})
}

// TestAnOlderCopyOfALedgerIsNoticed when it does not know what the agent itself
// had begun: a task of delivery once is not run again, and an operator decides
// about the agent. A repeatable one was not synced, and a power cut may take it.
func TestAnOlderCopyOfALedgerIsNoticed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.script(0, silent)
		r.script(1, silent)
		once := r.submit(0, func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }).ID
		next := r.submit(0).ID
		repeatable := r.submit(1).ID
		synctest.Wait()
		r.script(0, nil2())
		r.script(1, nil2())
		for i, id := range []tasks.ID{once, repeatable} {
			num := r.agents[i].Num
			r.runner.Restart(num)
			r.runner.PutBack(num, id)
			r.runner.Connect(num)
		}
		r.pass(2 * time.Second)
		r.is(once, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonLedgerChanged)
		r.isDone(repeatable)
		r.isNew(next)
		if w := r.get(next).Waiting; w.Cause != tasks.CauseQuarantined {
			t.Errorf("waits because of %+v", w)
		}
		r.runner.Approve(r.agents[0].Num)
		r.pass(2 * time.Second)
		r.isDone(next)
		if starts := r.runner.Starts(r.agents[0].Num); slices.ContainsFunc(starts[1:], func(ref tasks.Ref) bool { return ref.ID == once }) {
			t.Errorf("the task of delivery once was started again: %v", starts)
		}
		r.check()
	})
}

// A change of an agent that was on its way when the agent came back with
// another ledger (a new name, say) is no operator's approval.
func TestARenameIsNoApproval(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		num := r.agents[0].Num
		id := r.submit(0).ID
		r.runner.LoseLedger(num)
		r.script(0, nil2())
		r.runner.Connect(num)
		renamed := r.agents[0]
		renamed.Name = "another name"
		r.manager.AgentChanged(renamed)
		r.pass(time.Minute)
		r.is(id, tasks.StateWaiting, 1, "", "")
		r.runner.Approve(num)
		r.pass(2 * time.Minute)
		r.isDone(id)
		r.check()
	})
}

func TestDeadlineAsksThenGivesUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		num := r.agents[0].Num
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true, Deaf: true} })
		id := r.submit(0, func(s *tasks.Submission) { s.Timeout = 10 * time.Second }).ID
		next := r.submit(0).ID
		r.pass(14 * time.Second)
		if n := len(r.runner.Cancels()); n != 0 {
			t.Errorf("%d cancels before the grace was over", n)
		}
		r.pass(3 * time.Second)
		if got := r.runner.Cancels(); len(got) != 1 || got[0].ID != id {
			t.Errorf("cancels %v", got)
		}
		r.pass(50 * time.Second)
		r.is(id, tasks.StateWaiting, 1, "", "")
		r.pass(5 * time.Second)
		r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonNoWord)
		// The agent still runs it: its slot stays busy until its word.
		r.pass(time.Hour)
		r.isNew(next)
		if w := r.get(next).Waiting; w.Cause != tasks.CauseBusy || w.Blocking != id {
			t.Errorf("waits because of %+v", w)
		}
		r.script(0, nil2())
		r.runner.Finish(num, tasks.Ending{Outcome: tasks.Succeeded})
		synctest.Wait()
		r.isDone(next)
		r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonNoWord)
		if late := r.store.Late(); len(late) != 1 || late[0].ID != id {
			t.Errorf("late answers %v", late)
		}
		if n := r.runner.Remembered(num); n != 0 {
			t.Errorf("the agent still remembers %d tasks", n)
		}
		r.check()
	})
}

func TestRefusedTasksGoBackAndAreTriedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		n := 0
		r.script(0, func(tasks.Assignment) tasktest.Answer {
			if n++; n < 4 {
				return tasktest.Answer{Refuse: &tasks.Refusal{Cause: "disk", Detail: "no space left"}}
			}
			return tasktest.Answer{}
		})
		first, second := r.submit(0).ID, r.submit(0).ID
		r.isNew(second)
		if w := r.get(second).Waiting; w.Cause != tasks.CauseHeld {
			t.Errorf("waits because of %+v", w)
		}
		r.pass(20 * time.Second)
		if got := r.isDone(first); got.Attempt != 4 {
			t.Errorf("attempt %d, want 4", got.Attempt)
		}
		r.isDone(second)
		r.check()
	})
}

func TestLiesChangeNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.script(0, silent)
		r.script(1, silent)
		mine, other := r.submit(0).ID, r.submit(1).ID
		next := r.submit(0).ID
		liar := r.agents[0].Num
		say := func(id tasks.ID, attempt int, epoch int64) {
			r.runner.Say(func(s tasks.Sessions) {
				s.Final(liar, tasks.Final{Ref: tasks.Ref{ID: id, Attempt: attempt}, Epoch: epoch, Ending: tasks.Ending{Outcome: tasks.Succeeded}})
			})
		}
		say(other, 1, 1) // somebody else's
		say(mine, 2, 1)  // an attempt that is not in flight
		say(mine, 0, 1)
		say(mine, 1, 2) // another epoch
		say(next, 0, 1) // not started
		say(424242, 1, 1)
		r.runner.Say(func(s tasks.Sessions) {
			s.Final(tasks.AgentNum(77), tasks.Final{Ref: tasks.Ref{ID: mine, Attempt: 1}, Epoch: 1, Ending: tasks.Ending{Outcome: tasks.Succeeded}})
			s.Accepted(liar, tasks.Ref{ID: other, Attempt: 1})
			s.Output(liar, tasks.OutputChunk{Ref: tasks.Ref{ID: other, Attempt: 1}, Stream: "stdout", Data: []byte("x")})
			s.Refused(liar, tasks.Refusal{Ref: tasks.Ref{ID: other, Attempt: 1}, Cause: "busy"})
		})
		synctest.Wait()
		r.is(mine, tasks.StateWaiting, 1, "", "")
		r.is(other, tasks.StateWaiting, 1, "", "")
		r.isNew(next)
		// Twice the same answer, then another one: the first counts.
		say(mine, 1, 1)
		say(mine, 1, 1)
		r.runner.Say(func(s tasks.Sessions) {
			s.Final(liar, tasks.Final{Ref: tasks.Ref{ID: mine, Attempt: 1}, Epoch: 1, Ending: tasks.Ending{Outcome: tasks.Failed}})
		})
		synctest.Wait()
		r.isDone(mine)
		if len(r.store.Late()) != 0 {
			t.Errorf("late answers %v", r.store.Late())
		}
		if n := r.manager.Mismatches(); n != 0 {
			t.Errorf("disk and memory parted %v times", n)
		}
		r.stop()
	})
}

// TestALateAnswerThatCannotBeStoredHoldsUpNobody: an agent talks about an
// attempt that no column holds, among late answers that can be kept.
func TestALateAnswerThatCannotBeStoredHoldsUpNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		done := r.submit(0).ID
		r.isDone(done)
		liar := r.agents[0].Num
		r.runner.Say(func(s tasks.Sessions) {
			for _, attempt := range []int{7, 1 << 20, 8} {
				s.Final(liar, tasks.Final{Ref: tasks.Ref{ID: done, Attempt: attempt}, Epoch: 1, Ending: tasks.Ending{Outcome: tasks.Failed}})
			}
		})
		synctest.Wait()
		r.isDone(r.submit(1).ID)
		r.isDone(r.submit(0).ID)
		if late := r.store.Late(); len(late) != 2 {
			t.Errorf("late answers %v, want those of attempts 7 and 8", late)
		}
		r.check()
	})
}

// TestAssignmentNeverMeetsTheNextSession: the session changes while the claim
// is on its way to disk. The new session's welcome does not name the task, so
// it is given back; it must not have been sent on that session too.
func TestAssignmentNeverMeetsTheNextSession(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		num := r.agents[0].Num
		r.faults.OnTurn(func(x *tasks.Turn) tasktest.Fault {
			if len(x.Inserts) > 0 {
				r.runner.Disconnect(num, "cable")
				r.runner.Connect(num)
			}
			return tasktest.None
		})
		id := r.submit(0, func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }).ID
		r.pass(time.Second)
		r.isDone(id)
		if got := r.runner.Starts(num); len(got) != 1 {
			t.Errorf("started %v, want once", got)
		}
		r.check()
	})
}

func TestApprovalSurvivesARestart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		num := r.agents[0].Num
		once := r.submit(0, func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }).ID
		again := r.submit(0).ID
		r.runner.LoseLedger(num)
		r.runner.Connect(num)
		r.pass(time.Second)
		r.stop()
		r.runner.Disconnect(num, "the controller stops")
		r.runner.Approve(num) // nobody listens
		r.script(0, nil2())
		r.make()
		r.start()
		r.pass(3 * time.Second)
		r.is(once, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonLedgerChanged)
		r.isDone(again)
		if got := r.runner.Starts(num); len(got) != 2 {
			t.Errorf("started %v", got)
		}
		r.check()
	})
}
