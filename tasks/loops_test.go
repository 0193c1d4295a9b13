package tasks_test

import (
	"testing"

	"headgate/tasks"
)

// Lists show the newest task first by its id, so that ids must rise whatever
// loop takes a task in.
func TestIDsRiseAcrossWriteLoops(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const agents = 4
		r := newRig(t, agents, func(c *tasks.Config) { c.Loops = agents })
		var last tasks.ID
		for i := range 3 * tasks.IDBlock { // more than one block
			id := r.submit(i % agents).ID
			if id <= last {
				t.Fatalf("submission %d got id %d after %d", i, id, last)
			}
			last = id
		}
		r.check()
	})
}

func TestTotalDepthIsThatOfAllWriteLoops(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 3, func(c *tasks.Config) { c.Loops, c.Limits.AgentDepth, c.Limits.TotalDepth = 3, 5, 8 })
		for i := range 3 {
			r.script(i, silent)
			for range 1 + 2 { // one runs, two wait
				r.submit(i)
			}
		}
		for range 2 { // eight wait in all
			r.submit(1)
		}
		_, err := r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "queue_full")
		r.check()
	})
}
