package main

import (
	"errors"
	"testing"
	"time"
	"uuid"

	"google.golang.org/grpc"

	"headgate/internal/agentpb"
)

// serveAgents runs a simulator in this process on a fleet of its own.
func serveAgents(t *testing.T, n int) (*simulator, string) {
	t.Helper()
	dir := t.TempDir()
	if err := echoFleet(dir, n); err != nil {
		t.Fatal(err)
	}
	s, err := newSimulator(dir, n)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.listenAll(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	g := s.server()
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
		release(s.dir)
	})
	return s, dir
}

func TestEachConnectionMeetsItsOwnAgent(t *testing.T) {
	t.Parallel()
	const n = 30
	s, dir := serveAgents(t, n)
	c := &echoClient{}
	t.Cleanup(c.close)
	if err := c.connect(t.Context(), dir, n); err != nil {
		t.Fatal(err) // the dialler pins the key of each agent
	}
	for i, cc := range c.conns {
		pong, err := agentpb.NewAgentClient(cc).Ping(t.Context(), &agentpb.PingRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if want := s.agents[i].id.String(); pong.GetAgentId() != want {
			t.Errorf("agent %d answers as %s, want %s", i, pong.GetAgentId(), want)
		}
	}
	r, err := c.callAll(t.Context(), 50*time.Millisecond)
	if err != nil || r.Calls < n {
		t.Errorf("%d calls on %d connections, error %v", r.Calls, n, err)
	}
}

func TestSessionAnswersOnceAndListsWhatIsNotForgotten(t *testing.T) {
	t.Parallel()
	s, dir := serveAgents(t, 1)
	c := &echoClient{}
	t.Cleanup(c.close)
	if err := c.connect(t.Context(), dir, 1); err != nil {
		t.Fatal(err)
	}
	open := func(epoch int64) (agentpb.Agent_SessionClient, *agentpb.Welcome) {
		stream, err := agentpb.NewAgentClient(c.conns[0]).Session(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		say(t, stream, &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Hello{Hello: &agentpb.Hello{Protocol: 1, Epoch: epoch}}})
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return stream, m.GetWelcome()
	}
	first, _ := open(3)
	e := &agentpb.Execute{TaskId: 7, Attempt: 1, Epoch: 3, Kind: "core.echo", Args: []byte(echoArgs)}
	say(t, first, &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Execute{Execute: e}})
	if m, err := first.Recv(); err != nil || string(m.GetFinal().GetResult()) != echoArgs {
		t.Fatalf("answer %v, error %v", m, err)
	}
	second, welcome := open(4)
	if n := len(welcome.GetFinished()); n != 1 || welcome.GetFinished()[0].GetTaskId() != 7 {
		t.Fatalf("%d finished tasks in the greeting, want task 7 alone", n)
	}
	say(t, first, &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Execute{Execute: e}})
	if m, err := first.Recv(); err == nil {
		t.Errorf("the older session still answers: %v", m)
	}
	say(t, second, &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Forget{Forget: &agentpb.Forget{TaskIds: []int64{7}}}})
	say(t, second, &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_StatusRequest{StatusRequest: &agentpb.StatusRequest{}}})
	if m, err := second.Recv(); err != nil || m.GetStatus().GetLedgerEntries() != 0 {
		t.Fatalf("status %v, error %v", m, err)
	}
	if _, welcome = open(4); len(welcome.GetFinished()) != 0 {
		t.Errorf("a forgotten task is still in the greeting")
	}
	if n := s.executed.Load(); n != 1 {
		t.Errorf("%d executions of one task", n)
	}
}

func say(t *testing.T, stream agentpb.Agent_SessionClient, m *agentpb.ControllerMessage) {
	t.Helper()
	if err := stream.Send(m); err != nil {
		t.Fatal(err)
	}
}

func TestAgentsStayTheSameAfterARestart(t *testing.T) {
	t.Parallel()
	first, dir := serveAgents(t, 3)
	second, err := newSimulator(dir, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer release(second.dir)
	for i, a := range first.agents {
		b := second.agents[i]
		if a.id == uuid.Nil() || a.id != b.id || a.identity.SPKI() != b.identity.SPKI() || !b.paired.Load() {
			t.Errorf("agent %d is another one after a restart", i)
		}
	}
}

func TestAddressesAreTheirOwnInverse(t *testing.T) {
	t.Parallel()
	for _, i := range []int{0, 1, 255, 256, 9_999} {
		if got := indexOf(agentAddress(i)); got != i {
			t.Errorf("agent %d is at %s, which is said to be agent %d", i, agentAddress(i), got)
		}
	}
}
