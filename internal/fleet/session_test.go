package fleet_test

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/tasks"
)

func finalMessage(f *agentpb.Final) *agentpb.AgentMessage {
	return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: f}}
}

func TestATaskTravelsToItsAgentAndBack(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", nil)
	h.run()
	up := h.up(row.Num, 1)
	if up.Session.LedgerNew || up.Session.Running != nil {
		t.Errorf("first session says %+v", up.Session)
	}
	ref := h.give(row.Num, 7, `{"x":1}`)
	got := h.final(row.Num, 1).Final
	want := tasks.Final{Ref: ref, Epoch: 1, Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: []byte(`{"x":1}`)}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	v, err := h.Get(row.ID)
	if err != nil || v.Live.Health != fleet.HealthConnected || v.Hostname != "host-a" || len(v.Live.Kinds) != 1 {
		t.Errorf("view %+v, %v", v, err)
	}
	if stored := h.store.Row(row.Num); stored.LedgerID == uuid.Nil() {
		t.Error("the first ledger was not recorded")
	}
	if pong, err := h.Ping(t.Context(), row.ID); err != nil || pong.RTT <= 0 {
		t.Errorf("ping: %+v, %v", pong, err)
	}
}

func TestForgottenIDsRideAndEverythingArrivesInOrder(t *testing.T) {
	t.Parallel()
	var forgotten, executed []int64
	done := make(chan struct{})
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", func(a *fleettest.Agent) {
		a.Serve = func(s fleettest.Stream) error {
			defer close(done)
			for len(executed) < 200 || len(forgotten) < 400 {
				m, err := s.Recv()
				if err != nil {
					return err
				}
				forgotten = append(forgotten, m.GetForget().GetTaskIds()...)
				if e := m.GetExecute(); e != nil {
					executed = append(executed, e.GetTaskId())
					forgotten = append(forgotten, e.GetForget()...)
					if err := fleettest.Succeed(s, e); err != nil {
						return err
					}
				}
			}
			return nil
		}
	})
	h.run()
	h.up(row.Num, 1)
	for i := range tasks.ID(200) {
		h.Forget(row.Num, 2*i+1)
		h.Execute(tasks.Assignment{Queued: tasks.Queued{Agent: row.Num, ID: 1000 + i, Attempt: 1, Kind: "core.echo"}, Epoch: 1, Forget: []tasks.ID{2*i + 2}})
		h.final(row.Num, int(i)+1)
	}
	<-done
	for i, id := range executed {
		if id != int64(1000+i) {
			t.Fatalf("execution %d is task %d", i, id)
		}
	}
	if len(forgotten) != 400 {
		t.Errorf("%d ids forgotten, want 400", len(forgotten))
	}
}

// TestAnswersAreChecked sends what no honest agent sends.
func TestAnswersAreChecked(t *testing.T) {
	t.Parallel()
	code := int32(3)
	deep := strings.Repeat("[", 2000) + strings.Repeat("]", 2000)
	cases := map[string]struct {
		sent *agentpb.Final
		want tasks.Ending
	}{
		"not JSON":     {&agentpb.Final{Outcome: "succeeded", Result: []byte("{")}, tasks.Ending{Outcome: tasks.Succeeded, ResultBytes: []byte("{")}},
		"not UTF-8":    {&agentpb.Final{Outcome: "succeeded", Result: []byte("\"\xff\"")}, tasks.Ending{Outcome: tasks.Succeeded, ResultBytes: []byte("\"\xff\"")}},
		"too deep":     {&agentpb.Final{Outcome: "succeeded", Result: []byte(deep)}, tasks.Ending{Outcome: tasks.Succeeded, ResultBytes: []byte(deep)}},
		"deep strings": {&agentpb.Final{Outcome: "succeeded", Result: []byte(`"` + deep + `\""`)}, tasks.Ending{Outcome: tasks.Succeeded, Result: []byte(`"` + deep + `\""`)}},
		"NUL in text":  {&agentpb.Final{Outcome: "failed", Reason: "r\x00", Detail: "d\x00"}, tasks.Ending{Outcome: tasks.Failed, Reason: "r\uFFFD", Detail: "d\uFFFD"}},
		"unknown outcome": {
			&agentpb.Final{Outcome: "perhaps", Detail: "d"},
			tasks.Ending{Outcome: tasks.Failed, Reason: "invalid_answer", Detail: `the agent gave the outcome "perhaps", which does not exist; it also said: d`},
		},
		"too large": {
			&agentpb.Final{Outcome: "succeeded", Result: bytes.Repeat([]byte("1"), tasks.MaxResultBytes+1)},
			tasks.Ending{Outcome: tasks.Failed, Reason: "invalid_answer", Detail: `the agent said "succeeded" and gave a result of 1048577 bytes; 1048576 are allowed`},
		},
		"exit": {
			&agentpb.Final{Outcome: "failed", OutputBytes: -1, Exit: &agentpb.Exit{Code: &code, Signal: "S\x00"}},
			tasks.Ending{Outcome: tasks.Failed, Exit: &tasks.Exit{Code: new(3), Signal: "S\uFFFD"}},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, quick(), nil)
			_, row := h.agent("a", func(a *fleettest.Agent) {
				a.Answer = func(s fleettest.Stream, e *agentpb.Execute) error {
					c.sent.TaskId, c.sent.Attempt = e.GetTaskId(), e.GetAttempt()
					return s.Send(finalMessage(c.sent))
				}
			})
			h.run()
			h.up(row.Num, 1)
			h.give(row.Num, 5, "1")
			if diff := cmp.Diff(c.want, h.final(row.Num, 1).Final.Ending); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestLiarsHurtOnlyThemselves: each liar's session ends with its cause, while
// an honest agent beside it works on.
func TestLiarsHurtOnlyThemselves(t *testing.T) {
	t.Parallel()
	flood := func(m *agentpb.AgentMessage) func(fleettest.Stream) error {
		return func(s fleettest.Stream) error {
			for {
				if err := s.Send(m); err != nil {
					return err
				}
			}
		}
	}
	greeting := func(edit func(*agentpb.Welcome)) func(*fleettest.Agent) {
		return func(a *fleettest.Agent) {
			a.Welcome = func(_ *agentpb.Hello, w *agentpb.Welcome) error { edit(w); return nil }
		}
	}
	serving := func(f func(fleettest.Stream) error) func(*fleettest.Agent) {
		return func(a *fleettest.Agent) { a.Serve = f }
	}
	cases := map[string]struct {
		edit  func(*fleettest.Agent)
		cause string
	}{
		"another id":      {greeting(func(w *agentpb.Welcome) { w.AgentId = uuid.NewV4().String() }), fleet.CauseOtherAgent},
		"no ledger":       {greeting(func(w *agentpb.Welcome) { w.LedgerId = "x" }), fleet.CauseProtocol},
		"no instance":     {greeting(func(w *agentpb.Welcome) { w.InstanceId = "" }), fleet.CauseProtocol},
		"another version": {greeting(func(w *agentpb.Welcome) { w.Protocol = 2 }), fleet.CauseProtocol},
		"foreign tasks":   {serving(flood(finalMessage(&agentpb.Final{TaskId: 99, Attempt: 1, Outcome: "succeeded"}))), fleet.CauseProtocol},
		"empty messages":  {serving(flood(&agentpb.AgentMessage{})), fleet.CauseProtocol},
		"statuses":        {serving(flood(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Status{Status: &agentpb.Status{}}})), fleet.CauseProtocol},
		"two greetings":   {serving(flood(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Welcome{Welcome: &agentpb.Welcome{}}})), fleet.CauseProtocol},
		"a huge message":  {serving(flood(finalMessage(&agentpb.Final{TaskId: 1, Attempt: 1, Result: make([]byte, 9<<20)}))), fleet.CauseProtocol},
		"a huge chunk": {serving(flood(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Output{Output: &agentpb.Output{
			TaskId: 1, Stream: agentpb.Stream_STREAM_STDOUT, Data: make([]byte, 65<<10),
		}}})), fleet.CauseProtocol},
		"a stale epoch": {func(a *fleettest.Agent) {
			a.Welcome = func(*agentpb.Hello, *agentpb.Welcome) error {
				return status.Error(codes.FailedPrecondition, "STALE_EPOCH 44")
			}
		}, fleet.CauseStaleEpoch},
		"a refusal": {func(a *fleettest.Agent) {
			a.Welcome = func(*agentpb.Hello, *agentpb.Welcome) error { return status.Error(codes.Unavailable, "STOPPING") }
		}, fleet.CauseEnded},
	}
	h := newHarness(t, quick(), nil)
	_, honest := h.agent("honest", nil)
	rows := map[string]fleet.Agent{}
	for name, c := range cases {
		_, rows[name] = h.agent(name, c.edit)
	}
	h.run()
	h.up(honest.Num, 1)
	for name, c := range cases {
		v := h.trouble(rows[name].ID, c.cause)
		if !strings.Contains(v.Live.Sentence, "127.0.0.1") && c.cause != fleet.CauseStaleEpoch {
			t.Errorf("%s: sentence %q names no address", name, v.Live.Sentence)
		}
		if c.cause == fleet.CauseStaleEpoch && !strings.Contains(v.Live.Sentence, "44") {
			t.Errorf("%s: sentence %q does not name the epoch", name, v.Live.Sentence)
		}
	}
	for i := range 100 {
		h.give(honest.Num, tasks.ID(i+1), "1")
		h.final(honest.Num, i+1)
	}
}

// What an agent says is kept in memory until the queue comes to it, which may
// take as long as the database is away. Who goes on without waiting for an
// answer is bounded; who waits may say as much as it likes.
func TestAnAgentThatWaitsForNoAcknowledgementIsEnded(t *testing.T) {
	t.Parallel()
	const most = 8 << 20
	chunk := make([]byte, 64<<10)
	printing := func(chunks int) func(*fleettest.Agent) {
		return func(a *fleettest.Agent) {
			a.Answer = func(s fleettest.Stream, e *agentpb.Execute) error {
				for i := range chunks {
					out := &agentpb.Output{
						TaskId: e.GetTaskId(), Attempt: e.GetAttempt(), Seq: int32(i), Stream: agentpb.Stream_STREAM_STDOUT, Data: chunk,
					}
					if err := s.Send(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Output{Output: out}}); err != nil {
						return err
					}
				}
				return fleettest.Succeed(s, e)
			}
		}
	}
	h := newHarness(t, quick(), nil)
	_, honest := h.agent("honest", printing(2*most/len(chunk)))
	_, liar := h.agent("liar", printing(100*most/len(chunk)))
	var kept atomic.Int64
	h.queue.On = func(c fleettest.Call) {
		switch {
		case c.Method != "output":
		case c.Agent == honest.Num:
			h.AckOutput(c.Agent, c.Ref, c.Output.Seq)
		default:
			kept.Add(int64(len(c.Output.Data)))
		}
	}
	h.run()
	h.up(honest.Num, 1)
	h.up(liar.Num, 1)
	h.give(liar.Num, 1, "1")
	h.give(honest.Num, 2, "1")
	h.final(honest.Num, 1)
	if why := h.down(liar.Num, 1).Why; !strings.Contains(why, "more than was acknowledged") {
		t.Errorf("the session of the liar ended because %q", why)
	}
	if n := kept.Load(); n > most+int64(len(chunk)) {
		t.Errorf("%d bytes of the liar were passed on, want about %d", n, most)
	}
	if n := len(h.queue.Calls(fleettest.Is("down", honest.Num))); n != 0 {
		t.Error("the session of the honest agent ended")
	}
}

func TestOddAnswersArePassedOnForTheQueueToJudge(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", func(a *fleettest.Agent) {
		a.Answer = func(s fleettest.Stream, e *agentpb.Execute) error {
			for _, attempt := range []int32{0, e.GetAttempt(), e.GetAttempt(), 9} { // old, right, doubled, future
				if err := s.Send(finalMessage(&agentpb.Final{TaskId: e.GetTaskId(), Attempt: attempt, Outcome: "succeeded"})); err != nil {
					return err
				}
			}
			return nil
		}
	})
	h.run()
	h.up(row.Num, 1)
	h.give(row.Num, 3, "1")
	for i, want := range []int{0, 1, 1, 9} {
		if got := h.final(row.Num, i+1).Ref; got != (tasks.Ref{ID: 3, Attempt: want}) {
			t.Errorf("answer %d: %v", i, got)
		}
	}
	if n := len(h.queue.Calls(fleettest.Is("down", row.Num))); n != 0 {
		t.Error("the session ended")
	}
}

// Cases R27.
func TestASilentAgentIsNoticed(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.Pulse, limits.SilentAfter = 500*time.Millisecond, 4*time.Second
	h := newHarness(t, limits, nil)
	_, row := h.agent("mute", func(a *fleettest.Agent) { a.Serve = fleettest.Silence })
	_, quiet := h.agent("quiet", nil) // idle, but answers when asked
	h.run()
	h.up(row.Num, 1)
	h.up(quiet.Num, 1)
	began := time.Now()
	h.trouble(row.ID, fleet.CauseSilent)
	if d := time.Since(began); d < 3*time.Second || d > 12*time.Second {
		t.Errorf("noticed after %s", d)
	}
	if n := len(h.queue.Calls(fleettest.Is("down", quiet.Num))); n != 0 {
		t.Error("the quiet agent's session ended")
	}
	if v, err := h.Get(quiet.ID); err != nil || v.Live.RTT <= 0 {
		t.Errorf("no round trip measured: %+v, %v", v.Live, err)
	}
}

func TestAnAgentThatDoesNotReadBlocksNobody(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, deaf := h.agent("deaf", func(a *fleettest.Agent) { a.Serve = fleettest.Silence })
	_, good := h.agent("good", nil)
	h.run()
	h.up(deaf.Num, 1)
	h.up(good.Num, 1)
	big := `"` + strings.Repeat("x", 900<<10) + `"`
	for i := range tasks.ID(300) { // far more than any window or buffer holds
		began := time.Now()
		h.give(deaf.Num, i+1, big)
		if d := time.Since(began); d > 2*time.Second {
			t.Fatalf("Execute took %s", d)
		}
	}
	if why := h.down(deaf.Num, 1).Why; !strings.Contains(why, "does not read") {
		t.Errorf("session ended because %q", why)
	}
	h.give(good.Num, 1, "1")
	h.final(good.Num, 1)
}

// TestHungAgentsDelayNobody: 50 agents accept connections and never speak.
func TestHungAgentsDelayNobody(t *testing.T) {
	t.Parallel()
	limits := quick()
	// Without the gate's care for slow dials the last good agent would wait for
	// up to 50/4 times 8 s, far longer than this test does.
	limits.Dials, limits.SlowAfter, limits.ConnectTimeout = 4, 50*time.Millisecond, 8*time.Second
	h := newHarness(t, limits, nil)
	var hung, good []fleet.Agent
	for i := range 50 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		hung = append(hung, h.store.Add(fleettest.NewAgent(t, h.authority, fmt.Sprint("hung", i)).Row(l.Addr().String())))
	}
	for i := range 50 {
		_, row := h.agent(fmt.Sprint("good", i), nil)
		good = append(good, row)
	}
	h.run()
	for _, row := range good {
		h.up(row.Num, 1)
	}
	for _, row := range good {
		h.give(row.Num, 1, "1")
	}
	for _, row := range good {
		h.final(row.Num, 1)
	}
	if v := h.trouble(hung[0].ID, fleet.CauseTimeout); !strings.Contains(v.Live.Sentence, "TLS") {
		t.Errorf("sentence %q", v.Live.Sentence)
	}
}

func TestDialsBackOffAndComeBack(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepted atomic.Int64
	tries := make(chan struct{}, 1000)
	go func() {
		defer close(tries)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			_ = c.Close()
			tries <- struct{}{}
		}
	}()
	h := newHarness(t, quick(), nil)
	a := fleettest.NewAgent(t, h.authority, "a")
	row := h.store.Add(a.Row(l.Addr().String()))
	began := time.Now()
	h.run()
	for range 8 {
		<-tries
	}
	// 20 ms growing by 1.6 to 200 ms, at least half of each: 8 dials take
	// at least 10+16+25+41+65+100+100 ms.
	if d := time.Since(began); d < 300*time.Millisecond {
		t.Errorf("8 dials within %s", d)
	}
	v := h.trouble(row.ID, fleet.CauseEnded)
	if n := h.countEvents(func(e fleet.Event) bool { return e.What == fleet.EventHealth && e.View.ID == row.ID }); n > 2 {
		t.Errorf("%d health events for one change (connecting, unreachable)", n)
	}
	_ = v
	_ = l.Close()
	for range tries { // until closed
	}
	v, err = h.Get(row.ID)
	if err != nil || v.Live.Failures < 7 || !strings.Contains(v.Live.Sentence, "tries") {
		t.Errorf("live %+v, %v", v.Live, err)
	}
	other := []string{a.Start(t)}
	if _, err := h.Update(t.Context(), row.ID, fleet.Change{Addresses: &other}, "test"); err != nil {
		t.Fatal(err)
	}
	h.up(row.Num, 1)
}

// An agent that tasks wait for is not left alone until a long back-off is over:
// it may have come back.
func TestAnAgentWithTasksIsDialledSoon(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	tries := make(chan struct{}, 1000)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
			tries <- struct{}{}
		}
	}()
	limits := quick()
	limits.BackoffBase, limits.BackoffMax, limits.BackoffWork = time.Hour, time.Hour, 20*time.Millisecond
	var work atomic.Bool
	h := newHarness(t, limits, func(c *fleet.Config) { c.HasWork = func(tasks.AgentNum) bool { return work.Load() } })
	a := fleettest.NewAgent(t, h.authority, "a")
	row := h.store.Add(a.Row(l.Addr().String()))
	h.run()
	<-tries
	h.trouble(row.ID, fleet.CauseEnded)
	work.Store(true) // within the hour
	for range 3 {
		select {
		case <-tries:
		case <-time.After(30 * time.Second):
			t.Fatal("it was not dialled again although tasks wait for it")
		}
	}
}

func TestASessionThatEndsIsFollowedByAnother(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	a, row := h.agent("a", nil)
	h.run()
	for i := range 5 {
		h.up(row.Num, i+1)
		h.Reconnect(row.Num, "the test wants it")
		if why := h.down(row.Num, i+1).Why; why != "the test wants it" {
			t.Errorf("down because %q", why)
		}
	}
	h.up(row.Num, 6)
	calls := h.queue.Calls(func(c fleettest.Call) bool { return c.Method == "up" || c.Method == "down" })
	for i, c := range calls {
		if want := []string{"up", "down"}[i%2]; c.Method != want {
			t.Fatalf("call %d is %s", i, c.Method)
		}
	}
	if a.Sessions() < 6 {
		t.Errorf("the agent saw %d sessions", a.Sessions())
	}
}

func TestOwnershipDecidesAboutSessions(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", nil)
	h.run()
	h.up(row.Num, 1)
	h.own(2)
	h.down(row.Num, 1)
	h.up(row.Num, 2)
	h.give(row.Num, 1, "1") // of epoch 1: dropped
	h.Execute(tasks.Assignment{Queued: tasks.Queued{Agent: row.Num, ID: 2, Attempt: 1, Kind: "core.echo", Args: "2"}, Epoch: 2})
	if ref := h.final(row.Num, 1).Ref; ref.ID != 2 {
		t.Errorf("task %s ran", ref.ID)
	}
	h.Own(nil)
	h.down(row.Num, 2)
	h.event("elsewhere", func(e fleet.Event) bool {
		return e.View.ID == row.ID && e.View.Live.Health == fleet.HealthElsewhere && e.What == fleet.EventHealth
	})
	if _, err := h.Ping(t.Context(), row.ID); fault.CodeOf(err) != fleet.CodeAgentElsewhere {
		t.Errorf("ping: %v", err)
	}
	h.own(1) // older than what the agent has obeyed
	h.trouble(row.ID, fleet.CauseStaleEpoch)
}

func TestStoppingEndsEverySession(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	var rows []fleet.Agent
	for i := range 20 {
		_, row := h.agent(fmt.Sprint("a", i), nil)
		rows = append(rows, row)
	}
	h.run()
	for _, row := range rows {
		h.up(row.Num, 1)
	}
	began := time.Now()
	h.stop()
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("stopped after %s", d)
	}
	for _, row := range rows {
		h.down(row.Num, 1)
	}
}
