package agent_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"headgate/internal/agent"
	"headgate/internal/agent/ledger"
	"headgate/internal/agentpb"
	"headgate/internal/fault"
)

func TestWelcomeTellsWhoTheAgentIs(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{Version: "1.2", PolicyFile: policyWith(t, "show")})
	c := a.session(t, 1)
	w := c.welcome
	if w.GetAgentId() != a.id.String() || w.GetProtocol() != 1 || w.GetVersion() != "1.2" || w.GetHostname() == "" || w.GetOs() == "" {
		t.Errorf("Welcome %v", w)
	}
	var kinds []string
	for _, k := range w.GetKinds() {
		kinds = append(kinds, k.GetName())
		if k.GetName() == "cmd.run" && (len(k.GetPrograms()) != 1 || k.GetPrograms()[0].GetName() != "show") {
			t.Errorf("programs %v", k.GetPrograms())
		}
	}
	if diff := cmp.Diff([]string{"cmd.run", "core.echo", "core.inventory", "core.ping", "core.sleep"}, kinds); diff != "" {
		t.Errorf("kinds (-want +got):\n%s", diff)
	}
	check(t, a.end(t))
	a.restart(t)
	again := a.session(t, 1).welcome
	if again.GetLedgerId() != w.GetLedgerId() || again.GetInstanceId() == w.GetInstanceId() {
		t.Errorf("after a restart: ledger %s and %s, instance %s and %s", w.GetLedgerId(), again.GetLedgerId(), w.GetInstanceId(), again.GetInstanceId())
	}
}

func TestCoreKinds(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{Limits: agent.Limits{AcceptDelay: time.Hour}})
	c := a.session(t, 3)
	const args = `{ "b" : 1.50, "a": "\u0000é", "n": 123456789012345678901234567890 }`
	c.execute(c.job(1, "core.echo", args))
	f := c.final() // Accepted is left out
	if f.GetOutcome() != "succeeded" || string(f.GetResult()) != args || f.GetReason() != "" || f.GetEpoch() != 3 || f.GetStartedUnixNano() > f.GetEndedUnixNano() {
		t.Errorf("echo: %v", f)
	}
	c.execute(c.job(2, "core.ping", `{}`))
	if f := c.final(); f.GetOutcome() != "succeeded" || !json.Valid(f.GetResult()) {
		t.Errorf("ping: %v", f)
	}
	c.execute(c.job(3, "core.sleep", `{"seconds":0.001}`))
	if f := c.final(); f.GetOutcome() != "succeeded" || string(f.GetResult()) != `{"slept_seconds":0.001}` {
		t.Errorf("sleep: %v", f)
	}
	c.execute(c.job(4, "core.inventory", `{}`))
	f = c.final()
	var facts struct {
		Hostname, OS, Kernel string
		CPU                  struct{ Logical int }
		Memory               struct {
			Total uint64 `json:"total_bytes"`
		}
		Disks    []struct{ Mount string }
		Problems []string
	}
	if err := json.Unmarshal(f.GetResult(), &facts); err != nil || f.GetOutcome() != "succeeded" {
		t.Fatalf("inventory: %v, %v", f, err)
	}
	if facts.Hostname == "" || facts.OS == "" || facts.Kernel == "" || facts.CPU.Logical == 0 || facts.Memory.Total == 0 || len(facts.Disks) == 0 || len(facts.Problems) > 0 {
		t.Errorf("inventory: %s", f.GetResult())
	}
}

func TestWhatCannotRunIsRejectedWithItsCause(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "show", "append")})
	c := a.session(t, 1)
	for i, j := range []struct{ kind, args, reason string }{
		{"core.unheard", `{}`, "unknown_kind"},
		{"core.sleep", `{"seconds":"x"}`, "invalid_args"},
		{"core.echo", `[]`, "invalid_args"},
		{"core.echo", ``, "invalid_args"},
		{"cmd.run", `{"program":"sh"}`, "unknown_program"},
		{"cmd.run", `{"program":"/bin/sh"}`, "invalid_args"},
		{"cmd.run", `{"program":"append"}`, "invalid_args"},
		{"cmd.run", `{"program":"append","args":{"file":"-x"}}`, "invalid_args"},
		{"cmd.run", `{"program":"show","args":{"x":"y"}}`, "invalid_args"},
		{"cmd.run", `{"program":"show","path":"/bin/sh"}`, "invalid_args"},
	} {
		c.execute(c.job(int64(i+1), j.kind, j.args))
		_, _, f := c.finish()
		if f.GetOutcome() != "rejected" || f.GetReason() != j.reason || !strings.HasSuffix(f.GetDetail(), ".") && !strings.HasSuffix(f.GetDetail(), "?") {
			t.Errorf("%s %s: %v", j.kind, j.args, f)
		}
	}
	b := newFleet(t).paired(t, agent.Config{})
	c = b.session(t, 1)
	c.execute(c.job(1, "cmd.run", `{"program":"show"}`))
	if _, _, f := c.finish(); f.GetOutcome() != "rejected" || f.GetReason() != "policy_denied" {
		t.Errorf("without a policy: %v", f)
	}
}

func TestTheSlotIsOne(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.Heartbeat = 20 * time.Millisecond
	a := newFleet(t).paired(t, agent.Config{Limits: limits})
	c := a.session(t, 1)
	long := c.job(1, "core.sleep", `{"seconds":3600}`)
	c.execute(long)
	for beaten, accepted := false, false; !beaten || !accepted; { // on a busy machine a heartbeat may come first
		m := c.recv()
		switch {
		case m.GetHeartbeat().GetTaskId() == 1:
			beaten = true
		case m.GetAccepted().GetTaskId() == 1 && m.GetAccepted().GetStartedUnixNano() != 0:
			accepted = true
		default:
			t.Fatalf("the first task got %v", m)
		}
	}
	c.execute(c.job(2, "core.echo", `{}`))
	for {
		m := c.recv()
		if m.GetHeartbeat() != nil {
			continue
		}
		r := m.GetRefused()
		if r.GetTaskId() != 2 || r.GetCause() != agentpb.Refusal_REFUSAL_BUSY || r.GetRunning().GetTaskId() != 1 {
			t.Fatalf("the second task got %v", m)
		}
		break
	}
	c.execute(long) // the same again is attached to
	for {
		m := c.recv()
		if m.GetHeartbeat() != nil {
			continue
		}
		if m.GetAccepted().GetTaskId() != 1 {
			t.Fatalf("the same task again got %v", m)
		}
		break
	}
	if s := c.status(); s.GetRunning().GetTaskId() != 1 || s.GetLedgerEntries() != 1 {
		t.Errorf("status %v", s)
	}
	r, err := agentpb.NewAgentClient(a.dial(t)).Ping(t.Context(), &agentpb.PingRequest{})
	check(t, err)
	if r.GetRunning().GetTaskId() != 1 {
		t.Errorf("ping %v", r)
	}
	c.forget(1) // it runs: nobody can have its result
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Cancel{Cancel: &agentpb.Cancel{TaskId: 1, Attempt: 2}}})
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Cancel{Cancel: &agentpb.Cancel{TaskId: 1, Attempt: 1, Reason: "enough"}}})
	_, _, f := c.finish()
	if f.GetOutcome() != "cancelled" || f.GetReason() != "cancelled_by_user" || !strings.Contains(f.GetDetail(), "enough") {
		t.Errorf("cancelled: %v", f)
	}
	c.execute(c.job(2, "core.echo", `{}`))
	if _, _, f := c.finish(); f.GetTaskId() != 2 || f.GetOutcome() != "succeeded" {
		t.Errorf("after it: %v", f)
	}
}

func TestATaskEndsAtItsTimeLimit(t *testing.T) {
	t.Parallel()
	c := newFleet(t).paired(t, agent.Config{}).session(t, 1)
	j := c.job(1, "core.sleep", `{"seconds":3600}`)
	j.TimeoutMs = 30
	c.execute(j)
	if _, _, f := c.finish(); f.GetOutcome() != "timed-out" || f.GetReason() != "deadline_exceeded" {
		t.Errorf("got %v", f)
	}
}

func TestAResultIsKeptUntilItIsForgotten(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "append")})
	file := filepath.Join(t.TempDir(), "ids")
	c := a.session(t, 1)
	args := fmt.Sprintf(`{"program":"append","args":{"file":%q}}`, file)
	c.execute(c.job(7, "cmd.run", args))
	_, _, first := c.finish()
	if first.GetOutcome() != "succeeded" {
		t.Fatalf("got %v", first)
	}
	c.execute(c.job(8, "core.echo", `{"x":1}`))
	_, _, second := c.finish()
	check(t, a.end(t))
	a.restart(t)

	c = a.session(t, 2)
	if diff := cmp.Diff([]*agentpb.Final{first, second}, c.welcome.GetFinished(), protocmp.Transform()); diff != "" {
		t.Errorf("finished (-want +got):\n%s", diff)
	}
	again := c.job(7, "cmd.run", args)
	again.Attempt = 3
	c.execute(again)
	want := proto.Clone(first).(*agentpb.Final)
	want.Attempt, want.Epoch = 3, 2
	if diff := cmp.Diff(want, c.final(), protocmp.Transform()); diff != "" {
		t.Errorf("asked again (-want +got):\n%s", diff)
	}
	c.execute(c.job(7, "core.echo", `{"another":"task"}`))
	if f := c.final(); f.GetOutcome() != "rejected" || f.GetReason() != "task_id_reused" {
		t.Errorf("another task under the id: %v", f)
	}
	c.forget(7, 8, 9)
	if s := c.status(); s.GetLedgerEntries() != 0 {
		t.Errorf("status %v", s)
	}
	c.execute(again)
	if f := c.final(); f.GetOutcome() != "succeeded" || len(f.GetResult()) != 0 || f.GetDetail() == "" {
		t.Errorf("once, forgotten and asked again: %v", f)
	}
	c.execute(c.job(8, "core.echo", `{"x":1}`))
	if _, _, f := c.finish(); string(f.GetResult()) != `{"x":1}` {
		t.Errorf("repeatable, forgotten and asked again: %v", f)
	}
	if got := lines(t, file); len(got) != 1 || got[0] != "7" {
		t.Errorf("the program ran for %q", got)
	}
}

func TestAFullLedgerRefusesUntilResultsAreTaken(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.Ledger = ledger.Limits{Live: 2}
	c := newFleet(t).paired(t, agent.Config{Limits: limits}).session(t, 1)
	for id := int64(1); id <= 2; id++ {
		c.execute(c.job(id, "core.echo", `{}`))
		c.finish()
	}
	c.execute(c.job(3, "core.echo", `{}`))
	if r := c.recv().GetRefused(); r.GetCause() != agentpb.Refusal_REFUSAL_LEDGER_FULL {
		t.Fatalf("got %v", r)
	}
	j := c.job(3, "core.echo", `{}`)
	j.Forget = []int64{1}
	c.execute(j)
	if _, _, f := c.finish(); f.GetTaskId() != 3 {
		t.Errorf("got %v", f)
	}
}

func TestEpochsOnlyRise(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{})
	old := a.session(t, 5)
	again := a.session(t, 5) // the same controller, on a new connection
	old.expectEnd(codes.Aborted, "REPLACED")
	hello := func(shard int32, epoch int64, protocol uint32) *control {
		return a.sessionOn(t, a.dial(t), &agentpb.Hello{Protocol: protocol, Shard: shard, Epoch: epoch})
	}
	hello(a.shard(), 4, 1).expectEnd(codes.FailedPrecondition, "STALE_EPOCH 5")
	hello((a.shard()+1)%16, 9, 1).expectEnd(codes.InvalidArgument, "WRONG_SHARD")
	hello(a.shard(), 9, 2).expectEnd(codes.FailedPrecondition, "UNSUPPORTED_PROTOCOL")
	again.execute(again.job(1, "core.echo", `{}`)) // refused Hellos end nobody's session
	again.finish()
	stale := again.job(2, "core.echo", `{}`)
	stale.Epoch = 4
	again.execute(stale)
	if r := again.recv().GetRefused(); r.GetCause() != agentpb.Refusal_REFUSAL_STALE_EPOCH {
		t.Errorf("got %v", r)
	}
	newer := a.session(t, 8)
	again.expectEnd(codes.Aborted, "REPLACED")
	newer.cancel()
	check(t, a.end(t))
	a.restart(t)
	hello(a.shard(), 7, 1).expectEnd(codes.FailedPrecondition, "STALE_EPOCH 8")
	a.session(t, 8)
}

func TestASessionBeginsWithOneHello(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.HelloTimeout = 50 * time.Millisecond
	a := newFleet(t).paired(t, agent.Config{Limits: limits})
	stream, err := agentpb.NewAgentClient(a.dial(t)).Session(t.Context())
	check(t, err)
	_, err = stream.Recv()
	expectStatus(t, err, codes.DeadlineExceeded, "NO_HELLO")
	stream, err = agentpb.NewAgentClient(a.dial(t)).Session(t.Context())
	check(t, err)
	check(t, stream.Send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_StatusRequest{}}))
	_, err = stream.Recv()
	expectStatus(t, err, codes.InvalidArgument, "NO_HELLO")
	c := a.session(t, 1)
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Hello{Hello: &agentpb.Hello{}}})
	c.expectEnd(codes.InvalidArgument, "SECOND_HELLO")
	c = a.session(t, 1)
	c.send(&agentpb.ControllerMessage{})
	c.expectEnd(codes.InvalidArgument, "UNKNOWN_MESSAGE")
	c = a.session(t, 1)
	check(t, c.stream.CloseSend())
	select {
	case <-c.in:
	case <-time.After(patience):
		t.Fatal("the session goes on")
	}
}

// TestNothingOfAnOlderSessionStartsAfterANewerWelcome floods the old stream
// with tasks while a new one is opened. Whatever the newer Welcome does not
// know must never have started.
func TestNothingOfAnOlderSessionStartsAfterANewerWelcome(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{})
	conn := a.dial(t)
	id := int64(0)
	for round := range int64(60) {
		old := a.sessionOn(t, conn, &agentpb.Hello{Protocol: 1, Shard: a.shard(), Epoch: 2*round + 1})
		if old.recv().GetWelcome() == nil {
			t.Fatal("no Welcome")
		}
		first := id + 1
		started := make(chan struct{})
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				id++
				old.execute(old.job(id, "core.echo", `{}`))
				if n == 20 {
					close(started)
				}
			}
		})
		wg.Go(func() { // keep the old stream flowing
			for range old.in {
			}
		})
		<-started
		// The new session comes over another connection, so no order of one
		// transport helps.
		c := a.session(t, 2*round+2)
		known := map[int64]bool{c.welcome.GetRunning().GetTaskId(): true}
		for _, f := range c.welcome.GetFinished() {
			known[f.GetTaskId()] = true
		}
		if c.welcome.GetRunning() != nil {
			c.finish()
		}
		close(stop)
		old.cancel()
		wg.Wait()
		if n := c.status().GetLedgerEntries(); int(n) > len(known) {
			t.Fatalf("round %d: %d tasks in the ledger, the Welcome knew %d", round, n, len(known))
		}
		var all []int64
		for n := first; n <= id; n++ {
			all = append(all, n)
		}
		for n := range known {
			if n != 0 && (n < first || n > id) {
				t.Fatalf("round %d: task %d of another round", round, n)
			}
		}
		c.forget(all...)
		if n := c.status().GetLedgerEntries(); n != 0 {
			t.Fatalf("round %d: %d entries are left", round, n)
		}
		c.cancel()
	}
}

func TestADamagedLedgerIsNotStartedWith(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{})
	c := a.session(t, 1)
	for id := int64(1); id <= 2; id++ {
		c.execute(c.job(id, "core.echo", `{}`))
		c.finish()
	}
	check(t, a.end(t))
	flipByte(t, filepath.Join(a.config.DataDir, "ledger"), 60)
	if err := agent.Run(t.Context(), a.config); fault.CodeOf(err) != "ledger_damaged" {
		t.Errorf("got %v", err)
	}
}

func TestOneProcessOwnsADirectory(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{})
	if err := agent.Run(t.Context(), a.config); fault.CodeOf(err) != "data_dir_locked" {
		t.Errorf("got %v", err)
	}
}

func TestAnAgentWithoutAFleetAndATokenSaysSo(t *testing.T) {
	t.Parallel()
	c := agent.Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0"}
	if err := agent.Run(t.Context(), c); fault.CodeOf(err) != "not_enrolled" {
		t.Errorf("got %v", err)
	}
	if err := agent.Run(t.Context(), agent.Config{}); fault.CodeOf(err) != "data_dir_missing" {
		t.Errorf("got %v", err)
	}
}

func TestADemoAgentMisbehaves(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{Demo: agent.Demo{Delay: time.Millisecond, Flaky: 1}})
	c := a.session(t, 1)
	outcomes := map[string]int{}
	dropped := 0
	for id := int64(1); id <= 40; id++ {
		c.execute(c.job(id, "core.echo", `{}`))
		for outcome := ""; outcome == ""; {
			select {
			case m, ok := <-c.in:
				if !ok { // the session was dropped, the task goes on
					dropped++
					c = a.session(t, 1)
					for _, f := range c.welcome.GetFinished() {
						if f.GetTaskId() == id {
							outcome = f.GetReason()
						}
					}
				} else if f := m.GetFinal(); f != nil {
					outcome = f.GetReason()
				}
			case <-time.After(patience):
				t.Fatal("no message arrives")
			}
			if outcome != "" {
				outcomes[outcome]++
			}
		}
		c.forget(id)
	}
	if outcomes["demo_flaky"] != 40 || dropped == 0 {
		t.Errorf("outcomes %v, %d sessions dropped", outcomes, dropped)
	}
}

func TestAReusedIDOfAForgottenTaskRunsWhenItIsAnotherTask(t *testing.T) {
	t.Parallel()
	c := newFleet(t).paired(t, agent.Config{}).session(t, 1)
	once := func(args string) *agentpb.Execute {
		j := c.job(1, "core.echo", args)
		j.Repeatable = false
		return j
	}
	c.execute(once(`{"a":1}`))
	c.finish()
	c.forget(1)
	c.execute(once(`{"a":2}`))
	if _, _, f := c.finish(); string(f.GetResult()) != `{"a":2}` {
		t.Errorf("got %v", f)
	}
}

func TestLargeArgumentsComeBackWhole(t *testing.T) {
	t.Parallel()
	c := newFleet(t).paired(t, agent.Config{}).session(t, 1)
	args := `{"x":"` + strings.Repeat("y", 1<<20-8) + `"}`
	for id := int64(1); id <= 6; id++ { // more than one Welcome can hold
		c.execute(c.job(id, "core.echo", args))
		if _, _, f := c.finish(); !bytes.Equal(f.GetResult(), []byte(args)) {
			t.Fatalf("%d bytes came back, outcome %s %s", len(f.GetResult()), f.GetOutcome(), f.GetDetail())
		}
	}
	again := c.agent.session(t, 2)
	if n := len(again.welcome.GetFinished()); n == 0 || n > 3 {
		t.Errorf("%d results in the Welcome", n)
	}
	again.execute(again.job(6, "core.echo", args))
	if f := again.final(); !bytes.Equal(f.GetResult(), []byte(args)) {
		t.Errorf("asked for again: %d bytes", len(f.GetResult()))
	}
}

// BenchmarkEcho is one task after the other over a real session, the floor for
// a single agent.
func BenchmarkEcho(b *testing.B) {
	c := newFleet(b).paired(b, agent.Config{}).session(b, 1)
	id := int64(0)
	for b.Loop() {
		id++
		j := c.job(id, "core.echo", `{"n":1}`)
		j.Forget = []int64{id - 1}
		c.execute(j)
		if c.recv().GetFinal() == nil {
			c.final()
		}
	}
}
