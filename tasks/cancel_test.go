package tasks_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/fault"
	"headgate/internal/kinds"
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

// Cases Q1, Q39.
func TestEndsThatMeetAreWrittenOnce(t *testing.T) {
	t.Run("over several turns", func(t *testing.T) { bubble(t, func(t *testing.T) { endsMeet(t, 2, false) }) })
	t.Run("in one pass", func(t *testing.T) { bubble(t, func(t *testing.T) { endsMeet(t, 1000, true) }) })
}

// TestEveryCancelEndsInBoundedTime: whatever the agent does, a cancelled task
// is completed, its cancellation is shown with who and when until then, and the
// tasks behind it are not lost.
//
// Cases P2, P39.
func TestEveryCancelEndsInBoundedTime(t *testing.T) {
	deaf := func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true, Deaf: true} }
	for name, c := range map[string]struct {
		trouble func(r *rig) // after the start, before the cancel
		within  time.Duration
		says    string
	}{
		"the agent ignores it": {func(*rig) {}, tasks.DefaultForcedGrace, "the agent was told"},
		"the agent is away":    {func(r *rig) { r.runner.Disconnect(r.agents[0].Num, "cable") }, tasks.DefaultAwayGrace, "the connection to the agent was lost"},
		"the agent comes and goes": {func(r *rig) {
			go r.flap(0, 5*time.Second)
		}, tasks.DefaultForcedGrace, "the agent was told"},
		"the agent is quarantined": {func(r *rig) {
			r.runner.LoseLedger(r.agents[0].Num)
			r.runner.Connect(r.agents[0].Num)
		}, tasks.DefaultAwayGrace, "is quarantined"},
		"the controller restarts, the agent does not come": {func(r *rig) {
			r.runner.AutoConnect(false)
			r.runner.Disconnect(r.agents[0].Num, "the controller was killed")
			r.next()
		}, tasks.DefaultAwayGrace, "the connection to the agent was lost"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, 1)
				r.script(0, deaf)
				id := r.submit(0, func(s *tasks.Submission) { s.Kind, s.Args = kinds.Sleep, []byte(`{"seconds":3600}`) }).ID
				behind := r.submit(0).ID
				c.trouble(r)
				r.pass(2 * time.Second)
				asked := time.Now()
				if _, err := r.service.Cancel(t.Context(), id, "user:eve"); err != nil {
					t.Fatal(err)
				}
				r.pass(time.Second)
				w := r.is(id, tasks.StateWaiting, 1, "", "").Waiting
				if w.Cause != tasks.CauseCancel || !strings.Contains(w.Sentence, "user:eve") || !strings.Contains(w.Sentence, c.says) {
					t.Errorf("explained as %+v", w)
				}
				r.pass(c.within - 2*time.Second)
				r.is(id, tasks.StateWaiting, 1, "", "")
				r.pass(3 * time.Second)
				got := r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonCancelNoWord)
				if got.CancelActor != "user:eve" || !got.CancelRequestedAt.Equal(asked) || !strings.Contains(got.Ending.Detail, "user:eve") {
					t.Errorf("ended as %+v", got)
				}
				r.isNew(behind)
				r.check()
			})
		})
	}
}

// TestCancelledOrphanFreesItsAgent cancels a task that was under way when the
// controller was killed and whose agent was restarted: the next task starts
// as soon as the agent is there.
//
// Cases P1, P2.
func TestCancelledOrphanFreesItsAgent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		num := r.agents[0].Num
		r.script(0, silent)
		id := r.submit(0, func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce }).ID
		r.runner.AutoConnect(false)
		r.runner.Restart(num)
		r.next()
		if _, err := r.service.Cancel(t.Context(), id, "user:eve"); err != nil {
			t.Fatal(err)
		}
		r.pass(tasks.DefaultAwayGrace + 2*time.Second)
		r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonCancelNoWord)
		r.script(0, nil2())
		next := r.submit(0).ID
		r.runner.Connect(num)
		synctest.Wait()
		r.isDone(next)
		r.check()
	})
}

// TestCancelsAndTheEndRace lets two people cancel a task while its agent ends
// it, a thousand times: there is one terminal event, and it, both answers and
// the table tell the same end.
//
// Cases Q6, P39.
func TestCancelsAndTheEndRace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		num := r.agents[0].Num
		won := map[tasks.Outcome]int{}
		for i := range 1000 {
			r.script(0, silent)
			id := r.submit(0).ID
			sub := subscribe(t, r.manager.Hub(), "", tasks.TopicTask(id))
			answers := make(chan *tasks.Task, 2)
			for _, who := range []string{"user:eve", "user:mira"} {
				go func() {
					got, err := r.service.Cancel(t.Context(), id, who)
					if err != nil && fault.CodeOf(err) != "already_completed" {
						t.Error(err)
					}
					answers <- got
				}()
			}
			if i%3 == 0 {
				synctest.Wait() // the cancels are first
			}
			r.runner.Finish(num, tasks.Ending{Outcome: tasks.Succeeded})
			r.pass(100 * time.Millisecond) // those who look again
			got := r.get(id)
			won[got.Ending.Outcome]++
			for range 2 {
				if a := <-answers; a != nil && a.State == tasks.StateCompleted && a.Ending.Outcome != got.Ending.Outcome {
					t.Errorf("task %d: one answer is %+v, the task %+v", id, a.Ending, got.Ending)
				}
			}
			ends := 0
			types, last := read(sub)
			sub.Close()
			for _, what := range types {
				if what == tasks.EventCompleted {
					ends++
				}
			}
			if last.Outcome != got.Ending.Outcome {
				t.Errorf("task %d: the last event is %+v, the outcome %s", id, last, got.Ending.Outcome)
			}
			if ends != 1 || got.State != tasks.StateCompleted {
				t.Fatalf("task %d is %s with %d terminal events", id, got.State, ends)
			}
		}
		if won[tasks.Succeeded] == 0 || won[tasks.Cancelled] == 0 {
			t.Errorf("the same side always won: %v", won)
		}
		r.check()
	})
}

// flap lets an agent come and go until the test ends.
func (r *rig) flap(agent int, every time.Duration) {
	num := r.agents[agent].Num
	for up := true; ; up = !up {
		select {
		case <-r.Context().Done():
			return
		case <-time.After(every):
		}
		if up {
			r.runner.Disconnect(num, "cable")
		} else {
			r.runner.Connect(num)
		}
	}
}

// next stops the controller and starts the next one.
func (r *rig) next() {
	r.stop()
	r.make()
	r.start()
}
