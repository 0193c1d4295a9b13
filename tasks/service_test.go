package tasks_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func TestSubmissionsAreChecked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		twin := tasks.Agent{ID: r.agents[1].ID, Name: "a0"}
		twin.ID[0] ^= 1
		twin.Num = r.store.NewAgent(twin.ID, "a0", nil)
		prio := func(p int) func(*tasks.Submission) { return func(s *tasks.Submission) { s.Priority = &p } }
		now := time.Now()
		cases := map[string]struct {
			change  func(*tasks.Submission)
			code    string
			pointer string
		}{
			"no agent":          {func(s *tasks.Submission) { s.Agent = "" }, "unknown_agent", "/agent"},
			"unknown agent":     {func(s *tasks.Submission) { s.Agent = "nobody" }, "unknown_agent", "/agent"},
			"unknown kind":      {func(s *tasks.Submission) { s.Kind = "core.ecco" }, "unknown_kind", ""},
			"bad args":          {func(s *tasks.Submission) { s.Kind, s.Args = kinds.Sleep, json.RawMessage(`{"seconds":"x"}`) }, "invalid_args", "/args/seconds"},
			"args not JSON":     {func(s *tasks.Submission) { s.Args = json.RawMessage(`{`) }, "invalid_args", ""},
			"priority too low":  {prio(-1), "invalid_priority", "/priority"},
			"priority too high": {prio(10), "invalid_priority", "/priority"},
			"negative timeout":  {func(s *tasks.Submission) { s.Timeout = -time.Second }, "invalid_timeout", "/timeout"},
			"timeout too long":  {func(s *tasks.Submission) { s.Timeout = 1000 * time.Hour }, "invalid_timeout", "/timeout"},
			"expired":           {func(s *tasks.Submission) { s.ExpiresAt = now }, "invalid_expires_at", "/expires_at"},
			"expires far away":  {func(s *tasks.Submission) { s.ExpiresAt = now.Add(31 * 24 * time.Hour) }, "invalid_expires_at", "/expires_at"},
			"due after the end": {func(s *tasks.Submission) { s.NotBefore, s.ExpiresAt = now.Add(time.Hour), now.Add(time.Minute) }, "invalid_not_before", "/not_before"},
			"due far away":      {func(s *tasks.Submission) { s.NotBefore = now.Add(40 * 24 * time.Hour) }, "invalid_not_before", "/not_before"},
			"unknown delivery":  {func(s *tasks.Submission) { s.Delivery = "twice" }, "invalid_delivery", "/delivery"},
			"once made to repeat": {func(s *tasks.Submission) {
				s.Kind, s.Args, s.Delivery = kinds.Run, json.RawMessage(`{"program":"x"}`), kinds.DeliveryRepeatable
			}, "invalid_delivery", "/delivery"},
		}
		for name, c := range cases {
			s := echo(0)
			c.change(&s)
			_, err := r.service.Submit(t.Context(), s, "user:test", tasks.Idempotency{})
			f, ok := errors.AsType[*fault.Error](err)
			if !ok || f.Code != c.code || !strings.HasSuffix(f.Message, ".") {
				t.Errorf("%s: %v, want %s and a sentence", name, err, c.code)
				continue
			}
			if c.pointer != "" && (len(f.Fields) == 0 || f.Fields[0].Pointer != c.pointer) {
				t.Errorf("%s: fields %v, want %s", name, f.Fields, c.pointer)
			}
		}
		_, err := r.service.Submit(t.Context(), echo(0), "a\x00b", tasks.Idempotency{})
		wantFault(t, err, "invalid_actor")
		if n := r.store.Open(); n != 0 {
			t.Errorf("%d tasks were stored", n)
		}
		r.runner.Add(twin, nil)
		_, err = r.service.Submit(t.Context(), echo(0), "user:test", tasks.Idempotency{})
		wantFault(t, err, "ambiguous_agent")
		if _, err := r.service.Submit(t.Context(), func() tasks.Submission { s := echo(0); s.Agent = twin.ID.String(); return s }(), "u", tasks.Idempotency{}); err != nil {
			t.Errorf("by id: %v", err)
		}
		r.check()
	})
}

func TestBatchIsCheckedAsAWholeAndAnswersInOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 7, func(c *tasks.Config) { c.Loops = 3 })
		batch := make([]tasks.Submission, 3000)
		for i := range batch {
			batch[i] = echo(i % 7)
			batch[i].Args = json.RawMessage(fmt.Sprintf(`{"i":%d}`, i))
		}
		bad := append([]tasks.Submission(nil), batch...)
		bad[17].Kind, bad[17].Args = kinds.Sleep, json.RawMessage(`{"seconds":"x"}`)
		bad[42].Agent = "nobody"
		_, err := r.service.SubmitBatch(t.Context(), bad, "user:test", tasks.Idempotency{})
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || f.Kind != fault.Invalid || len(f.Fields) != 2 || f.Fields[0].Pointer != "/tasks/17/args/seconds" || f.Fields[1].Pointer != "/tasks/42/agent" {
			t.Fatalf("a bad batch: %+v", f)
		}
		if n := r.faults.Turns(); n != 0 {
			t.Errorf("%d turns were made for a bad batch", n)
		}
		got, err := r.service.SubmitBatch(t.Context(), batch, "user:test", tasks.Idempotency{})
		if err != nil {
			t.Fatal(err)
		}
		r.pass(2 * time.Second)
		for i := range got {
			done := r.isDone(got[i].ID)
			if string(done.Ending.Result) != fmt.Sprintf(`{"i":%d}`, i) || done.Agent.Name != fmt.Sprintf("a%d", i%7) {
				t.Fatalf("item %d came back as %+v", i, done)
			}
		}
		// In order per agent.
		for n, a := range r.agents {
			starts := r.runner.Starts(a.Num)
			for i := range starts {
				if starts[i].ID != got[n+7*i].ID {
					t.Fatalf("agent %d started %v as its number %d", n, starts[i], i)
				}
			}
		}
		_, err = r.service.SubmitBatch(t.Context(), nil, "user:test", tasks.Idempotency{})
		wantFault(t, err, "empty_batch")
		_, err = r.service.SubmitBatch(t.Context(), make([]tasks.Submission, tasks.MaxBatch+1), "user:test", tasks.Idempotency{})
		wantFault(t, err, "batch_too_large")
		r.check()
	})
}

func TestIdempotencyKeys(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		key := func(k, body string) tasks.Idempotency {
			return tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: k, Hash: [32]byte{1, byte(len(body))}}
		}
		first, err := r.service.Submit(t.Context(), echo(0), "user:test", key("k", "x"))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		again, err := r.service.Submit(t.Context(), echo(0), "user:test", key("k", "x"))
		if err != nil || again.ID != first.ID || again.State != tasks.StateCompleted {
			t.Fatalf("the second try gave %+v, %v", again, err)
		}
		_, err = r.service.Submit(t.Context(), echo(0), "user:test", key("k", "other"))
		wantFault(t, err, "idempotency_key_reused")
		_, err = r.service.Submit(t.Context(), echo(0), "user:test", key(strings.Repeat("k", 300), ""))
		wantFault(t, err, "invalid_idempotency_key")

		// A batch that broke off is completed by the same key: the store has
		// only its first half.
		batch := []tasks.Submission{echo(0), echo(1), echo(0), echo(1)}
		r.faults.OnTurn(func(x *tasks.Turn) tasktest.Fault {
			if len(x.Inserts) == 0 {
				return tasktest.None
			}
			r.faults.OnTurn(func(*tasks.Turn) tasktest.Fault { return tasktest.Broken })
			half := *x
			half.Inserts, half.Claims, half.Finishes = x.Inserts[:2], nil, nil
			if _, err := r.store.Turn(t.Context(), &half); err != nil {
				t.Error(err)
			}
			return tasktest.Broken
		})
		_, err = r.service.SubmitBatch(t.Context(), batch, "user:test", key("b", "batch"))
		if err == nil {
			t.Fatal("the batch did not break off")
		}
		r.faults.OnTurn(nil)
		r.pass(5 * time.Second)
		whole, err := r.service.SubmitBatch(t.Context(), batch, "user:test", key("b", "batch"))
		if err != nil || len(whole) != 4 {
			t.Fatalf("the same key again: %v, %v", whole, err)
		}
		twice, err := r.service.SubmitBatch(t.Context(), batch, "user:test", key("b", "batch"))
		if err != nil {
			t.Fatal(err)
		}
		seen := map[tasks.ID]bool{}
		for i := range whole {
			if whole[i].ID != twice[i].ID || seen[whole[i].ID] {
				t.Errorf("item %d: %d, then %d", i, whole[i].ID, twice[i].ID)
			}
			seen[whole[i].ID] = true
		}
		r.stop()
	})
}

func TestOneKeyAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		key := tasks.Idempotency{Principal: "p", Route: "r", Key: "k"}
		var mu sync.Mutex
		codes := map[string]int{}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				_, err := r.service.Submit(t.Context(), echo(0), "user:test", key)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					codes["ok"]++
				} else {
					codes[fault.CodeOf(err)]++
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		if codes["ok"]+codes["key_in_progress"] != 20 || codes["ok"] == 0 {
			t.Errorf("answers %v", codes)
		}
		if n := len(r.runner.Starts(r.agents[0].Num)); n != 1 {
			t.Errorf("started %d times", n)
		}
		r.check()
	})
}

func TestWaitEndsWithTheTaskOrTheTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{After: 5 * time.Second} })
		id := r.submit(0).ID
		begin := time.Now()
		got, err := r.service.Wait(t.Context(), id, 2*time.Second)
		if err != nil || got.State != tasks.StateWaiting || time.Since(begin) != 2*time.Second {
			t.Errorf("after %s: %+v, %v", time.Since(begin), got, err)
		}
		got, err = r.service.Wait(t.Context(), id, time.Minute)
		if err != nil || got.State != tasks.StateCompleted || time.Since(begin) != 5*time.Second {
			t.Errorf("after %s: %+v, %v", time.Since(begin), got, err)
		}
		got, err = r.service.Wait(t.Context(), id, time.Minute)
		if err != nil || got.State != tasks.StateCompleted || time.Since(begin) != 5*time.Second {
			t.Errorf("of a completed task: %+v, %v", got, err)
		}
		_, err = r.service.Wait(t.Context(), 999, time.Minute)
		wantFault(t, err, "unknown_task")
		next := r.submit(0).ID
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if got, err := r.service.Wait(ctx, next, time.Minute); err != nil || got.State != tasks.StateWaiting {
			t.Errorf("with an ended context: %+v, %v", got, err)
		}
		leave := make(chan struct{})
		close(leave)
		begin = time.Now()
		if got, err := r.service.Wait(tasks.WithLeave(t.Context(), leave), next, time.Minute); err != nil || got.State != tasks.StateWaiting || time.Since(begin) != 0 {
			t.Errorf("asked to leave: after %s: %+v, %v", time.Since(begin), got, err)
		}
		r.pass(10 * time.Second)
		r.check()
	})
}

func TestListPages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		var want []tasks.ID
		for range 5 {
			want = append(want, r.submit(0).ID)
		}
		var got []tasks.ID
		f := tasks.Filter{Limit: 2, Ascending: true}
		for {
			p, err := r.service.List(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			for _, x := range p.Items {
				got = append(got, x.ID)
			}
			if p.Next == 0 {
				break
			}
			f.After = p.Next
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %v, want %v", got, want)
		}
		_, err := r.service.List(t.Context(), tasks.Filter{Limit: 501})
		wantFault(t, err, "invalid_limit")
		r.check()
	})
}

// droppedStore is a store whose retention has removed every task.
type droppedStore struct{ tasks.Store }

func (droppedStore) Task(context.Context, tasks.ID) (*tasks.Task, error) {
	return nil, fmt.Errorf("%w: %w", tasks.ErrNoTask, tasks.ErrDropped)
}

func TestATaskThatRetentionHasRemovedIsExplained(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1, func(c *tasks.Config) { c.Store = droppedStore{c.Store} })
		_, err := r.service.Get(t.Context(), 7)
		wantFault(t, err, "task_removed_by_retention")
		_, err = r.service.Cancel(t.Context(), 7, "user:eve")
		wantFault(t, err, "task_removed_by_retention")
		_, err = r.service.Wait(t.Context(), 7, time.Second)
		wantFault(t, err, "task_removed_by_retention")
	})
}

// TestAKeyKnowsTheRequestAgain: what counts is what is asked for, not how it
// is written; and what is stored stays the answer when it could not be
// submitted any more.
//
// Cases P23.
func TestAKeyKnowsTheRequestAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		key := tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k"}
		args := func(text string) func(*tasks.Submission) {
			return func(s *tasks.Submission) { s.Args = json.RawMessage(text) }
		}
		expires := time.Now().Add(time.Hour)
		send := func(change ...func(*tasks.Submission)) (*tasks.Task, error) {
			s := echo(0)
			s.Args, s.ExpiresAt = json.RawMessage(`{"a":1,"b":{"c":12345678901234567890,"d":"\u00e4"}}`), expires
			for _, f := range change {
				f(&s)
			}
			return r.service.Submit(t.Context(), s, "user:test", key)
		}
		first, err := send()
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, same := range []string{
			`{"a":1,"b":{"c":12345678901234567890,"d":"\u00e4"}}`, ` { "b" : {"d":"\u00E4", "c":12345678901234567890}, "a":1 }`, `{"b":{"d":"ä","c":12345678901234567890},"a":1}`,
		} {
			if got, err := send(args(same)); err != nil || got.ID != first.ID {
				t.Errorf("%s gave %+v, %v", same, got, err)
			}
		}
		priority := tasks.DefaultPriority
		for name, other := range map[string]func(*tasks.Submission){
			"another number":    args(`{"a":1,"b":{"c":12345678901234567891,"d":"\u00e4"}}`),
			"another agent":     func(s *tasks.Submission) { s.Agent = "a1" },
			"another kind":      func(s *tasks.Submission) { s.Kind = kinds.Ping },
			"another timeout":   func(s *tasks.Submission) { s.Timeout = time.Second },
			"a priority":        func(s *tasks.Submission) { s.Priority = &priority },
			"another delivery":  func(s *tasks.Submission) { s.Delivery = kinds.DeliveryOnce },
			"not before":        func(s *tasks.Submission) { s.NotBefore = expires },
			"another expires":   func(s *tasks.Submission) { s.ExpiresAt = expires.Add(time.Second) },
			"expires not given": func(s *tasks.Submission) { s.ExpiresAt = time.Time{} },
		} {
			if _, err := send(other); fault.CodeOf(err) != "idempotency_key_reused" {
				t.Errorf("%s gave %v", name, err)
			}
		}
		r.pass(2 * time.Hour)
		r.runner.Change(r.agents[0].Num, func(a *tasks.Agent) { a.Removed = true })
		synctest.Wait()
		if got, err := send(); err != nil || got.ID != first.ID || got.State != tasks.StateCompleted {
			t.Errorf("after its time, and without its agent, it gave %+v, %v", got, err)
		}
		r.check()
	})
}

// TestTimeoutsAreWholeMilliseconds: what is answered is what is stored.
func TestTimeoutsAreWholeMilliseconds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.script(0, silent)
		got := r.submit(0, func(s *tasks.Submission) { s.Timeout = 1500*time.Millisecond + 700*time.Microsecond })
		if got.Timeout != 1500*time.Millisecond {
			t.Errorf("the timeout is %s", got.Timeout)
		}
		s := echo(0)
		s.Timeout = 700 * time.Microsecond
		_, err := r.service.Submit(t.Context(), s, "user:test", tasks.Idempotency{})
		wantFault(t, err, "invalid_timeout")
		r.check()
	})
}

// TestEveryTaskOfABatchSaysWhyItWaits: also those that stand behind what is
// kept in memory; their places are counted when one of them is asked for.
func TestEveryTaskOfABatchSaysWhyItWaits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 2)
		r.busy()
		subs := make([]tasks.Submission, 300)
		for i := range subs {
			subs[i] = echo(i % 2)
		}
		list, err := r.service.SubmitBatch(t.Context(), subs, "user:test", tasks.Idempotency{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range list {
			w := list[i].Waiting
			want := tasks.CauseBusy
			if i%2 == 1 {
				continue // its agent is free: started, or about to
			}
			if w == nil || w.Cause != want || w.Blocking == 0 || w.BlockingKind != kinds.Sleep || w.BlockingSince.IsZero() {
				t.Fatalf("task %d of the batch waits because of %+v", i, w)
			}
			if place := i/2 + 1; w.Position != place && (w.Position != 0 || place <= 64) {
				t.Errorf("task %d of the batch has position %d, want %d", i, w.Position, place)
			}
		}
		synctest.Wait()
		for _, place := range []int{1, 64, 65, 100, 150} {
			w := r.get(list[2*place-2].ID).Waiting
			if w == nil || w.Position != place || !strings.HasSuffix(w.Sentence, fmt.Sprintf("; position %d.", place)) {
				t.Errorf("the task at %d says %+v", place, w)
			}
		}
		r.check()
	})
}
