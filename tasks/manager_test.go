package tasks_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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

// Cases Q14.
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

// Cases P10.
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

func nil2() func(tasks.Assignment) tasktest.Answer {
	return func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{} }
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

// Cases P47.
func TestAnAgentThatIgnoresTheLimitOfOutputFillsNoDisk(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1, func(c *tasks.Config) { c.Limits.TaskOutput = 1000 })
		r.script(0, func(tasks.Assignment) tasktest.Answer {
			var out []tasks.OutputChunk
			for seq := range 6 {
				out = append(out, tasks.OutputChunk{Seq: seq, Stream: "stdout", Offset: int64(300 * seq), Data: make([]byte, 300)})
			}
			return tasktest.Answer{Output: out}
		})
		id := r.submit(0).ID
		r.isDone(id)
		if got := len(r.output(id, "")); got != 900 {
			t.Errorf("%d bytes are kept, want 900", got)
		}
		if got := r.runner.Acks(); !slices.Contains(got, 5) {
			t.Errorf("acknowledged %v: the agent waits", got)
		}
		r.check()
	})
}

// orderedStore fails when output is stored after the end of its task.
type orderedStore struct {
	tasks.Store
	t     *testing.T
	mu    sync.Mutex
	ended map[tasks.ID]bool
}

// Turn implements tasks.Queue.
func (s *orderedStore) Turn(ctx context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range t.Output {
		if s.ended[o.ID] {
			s.t.Errorf("chunk %d of task %s comes after its end", o.Seq, o.ID)
		}
	}
	for _, f := range t.Finishes {
		s.ended[f.ID] = true
	}
	return s.Store.Turn(ctx, t)
}

// Output that waits for a later turn holds up the end of its own task alone, and
// comes before it.
//
// Cases P5, P48.
func TestThoseWhoPrintMuchDoNotHoldUpOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const agents = 20
		r := newRig(t, agents, func(c *tasks.Config) {
			c.Limits.TurnOutput = 10
			c.Store = &orderedStore{Store: c.Store, t: t, ended: map[tasks.ID]bool{}}
		})
		want := make([]string, agents)
		ids := make([]tasks.ID, agents)
		for i := range agents {
			var out []tasks.OutputChunk
			for seq := range 6 {
				text := fmt.Sprintf("%d.%d ", i, seq)
				out = append(out, tasks.OutputChunk{Seq: seq, Stream: "stdout", Offset: int64(len(want[i])), Data: []byte(text)})
				want[i] += text
			}
			r.script(i, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Output: out} })
		}
		for i := range agents {
			ids[i] = r.submit(i).ID
		}
		for i, id := range ids {
			r.isDone(id)
			if got := r.output(id, ""); got != want[i] {
				t.Errorf("agent %d: kept is %q, printed was %q", i, got, want[i])
			}
		}
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

// TestAPanickingHookHarmsNobody: the next hook of the task, and the hooks of
// later tasks, are called all the same.
func TestAPanickingHookHarmsNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.stop()
		r.make()
		var told []tasks.ID
		r.manager.OnCompleted(kinds.Echo, func(context.Context, tasks.Completed) { panic("a defect") })
		r.manager.OnCompleted(kinds.Echo, func(_ context.Context, c tasks.Completed) { told = append(told, c.ID) })
		r.start()
		first, second := r.submit(0), r.submit(0)
		r.isDone(first.ID)
		r.isDone(second.ID)
		r.stop()
		if len(told) != 2 || told[0] != first.ID || told[1] != second.ID {
			t.Errorf("the other hook was told of %v", told)
		}
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
