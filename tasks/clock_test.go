package tasks_test

import (
	"testing"
	"testing/synctest"
	"time"

	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// TestTheClockOfAnAgentDecidesNothing lets an agent's clock be set by a day, to
// either side, while it runs a task: the task's times are the controller's.
// Cases P35.
func TestTheClockOfAnAgentDecidesNothing(t *testing.T) {
	for _, jump := range []time.Duration{time.Second, -time.Second, 5 * time.Minute, -5 * time.Minute, 24 * time.Hour, -24 * time.Hour} {
		t.Run(jump.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := newRig(t, 1)
				var given tasks.Assignment
				r.script(0, func(x tasks.Assignment) tasktest.Answer {
					given = x
					return tasktest.Answer{Silent: true}
				})
				begin := time.Now()
				id := r.submit(0).ID
				r.pass(3 * time.Second)
				ended := time.Now().Add(jump)
				r.runner.Say(func(s tasks.Sessions) {
					s.Final(given.Agent, tasks.Final{
						Ref: given.Ref(), Epoch: given.Epoch, StartedAt: begin.Add(-jump), EndedAt: ended,
						Ending: tasks.Ending{Outcome: tasks.Succeeded},
					})
				})
				synctest.Wait()
				r.pass(time.Second)
				task := r.is(id, tasks.StateCompleted, 1, tasks.Succeeded, "")
				if task.StartedAt.Before(begin) || task.StartedAt.After(begin.Add(time.Second)) || task.CompletedAt.Sub(task.StartedAt) < 2*time.Second || task.CompletedAt.Sub(task.StartedAt) > 5*time.Second {
					t.Errorf("begun %s, started %s, completed %s", begin, task.StartedAt, task.CompletedAt)
				}
			})
		})
	}
}
