package tasks_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// Cases Q25.
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

// Cases Q4, Q14, Q31.
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
