package agent

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/pki"
)

type pairStream = grpc.BidiStreamingServer[agentpb.PairRequest, agentpb.PairReply]

// pairing is the agent's side of HG-PAIR/1 by token, open for one window.
type pairing struct {
	agentpb.UnimplementedPairingServer

	state    *state
	epochs   *epochs
	token    *pki.Token
	config   Config
	log      *slog.Logger
	readers  sync.WaitGroup
	finished chan error // nil: paired; else why the window closed; never blocks
	port     *phase     // set before serving

	mu      sync.Mutex // guards all below
	running bool
	closed  bool
	lastRun time.Time // zero before the first
	tries   tries
}

// tries is what is kept on disk of failed runs, for each token anew.
type tries struct {
	Token    string `json:"token_id"`
	Failures int    `json:"failures"`
}

// openPairing reads the token and what is known of its earlier tries.
func openPairing(c Config, s *state, e *epochs) (*pairing, error) {
	if c.EnrolTokenFile == "" {
		return nil, fault.New(fault.Conflict, "not_enrolled", "This agent does not belong to a fleet yet.").
			WithHint("Make an enrolment token on a controller, store it in a file and start the agent with --enrol-token-file FILE.")
	}
	text, err := os.ReadFile(c.EnrolTokenFile)
	if err != nil {
		return nil, fault.Wrap(err, fault.NotFound, "enrol_token_unreadable", "The enrolment token file "+c.EnrolTokenFile+" cannot be read.")
	}
	defer clear(text)
	token, err := pki.ParseToken(string(text))
	if err != nil {
		return nil, err
	}
	p := &pairing{state: s, epochs: e, token: token, config: c, log: c.Logger, finished: make(chan error, 1)}
	if err := s.loadJSON(pairingFile, &p.tries); err != nil {
		return nil, err
	}
	if p.tries.Token != token.ID() {
		p.tries = tries{Token: token.ID()}
	}
	if p.tries.Failures >= c.Limits.PairingFailures {
		return nil, p.locked()
	}
	return p, nil
}

func (p *pairing) locked() error {
	return fault.Newf(fault.Forbidden, "pairing_locked", "Pairing with token %s is locked after %d failed tries.", p.tries.Token, p.tries.Failures).
		WithHint("Find out who dialled with a wrong secret, then make a new token and start the agent with it.")
}

// begin admits one run and counts it as failed before it goes on.
func (p *pairing) begin(now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return status.Error(codes.FailedPrecondition, "WINDOW_CLOSED This agent is not in pairing mode any more.")
	case p.running:
		return status.Error(codes.ResourceExhausted, "BUSY Another pairing is running.")
	case !p.lastRun.IsZero() && now.Sub(p.lastRun) < p.config.Limits.PairingSpacing:
		return status.Errorf(codes.ResourceExhausted, "SLOW_DOWN Pairing may be tried once in %s.", p.config.Limits.PairingSpacing)
	}
	p.tries.Failures++
	if err := p.state.saveJSON(pairingFile, p.tries); err != nil {
		p.tries.Failures--
		p.log.Error("count a try of pairing", "err", err)
		return status.Error(codes.Unavailable, "DISK The agent cannot write to its data directory.")
	}
	p.running, p.lastRun = true, now
	return nil
}

// proven takes the failure back: the dialler knows the secret.
func (p *pairing) proven() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tries.Failures--
	return p.state.saveJSON(pairingFile, p.tries)
}

// end is called when a run is over; after too many failures the window closes.
func (p *pairing) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = false
	if p.tries.Failures >= p.config.Limits.PairingFailures {
		p.closeLocked(p.locked())
	}
}

// close ends the window; the first reason counts.
func (p *pairing) close(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closeLocked(why)
}

func (p *pairing) closeLocked(why error) {
	if !p.closed {
		p.closed = true
		p.finished <- why // buffered, and sent once
	}
}

func (p *pairing) left() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.config.Limits.PairingFailures - p.tries.Failures
}

// Pair serves one run. Nothing is sent before the dialler's certificates have
// been found to lead to the authority that the token names.
func (p *pairing) Pair(stream pairStream) error {
	from, tlsState, err := connection(stream.Context())
	if err != nil {
		return err
	}
	log := p.log.With("from", from)
	controller, ca, err := pki.CheckControllerChain(tlsState.PeerCertificates, p.token.CA())
	if err != nil {
		log.Warn("refuse to pair", "err", err)
		return status.Error(codes.PermissionDenied, "FOREIGN_CONTROLLER The enrolment token was made for another fleet.")
	}
	done := make(chan struct{})
	defer close(done)
	timer := time.NewTimer(p.config.Limits.PairingRun)
	defer timer.Stop()
	r := &pairRun{pairing: p, stream: stream, tls: tlsState, controller: controller, ca: ca, in: p.receive(stream, done), timeout: timer.C}
	err = r.run()
	if err != nil {
		log.Warn("pairing failed", "controller", controller.ID, "tries_left", p.left(), "err", err)
		return err
	}
	log.Info("paired", "controller", controller.ID, "fleet", r.fleet)
	p.close(nil)
	return nil
}

func connection(ctx context.Context) (string, tls.ConnectionState, error) {
	pr, ok := peer.FromContext(ctx)
	if ok {
		if info, isTLS := pr.AuthInfo.(credentials.TLSInfo); isTLS {
			return pr.Addr.String(), info.State, nil
		}
	}
	return "", tls.ConnectionState{}, status.Error(codes.Internal, "NO_TLS The connection is not secured.")
}

// receive reads messages in a goroutine that ends with the stream, so that a
// run can wait for them and for its time limit at once.
func (p *pairing) receive(stream pairStream, done <-chan struct{}) <-chan *agentpb.PairRequest {
	in := make(chan *agentpb.PairRequest)
	p.readers.Go(func() {
		defer close(in)
		for {
			m, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case in <- m:
			case <-done:
				return
			}
		}
	})
	return in
}

// pairRun is one run of the protocol.
type pairRun struct {
	*pairing
	stream     pairStream
	tls        tls.ConnectionState
	controller pki.Peer
	ca         *x509.Certificate // the authority that the token names
	in         <-chan *agentpb.PairRequest
	timeout    <-chan time.Time
	fleet      string
}

func (r *pairRun) run() error {
	m, err := r.next()
	if err != nil {
		return err
	}
	transcript, err := r.hello(m.GetHello())
	if err != nil {
		return err
	}
	if err := r.begin(time.Now()); err != nil {
		return err
	}
	defer r.end()
	reply := &agentpb.PairHello{
		Version: pki.PairingVersion, Nonce: transcript.AgentNonce[:], Id: r.state.id.String(), Name: r.wantedName(),
		Software: r.config.Version, Hostname: hostname(), Os: osName(),
	}
	if err := r.stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Hello{Hello: reply}}); err != nil {
		return err
	}
	if m, err = r.next(); err != nil {
		return err
	}
	if err := r.confirm(transcript, m.GetConfirm()); err != nil {
		return err
	}
	if m, err = r.next(); err != nil {
		return err
	}
	hash, err := r.enrol(m.GetEnrol())
	if err != nil {
		return err
	}
	return r.stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Done{Done: &agentpb.PairDone{StoredHash: hash}}})
}

func (r *pairRun) wantedName() string {
	if r.config.Name != "" {
		return r.config.Name
	}
	return hostname()
}

func (r *pairRun) next() (*agentpb.PairRequest, error) {
	select {
	case m, ok := <-r.in:
		if !ok {
			return nil, status.Error(codes.Aborted, "BROKEN_OFF The other side ended the pairing.")
		}
		return m, nil
	case <-r.timeout:
		return nil, status.Errorf(codes.DeadlineExceeded, "TOO_SLOW A pairing has %s.", r.config.Limits.PairingRun)
	}
}

func malformed(what string) error {
	return status.Error(codes.InvalidArgument, "MALFORMED "+what)
}

// hello checks the dialler's first message and begins the transcript. Nothing
// in it tests the secret, so what fails here is not counted.
func (r *pairRun) hello(h *agentpb.PairHello) (*pki.Transcript, error) {
	if h == nil {
		return nil, malformed("A pairing begins with a Hello.")
	}
	if h.GetVersion() != pki.PairingVersion {
		return nil, status.Errorf(codes.FailedPrecondition, "UNSUPPORTED_VERSION This agent speaks version %d of pairing, not %d.", pki.PairingVersion, h.GetVersion())
	}
	nonce, err := pki.ParseNonce(h.GetNonce())
	if err != nil {
		return nil, malformed("The nonce has the wrong length.")
	}
	if id, err := uuid.Parse(h.GetId()); err != nil || id != r.controller.ID {
		return nil, malformed("The controller's id is not that of its certificate.")
	}
	if hex.EncodeToString(h.GetTokenId()) != r.token.ID() {
		return nil, status.Error(codes.NotFound, "OTHER_TOKEN This agent was given another enrolment token.")
	}
	exporter, err := pki.Exporter(r.tls)
	if err != nil {
		return nil, err
	}
	return &pki.Transcript{
		Version: pki.PairingVersion, Exporter: exporter,
		ControllerSPKI: pki.SPKI(r.tls.PeerCertificates[0]), AgentSPKI: r.state.identity.SPKI(),
		ControllerID: r.controller.ID, AgentID: r.state.id, Fleet: h.GetName(), TokenID: r.token.ID(),
		ControllerNonce: nonce, AgentNonce: pki.NewNonce(),
	}, nil
}

// confirm checks the dialler's proof and answers with ours.
func (r *pairRun) confirm(t *pki.Transcript, c *agentpb.PairConfirm) error {
	if c == nil {
		return malformed("After Hello comes Confirm.")
	}
	tag, err := pki.AnswerTag(r.token.Secret(), t, c.GetTag())
	if err != nil {
		return status.Errorf(codes.Unauthenticated, "WRONG_SECRET The two sides do not hold the same token, or somebody sits between them; %d tries left.", r.left())
	}
	if err := r.proven(); err != nil {
		return status.Error(codes.Unavailable, "DISK The agent cannot write to its data directory.")
	}
	csr, err := pki.NewRequest(r.state.identity.Key())
	if err != nil {
		return err
	}
	return r.stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Confirm{Confirm: &agentpb.PairConfirm{Tag: tag, Csr: csr}}})
}

// enrol checks and stores what the fleet gives.
func (r *pairRun) enrol(e *agentpb.PairEnrol) ([]byte, error) {
	if e == nil {
		return nil, malformed("After Confirm comes Enrol.")
	}
	leaf, bundle, err := r.checkEnrol(e)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, "UNACCEPTABLE_CERTIFICATE "+err.Error())
	}
	err = r.epochs.raise(e.GetShard(), e.GetEpoch())
	if err == nil {
		err = r.state.storeFleet(leaf, bundle)
	}
	if err != nil {
		r.log.Error("store the fleet's certificates", "err", err)
		return nil, status.Error(codes.Unavailable, "DISK The agent cannot write to its data directory.")
	}
	r.fleet = e.GetFleet()
	r.port.pause() // whoever dials once Done has arrived shall meet a member of the fleet
	return storedHash(leaf, bundle), nil
}

func (r *pairRun) checkEnrol(e *agentpb.PairEnrol) (*x509.Certificate, []*x509.Certificate, error) {
	leaf, err := x509.ParseCertificate(e.GetCertificate())
	if err != nil {
		return nil, nil, errors.New("the certificate cannot be read")
	}
	if n := len(e.GetCa()); n == 0 || n > pairingBundle {
		return nil, nil, fmt.Errorf("a bundle has 1 to %d authorities, not %d", pairingBundle, n)
	}
	pool := x509.NewCertPool()
	var bundle []*x509.Certificate
	for _, der := range e.GetCa() {
		ca, err := x509.ParseCertificate(der)
		if err != nil || !ca.IsCA {
			return nil, nil, errors.New("the bundle holds something else than authorities")
		}
		pool.AddCert(ca)
		bundle = append(bundle, ca)
	}
	if !slices.ContainsFunc(bundle, r.ca.Equal) {
		return nil, nil, errors.New("the bundle lacks the authority that the token names")
	}
	peer, err := pki.PeerOf(leaf)
	if err != nil || peer.Role != pki.RoleAgent || peer.ID != r.state.id || pki.SPKI(leaf) != r.state.identity.SPKI() {
		return nil, nil, errors.New("the certificate is not for this agent's id and key")
	}
	_, err = leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err != nil {
		return nil, nil, fmt.Errorf("the certificate does not lead to the bundle: %w", err)
	}
	if len(leaf.ExtKeyUsage) != 1 || leaf.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth {
		return nil, nil, errors.New("the certificate of an agent is for serving and nothing else")
	}
	return leaf, bundle, nil
}

// storedHash is SHA-256 over the DER forms of the certificate and of the
// bundle's authorities, in the order in which they were given.
func storedHash(leaf *x509.Certificate, bundle []*x509.Certificate) []byte {
	h := sha256.New()
	h.Write(leaf.Raw)
	for _, ca := range bundle {
		h.Write(ca.Raw)
	}
	return h.Sum(nil)
}

// storeFleet makes the agent a member: all files are written to a new folder,
// whose rename is the one moment from which on the agent is paired.
func (s *state) storeFleet(leaf *x509.Certificate, bundle []*x509.Certificate) error {
	if err := s.removeHalfPaired(); err != nil {
		return err
	}
	member, err := pki.NewIdentity(s.identity.Key(), leaf)
	if err != nil {
		return err
	}
	if err := s.dir.Write(fleetNewDir+"/"+bundleFile, pki.EncodeCertificates(bundle...)); err != nil {
		return err
	}
	if err := member.Save(s.dir, fleetNewDir+"/"+identityFile); err != nil {
		return err
	}
	old, renamed := filepath.Join(s.dir.Path(), fleetNewDir), filepath.Join(s.dir.Path(), fleetDir)
	if err := os.Rename(old, renamed); err != nil {
		return err
	}
	d, err := os.Open(s.dir.Path())
	if err != nil {
		return err
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return err
	}
	s.roots.Set(bundle...)
	s.identity, s.paired = member, true
	return nil
}
