package tasks_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/tasks"
	"headgate/tasks/tasktest"
)

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

func TestEndsThatMeetAreWrittenOnce(t *testing.T) {
	t.Run("over several turns", func(t *testing.T) { bubble(t, func(t *testing.T) { endsMeet(t, 2, false) }) })
	t.Run("in one pass", func(t *testing.T) { bubble(t, func(t *testing.T) { endsMeet(t, 1000, true) }) })
}
