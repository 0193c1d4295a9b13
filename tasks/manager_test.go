package tasks_test

import (
	"context"
	"encoding/json"
	"errors"
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

func TestTaskIsStartedAtOnceAndCompleted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		got := r.submit(0)
		if got.State != tasks.StateWaiting || got.Attempt != 1 || got.StartedAt.IsZero() {
			t.Errorf("a task for an idle agent came back as %+v", got)
		}
		done := r.isDone(got.ID)
		if string(done.Ending.Result) != `{"x":1}` {
			t.Errorf("result %s", done.Ending.Result)
		}
		if n := r.runner.Remembered(r.agents[0].Num); n != 0 {
			t.Errorf("the agent still remembers %d tasks", n)
		}
		if u := r.manager.Ready(); len(u) != 0 {
			t.Errorf("not ready: %v", u)
		}
		r.check()
	})
}

func TestTasksOfOneAgentGoOneAfterAnother(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: time.Second} })
		var ids []tasks.ID
		for range 200 { // more than memory keeps
			ids = append(ids, r.submit(0).ID)
		}
		fast := r.submit(1)
		r.isDone(fast.ID)
		w := r.get(ids[70]).Waiting
		if w == nil || w.Cause != tasks.CauseBusy || w.Blocking != ids[0] || !strings.Contains(w.Sentence, "is busy with") {
			t.Errorf("a waiting task explains itself as %+v", w)
		}
		if w := r.get(ids[3]).Waiting; w.Position != 3 {
			t.Errorf("position %d, want 3", w.Position)
		}
		r.pass(201 * time.Second)
		var want []tasks.Ref
		for _, id := range ids {
			r.isDone(id)
			want = append(want, tasks.Ref{ID: id, Attempt: 1})
		}
		if got := r.runner.Starts(r.agents[0].Num); !slices.Equal(got, want) {
			t.Errorf("started in the order %v", got)
		}
		r.check()
	})
}

func TestPriorityGoesFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: time.Second} })
		prio := func(p int) func(*tasks.Submission) { return func(s *tasks.Submission) { s.Priority = &p } }
		first := r.submit(0).ID
		low, normal, high := r.submit(0, prio(9)).ID, r.submit(0).ID, r.submit(0, prio(0)).ID
		r.pass(5 * time.Second)
		var got []tasks.ID
		for _, ref := range r.runner.Starts(r.agents[0].Num) {
			got = append(got, ref.ID)
		}
		if want := []tasks.ID{first, high, normal, low}; !slices.Equal(got, want) {
			t.Errorf("started in the order %v, want %v", got, want)
		}
		r.check()
	})
}

func TestSweepAloneMakesProgress(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 3)
		r.manager.Deafen()
		const n = 5
		type answer struct {
			id  tasks.ID
			err error
		}
		answers := make(chan answer, 3*n)
		for i := range 3 * n {
			go func() {
				got, err := r.service.Submit(t.Context(), echo(i%3), "user:test", tasks.Idempotency{})
				if err != nil {
					answers <- answer{err: err}
					return
				}
				answers <- answer{id: got.ID}
			}()
		}
		// P12: 2 s from the submission to the start for the first of each
		// agent, then one more sweep for each result and each claim.
		r.pass(2 * time.Second)
		for i := range r.agents {
			if len(r.runner.Starts(r.agents[i].Num)) == 0 {
				t.Errorf("agent %d was given nothing within 2 s", i)
			}
		}
		r.pass(2 * n * time.Second)
		for range 3 * n {
			a := <-answers
			if a.err != nil {
				t.Fatal(a.err)
			}
			r.isDone(a.id)
		}
		r.check()
	})
}

func TestNotBeforeIsKept(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		at := time.Now().Add(3 * time.Hour)
		id := r.submit(0, func(s *tasks.Submission) { s.NotBefore = at }).ID
		r.pass(3*time.Hour - time.Second)
		r.isNew(id)
		if w := r.get(id).Waiting; w == nil || w.Cause != tasks.CauseNotDue {
			t.Errorf("waits because of %+v", w)
		}
		if s := r.manager.Stats(); s.Later != 1 || s.New != 1 {
			t.Errorf("stats %+v", s)
		}
		r.pass(3 * time.Second)
		r.isDone(id)
		r.check()
	})
}

func TestTasksExpireInsteadOfStarting(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 10 * time.Second} })
		long := func(s *tasks.Submission) { s.Timeout = time.Minute }
		soon := func(s *tasks.Submission) { s.ExpiresAt = time.Now().Add(5 * time.Second) }
		exact := func(s *tasks.Submission) { s.ExpiresAt = time.Now().Add(10*time.Second - time.Millisecond) }
		run := r.submit(0, long).ID
		late, edge := r.submit(0, soon).ID, r.submit(0, exact).ID
		r.pass(7 * time.Second)
		r.is(late, tasks.StateCompleted, 0, tasks.Expired, tasks.ReasonExpired)
		r.pass(4 * time.Second)
		r.isDone(run)
		r.is(edge, tasks.StateCompleted, 0, tasks.Expired, tasks.ReasonExpired)
		if got := r.runner.Starts(r.agents[0].Num); len(got) != 1 {
			t.Errorf("started %v", got)
		}
		r.check()
	})
}

func TestCancelBeforeTheStartAndAfter(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		run, wait := r.submit(0).ID, r.submit(0).ID
		later := r.submit(0, func(s *tasks.Submission) { s.NotBefore = time.Now().Add(time.Hour) }).ID
		for _, id := range []tasks.ID{wait, later} {
			got, err := r.service.Cancel(t.Context(), id, "user:eve")
			if err != nil || got.State != tasks.StateCompleted || got.Ending.Outcome != tasks.Cancelled || !strings.Contains(got.Ending.Detail, "user:eve") {
				t.Fatalf("cancel of a waiting task: %+v, %v", got, err)
			}
		}
		got, err := r.service.Cancel(t.Context(), run, "user:eve")
		if err != nil {
			t.Fatal(err)
		}
		if got.State == tasks.StateWaiting && got.CancelRequestedAt.IsZero() {
			t.Errorf("cancel of a running task: %+v", got)
		}
		synctest.Wait()
		r.is(run, tasks.StateCompleted, 1, tasks.Cancelled, "cancelled")
		_, err = r.service.Cancel(t.Context(), run, "user:eve")
		wantFault(t, err, "already_completed")
		_, err = r.service.Cancel(t.Context(), 99999, "user:eve")
		wantFault(t, err, "unknown_task")
		r.check()
	})
}

func TestCancelOfATaskWhoseAgentIsAway(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true} })
		run := r.submit(0).ID
		num := r.agents[0].Num
		r.runner.Disconnect(num, "cable")
		r.pass(time.Second)
		if _, err := r.service.Cancel(t.Context(), run, "user:eve"); err != nil {
			t.Fatal(err)
		}
		if n := len(r.runner.Cancels()); n != 0 {
			t.Errorf("%d cancels went to an agent that is away", n)
		}
		r.runner.Connect(num)
		r.pass(time.Second)
		r.is(run, tasks.StateCompleted, 1, tasks.Cancelled, "cancelled")
		r.check()
	})
}

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

func nil2() func(tasks.Assignment) tasktest.Answer {
	return func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{} }
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

func TestPausedAndRemovedAgents(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		num := r.agents[0].Num
		r.runner.Change(num, func(a *tasks.Agent) { a.Paused, a.PausedBy, a.PausedAt = true, "mira", time.Now() })
		var ids []tasks.ID
		for range 2500 {
			ids = append(ids, r.submit(0).ID)
		}
		later := r.submit(0, func(s *tasks.Submission) { s.NotBefore = time.Now().Add(time.Hour) }).ID
		r.pass(time.Minute)
		r.isNew(ids[0])
		if w := r.get(ids[1]).Waiting; w.Cause != tasks.CausePaused || !strings.Contains(w.Sentence, "mira") || w.Position != 2 {
			t.Errorf("waits because of %+v", w)
		}
		r.runner.Change(num, func(a *tasks.Agent) { a.Removed = true })
		r.pass(2 * time.Second)
		for _, id := range ids {
			r.is(id, tasks.StateCompleted, 0, tasks.Cancelled, tasks.ReasonAgentRemoved)
		}
		r.pass(time.Hour)
		r.is(later, tasks.StateCompleted, 0, tasks.Cancelled, tasks.ReasonAgentRemoved)
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "unknown_agent")
		r.check()
	})
}

func TestPausedAgentGoesOnWhenResumed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Paused = true })
		id := r.submit(0).ID
		r.pass(time.Minute)
		r.isNew(id)
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Paused = false })
		synctest.Wait()
		r.isDone(id)
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

func TestStrangeAnswersAreStoredSafely(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		code := 1
		cases := []struct {
			ending  tasks.Ending
			outcome tasks.Outcome
			reason  string
		}{
			{tasks.Ending{Outcome: "great"}, tasks.Failed, "invalid_answer"},
			{tasks.Ending{Outcome: tasks.Expired}, tasks.Failed, "invalid_answer"},
			{tasks.Ending{Outcome: tasks.Failed, Reason: "exit\x00code", Detail: "a\x00b\xff"}, tasks.Failed, "exit\uFFFDcode"},
			{tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage("\x00\xff")}, tasks.Succeeded, ""},
			{tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`"\u0000"`)}, tasks.Succeeded, ""},
			{tasks.Ending{Outcome: tasks.Succeeded, Result: make([]byte, tasks.MaxResultBytes+1)}, tasks.Failed, "result_too_large"},
			{tasks.Ending{Outcome: tasks.Failed, Reason: "exit_code", Exit: &tasks.Exit{Code: &code, Signal: "\x00"}}, tasks.Failed, "exit_code"},
			{tasks.Ending{Outcome: tasks.Failed, Detail: strings.Repeat("ä", 5000)}, tasks.Failed, ""},
		}
		for _, c := range cases {
			r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Ending: c.ending} })
			id := r.submit(0).ID
			r.is(id, tasks.StateCompleted, 1, c.outcome, c.reason)
		}
		r.check()
	})
}

func TestPoisonIsIsolated(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 20)
		for i := range r.agents {
			r.script(i, silent)
		}
		var ids []tasks.ID
		for i := range r.agents {
			ids = append(ids, r.submit(i).ID)
		}
		waiting := r.submit(3).ID
		// What the checks let through and the database refuses all the same.
		r.faults.OnTurn(func(x *tasks.Turn) tasktest.Fault { return tasktest.None })
		r.poison(func(x *tasks.Turn) bool {
			return slices.ContainsFunc(x.Finishes, func(f tasks.Finish) bool { return string(f.Ending.Result) == `"bad"` })
		})
		for i := range r.agents {
			result := json.RawMessage(`"good"`)
			if i == 3 {
				result = json.RawMessage(`"bad"`)
			}
			r.runner.Finish(r.agents[i].Num, tasks.Ending{Outcome: tasks.Succeeded, Result: result})
		}
		synctest.Wait()
		for i, id := range ids {
			if i == 3 {
				got := r.is(id, tasks.StateCompleted, 1, tasks.Failed, tasks.ReasonNotStorable)
				if string(got.Ending.ResultBytes) != `"bad"` {
					t.Errorf("the refused result was kept as %q", got.Ending.ResultBytes)
				}
				continue
			}
			r.isDone(id)
		}
		r.is(waiting, tasks.StateWaiting, 1, "", "")
		r.check()
	})
}

// poison makes the store refuse the data of some turns.
func (r *rig) poison(bad func(*tasks.Turn) bool) {
	r.faults.Poison(func(x *tasks.Turn) error {
		if bad(x) {
			return &tasks.PoisonError{Err: errors.New("refused")}
		}
		return nil
	})
}

func TestPoisonousSubmissionFailsAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.poison(func(x *tasks.Turn) bool {
			return slices.ContainsFunc(x.Inserts, func(i tasks.Insert) bool { return i.Args == `{"x":"bad"}` })
		})
		errs := make(chan error, 10)
		for i := range 10 {
			go func() {
				s := echo(i % 2)
				if i == 4 {
					s.Args = json.RawMessage(`{"x":"bad"}`)
				}
				_, err := r.service.Submit(t.Context(), s, "user:test", tasks.Idempotency{})
				errs <- err
			}()
		}
		failed := 0
		for range 10 {
			if err := <-errs; err != nil {
				failed++
				wantFault(t, err, "not_storable")
			}
		}
		if failed != 1 || r.store.Open() > 9 {
			t.Errorf("%d submissions failed, want 1", failed)
		}
		r.check()
	})
}

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
		if owners, err := r.store.Owners(t.Context()); err != nil || len(owners) != 0 {
			t.Errorf("owners after a clean stop: %v, %v", owners, err)
		}
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		if err == nil {
			t.Error("a stopped manager took a task")
		}
	})
}

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
		if _, err := r.store.Turn(t.Context(), &tasks.Turn{Owner: owners[0].Owner, Leases: owners, Finishes: []tasks.Finish{f}}); err != nil {
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

func TestQueueCaps(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2, func(c *tasks.Config) { c.Limits.AgentDepth, c.Limits.TotalDepth = 5, 8 })
		r.script(0, silent)
		r.script(1, silent)
		for range 6 { // one runs, five wait
			r.submit(0)
		}
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "queue_full")
		for range 4 {
			r.submit(1)
		}
		_, err = r.service.Submit(t.Context(), echo(1), "user:test", tasks.Idempotency{})
		wantFault(t, err, "queue_full")
		r.check()
	})
}

func TestOutputIsOnDiskBeforeItIsAcknowledged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer {
			return tasktest.Answer{Output: []tasks.OutputChunk{
				{Seq: 0, Stream: "stdout", Data: []byte("one ")},
				{Seq: 1, Stream: "stderr", Data: []byte("err")},
				{Seq: 2, Stream: "stdout", Offset: 4, Data: []byte("two")},
			}}
		})
		id := r.submit(0).ID
		r.isDone(id)
		for stream, want := range map[string]string{"": "one errtwo", "stdout": "one two", "stderr": "err"} {
			if got := r.output(id, stream); got != want {
				t.Errorf("output %q is %q, want %q", stream, got, want)
			}
		}
		if got := r.runner.Acks(); !slices.Equal(got, []int{0, 1, 2}) {
			t.Errorf("acknowledged %v", got)
		}
		_, err := r.service.Output(t.Context(), id, "stdin")
		wantFault(t, err, "invalid_stream")
		r.check()
	})
}

func TestHooksAreCalledAfterTheCommit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := buildRig(t, 1)
		got := make(chan tasks.Completed, 10)
		r.manager.OnCompleted(kinds.Echo, func(_ context.Context, c tasks.Completed) { got <- c })
		r.start()
		id := r.submit(0).ID
		r.submit(0, func(s *tasks.Submission) { s.Kind, s.Args = kinds.Ping, nil })
		synctest.Wait()
		if c := <-got; c.ID != id || c.Agent != r.agents[0].Num || string(c.Ending.Result) != `{"x":1}` || c.CompletedAt.IsZero() {
			t.Errorf("hook was told %+v", c)
		}
		if len(got) != 0 {
			t.Error("the hook was called for another kind")
		}
		r.check()
	})
}

func TestStatsAndSeries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 10 * time.Second} })
		for range 5 {
			r.submit(0)
		}
		r.submit(1)
		r.pass(11 * time.Second)
		s := r.manager.Stats()
		if s.New != 3 || s.Waiting != 1 || s.Submitted != 6 || s.Completed[tasks.Succeeded] != 2 || s.Sessions != 2 || s.Oldest.IsZero() {
			t.Errorf("stats %+v", s)
		}
		if s.Run.P99 < 8*time.Second || s.Run.P99 > 15*time.Second {
			t.Errorf("run p99 %s", s.Run.P99)
		}
		a, ok := r.manager.AgentStats(r.agents[0].Num)
		if !ok || a.Depth != 3 || a.Busy == 0 || a.Kind != kinds.Echo {
			t.Errorf("agent stats %+v", a)
		}
		r.pass(2 * time.Minute)
		points := r.manager.Series(time.Time{})
		if len(points) != 2 {
			t.Fatalf("%d points", len(points))
		}
		var p tasks.MinutePoint
		if err := json.Unmarshal(points[0].Value, &p); err != nil || p.Submitted != 6 || p.Completed[tasks.Succeeded] != 6 {
			t.Errorf("point %s, %v", points[0].Value, err)
		}
		r.check()
		r.make()
		r.start()
		if got := r.manager.Series(time.Time{}); len(got) != 2 {
			t.Errorf("%d points after a restart", len(got))
		}
		r.stop()
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

func TestEndsThatMeetAreWrittenOnce(t *testing.T) {
	t.Run("over several turns", func(t *testing.T) { bubble(t, func(t *testing.T) { endsMeet(t, 2, false) }) })
	t.Run("in one pass", func(t *testing.T) { bubble(t, func(t *testing.T) { endsMeet(t, 1000, true) }) })
}

// endsMeet cancels tasks in the moment in which they expire and fall due.
func endsMeet(t *testing.T, items int, deaf bool) {
	r := newRig(t, 1, func(c *tasks.Config) { c.Limits.TurnItems = items })
	r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 5 * time.Second} })
	long := func(s *tasks.Submission) { s.Timeout = time.Minute }
	r.submit(0, long)
	at := time.Now().Add(5 * time.Second)
	var ids []tasks.ID
	for i := range 30 {
		ids = append(ids, r.submit(0, func(s *tasks.Submission) {
			if s.ExpiresAt = at; i%3 == 0 {
				s.NotBefore = at.Add(-time.Millisecond)
			}
		}).ID)
	}
	r.pass(5*time.Second - time.Millisecond)
	if deaf {
		r.manager.Deafen() // cancels and sweep come in the same pass
	}
	for _, id := range ids {
		go func() { _, _ = r.service.Cancel(t.Context(), id, "user:eve") }()
	}
	r.pass(20 * time.Second)
	for _, id := range ids {
		got := r.get(id)
		if o := got.Ending.Outcome; o != tasks.Expired && o != tasks.Cancelled {
			t.Errorf("task %d is %s, outcome %q", id, got.State, o)
		}
	}
	if n := r.store.Open(); n != 0 {
		t.Errorf("%d tasks are open", n)
	}
	r.check()
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
