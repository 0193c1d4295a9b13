package fleettest

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"sync"
	"testing"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/pki"
)

// Newcomer is an agent in pairing mode: it serves pairing on its first
// connections and, once it has a certificate, the fleet's sessions.
type Newcomer struct {
	*Agent
	Token *pki.Token
	// Step, if set, is asked before the agent says "hello", "confirm" and
	// "done" and before it does "store". An error ends the run.
	Step func(step string) error
	// CSR, if set, replaces the certificate request.
	CSR []byte

	mu     sync.Mutex
	paired bool
}

// NewNewcomer makes an agent that was given a token, on a free port.
func NewNewcomer(t testing.TB, token string) (*Newcomer, string) {
	t.Helper()
	parsed, err := pki.ParseToken(token)
	if err != nil {
		t.Fatal(err)
	}
	id := uuid.NewV4()
	identity, err := pki.NewAgentIdentity(id, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	n := &Newcomer{
		Agent: &Agent{ID: id, Name: "newcomer", Ledger: uuid.NewV4(), Instance: uuid.NewV4(), Identity: identity, Roots: &pki.Roots{}},
		Token: parsed,
	}
	n.TLS = pki.Switching(n.pick)
	n.Pairing = pairingServer{n: n}
	return n, n.Start(t)
}

// pick gives the rules for the next connection.
func (n *Newcomer) pick() *tls.Config {
	if n.Paired() {
		return pki.AgentServer(n.Identity, n.Roots)
	}
	return pki.PairingServer(n.Identity)
}

// Paired says whether the agent has its certificate.
func (n *Newcomer) Paired() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.paired
}

type pairingServer struct {
	agentpb.UnimplementedPairingServer
	n *Newcomer
}

func (n *Newcomer) step(name string) error {
	if n.Step == nil {
		return nil
	}
	return n.Step(name)
}

// Pair implements agentpb.PairingServer.
func (p pairingServer) Pair(stream grpc.BidiStreamingServer[agentpb.PairRequest, agentpb.PairReply]) error {
	n := p.n
	if n.Paired() {
		return status.Error(codes.FailedPrecondition, "WINDOW_CLOSED This agent is not in pairing mode.")
	}
	from, _ := peer.FromContext(stream.Context())
	state := from.AuthInfo.(credentials.TLSInfo).State
	controller, _, err := pki.CheckControllerChain(state.PeerCertificates, n.Token.CA())
	if err != nil {
		return status.Error(codes.PermissionDenied, "FOREIGN_CONTROLLER")
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	theirs, err := pki.ParseNonce(first.GetHello().GetNonce())
	if err != nil {
		return err
	}
	exporter, err := pki.Exporter(state)
	if err != nil {
		return err
	}
	mine := pki.NewNonce()
	transcript := &pki.Transcript{
		Version: pki.PairingVersion, Exporter: exporter,
		ControllerSPKI: pki.SPKI(state.PeerCertificates[0]), AgentSPKI: n.Identity.SPKI(),
		ControllerID: controller.ID, AgentID: n.ID, Fleet: first.GetHello().GetName(), TokenID: n.Token.ID(),
		ControllerNonce: theirs, AgentNonce: mine,
	}
	if err := n.step("hello"); err != nil {
		return err
	}
	hello := &agentpb.PairHello{Version: pki.PairingVersion, Nonce: mine[:], Id: n.ID.String(), Name: n.Name, Software: "test", Hostname: "host", Os: "linux"}
	if err := stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Hello{Hello: hello}}); err != nil {
		return err
	}
	return n.prove(stream, transcript)
}

func (n *Newcomer) prove(stream grpc.BidiStreamingServer[agentpb.PairRequest, agentpb.PairReply], transcript *pki.Transcript) error {
	second, err := stream.Recv()
	if err != nil {
		return err
	}
	tag, err := pki.AnswerTag(n.Token.Secret(), transcript, second.GetConfirm().GetTag())
	if err != nil {
		return status.Error(codes.Unauthenticated, "WRONG_SECRET The tokens differ; 4 tries left.")
	}
	if err := n.step("confirm"); err != nil {
		return err
	}
	csr, err := pki.NewRequest(n.Identity.Key())
	if n.CSR != nil {
		csr = n.CSR
	}
	if err != nil {
		return err
	}
	if err := stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Confirm{Confirm: &agentpb.PairConfirm{Tag: tag, Csr: csr}}}); err != nil {
		return err
	}
	third, err := stream.Recv()
	if err != nil {
		return err
	}
	hash, err := n.enrol(third.GetEnrol())
	if err != nil {
		return err
	}
	if err := n.step("done"); err != nil {
		return err
	}
	return stream.Send(&agentpb.PairReply{Msg: &agentpb.PairReply_Done{Done: &agentpb.PairDone{StoredHash: hash}}})
}

func (n *Newcomer) enrol(e *agentpb.PairEnrol) ([]byte, error) {
	cert, err := x509.ParseCertificate(e.GetCertificate())
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	hash.Write(cert.Raw)
	var bundle []*x509.Certificate
	for _, der := range e.GetCa() {
		ca, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		hash.Write(ca.Raw)
		bundle = append(bundle, ca)
	}
	if err := n.step("store"); err != nil {
		return nil, err
	}
	if err := n.Identity.Set(n.Identity.Key(), cert); err != nil {
		return nil, err
	}
	n.Roots.Set(bundle...)
	n.mu.Lock()
	n.paired = true
	n.mu.Unlock()
	return hash.Sum(nil), nil
}
