package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/kinds"
	"headgate/internal/pki"
)

const protocolVersion = 1

// simAgent is one simulated agent: identity, epoch and a ledger of one entry,
// all in memory but the identity.
type simAgent struct {
	index    int
	id       uuid.UUID
	instance uuid.UUID
	identity *pki.Identity
	roots    *pki.Roots
	paired   atomic.Bool

	mu      sync.Mutex // guards all below
	epoch   int64
	session int            // the newest; older ones start nothing
	final   *agentpb.Final // of the last task, until it is forgotten
}

// serverConfig is what a connection to this agent is served with.
func (a *simAgent) serverConfig() (*tls.Config, error) {
	if !a.paired.Load() {
		return pki.PairingServer(a.identity), nil
	}
	// crypto/tls does not ask a chosen configuration to choose again.
	return pki.AgentServer(a.identity, a.roots).GetConfigForClient(nil)
}

// Session implements agentpb.AgentServer for whichever agent was dialled.
func (s *simulator) Session(stream grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage]) error {
	a, _, err := s.dialled(stream.Context())
	if err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	session, welcome, err := a.greet(first.GetHello())
	if err != nil {
		return err
	}
	if err := stream.Send(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Welcome{Welcome: welcome}}); err != nil {
		return err
	}
	s.sessions.Add(1)
	defer s.sessions.Add(-1)
	if s.lies(a) {
		return s.misbehave(a, stream)
	}
	var in agentpb.ControllerMessage
	for {
		if err := stream.RecvMsg(&in); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		reply, err := s.answer(a, session, &in)
		if err != nil {
			return err
		}
		if reply == nil {
			continue
		}
		if err := stream.Send(reply); err != nil {
			return err
		}
	}
}

// greet begins a session, which ends all older ones of the agent.
func (a *simAgent) greet(h *agentpb.Hello) (int, *agentpb.Welcome, error) {
	if h == nil || h.GetProtocol() != protocolVersion {
		return 0, nil, status.Error(codes.InvalidArgument, "NO_HELLO A session begins with a Hello of version 1.")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if h.GetEpoch() < a.epoch {
		return 0, nil, status.Error(codes.FailedPrecondition, "STALE_EPOCH "+strconv.FormatInt(a.epoch, 10))
	}
	a.epoch = h.GetEpoch()
	a.session++
	w := &agentpb.Welcome{
		Protocol: protocolVersion, AgentId: a.id.String(), LedgerId: a.id.String(), InstanceId: a.instance.String(),
		Version: simulatorVersion, ClockUnixNano: time.Now().UnixNano(), Hostname: a.name(), Os: "simulated",
		Kinds: []*agentpb.KindInfo{{Name: kinds.Echo}, {Name: kinds.Ping}},
	}
	if a.final != nil {
		w.Finished = []*agentpb.Final{a.final}
	}
	return a.session, w, nil
}

func (a *simAgent) name() string { return fmt.Sprintf("sim-%05d", a.index) }

// answer handles one message; nil means that there is nothing to say.
func (s *simulator) answer(a *simAgent, session int, in *agentpb.ControllerMessage) (*agentpb.AgentMessage, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.session != session {
		return nil, status.Error(codes.Aborted, "SUPERSEDED A newer session has begun.")
	}
	switch m := in.GetMsg().(type) {
	case *agentpb.ControllerMessage_Execute:
		return s.execute(a, m.Execute), nil
	case *agentpb.ControllerMessage_Forget:
		a.forget(m.Forget.GetTaskIds())
	case *agentpb.ControllerMessage_StatusRequest:
		st := &agentpb.Status{ClockUnixNano: time.Now().UnixNano()}
		if a.final != nil {
			st.LedgerEntries = 1
		}
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Status{Status: st}}, nil
	}
	return nil, nil // a Cancel or Ack of a task that is over already
}

// execute runs a task at once; the caller holds the agent's lock.
func (s *simulator) execute(a *simAgent, e *agentpb.Execute) *agentpb.AgentMessage {
	s.recorder.started(e.GetTaskId())
	now := time.Now().UnixNano()
	if e.GetEpoch() != a.epoch {
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Refused{Refused: &agentpb.Refused{
			TaskId: e.GetTaskId(), Attempt: e.GetAttempt(), Cause: agentpb.Refusal_REFUSAL_STALE_EPOCH,
		}}}
	}
	if a.final != nil && a.final.GetTaskId() == e.GetTaskId() && a.final.GetAttempt() == e.GetAttempt() {
		s.repeated.Add(1)
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: a.final}}
	}
	s.executed.Add(1)
	s.lastTask.Store(e.GetTaskId())
	final := &agentpb.Final{
		TaskId: e.GetTaskId(), Attempt: e.GetAttempt(), Epoch: e.GetEpoch(), Outcome: "succeeded",
		Result: e.GetArgs(), StartedUnixNano: now, EndedUnixNano: now,
	}
	if e.GetKind() != kinds.Echo && e.GetKind() != kinds.Ping {
		final.Outcome, final.Reason, final.Result = "rejected", "unknown_kind", nil
	}
	a.forget(e.GetForget())
	a.final = final
	return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: final}}
}

func (a *simAgent) forget(ids []int64) {
	for _, id := range ids {
		if a.final.GetTaskId() == id {
			a.final = nil
		}
	}
}

// Ping implements agentpb.AgentServer.
func (s *simulator) Ping(ctx context.Context, m *agentpb.PingRequest) (*agentpb.PingReply, error) {
	a, _, err := s.dialled(ctx)
	if err != nil {
		return nil, err
	}
	return &agentpb.PingReply{Nonce: m.GetNonce(), AgentId: a.id.String(), Version: simulatorVersion, ClockUnixNano: time.Now().UnixNano()}, nil
}

// dialled finds the agent that a call is for by the local address of its
// connection.
func (s *simulator) dialled(ctx context.Context) (*simAgent, tls.ConnectionState, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, tls.ConnectionState{}, status.Error(codes.Internal, "NO_PEER The connection is unknown.")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return nil, tls.ConnectionState{}, status.Error(codes.Internal, "NO_TLS The connection is not secured.")
	}
	a, err := s.agentAt(p.LocalAddr)
	return a, info.State, err
}

// Pair implements agentpb.PairingServer: the agent's side of HG-PAIR/1.
func (s *simulator) Pair(stream grpc.BidiStreamingServer[agentpb.PairRequest, agentpb.PairReply]) error {
	a, state, err := s.dialled(stream.Context())
	if err != nil {
		return err
	}
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	run, err := s.beginPairing(a, state, m.GetHello())
	if err != nil {
		return err
	}
	hello := &agentpb.PairHello{
		Version: pki.PairingVersion, Nonce: run.transcript.AgentNonce[:], Id: a.id.String(), Name: a.name(),
		Software: simulatorVersion, Hostname: a.name(), Os: "simulated",
	}
	if err := stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Hello{Hello: hello}}); err != nil {
		return err
	}
	if m, err = stream.Recv(); err != nil {
		return err
	}
	tag, err := pki.AnswerTag(run.token.Secret(), run.transcript, m.GetConfirm().GetTag())
	if err != nil {
		return status.Error(codes.Unauthenticated, "WRONG_SECRET The two sides do not hold the same token; 0 tries left.")
	}
	csr, err := pki.NewRequest(a.identity.Key())
	if err != nil {
		return err
	}
	confirm := &agentpb.PairConfirm{Tag: tag, Csr: csr}
	if err := stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Confirm{Confirm: confirm}}); err != nil {
		return err
	}
	if m, err = stream.Recv(); err != nil {
		return err
	}
	hash, err := s.enrol(a, m.GetEnrol())
	if err != nil {
		return status.Error(codes.InvalidArgument, "UNACCEPTABLE_CERTIFICATE "+err.Error())
	}
	return stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Done{Done: &agentpb.PairDone{StoredHash: hash}}})
}

// pairRun is one run of the pairing protocol.
type pairRun struct {
	token      *pki.Token
	transcript *pki.Transcript
}

func (s *simulator) beginPairing(a *simAgent, state tls.ConnectionState, h *agentpb.PairHello) (*pairRun, error) {
	token := s.token.Load()
	if token == nil || a.paired.Load() {
		return nil, status.Error(codes.FailedPrecondition, "WINDOW_CLOSED This agent is not in pairing mode.")
	}
	controller, _, err := pki.CheckControllerChain(state.PeerCertificates, token.CA())
	if err != nil {
		return nil, status.Error(codes.PermissionDenied, "FOREIGN_CONTROLLER "+err.Error())
	}
	nonce, err := pki.ParseNonce(h.GetNonce())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, "MALFORMED "+err.Error())
	}
	exporter, err := pki.Exporter(state)
	if err != nil {
		return nil, err
	}
	return &pairRun{token, &pki.Transcript{
		Version: pki.PairingVersion, Exporter: exporter,
		ControllerSPKI: pki.SPKI(state.PeerCertificates[0]), AgentSPKI: a.identity.SPKI(),
		ControllerID: controller.ID, AgentID: a.id, Fleet: h.GetName(), TokenID: token.ID(),
		ControllerNonce: nonce, AgentNonce: pki.NewNonce(),
	}}, nil
}

// enrol takes the certificate and stores it, so that a later simulator process
// is the same agent.
func (s *simulator) enrol(a *simAgent, e *agentpb.PairEnrol) ([]byte, error) {
	leaf, err := x509.ParseCertificate(e.GetCertificate())
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	hash.Write(leaf.Raw)
	var bundle []*x509.Certificate
	for _, der := range e.GetCa() {
		ca, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		hash.Write(ca.Raw)
		bundle = append(bundle, ca)
	}
	if len(bundle) == 0 {
		return nil, errors.New("the bundle of authorities is empty")
	}
	if err := a.identity.Set(a.identity.Key(), leaf); err != nil {
		return nil, err
	}
	if err := s.storeIdentity(a, bundle); err != nil {
		return nil, err
	}
	a.roots.Set(bundle...)
	a.mu.Lock()
	a.epoch = e.GetEpoch()
	a.mu.Unlock()
	a.paired.Store(true)
	return hash.Sum(nil), nil
}

// recorder notes when tasks were started, by CLOCK_MONOTONIC, which all
// processes of one machine share.
type recorder struct {
	on atomic.Bool
	mu sync.Mutex
	at map[int64]int64 // nanoseconds by task id
}

func (r *recorder) started(task int64) {
	if !r.on.Load() {
		return
	}
	now := monotonic()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at == nil {
		r.at = map[int64]int64{}
	}
	if _, known := r.at[task]; !known {
		r.at[task] = now
	}
}

// take gives what was noted and begins anew.
func (r *recorder) take() map[int64]int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := r.at
	r.at = nil
	return at
}

// monotonic reads the clock that is comparable between processes.
func monotonic() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // the clock exists on every Linux
	}
	return t.Nano()
}
