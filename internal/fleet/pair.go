package fleet

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"sync"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/pki"
	"headgate/tasks"
)

const (
	// DefaultTokenLife and MaxTokenLife bound enrolment tokens in time; a
	// token is a password that lies in provisioning scripts.
	DefaultTokenLife = time.Hour
	MaxTokenLife     = 24 * time.Hour
	// MaxTokenUses bounds how many agents one token enrols.
	MaxTokenUses = 1000
)

// CreateEnrolmentToken makes a token by which agents prove themselves. The
// text is given once; only the hash of its secret is kept.
func (f *Fleet) CreateEnrolmentToken(ctx context.Context, actor string, life time.Duration, uses int) (text string, expires time.Time, err error) {
	authority, err := f.ready()
	if err != nil {
		return "", time.Time{}, err
	}
	if life == 0 {
		life = DefaultTokenLife
	}
	if uses == 0 {
		uses = 1
	}
	if life < time.Second || life > MaxTokenLife || uses < 1 || uses > MaxTokenUses {
		return "", time.Time{}, fault.Newf(fault.Invalid, CodeInvalidLifetime,
			"A token lives up to %d hours and enrols 1 to %d agents.", int(MaxTokenLife.Hours()), MaxTokenUses)
	}
	token := pki.NewToken(pki.SPKI(authority.Certificate()))
	defer token.Zero()
	now := time.Now()
	row := EnrolmentToken{
		ID: tokenID(token), SecretHash: sha256.Sum256(token.Secret()[:]), CreatedAt: now, CreatedBy: actor,
		ExpiresAt: now.Add(life), MaxUses: uses,
	}
	if err := f.cfg.Store.InsertEnrolmentToken(ctx, row); err != nil {
		return "", time.Time{}, err
	}
	return token.Reveal(), row.ExpiresAt, nil
}

func tokenID(t *pki.Token) (id [8]byte) {
	_, _ = hex.Decode(id[:], []byte(t.ID())) // always 16 hexadecimal digits
	return id
}

// Pairings gives the newest runs of the pairing protocol.
func (f *Fleet) Pairings(ctx context.Context, limit int) ([]Pairing, error) {
	return f.cfg.Store.Pairings(ctx, limit)
}

// Pair dials the address, proves to the agent there that both know the token,
// has it prove the same, and enrols it. The outcome is on record whatever
// becomes of the caller, so the context's end does not interrupt it.
func (f *Fleet) Pair(ctx context.Context, actor, address, tokenText string) (View, error) {
	run, err := f.admitPairing(ctx, actor, address, tokenText)
	if err != nil {
		f.metrics.pairings.WithLabelValues(resultOf(err)).Inc()
		return View{}, err
	}
	defer run.token.Zero()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.cfg.Limits.PairTimeout)
	defer cancel()
	began := time.Now()
	view, err := run.do(ctx)
	f.metrics.pairings.WithLabelValues(resultOf(err)).Inc()
	run.record(ctx, err)
	if err != nil {
		roundUpTo(ctx, began, f.cfg.Limits.AnswerStep)
	}
	return view, err
}

// resultOf gives a closed set of labels: codes of this package and of faults.
func resultOf(err error) string {
	if err == nil {
		return "paired"
	}
	return fault.CodeOf(err)
}

// roundUpTo keeps the time of a failure from telling what lies at an address.
func roundUpTo(ctx context.Context, began time.Time, step time.Duration) {
	steps := time.Since(began)/step + 1
	pause(ctx, time.Until(began.Add(steps*step)))
}

// pairing is one run.
type pairing struct {
	f         *Fleet
	authority *pki.Authority
	token     *pki.Token
	row       Pairing
	tried     bool // the secret was used in a proof

	cc     *grpc.ClientConn
	link   *link
	stream grpc.BidiStreamingClient[agentpb.PairRequest, agentpb.PairReply]
	proof  pki.Transcript
	hello  *agentpb.PairHello // of the agent
}

// admitPairing does everything that needs no dial. The use of the token is
// counted here: before anybody gets a chance to answer.
func (f *Fleet) admitPairing(ctx context.Context, actor, address, tokenText string) (*pairing, error) {
	authority, err := f.ready()
	if err != nil {
		return nil, err
	}
	address, err = ParseAddress(address)
	if err != nil {
		return nil, err
	}
	token, err := pki.ParseToken(tokenText)
	if err != nil {
		return nil, err
	}
	if token.CA() != pki.SPKI(authority.Certificate()) {
		return nil, fault.New(fault.Invalid, CodeForeignToken, "The token was made by another fleet.").
			WithHint("Make a token on this fleet and start the agent's pairing with it.")
	}
	if wait := f.pairs.admit(actor, time.Now()); wait > 0 {
		return nil, fault.Newf(fault.Exhausted, CodePairingRate, "You have started %d pairings within a minute.", f.cfg.Limits.PairsPerMinute).
			WithHint("Go on in " + roundUp(wait) + ".")
	}
	if err := f.cfg.Store.UseEnrolmentToken(ctx, tokenID(token), sha256.Sum256(token.Secret()[:])); err != nil {
		return nil, err
	}
	run := &pairing{f: f, authority: authority, token: token, row: Pairing{
		ID: uuid.New(), Address: address, TokenID: tokenID(token), Actor: actor, StartedAt: time.Now(), State: "running",
	}}
	if err := f.cfg.Store.RecordPairing(ctx, run.row); err != nil {
		return nil, err
	}
	return run, nil
}

func (p *pairing) record(ctx context.Context, err error) {
	if err != nil && !p.tried {
		if err := p.f.cfg.Store.ReturnEnrolmentToken(ctx, p.row.TokenID); err != nil {
			p.f.log.Warn("cannot give back the use of an enrolment token", "err", err)
		}
	}
	p.row.State, p.row.Detail = "paired", ""
	if err != nil {
		p.row.State, p.row.Detail = "failed", "The pairing failed."
		if e, ok := errors.AsType[*fault.Error](err); ok {
			p.row.Detail = e.Message
		}
	}
	p.f.log.Info("pairing ended", "address", p.row.Address, "agent", p.row.AgentID, "actor", p.row.Actor, "result", resultOf(err), "err", err)
	if err := p.f.cfg.Store.RecordPairing(ctx, p.row); err != nil {
		p.f.log.Warn("cannot record the end of a pairing", "err", err)
	}
}

func (p *pairing) do(ctx context.Context) (View, error) {
	cc, l, err := p.f.dialer.client(p.row.Address, pki.DialPairing(p.f.identity))
	if err != nil {
		return View{}, p.noAgent(err)
	}
	p.cc, p.link = cc, l
	defer func() { _ = cc.Close() }() // it was our own; there is nobody to tell
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := p.greet(ctx); err != nil {
		return View{}, err
	}
	csr, err := p.prove()
	if err != nil {
		return View{}, err
	}
	return p.enrol(ctx, csr)
}

// greet exchanges the hellos; nothing secret has been used when it is over.
func (p *pairing) greet(ctx context.Context) error {
	stream, err := agentpb.NewPairingClient(p.cc).Pair(ctx)
	if err != nil {
		return p.explain(err)
	}
	p.stream = stream
	nonce, id := pki.NewNonce(), tokenID(p.token)
	mine := &agentpb.PairHello{
		Version: pki.PairingVersion, Nonce: nonce[:], Id: p.f.cfg.ControllerID.String(),
		Name: p.authority.Fleet(), Software: p.f.cfg.Version, TokenId: id[:],
	}
	if err := p.send(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Hello{Hello: mine}}); err != nil {
		return p.explain(err)
	}
	reply, err := stream.Recv()
	if err != nil {
		return p.explain(err)
	}
	if p.hello = reply.GetHello(); p.hello == nil || p.hello.GetVersion() != pki.PairingVersion {
		return broken("its greeting cannot be understood", nil)
	}
	return p.transcribe(nonce)
}

// send passes a message on. Of a stream that the agent has ended already it
// learns only that it is over; the Recv that follows says why.
func (p *pairing) send(m *agentpb.PairRequest) error {
	if err := p.stream.Send(m); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// transcribe collects what both sides must agree on, from what was seen here.
func (p *pairing) transcribe(nonce pki.Nonce) error {
	hello, state := p.hello, p.link.tls()
	leaf := state.PeerCertificates[0]
	theirs, err := pki.ParseNonce(hello.GetNonce())
	if err != nil {
		return broken("its nonce has the wrong length", err)
	}
	peer, err := pki.PeerOf(leaf)
	id, perr := uuid.Parse(hello.GetId())
	if err != nil || perr != nil || peer.ID != id || id == uuid.Nil() {
		return broken("its id and its certificate contradict each other", errors.Join(err, perr))
	}
	exporter, err := pki.Exporter(*state)
	if err != nil {
		return err
	}
	p.row.AgentID = id
	p.proof = pki.Transcript{
		Version: pki.PairingVersion, Exporter: exporter,
		ControllerSPKI: p.f.identity.SPKI(), AgentSPKI: pki.SPKI(leaf),
		ControllerID: p.f.cfg.ControllerID, AgentID: id, Fleet: p.authority.Fleet(), TokenID: p.token.ID(),
		ControllerNonce: nonce, AgentNonce: theirs,
	}
	return nil
}

// prove shows the agent that we know the secret, and has it show the same.
func (p *pairing) prove() (csr []byte, err error) {
	p.tried = true
	confirm := &agentpb.PairConfirm{Tag: pki.ControllerTag(p.token.Secret(), &p.proof)}
	if err := p.send(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Confirm{Confirm: confirm}}); err != nil {
		return nil, p.explain(err)
	}
	reply, err := p.stream.Recv()
	if err != nil {
		return nil, p.explain(err)
	}
	if reply.GetConfirm() == nil {
		return nil, broken("it left out its proof", nil)
	}
	if err := pki.CheckAnswer(p.token.Secret(), &p.proof, reply.GetConfirm().GetTag()); err != nil {
		return nil, wrongToken(err)
	}
	return reply.GetConfirm().GetCsr(), nil
}

// enrol stores the agent as enrolling, hands out its certificate and makes it
// active once the agent says that it has it.
func (p *pairing) enrol(ctx context.Context, csr []byte) (View, error) {
	request, err := pki.ParseRequest(csr)
	if err != nil {
		return View{}, broken("its certificate request is not acceptable", err)
	}
	leaf := p.link.tls().PeerCertificates[0]
	if !request.Key.Equal(leaf.PublicKey) {
		return View{}, broken("its certificate request is for another key than that of the connection", nil)
	}
	if len(request.Ignored) > 0 {
		p.f.log.Info("ignored parts of a certificate request", "agent", p.row.AgentID, "parts", request.Ignored)
	}
	now := time.Now()
	cert, err := p.authority.IssueAgent(request.Key, p.row.AgentID, now)
	if err != nil {
		return View{}, err
	}
	row, err := p.f.insertEnrolling(ctx, Agent{
		ID: p.row.AgentID, Name: p.name(), Addresses: []string{p.row.Address}, Labels: map[string]string{},
		Status: Enrolling, SPKI: p.proof.AgentSPKI, CertSerial: cert.SerialNumber.Text(16), CertExpires: cert.NotAfter,
		Hostname: clean(p.hello.GetHostname(), maxName), OS: clean(p.hello.GetOs(), maxName),
		Version: clean(p.hello.GetSoftware(), maxName), PairedAt: now, PairedBy: p.row.Actor,
	})
	if err != nil {
		return View{}, err
	}
	p.f.mu.Lock()
	epoch := p.f.held[tasks.ShardOf(row.ID)].lease.Epoch
	p.f.mu.Unlock()
	bundle := p.f.roots.Certificates()
	grant := &agentpb.PairEnrol{Certificate: cert.Raw, Fleet: p.authority.Fleet(), Shard: int32(tasks.ShardOf(row.ID)), Epoch: epoch}
	stored := sha256.New()
	stored.Write(cert.Raw)
	for _, c := range bundle {
		grant.Ca = append(grant.Ca, c.Raw)
		stored.Write(c.Raw)
	}
	done, err := p.handOver(grant, stored.Sum(nil))
	switch {
	case done:
		return p.f.confirm(ctx, row)
	case err == nil:
		return p.f.settleNow(ctx, row)
	}
	if _, rerr := p.f.cfg.Store.SetStatus(ctx, row.ID, Removed, "the agent refused its certificate", p.row.Actor); rerr != nil {
		p.f.log.Warn("cannot remove an agent that refused its certificate; it is swept later", "agent", row.ID, "err", rerr)
	}
	return View{}, err
}

// handOver sends the certificate. Neither done nor an error means that nobody
// knows whether the agent has it; an error, that the agent says it has not.
func (p *pairing) handOver(grant *agentpb.PairEnrol, stored []byte) (done bool, err error) {
	if err := p.stream.Send(&agentpb.PairRequest{Msg: &agentpb.PairRequest_Enrol{Enrol: grant}}); err != nil {
		return false, nil
	}
	reply, err := p.stream.Recv()
	if err == nil {
		return subtle.ConstantTimeCompare(reply.GetDone().GetStoredHash(), stored) == 1, nil
	}
	word, _, _ := strings.Cut(status.Convert(err).Message(), " ")
	switch word {
	case "UNACCEPTABLE_CERTIFICATE":
		return false, broken("the agent does not accept the certificate that it was given", err)
	case "DISK":
		return false, broken("the agent cannot write to its disk", err)
	}
	p.f.log.Info("the agent's word that it is enrolled got lost", "agent", p.row.AgentID, "err", err)
	return false, nil
}

// name takes the agent's wish, its host name, or its id, whichever is usable.
func (p *pairing) name() string {
	for _, wish := range []string{p.hello.GetName(), p.hello.GetHostname()} {
		if wish = strings.TrimSpace(clean(wish, maxNamePeople)); checkName(wish) == nil {
			return wish
		}
	}
	return "agent-" + p.row.AgentID.String()[:8]
}

// explain tells apart what people can do something about. What a stranger at
// the address says is never repeated.
func (p *pairing) explain(err error) error {
	_, first := p.link.failure()
	if e, ok := errors.AsType[*fault.Error](first); ok && e.Code == CodeAddressRefused {
		return e
	}
	s := status.Convert(err)
	word, _, _ := strings.Cut(s.Message(), " ")
	switch strings.TrimSuffix(word, ":") {
	case "WRONG_SECRET", "OTHER_TOKEN":
		if !strings.Contains(s.Message(), " 0 tries left") {
			return wrongToken(err)
		}
		return fault.Wrap(err, fault.Conflict, CodePairingLocked, "The agent has closed its pairing window after too many failed tries.").
			WithHint("Start pairing again on the agent itself, with a new token.")
	case "BUSY", "SLOW_DOWN":
		return fault.Wrap(err, fault.Exhausted, CodePairingBusy, "The agent is in the middle of another pairing, or had one a moment ago.").
			WithHint("Try again in a few seconds.")
	case "FOREIGN_CONTROLLER":
		return fault.Wrap(err, fault.Conflict, CodeForeignToken, "The agent was started with a token of another fleet.").
			WithHint("Make a token on this fleet and start the agent's pairing with it.")
	}
	switch {
	case p.tried && (s.Code() == codes.PermissionDenied || s.Code() == codes.Unauthenticated):
		return wrongToken(err)
	case p.tried:
		return broken("the connection ended", err)
	}
	return p.noAgent(errors.Join(err, first))
}

func (p *pairing) noAgent(err error) error {
	return fault.Wrap(err, fault.Conflict, CodeNoPairingMode, "No Headgate agent in pairing mode answers at "+p.row.Address+".").
		WithHint("Start \"headgate-agent --enrol-token-file FILE\" on that machine and check address, port and firewall; a paired agent must be removed first.")
}

func wrongToken(err error) error {
	return fault.Wrap(err, fault.Forbidden, CodeWrongToken,
		"The agent was started with another token, or somebody sits between this controller and the agent.").
		WithHint("Compare the key fingerprints that both sides show; if they agree, make a new token and start again.")
}

func broken(what string, err error) error {
	return fault.Wrap(err, fault.Conflict, CodePairingBroken, "The pairing broke off: "+what+".").
		WithHint("Try again; if it happens again, check the versions of both programs.")
}

// pairLimiter bounds how many addresses a user can have dialled.
type pairLimiter struct {
	perMinute int
	mu        sync.Mutex
	minute    map[string][]time.Time
}

// admit gives 0 or how long the user has to wait.
func (l *pairLimiter) admit(actor string, now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.minute == nil {
		l.minute = map[string][]time.Time{}
	}
	for who, times := range l.minute {
		for len(times) > 0 && now.Sub(times[0]) >= time.Minute {
			times = times[1:]
		}
		if l.minute[who] = times; len(times) == 0 {
			delete(l.minute, who)
		}
	}
	times := l.minute[actor]
	if len(times) >= l.perMinute {
		return time.Minute - now.Sub(times[0])
	}
	l.minute[actor] = append(times, now)
	return 0
}
