package fleettest

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fleet"
	"headgate/internal/pki"
	"headgate/tasks"
)

// Stream is the agent's end of a session.
type Stream = grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage]

// Agent is a scripted agent: a real gRPC server over mutual TLS. Its fields
// may be changed until Start; by default it greets as it should, answers each
// Execute at once with the args as the result, and knows no ledger.
type Agent struct {
	ID       uuid.UUID
	Name     string
	Ledger   uuid.UUID
	Instance uuid.UUID
	Identity *pki.Identity
	Roots    *pki.Roots
	TLS      *tls.Config   // nil = pki.AgentServer
	Skew     time.Duration // how far its clock is before the true one

	// Welcome edits the greeting or refuses the session.
	Welcome func(*agentpb.Hello, *agentpb.Welcome) error
	// Serve replaces what follows the greeting.
	Serve func(Stream) error
	// Answer replaces what follows an Execute in the default Serve.
	Answer func(Stream, *agentpb.Execute) error
	// Listener, if set, is what the agent serves on.
	Listener net.Listener
	// Pairing, if set, is served too.
	Pairing agentpb.PairingServer

	agentpb.UnimplementedAgentServer
	server   *grpc.Server
	sessions atomic.Int64
	epochs   struct {
		sync.Mutex
		highest int64
	}
}

// NewAgent makes an agent with a certificate of the authority.
func NewAgent(t testing.TB, authority *pki.Authority, name string) *Agent {
	t.Helper()
	a := &Agent{ID: uuid.NewV4(), Name: name, Ledger: uuid.NewV4(), Instance: uuid.NewV4(), Roots: pki.NewRoots(authority.Certificate())}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	cert, err := authority.IssueAgent(&key.PublicKey, a.ID, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if a.Identity, err = pki.NewIdentity(key, cert); err != nil {
		t.Fatal(err)
	}
	return a
}

// Start serves on a free port of this machine, until Stop or the test's end.
func (a *Agent) Start(t testing.TB) string {
	t.Helper()
	if a.Listener == nil {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		a.Listener = l
	}
	conf := a.TLS
	if conf == nil {
		conf = pki.AgentServer(a.Identity, a.Roots)
	}
	a.server = grpc.NewServer(
		grpc.Creds(credentials.NewTLS(conf)),
		grpc.ReadBufferSize(4<<10),
		grpc.StaticStreamWindowSize(128<<10),
		grpc.StaticConnWindowSize(128<<10),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	)
	agentpb.RegisterAgentServer(a.server, a)
	if a.Pairing != nil {
		agentpb.RegisterPairingServer(a.server, a.Pairing)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = a.server.Serve(a.Listener) // ends by Stop
	}()
	t.Cleanup(func() {
		a.server.Stop()
		<-done
	})
	return a.Listener.Addr().String()
}

// Stop ends all connections and refuses new ones.
func (a *Agent) Stop() { a.server.Stop() }

// Sessions says how many sessions have been greeted.
func (a *Agent) Sessions() int64 { return a.sessions.Load() }

// Row gives the row of the agent at an address.
func (a *Agent) Row(addresses ...string) fleet.Agent {
	return fleet.Agent{
		ID: a.ID, Name: a.Name, Addresses: addresses, Status: fleet.Active, SPKI: a.Identity.SPKI(),
		Labels: map[string]string{}, PairedAt: time.Now(), CertExpires: a.Identity.Leaf().NotAfter,
	}
}

// Session implements agentpb.AgentServer.
func (a *Agent) Session(stream grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if hello == nil || hello.GetShard() != int32(tasks.ShardOf(a.ID)) {
		return status.Error(codes.InvalidArgument, "NO_HELLO")
	}
	w := &agentpb.Welcome{
		Protocol: 1, AgentId: a.ID.String(), LedgerId: a.Ledger.String(), InstanceId: a.Instance.String(),
		Version: "test", ClockUnixNano: time.Now().Add(a.Skew).UnixNano(), Hostname: "host-" + a.Name, Os: "linux",
		Kinds: []*agentpb.KindInfo{{Name: "core.echo"}},
	}
	a.epochs.Lock()
	highest := a.epochs.highest
	if hello.GetEpoch() >= highest {
		a.epochs.highest = hello.GetEpoch()
	}
	a.epochs.Unlock()
	if hello.GetEpoch() < highest {
		return status.Error(codes.FailedPrecondition, "STALE_EPOCH "+strconv.FormatInt(highest, 10))
	}
	if a.Welcome != nil {
		if err := a.Welcome(hello, w); err != nil {
			return err
		}
	}
	a.sessions.Add(1)
	if err := stream.Send(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Welcome{Welcome: w}}); err != nil {
		return err
	}
	if a.Serve != nil {
		return a.Serve(stream)
	}
	return a.ServeTasks(stream)
}

// ServeTasks is what an agent does after the greeting unless told otherwise.
func (a *Agent) ServeTasks(stream Stream) error {
	var in agentpb.ControllerMessage
	for {
		if err := stream.RecvMsg(&in); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		var err error
		switch m := in.GetMsg().(type) {
		case *agentpb.ControllerMessage_Execute:
			if a.Answer != nil {
				err = a.Answer(stream, m.Execute)
			} else {
				err = Succeed(stream, m.Execute)
			}
		case *agentpb.ControllerMessage_StatusRequest:
			err = stream.Send(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Status{Status: &agentpb.Status{ClockUnixNano: time.Now().Add(a.Skew).UnixNano()}}})
		}
		if err != nil {
			return err
		}
	}
}

// Succeed answers an Execute with success.
func Succeed(stream Stream, e *agentpb.Execute) error {
	return stream.Send(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: &agentpb.Final{
		TaskId: e.GetTaskId(), Attempt: e.GetAttempt(), Epoch: e.GetEpoch(), Outcome: "succeeded", Result: e.GetArgs(),
	}}})
}

// Silence reads nothing and says nothing until the session's end.
func Silence(stream Stream) error {
	<-stream.Context().Done()
	return nil
}

// Ping implements agentpb.AgentServer.
func (a *Agent) Ping(_ context.Context, m *agentpb.PingRequest) (*agentpb.PingReply, error) {
	return &agentpb.PingReply{Nonce: m.GetNonce(), AgentId: a.ID.String(), Version: "test", ClockUnixNano: time.Now().Add(a.Skew).UnixNano()}, nil
}
