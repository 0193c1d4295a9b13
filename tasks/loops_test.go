package tasks_test

import (
	"testing"
	"testing/synctest"
	"time"

	"headgate/tasks"
	"headgate/tasks/tasktest"
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

// While one loop waits for ids, no other one waits with it: nothing new can be
// taken in, but what its agents have goes on.
func TestALoopWithoutIDsGoesOnWithTheRest(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2, func(c *tasks.Config) { c.Loops = 2 })
		for i := range 2 {
			r.script(i, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 10 * time.Millisecond} })
		}
		batch := make([]tasks.Submission, tasks.IDBlock) // all ids of a block
		for i := range batch {
			batch[i] = echo(i % 2)
		}
		all, err := r.service.SubmitBatch(t.Context(), batch, "user:test", tasks.Idempotency{})
		if err != nil {
			t.Fatal(err)
		}
		release := r.faults.HoldIDs()
		late := make(chan *tasks.Task, 2)
		for i := range 2 {
			go func() {
				task, err := r.service.Submit(t.Context(), echo(i), "user:test", tasks.Idempotency{})
				if err != nil {
					t.Error(err)
				}
				late <- task
			}()
		}
		r.pass(7 * time.Second) // less than what a submission waits
		done := 0
		for i := range all {
			if r.get(all[i].ID).State == tasks.StateCompleted {
				done++
			}
		}
		if done < len(all)/2 {
			t.Errorf("%d of %d tasks were completed while one of two loops waited for ids, want those of the other one", done, len(all))
		}
		if len(late) > 0 {
			t.Error("a task was taken in without an id")
		}
		release()
		synctest.Wait()
		for range 2 {
			r.pass(10 * time.Second) // what the other loop has left comes first
			if task := <-late; task != nil {
				r.isDone(task.ID)
			}
		}
		r.check()
	})
}

// Ids that have become too old are given by no loop, also while another one
// takes new ones: the room for them may be gone.
func TestOldIDsAreNotGivenWhileNewOnesAreTaken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2, func(c *tasks.Config) { c.Loops = 2 })
		first := r.submit(0).ID
		r.pass(tasks.IDLife + time.Second)
		release := r.faults.HoldIDs()
		ids := make(chan tasks.ID, 2)
		for i := range 2 {
			go func() {
				task, err := r.service.Submit(t.Context(), echo(i), "user:test", tasks.Idempotency{})
				if err != nil {
					t.Error(err)
					ids <- 0
					return
				}
				ids <- task.ID
			}()
		}
		r.pass(time.Second)
		release()
		for range 2 {
			if id := <-ids; id < first+tasks.IDBlock {
				t.Errorf("a task has the id %d, of the old block that begins with %d", id, first)
			}
		}
		r.check()
	})
}
