package tasktest

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/tasks"
)

// RunnerEnv is a Runner under test with one agent that it can reach. The agent
// really does core.echo and core.sleep.
type RunnerEnv struct {
	Runner tasks.Runner
	Agent  tasks.Agent
}

// runnerWait bounds each wait of the suite, in real or simulated time.
const runnerWait = 20 * time.Second

// RunRunnerTests is the contract of tasks.Runner. open gives a fresh runner and
// agent that tell s of everything; it cleans up with t.Cleanup.
func RunRunnerTests(t *testing.T, open func(t *testing.T, s tasks.Sessions) RunnerEnv) {
	t.Helper()
	for name, test := range map[string]func(b *runnerBench){
		"agents are found by id and by name":              testLookup,
		"a task is executed once and answered":            testExecute,
		"an answer is said again until it is forgotten":   testForget,
		"a running task outlives its session":             testRunning,
		"a busy slot refuses and names what it runs":      testBusy,
		"sessions follow the leases":                      testOwn,
		"an assignment without a session is dropped":      testDropped,
		"quarantine ends dispatch until an operator acts": testQuarantine,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rec := &recorder{changed: make(chan struct{})}
			b := &runnerBench{T: t, rec: rec}
			b.env = open(t, rec)
			test(b)
			rec.mu.Lock()
			defer rec.mu.Unlock()
			for _, w := range rec.wrong {
				t.Error(w)
			}
		})
	}
}

// recorder is tasks.Sessions that remembers, and checks the order.
type recorder struct {
	mu      sync.Mutex
	up      bool
	ups     []tasks.Session
	downs   int
	finals  []tasks.Final
	accepts []tasks.Ref
	refuses []tasks.Refusal
	agents  []tasks.Agent
	wrong   []string
	changed chan struct{} // closed and replaced with each change
}

func (r *recorder) note(inSession bool, what string, f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if inSession && !r.up {
		r.wrong = append(r.wrong, what+" came without a session")
	}
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *recorder) AgentChanged(a tasks.Agent) {
	r.note(false, "AgentChanged", func() { r.agents = append(r.agents, a) })
}

func (r *recorder) SessionUp(s tasks.Session) {
	r.note(false, "SessionUp", func() {
		if r.up {
			r.wrong = append(r.wrong, "SessionUp came twice")
		}
		if len(r.agents) == 0 {
			r.wrong = append(r.wrong, "SessionUp came before AgentChanged")
		}
		r.up, r.ups = true, append(r.ups, s)
	})
}

func (r *recorder) SessionDown(tasks.AgentNum, string) {
	r.note(true, "SessionDown", func() { r.up = false; r.downs++ })
}

func (r *recorder) Accepted(_ tasks.AgentNum, ref tasks.Ref) {
	r.note(true, "Accepted", func() { r.accepts = append(r.accepts, ref) })
}

func (r *recorder) Output(tasks.AgentNum, tasks.OutputChunk) { r.note(true, "Output", func() {}) }

func (r *recorder) Final(_ tasks.AgentNum, f tasks.Final) {
	r.note(true, "Final", func() { r.finals = append(r.finals, f) })
}

func (r *recorder) Refused(_ tasks.AgentNum, x tasks.Refusal) {
	r.note(true, "Refused", func() { r.refuses = append(r.refuses, x) })
}

type runnerBench struct {
	*testing.T
	env RunnerEnv
	rec *recorder
}

// until waits for what the recorder has heard.
func (b *runnerBench) until(what string, ok func(r *recorder) bool) {
	b.Helper()
	limit := time.NewTimer(runnerWait)
	defer limit.Stop()
	for {
		b.rec.mu.Lock()
		done, changed := ok(b.rec), b.rec.changed
		b.rec.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-limit.C:
			b.Fatalf("no %s within %s", what, runnerWait)
		}
	}
}

func (b *runnerBench) own(epoch int64) {
	b.env.Runner.Own([]tasks.Lease{{Shard: b.env.Agent.Shard(), Epoch: epoch, Owner: uuid.NewV4()}})
}

// session owns the shard and waits for the n-th session.
func (b *runnerBench) session(epoch int64, n int) tasks.Session {
	b.Helper()
	b.own(epoch)
	return b.nth(n)
}

func (b *runnerBench) nth(n int) tasks.Session {
	b.Helper()
	b.until(fmt.Sprintf("session %d", n), func(r *recorder) bool { return len(r.ups) >= n && r.up })
	b.rec.mu.Lock()
	defer b.rec.mu.Unlock()
	return b.rec.ups[n-1]
}

func (b *runnerBench) execute(id tasks.ID, kind, args string, epoch int64) tasks.Ref {
	a := tasks.Assignment{Epoch: epoch, Queued: tasks.Queued{
		Agent: b.env.Agent.Num, ID: id, Attempt: 1, Kind: kind, Args: args, Delivery: kinds.DeliveryRepeatable,
		Timeout: time.Minute, CreatedAt: time.Now(), ExpiresAt: time.Now().Add(time.Hour),
	}}
	b.env.Runner.Execute(a)
	return a.Ref()
}

func (b *runnerBench) final(ref tasks.Ref) tasks.Final {
	b.Helper()
	at := -1
	b.until("answer", func(r *recorder) bool {
		at = slices.IndexFunc(r.finals, func(f tasks.Final) bool { return f.Ref == ref })
		return at >= 0
	})
	b.rec.mu.Lock()
	defer b.rec.mu.Unlock()
	return b.rec.finals[at]
}

func testLookup(b *runnerBench) {
	for _, ref := range []string{b.env.Agent.ID.String(), b.env.Agent.Name} {
		if a, err := b.env.Runner.Lookup(ref); err != nil || a.Num != b.env.Agent.Num || a.ID != b.env.Agent.ID {
			b.Errorf("lookup of %q: %+v, %v", ref, a, err)
		}
	}
	for _, ref := range []string{"nobody", uuid.NewV4().String()} {
		if _, err := b.env.Runner.Lookup(ref); fault.CodeOf(err) != "unknown_agent" || !fault.Is(err, fault.Invalid) {
			b.Errorf("lookup of %q: %v", ref, err)
		}
	}
}

func testExecute(b *runnerBench) {
	if s := b.session(3, 1); s.Running != nil || len(s.Finished) != 0 || s.LedgerNew || s.LedgerID == uuid.Nil() || s.Agent != b.env.Agent.Num {
		b.Fatalf("a fresh agent says %+v", s)
	}
	ref := b.execute(11, kinds.Echo, `{"x": [1, "ä"]}`, 3)
	f := b.final(ref)
	var got, want any
	if json.Unmarshal(f.Ending.Result, &got) != nil || json.Unmarshal([]byte(`{"x": [1, "ä"]}`), &want) != nil ||
		fmt.Sprint(got) != fmt.Sprint(want) || f.Epoch != 3 || f.Ending.Outcome != tasks.Succeeded {
		b.Errorf("answered %+v", f)
	}
}

func testForget(b *runnerBench) {
	b.session(1, 1)
	ref := b.execute(21, kinds.Echo, `{}`, 1)
	b.final(ref)
	b.env.Runner.Reconnect(b.env.Agent.Num, "test")
	s := b.nth(2)
	if len(s.Finished) != 1 || s.Finished[0].Ref != ref || s.Finished[0].Ending.Outcome != tasks.Succeeded {
		b.Fatalf("not forgotten, and the agent says %+v", s)
	}
	b.env.Runner.Forget(b.env.Agent.Num, ref.ID)
	// What follows on the session proves that the agent has read the Forget.
	next := b.execute(22, kinds.Echo, `{}`, 1)
	b.final(next)
	b.env.Runner.Reconnect(b.env.Agent.Num, "test")
	if s := b.nth(3); len(s.Finished) != 1 || s.Finished[0].Ref != next {
		b.Errorf("forgotten, and the agent says %+v", s)
	}
}

func testRunning(b *runnerBench) {
	b.session(1, 1)
	ref := b.execute(31, kinds.Sleep, `{"seconds": 30}`, 1)
	b.until("accepted", func(r *recorder) bool { return slices.Contains(r.accepts, ref) })
	b.env.Runner.Reconnect(b.env.Agent.Num, "test")
	if s := b.nth(2); s.Running == nil || *s.Running != ref {
		b.Fatalf("it runs %v, and the agent says %+v", ref, s)
	}
	b.env.Runner.Cancel(b.env.Agent.Num, ref, "test")
	if f := b.final(ref); f.Ending.Outcome != tasks.Cancelled {
		b.Errorf("cancelled, and answered %+v", f)
	}
}

func testBusy(b *runnerBench) {
	b.session(1, 1)
	first := b.execute(41, kinds.Sleep, `{"seconds": 30}`, 1)
	b.until("accepted", func(r *recorder) bool { return slices.Contains(r.accepts, first) })
	second := b.execute(42, kinds.Echo, `{}`, 1)
	b.until("refusal", func(r *recorder) bool { return len(r.refuses) > 0 })
	b.rec.mu.Lock()
	x := b.rec.refuses[0]
	b.rec.mu.Unlock()
	if x.Ref != second || x.Cause != "busy" || x.Running == nil || *x.Running != first {
		b.Errorf("refused with %+v", x)
	}
	b.env.Runner.Cancel(b.env.Agent.Num, first, "test")
	b.final(first)
}

func testOwn(b *runnerBench) {
	b.session(1, 1)
	b.session(2, 2) // a higher epoch begins a new session
	f := b.final(b.execute(51, kinds.Echo, `{}`, 2))
	if f.Epoch != 2 {
		b.Errorf("answered under epoch %d", f.Epoch)
	}
	b.env.Runner.Own(nil)
	b.until("end of the session", func(r *recorder) bool { return r.downs == 2 && !r.up })
	b.session(3, 3)
}

func testDropped(b *runnerBench) {
	b.execute(61, kinds.Echo, `{}`, 1) // no session yet
	if s := b.session(1, 1); s.Running != nil || len(s.Finished) != 0 {
		b.Errorf("the agent says %+v of a task that was never sent", s)
	}
	b.final(b.execute(62, kinds.Echo, `{}`, 1))
	b.rec.mu.Lock()
	defer b.rec.mu.Unlock()
	if len(b.rec.finals) != 1 {
		b.Errorf("answers %+v", b.rec.finals)
	}
}

func testQuarantine(b *runnerBench) {
	b.session(1, 1)
	b.env.Runner.Quarantine(b.env.Agent.Num, "It is strange.")
	b.until("word of it", func(r *recorder) bool {
		last := r.agents[len(r.agents)-1]
		return last.Quarantined && last.Num == b.env.Agent.Num
	})
	if a, err := b.env.Runner.Lookup(b.env.Agent.Name); err != nil || !a.Quarantined || a.Why == "" {
		b.Errorf("lookup of a quarantined agent: %+v, %v", a, err)
	}
}
