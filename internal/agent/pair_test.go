package agent_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"headgate/internal/agent"
	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/pki"
)

// dialler is the controller's side of one pairing, step by step.
type dialler struct {
	fleet      *testFleet
	controller *pki.Identity
	id         uuid.UUID
	token      *pki.Token
	conn       *grpc.ClientConn
	stream     grpc.BidiStreamingClient[agentpb.PairRequest, agentpb.PairReply]
	transcript *pki.Transcript
	csr        []byte
	leaf       []byte
}

func (f *testFleet) dialPairing(t testing.TB, addr string) (*dialler, error) {
	return f.dialPairingAs(t, addr, f.id, f.controller)
}

func (f *testFleet) dialPairingAs(t testing.TB, addr string, id uuid.UUID, controller *pki.Identity) (*dialler, error) {
	t.Helper()
	conn := newClient(t, addr, credentials.NewTLS(pki.DialPairing(controller)))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	stream, err := agentpb.NewPairingClient(conn).Pair(ctx)
	if err != nil {
		return nil, err
	}
	return &dialler{conn: conn, fleet: f, controller: controller, id: id, token: f.token, stream: stream}, nil
}

// hangUp gives the connection back, of which an agent has few.
func (d *dialler) hangUp() { d.conn.Close() }

func (d *dialler) ask(m *agentpb.PairRequest) (*agentpb.PairReply, error) {
	if err := d.stream.Send(m); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return d.stream.Recv()
}

func (d *dialler) helloMessage() *agentpb.PairHello {
	nonce := pki.NewNonce()
	tokenID, err := hex.DecodeString(d.token.ID())
	if err != nil {
		panic(err)
	}
	return &agentpb.PairHello{Version: 1, Nonce: nonce[:], Id: d.id.String(), Name: "test.fleet", Software: "test", TokenId: tokenID}
}

// hello exchanges the Hellos and fills in the transcript.
func (d *dialler) hello() error { return d.helloWith(d.helloMessage()) }

func (d *dialler) helloWith(h *agentpb.PairHello) error {
	r, err := d.ask(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Hello{Hello: h}})
	if err != nil {
		return err
	}
	p, _ := peer.FromContext(d.stream.Context())
	state := p.AuthInfo.(credentials.TLSInfo).State
	exporter, err := pki.Exporter(state)
	if err != nil {
		return err
	}
	nonce, err := pki.ParseNonce(r.GetHello().GetNonce())
	if err != nil {
		return err
	}
	agentID, err := uuid.Parse(r.GetHello().GetId())
	if err != nil {
		return err
	}
	d.transcript = &pki.Transcript{
		Version: 1, Exporter: exporter, ControllerSPKI: d.controller.SPKI(), AgentSPKI: pki.SPKI(state.PeerCertificates[0]),
		ControllerID: d.id, AgentID: agentID, Fleet: "test.fleet", TokenID: d.token.ID(),
		ControllerNonce: pki.Nonce(h.GetNonce()), AgentNonce: nonce,
	}
	return nil
}

func (d *dialler) confirm() error {
	return d.confirmWith(pki.ControllerTag(d.token.Secret(), d.transcript))
}

func (d *dialler) confirmWith(tag []byte) error {
	r, err := d.ask(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Confirm{Confirm: &agentpb.PairConfirm{Tag: tag}}})
	if err != nil {
		return err
	}
	d.csr = r.GetConfirm().GetCsr()
	return pki.CheckAnswer(d.token.Secret(), d.transcript, r.GetConfirm().GetTag())
}

func (d *dialler) enrolment() (*agentpb.PairEnrol, error) {
	req, err := pki.ParseRequest(d.csr)
	if err != nil {
		return nil, err
	}
	leaf, err := d.fleet.ca.IssueAgent(req.Key, d.transcript.AgentID, time.Now())
	if err != nil {
		return nil, err
	}
	d.leaf = leaf.Raw
	return &agentpb.PairEnrol{
		Certificate: leaf.Raw, Ca: [][]byte{d.fleet.ca.Certificate().Raw}, Fleet: "test.fleet",
		Shard: int32(d.transcript.AgentID[15] % 16), Epoch: 1,
	}, nil
}

func (d *dialler) enrol() error {
	e, err := d.enrolment()
	if err != nil {
		return err
	}
	return d.enrolWith(e)
}

func (d *dialler) enrolWith(e *agentpb.PairEnrol) error {
	r, err := d.ask(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Enrol{Enrol: e}})
	if err != nil {
		return err
	}
	want := sha256.Sum256(append(append([]byte(nil), e.GetCertificate()...), e.GetCa()[0]...))
	if string(r.GetDone().GetStoredHash()) != string(want[:]) {
		return errors.New("another hash was stored")
	}
	return nil
}

// pair does the whole protocol and notes who the agent is.
func (a *running) pair(t testing.TB) error {
	t.Helper()
	d, err := a.fleet.dialPairing(t, a.addr)
	if err != nil {
		return err
	}
	for _, step := range []func() error{d.hello, d.confirm, d.enrol} {
		if err := step(); err != nil {
			return err
		}
	}
	a.id, a.pin = d.transcript.AgentID, d.transcript.AgentSPKI
	return nil
}

func expectStatus(t testing.TB, err error, code codes.Code, text string) {
	t.Helper()
	if s, _ := status.FromError(err); s.Code() != code || !strings.HasPrefix(s.Message(), text) {
		t.Fatalf("got %v, want %s %s", err, code, text)
	}
}

func TestPairingLeadsToSessionsOnTheSamePort(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Name: "box"})
	d, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, d.hello())
	if _, err := agentpb.NewAgentClient(newClient(t, a.addr, credentials.NewTLS(pki.DialPairing(f.controller)))).Ping(t.Context(), &agentpb.PingRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("an agent that is not paired answers a ping with %v", err)
	}
	check(t, d.confirm())
	check(t, d.enrol())
	a.id, a.pin = d.transcript.AgentID, d.transcript.AgentSPKI
	ping := func() {
		t.Helper()
		r, err := agentpb.NewAgentClient(a.dial(t)).Ping(t.Context(), &agentpb.PingRequest{Nonce: []byte("n")}, grpc.WaitForReady(true))
		check(t, err)
		if r.GetAgentId() != a.id.String() || string(r.GetNonce()) != "n" {
			t.Errorf("ping says %v", r)
		}
	}
	ping()
	if d, err := f.dialPairing(t, a.addr); err == nil {
		if err := d.hello(); err == nil {
			t.Error("a paired agent answers a pairing")
		}
	}
	check(t, a.end(t))
	a.config.EnrolTokenFile = ""
	a.restart(t)
	ping()
	check(t, filepath.WalkDir(a.config.DataDir, func(path string, e fs.DirEntry, err error) error {
		check(t, err)
		info, err := e.Info()
		check(t, err)
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %o", path, info.Mode())
		}
		return nil
	}))
}

func TestFiveWrongSecretsLockPairing(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	wrong := pki.NewToken(pki.SPKI(f.ca.Certificate()))
	for try := range 5 {
		if try == 3 { // failures are remembered across restarts
			check(t, a.end(t))
			a.restart(t)
		}
		d, err := f.dialPairing(t, a.addr)
		check(t, err)
		check(t, d.hello())
		expectStatus(t, d.confirmWith(pki.ControllerTag(wrong.Secret(), d.transcript)), codes.Unauthenticated, "WRONG_SECRET")
	}
	if err := a.wait(t); fault.CodeOf(err) != "pairing_locked" {
		t.Fatalf("after five failures the agent says %v", err)
	}
	if err := agent.Run(t.Context(), a.config); fault.CodeOf(err) != "pairing_locked" {
		t.Fatalf("started again with the same token it says %v", err)
	}
	f.token = wrong
	a.config.EnrolTokenFile = tokenFile(t, f.token)
	a.restart(t)
	check(t, a.pair(t))
}

func TestADiallerOfAnotherFleetIsRefusedAndNotCounted(t *testing.T) {
	t.Parallel()
	f, other := newFleet(t), newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	other.token = f.token
	for range 6 {
		d, err := other.dialPairing(t, a.addr)
		check(t, err)
		expectStatus(t, d.hello(), codes.PermissionDenied, "FOREIGN_CONTROLLER")
		d.hangUp()
	}
	// A chain that names the right authority but was not signed by it.
	forged, err := pki.NewIdentity(other.controller.Key(), other.controller.Leaf(), f.ca.Certificate())
	check(t, err)
	d, err := f.dialPairingAs(t, a.addr, other.id, forged)
	check(t, err)
	expectStatus(t, d.hello(), codes.PermissionDenied, "FOREIGN_CONTROLLER")
	check(t, a.pair(t))
}

func TestOnlyOnePairingRunsAtATime(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	first, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, first.hello())
	for range 3 {
		d, err := f.dialPairing(t, a.addr)
		check(t, err)
		expectStatus(t, d.hello(), codes.ResourceExhausted, "BUSY")
	}
	fifth, err := f.dialPairing(t, a.addr) // one connection too many
	if err == nil {
		err = fifth.hello()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a fifth connection got %v", err)
	}
	check(t, first.confirm())
	check(t, first.enrol())
}

func TestPairingsKeepTheirDistance(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: agent.Limits{PairingSpacing: time.Hour}})
	d, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, d.hello())
	expectStatus(t, d.confirmWith(nil), codes.Unauthenticated, "WRONG_SECRET")
	d, err = f.dialPairing(t, a.addr)
	check(t, err)
	expectStatus(t, d.hello(), codes.ResourceExhausted, "SLOW_DOWN")
}

func TestARecordedOrRelayedProofIsWorthless(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	// A controller that proves itself on one connection, while its proof is
	// carried over to another by somebody in between with a certificate of
	// the same fleet.
	victim, err := f.dialPairing(t, a.addr)
	check(t, err)
	hello := victim.helloMessage()
	check(t, victim.helloWith(hello))
	tag := pki.ControllerTag(f.token.Secret(), victim.transcript)
	check(t, victim.stream.CloseSend())
	_, err = victim.stream.Recv()
	expectStatus(t, err, codes.Aborted, "BROKEN_OFF")

	again, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, again.helloWith(hello)) // the very same first message
	expectStatus(t, again.confirmWith(tag), codes.Unauthenticated, "WRONG_SECRET")

	third, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, third.hello())
	third.transcript.Exporter = victim.transcript.Exporter // all is right but the connection
	expectStatus(t, third.confirm(), codes.Unauthenticated, "WRONG_SECRET")
}

func TestWhatBreaksOffAfterTheProofIsNotCounted(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	for range 7 {
		d, err := f.dialPairing(t, a.addr)
		check(t, err)
		check(t, d.hello())
		check(t, d.confirm())
		check(t, d.stream.CloseSend())
		_, err = d.stream.Recv()
		expectStatus(t, err, codes.Aborted, "BROKEN_OFF")
		d.hangUp()
	}
	check(t, a.pair(t))
}

func TestBadFirstMessagesAreRefused(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	for name, c := range map[string]struct {
		change func(*agentpb.PairHello)
		code   codes.Code
		text   string
	}{
		"version":     {func(h *agentpb.PairHello) { h.Version = 2 }, codes.FailedPrecondition, "UNSUPPORTED_VERSION"},
		"nonce":       {func(h *agentpb.PairHello) { h.Nonce = h.GetNonce()[:31] }, codes.InvalidArgument, "MALFORMED"},
		"id":          {func(h *agentpb.PairHello) { h.Id = uuid.NewV4().String() }, codes.InvalidArgument, "MALFORMED"},
		"other token": {func(h *agentpb.PairHello) { h.TokenId = make([]byte, 8) }, codes.NotFound, "OTHER_TOKEN"},
		"too large":   {func(h *agentpb.PairHello) { h.Name = strings.Repeat("x", 17<<10) }, codes.ResourceExhausted, "grpc: received message larger"},
	} {
		d, err := f.dialPairing(t, a.addr)
		check(t, err)
		h := d.helloMessage()
		c.change(h)
		err = d.helloWith(h)
		if s, _ := status.FromError(err); s.Code() != c.code || !strings.HasPrefix(s.Message(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
		d.hangUp()
	}
	check(t, a.pair(t))
}

func TestACertificateThatDoesNotFitIsRefused(t *testing.T) {
	t.Parallel()
	f, other := newFleet(t), newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	key, err := pki.NewKey()
	check(t, err)
	for name, change := range map[string]func(*dialler, *agentpb.PairEnrol){
		"not a certificate": func(_ *dialler, e *agentpb.PairEnrol) { e.Certificate = []byte("x") },
		"another key": func(d *dialler, e *agentpb.PairEnrol) {
			leaf, err := f.ca.IssueAgent(&key.PublicKey, d.transcript.AgentID, time.Now())
			check(t, err)
			e.Certificate = leaf.Raw
		},
		"another id": func(d *dialler, e *agentpb.PairEnrol) {
			req, err := pki.ParseRequest(d.csr)
			check(t, err)
			leaf, err := f.ca.IssueAgent(req.Key, uuid.NewV4(), time.Now())
			check(t, err)
			e.Certificate = leaf.Raw
		},
		"a controller's": func(d *dialler, e *agentpb.PairEnrol) {
			req, err := pki.ParseRequest(d.csr)
			check(t, err)
			leaf, err := f.ca.IssueController(req.Key, d.transcript.AgentID, time.Now())
			check(t, err)
			e.Certificate = leaf.Raw
		},
		"no bundle":              func(_ *dialler, e *agentpb.PairEnrol) { e.Ca = nil },
		"a bundle of leaves":     func(_ *dialler, e *agentpb.PairEnrol) { e.Ca = [][]byte{f.controller.Leaf().Raw} },
		"another fleet's bundle": func(_ *dialler, e *agentpb.PairEnrol) { e.Ca = [][]byte{other.ca.Certificate().Raw} },
		"another fleet's leaf": func(d *dialler, e *agentpb.PairEnrol) {
			req, err := pki.ParseRequest(d.csr)
			check(t, err)
			leaf, err := other.ca.IssueAgent(req.Key, d.transcript.AgentID, time.Now())
			check(t, err)
			e.Certificate = leaf.Raw
		},
	} {
		d, err := f.dialPairing(t, a.addr)
		check(t, err)
		check(t, d.hello())
		check(t, d.confirm())
		e, err := d.enrolment()
		check(t, err)
		change(d, e)
		_, err = d.ask(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Enrol{Enrol: e}})
		if s, _ := status.FromError(err); !strings.HasPrefix(s.Message(), "UNACCEPTABLE_CERTIFICATE") {
			t.Errorf("%s: %v", name, err)
		}
		d.hangUp()
	}
	check(t, a.pair(t))
}

func TestACertificateThatCannotBeStoredIsNotConfirmed(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	a := f.start(t, agent.Config{Limits: quick()})
	inTheWay := filepath.Join(a.config.DataDir, "fleet", "something")
	check(t, os.MkdirAll(inTheWay, 0o700))
	d, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, d.hello())
	check(t, d.confirm())
	expectStatus(t, d.enrol(), codes.Unavailable, "DISK")
	check(t, os.RemoveAll(filepath.Dir(inTheWay)))
	check(t, a.pair(t))
	a.session(t, 1)
}

func TestTheWindowAndTheRunAreBounded(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	limits := quick()
	limits.PairingRun = 50 * time.Millisecond
	a := f.start(t, agent.Config{Limits: limits})
	d, err := f.dialPairing(t, a.addr)
	check(t, err)
	check(t, d.hello())
	_, err = d.stream.Recv()
	expectStatus(t, err, codes.DeadlineExceeded, "TOO_SLOW")

	limits = quick()
	limits.PairingWindow = 50 * time.Millisecond
	c := a.config
	c.DataDir, c.Limits, c.Listen = filepath.Join(t.TempDir(), "data"), limits, "127.0.0.1:0"
	if err := agent.Run(t.Context(), c); fault.CodeOf(err) != "pairing_window_closed" {
		t.Errorf("after the window the agent says %v", err)
	}
}

func TestKilledAtAnyStepAnAgentIsPairedOrNotPaired(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	for steps := range 5 {
		c := agent.Config{DataDir: filepath.Join(t.TempDir(), "data"), EnrolTokenFile: tokenFile(t, f.token), Limits: quick()}
		victim := (&running{config: c, fleet: f}).startChild(t)
		d, err := f.dialPairing(t, victim.addr)
		check(t, err)
		if steps > 0 {
			check(t, d.hello())
		}
		if steps > 1 {
			check(t, d.confirm())
		}
		if steps == 3 { // sent, and killed at whatever moment that is
			e, err := d.enrolment()
			check(t, err)
			check(t, d.stream.Send(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Enrol{Enrol: e}}))
		}
		if steps > 3 {
			check(t, d.enrol())
		}
		victim.kill(t)

		a := &running{config: c, fleet: f}
		a.restart(t)
		_, err = os.Stat(filepath.Join(c.DataDir, "fleet"))
		paired := err == nil
		if steps != 3 && paired != (steps > 3) {
			t.Errorf("killed after step %d: paired %v", steps, paired)
		}
		if paired {
			a.id, a.pin = d.transcript.AgentID, d.transcript.AgentSPKI
		} else {
			check(t, a.pair(t))
		}
		a.session(t, 1)
		check(t, a.end(t))
	}
}

func TestStrangersDoNotGetThroughToAPairedAgent(t *testing.T) {
	t.Parallel()
	f, other := newFleet(t), newFleet(t)
	a := f.paired(t, agent.Config{Limits: quick()})
	ping := func(creds credentials.TransportCredentials) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := agentpb.NewAgentClient(newClient(t, a.addr, creds)).Ping(ctx, &agentpb.PingRequest{})
		return err
	}
	roots := pki.NewRoots(f.ca.Certificate())
	dial := func(i *pki.Identity) credentials.TransportCredentials {
		return credentials.NewTLS(pki.DialAgent(pki.AgentDial{Identity: i, Roots: roots, ID: a.id, Pins: []pki.Fingerprint{a.pin}}))
	}
	key, err := pki.NewKey()
	check(t, err)
	leaf, err := f.ca.IssueAgent(&key.PublicKey, uuid.NewV4(), time.Now())
	check(t, err)
	anotherAgent, err := pki.NewIdentity(key, leaf)
	check(t, err)
	expired, err := f.ca.IssueController(&key.PublicKey, uuid.NewV4(), time.Now().Add(-8*24*time.Hour))
	check(t, err)
	old, err := pki.NewIdentity(key, expired)
	check(t, err)
	for name, creds := range map[string]credentials.TransportCredentials{
		"plain text":              nil,
		"another fleet":           dial(other.controller),
		"an agent of the fleet":   dial(anotherAgent),
		"an expired controller":   dial(old),
		"without any certificate": credentials.NewTLS(pki.Client(roots)),
	} {
		if err := ping(creds); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	check(t, ping(dial(f.controller)))
	c := a.session(t, 1)
	for range 100 { // strangers that say nothing
		silent, err := net.Dial("tcp", a.addr)
		check(t, err)
		defer silent.Close()
	}
	c.status() // who is in stays in
}
