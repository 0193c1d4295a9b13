package tasks_test

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// readCounter counts how often a task is read.
type readCounter struct {
	tasks.Store
	n atomic.Int64
}

func (r *readCounter) Task(ctx context.Context, id tasks.ID) (*tasks.Task, error) {
	r.n.Add(1)
	return r.Store.Task(ctx, id)
}

// counted makes the rig's store count reads.
func counted(r **readCounter) option {
	return func(c *tasks.Config) {
		*r = &readCounter{Store: c.Store}
		c.Store = *r
	}
}

// toldAsStored compares what a waiter was told with what is on disk.
func (r *rig) toldAsStored(told *tasks.Task, err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
	if told.State != tasks.StateCompleted {
		r.Fatalf("task %d is %s, want it completed", told.ID, told.State)
	}
	if diff := cmp.Diff(r.get(told.ID), told); diff != "" {
		r.Errorf("what was told of task %d differs from what is stored (-stored +told):\n%s", told.ID, diff)
	}
}

func (r *rig) submitAndWait(agent int, d time.Duration, key tasks.Idempotency, change ...func(*tasks.Submission)) (*tasks.Task, error) {
	s := echo(agent)
	for _, f := range change {
		f(&s)
	}
	return r.service.SubmitAndWait(r.Context(), s, "user:test", key, d)
}

func TestSubmitAndWaitReadsNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var reads *readCounter
		r := newRig(t, 1, counted(&reads))
		code := 3
		r.script(0, func(tasks.Assignment) tasktest.Answer {
			return tasktest.Answer{After: 3 * time.Second, Ending: tasks.Ending{
				Outcome: tasks.Failed, Reason: "exit", Detail: "It ended with 3.", Result: json.RawMessage(`{"y":2}`),
				Exit: &tasks.Exit{Code: &code},
			}}
		})
		first, err := r.submitAndWait(0, time.Minute, tasks.Idempotency{})
		if n := reads.n.Load(); n != 0 {
			t.Errorf("the task was read %d times", n)
		}
		r.toldAsStored(first, err)

		// Behind another task, and due later.
		r.submit(0)
		behind, err := r.submitAndWait(0, time.Minute, tasks.Idempotency{}, func(s *tasks.Submission) {
			s.NotBefore = time.Now().Add(20 * time.Second)
		})
		r.toldAsStored(behind, err)

		// A task that never starts ends by its expiry.
		r.script(0, silent)
		r.submit(0)
		expired, err := r.submitAndWait(0, time.Minute, tasks.Idempotency{}, func(s *tasks.Submission) {
			s.ExpiresAt = time.Now().Add(5 * time.Second)
		})
		r.toldAsStored(expired, err)
		if expired.Ending.Outcome != tasks.Expired || expired.Attempt != 0 || !expired.StartedAt.IsZero() {
			t.Errorf("expired: %+v", expired)
		}
	})
}

func TestWaitReadsOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var reads *readCounter
		r := newRig(t, 1, counted(&reads))
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 5 * time.Second} })
		r.submit(0)
		id := r.submit(0).ID // waits for its turn when it is read
		done, err := r.service.Wait(t.Context(), id, time.Minute)
		if n := reads.n.Load(); n != 1 {
			t.Errorf("the task was read %d times, want once", n)
		}
		r.toldAsStored(done, err)
		// That the database cannot be read at the end of the time is no error.
		open := r.submit(0)
		begin := time.Now()
		got := make(chan *tasks.Task, 1)
		go func() {
			x, err := r.service.Wait(t.Context(), open.ID, 2*time.Second)
			if err != nil {
				t.Error(err)
			}
			got <- x
		}()
		synctest.Wait()
		r.faults.Down(true)
		if x := <-got; x == nil || x.State != tasks.StateWaiting || time.Since(begin) != 2*time.Second {
			t.Errorf("after %s: %+v", time.Since(begin), x)
		}
		r.faults.Down(false)
		r.pass(10 * time.Second)
		r.check()
	})
}

func TestWaitersOfOneTaskAreAllTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: time.Second} })
		id := r.submit(0).ID
		told := make(chan *tasks.Task, 10)
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 10 {
			c := t.Context()
			if i%2 == 1 {
				c = ctx
			}
			go func() {
				x, err := r.service.Wait(c, id, time.Minute)
				if err != nil {
					t.Error(err)
				}
				told <- x
			}()
		}
		synctest.Wait()
		cancel() // half of them leave
		synctest.Wait()
		ended := 0
		for range 10 {
			if x := <-told; x.State == tasks.StateCompleted {
				ended++
			}
		}
		if n := r.manager.Hub().Waiting(); ended != 5 || n != 0 {
			t.Errorf("%d waiters were told of the end, want 5; %d are left, want 0", ended, n)
		}
		r.check()
	})
}

func TestSubmitAndWaitOfAReplayReads(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var reads *readCounter
		r := newRig(t, 1, counted(&reads))
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 5 * time.Second} })
		key := tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k"}
		first, err := r.submitAndWait(0, time.Second, key)
		if err != nil || first.State != tasks.StateWaiting {
			t.Fatalf("the first try gave %+v, %v", first, err)
		}
		again, err := r.submitAndWait(0, time.Minute, key)
		r.toldAsStored(again, err)
		third, err := r.submitAndWait(0, time.Minute, key)
		r.toldAsStored(third, err)
		if again.ID != first.ID || third.ID != first.ID || len(r.runner.Starts(r.agents[0].Num)) != 1 {
			t.Errorf("ids %d, %d, %d", first.ID, again.ID, third.ID)
		}
		if n := r.manager.Hub().Waiting(); n != 0 {
			t.Errorf("%d waiters are left", n)
		}
		r.check()
	})
}

func TestSubmitThatFailsLeavesNoWaiter(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		r.faults.Down(true)
		_, err := r.submitAndWait(0, time.Minute, tasks.Idempotency{})
		wantFault(t, err, "database_unavailable")
		// Stored after the submitter has been told that nobody knows.
		r.faults.Down(false)
		r.pass(5 * time.Second)
		r.faults.OnTurn(func(x *tasks.Turn) tasktest.Fault {
			if len(x.Inserts) > 0 {
				r.faults.OnTurn(nil)
				r.faults.FailSettles(1000)
				return tasktest.UnknownDone
			}
			return tasktest.None
		})
		_, err = r.submitAndWait(0, time.Minute, tasks.Idempotency{})
		wantFault(t, err, "commit_unknown")
		r.faults.FailSettles(0)
		r.pass(5 * time.Second)
		if n := r.manager.Hub().Waiting(); n != 0 || r.store.Open() != 1 {
			t.Errorf("%d waiters are left; %d tasks are stored, want 1", n, r.store.Open())
		}
		r.check()
	})
}

// TestWaitWhileAnotherControllerOwns lets a second controller take the shards
// while somebody waits at the first one, which is never told of the end.
func TestWaitWhileAnotherControllerOwns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 40 * time.Second} })
		began := time.Now()
		got := make(chan *tasks.Task, 1)
		go func() {
			x, err := r.submitAndWait(0, 2*time.Minute, tasks.Idempotency{}, func(s *tasks.Submission) { s.Timeout = time.Minute })
			if err != nil {
				t.Error(err)
			}
			got <- x
		}()
		synctest.Wait()
		r.faults.FailRenews(true)
		r.pass(20 * time.Second)
		other := tasks.NewManager(tasks.Config{Store: r.store, Runner: r.runner, Owner: tasks.Owner{ID: uuid.NewV4(), Name: "other"}})
		r.runner.Attach(other)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := other.Run(ctx); err != nil {
				t.Error(err)
			}
		}()
		x := <-got
		if x == nil || x.State != tasks.StateCompleted || time.Since(began) > 45*time.Second {
			t.Errorf("after %s: %+v", time.Since(began), x)
		}
		cancel()
		<-done
		r.stop()
	})
}

// BenchmarkWaitForResult is a submission with its result, as ?wait= gives it.
// What it allocates depends on no other load.
func BenchmarkWaitForResult(b *testing.B) {
	store := tasktest.NewStore()
	id := uuid.NewV4()
	a := tasks.Agent{Num: store.NewAgent(id, "a", nil), ID: id, Name: "a"}
	runner := &countingRunner{agents: map[string]tasks.Agent{"a": a}}
	reads := &readCounter{Store: store}
	m := tasks.NewManager(tasks.Config{Store: reads, Runner: runner, Owner: tasks.Owner{ID: uuid.NewV4()}})
	runner.sessions = m
	m.AgentChanged(a)
	s := tasks.NewService(tasks.ServiceConfig{Manager: m, Kinds: kinds.Default()})
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	until(func() bool { return len(m.Ready()) == 0 })
	sub := tasks.Submission{Agent: "a", Kind: kinds.Echo, Args: json.RawMessage(`{"x":1}`)}
	run := func(b *testing.B, one func() (*tasks.Task, error)) {
		b.ReportAllocs()
		before := reads.n.Load()
		for b.Loop() {
			t, err := one()
			if err != nil || t.State != tasks.StateCompleted {
				b.Fatal(t, err)
			}
		}
		b.ReportMetric(float64(reads.n.Load()-before)/float64(b.N), "reads/op")
	}
	b.Run("submit-and-wait", func(b *testing.B) {
		run(b, func() (*tasks.Task, error) {
			return s.SubmitAndWait(ctx, sub, "token:bench", tasks.Idempotency{}, time.Minute)
		})
	})
	b.Run("submit-then-wait", func(b *testing.B) {
		run(b, func() (*tasks.Task, error) {
			t, err := s.Submit(ctx, sub, "token:bench", tasks.Idempotency{})
			if err != nil {
				return nil, err
			}
			return s.Wait(ctx, t.ID, time.Minute)
		})
	})
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}
