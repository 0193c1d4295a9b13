package pki_test

import (
	"bytes"
	"crypto/tls"
	"encoding/gob"
	"errors"
	"io"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

// hello, and the byte slices of the tags, are the messages of the tests' own
// pairing, which runs over real TLS connections.
type hello struct {
	ID    uuid.UUID
	Nonce []byte
	Fleet string
	Token string
}

// wire codes messages; gob keeps no read-ahead beyond one buffered reader, so
// each end keeps its coders for the whole connection.
type wire struct {
	*gob.Encoder
	*gob.Decoder
}

func newWire(rw io.ReadWriter) wire { return wire{gob.NewEncoder(rw), gob.NewDecoder(rw)} }

// pairController is the controller's part: it confirms first.
func pairController(c *tls.Conn, me *pki.Identity, id uuid.UUID, token *pki.Token) error {
	if err := c.Handshake(); err != nil {
		return err
	}
	w, nonce := newWire(c), pki.NewNonce()
	if err := w.Encode(hello{ID: id, Nonce: nonce[:], Fleet: "fleet-a", Token: token.ID()}); err != nil {
		return err
	}
	var theirs hello
	if err := w.Decode(&theirs); err != nil {
		return err
	}
	exporter, err := pki.Exporter(c.ConnectionState())
	if err != nil {
		return err
	}
	agentNonce, err := pki.ParseNonce(theirs.Nonce)
	if err != nil {
		return err
	}
	t := &pki.Transcript{
		Version: pki.PairingVersion, Exporter: exporter,
		ControllerSPKI: me.SPKI(), AgentSPKI: pki.SPKI(c.ConnectionState().PeerCertificates[0]),
		ControllerID: id, AgentID: theirs.ID, Fleet: "fleet-a", TokenID: token.ID(),
		ControllerNonce: nonce, AgentNonce: agentNonce,
	}
	if err := w.Encode(pki.ControllerTag(token.Secret(), t)); err != nil {
		return err
	}
	var answer []byte
	if err := w.Decode(&answer); err != nil {
		return err
	}
	return pki.CheckAnswer(token.Secret(), t, answer)
}

// pairAgent is the agent's part. It returns the tag that it has seen, for the
// replay test.
func pairAgent(s *tls.Conn, me *pki.Identity, id uuid.UUID, token *pki.Token, checkChain func(tls.ConnectionState) error) ([]byte, error) {
	if err := s.Handshake(); err != nil {
		return nil, err
	}
	state := s.ConnectionState()
	if err := checkChain(state); err != nil {
		return nil, err
	}
	w, nonce := newWire(s), pki.NewNonce()
	var theirs hello
	if err := w.Decode(&theirs); err != nil {
		return nil, err
	}
	if err := w.Encode(hello{ID: id, Nonce: nonce[:]}); err != nil {
		return nil, err
	}
	exporter, err := pki.Exporter(state)
	if err != nil {
		return nil, err
	}
	controllerNonce, err := pki.ParseNonce(theirs.Nonce)
	if err != nil {
		return nil, err
	}
	t := &pki.Transcript{
		Version: pki.PairingVersion, Exporter: exporter,
		ControllerSPKI: pki.SPKI(state.PeerCertificates[0]), AgentSPKI: me.SPKI(),
		ControllerID: theirs.ID, AgentID: id, Fleet: theirs.Fleet, TokenID: token.ID(),
		ControllerNonce: controllerNonce, AgentNonce: nonce,
	}
	var seen []byte
	if err := w.Decode(&seen); err != nil {
		return nil, err
	}
	answer, err := pki.AnswerTag(token.Secret(), t, seen)
	if err != nil {
		return seen, err
	}
	return seen, w.Encode(answer)
}

func chainOf(token *pki.Token) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return errors.New("no certificate")
		}
		_, _, err := pki.CheckControllerChain(s.PeerCertificates, token.CA())
		return err
	}
}

func anyChain(tls.ConnectionState) error { return nil }

// pairOver runs both parts over the two ends and closes them.
func pairOver(f fleet, agent *pki.Identity, s, c *tls.Conn, tokens [2]*pki.Token, check func(tls.ConnectionState) error) (agentErr, controllerErr error) {
	done := make(chan error, 1)
	go func() {
		_, err := pairAgent(s, agent, f.agentID, tokens[0], check)
		if err != nil {
			s.NetConn().Close()
		}
		done <- err
	}()
	controllerErr = pairController(c, f.controller, f.controllerID, tokens[1])
	c.NetConn().Close()
	return <-done, controllerErr
}

func TestPairingProvesTheSecretBothWays(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	agent := must[*pki.Identity](t)(pki.NewAgentIdentity(f.agentID, time.Now()))
	token := pki.NewToken(pki.SPKI(f.ca.Certificate()))
	other := pki.NewToken(token.CA())
	for name, tc := range map[string]struct {
		tokens [2]*pki.Token
		ok     bool
	}{
		"same token":       {[2]*pki.Token{token, token}, true},
		"different tokens": {[2]*pki.Token{token, other}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, c := connect(t, pki.PairingServer(agent), pki.DialPairing(f.controller))
			agentErr, controllerErr := pairOver(f, agent, s, c, tc.tokens, chainOf(token))
			if tc.ok != (agentErr == nil) || tc.ok != (controllerErr == nil) {
				t.Fatalf("agent %v, controller %v", agentErr, controllerErr)
			}
			if !tc.ok && fault.CodeOf(agentErr) != "pairing_proof_failed" {
				t.Fatalf("agent %v", agentErr)
			}
		})
	}
}

func TestTokenNamesTheOnlyFleetThatMayPair(t *testing.T) {
	t.Parallel()
	f, foreign := newFleet(t, "fleet-a"), newFleet(t, "fleet-a")
	agent := must[*pki.Identity](t)(pki.NewAgentIdentity(f.agentID, time.Now()))
	token := pki.NewToken(pki.SPKI(f.ca.Certificate()))
	// A leaf without its authority, an authority that is not the leaf's, and an
	// agent of the right fleet are each refused, although the secret is known.
	key := newKey(t)
	leaf, err := f.ca.IssueController(&key.PublicKey, f.controllerID, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	alone := must[*pki.Identity](t)(pki.NewIdentity(key, leaf))
	foreignLeaf, err := foreign.ca.IssueController(&key.PublicKey, f.controllerID, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	borrowed := must[*pki.Identity](t)(pki.NewIdentity(key, foreignLeaf, foreign.ca.Certificate(), f.ca.Certificate()))
	agentKey := newKey(t)
	agentLeaf, err := f.ca.IssueAgent(&agentKey.PublicKey, uuid.New(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	asAgent := must[*pki.Identity](t)(pki.NewIdentity(agentKey, agentLeaf, f.ca.Certificate()))
	for name, dialler := range map[string]*pki.Identity{
		"foreign": foreign.controller, "leaf alone": alone, "borrowed authority": borrowed, "an agent": asAgent,
	} {
		g := f
		g.controller = dialler
		s, c := connect(t, pki.PairingServer(agent), pki.DialPairing(dialler))
		agentErr, controllerErr := pairOver(g, agent, s, c, [2]*pki.Token{token, token}, chainOf(token))
		if fault.CodeOf(agentErr) != "pairing_foreign_controller" || controllerErr == nil {
			t.Errorf("%s: agent %v, controller %v", name, agentErr, controllerErr)
		}
	}
}

// relay copies decrypted bytes between its two TLS legs, as somebody in the
// middle would who can answer for both sides but knows no secret.
func relay(front, back *tls.Conn, done chan<- struct{}) {
	pump := func(dst, src *tls.Conn) {
		_, _ = io.Copy(dst, src) // ends with either leg
		dst.NetConn().Close()
		src.NetConn().Close()
		done <- struct{}{}
	}
	if errors.Join(front.Handshake(), back.Handshake()) != nil {
		front.NetConn().Close()
		back.NetConn().Close()
		done <- struct{}{}
		done <- struct{}{}
		return
	}
	go pump(back, front)
	pump(front, back)
}

func TestManInTheMiddleFailsAlthoughTheSecretIsRight(t *testing.T) {
	t.Parallel()
	const runs = 50
	f := newFleet(t, "fleet-a")
	agent := must[*pki.Identity](t)(pki.NewAgentIdentity(f.agentID, time.Now()))
	fake := must[*pki.Identity](t)(pki.NewAgentIdentity(f.agentID, time.Now()))
	// The strongest case: the one in the middle holds a valid controller
	// certificate of the fleet, so that only the channel binding is left.
	insider := f.newController(t, uuid.New(), time.Now())
	for i := range runs {
		token := pki.NewToken(pki.SPKI(f.ca.Certificate()))
		front, c := connect(t, pki.PairingServer(fake), pki.DialPairing(f.controller))
		s, back := connect(t, pki.PairingServer(agent), pki.DialPairing(insider))
		done := make(chan struct{}, 2)
		go relay(front, back, done)
		agentErr, controllerErr := pairOver(f, agent, s, c, [2]*pki.Token{token, token}, chainOf(token))
		<-done
		<-done
		if fault.CodeOf(agentErr) != "pairing_proof_failed" || controllerErr == nil {
			t.Fatalf("run %d: agent %v, controller %v", i, agentErr, controllerErr)
		}
	}
}

func TestRecordedProofIsWorthlessOnAnotherConnection(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	agent := must[*pki.Identity](t)(pki.NewAgentIdentity(f.agentID, time.Now()))
	token := pki.NewToken(pki.SPKI(f.ca.Certificate()))
	type run struct {
		tag []byte
		err error
	}
	agentRun := func(s *tls.Conn) <-chan run {
		done := make(chan run, 1)
		go func() {
			tag, err := pairAgent(s, agent, f.agentID, token, anyChain)
			s.NetConn().Close()
			done <- run{tag, err}
		}()
		return done
	}
	s, c := connect(t, pki.PairingServer(agent), pki.DialPairing(f.controller))
	first := agentRun(s)
	if err := pairController(c, f.controller, f.controllerID, token); err != nil {
		t.Fatal(err)
	}
	recorded := <-first

	s, c = connect(t, pki.PairingServer(agent), pki.DialPairing(f.controller))
	second := agentRun(s)
	w, nonce := newWire(c), pki.NewNonce()
	if err := errors.Join(w.Encode(hello{ID: f.controllerID, Nonce: nonce[:], Fleet: "fleet-a"}), w.Decode(&hello{}), w.Encode(recorded.tag)); err != nil {
		t.Fatal(err)
	}
	if r := <-second; fault.CodeOf(r.err) != "pairing_proof_failed" {
		t.Fatalf("replay: %v", r.err)
	}
}

func TestTagsCoverEveryPartOfTheTranscript(t *testing.T) {
	t.Parallel()
	secret := pki.NewToken(pki.Fingerprint{}).Secret()
	base := pki.Transcript{Version: 1, Fleet: "a", TokenID: "b"}
	want := pki.ControllerTag(secret, &base)
	for name, change := range map[string]func(*pki.Transcript){
		"version":          func(t *pki.Transcript) { t.Version++ },
		"exporter":         func(t *pki.Transcript) { t.Exporter[31]++ },
		"controller key":   func(t *pki.Transcript) { t.ControllerSPKI[0]++ },
		"agent key":        func(t *pki.Transcript) { t.AgentSPKI[0]++ },
		"controller id":    func(t *pki.Transcript) { t.ControllerID[0]++ },
		"agent id":         func(t *pki.Transcript) { t.AgentID[0]++ },
		"fleet":            func(t *pki.Transcript) { t.Fleet = "" },
		"token":            func(t *pki.Transcript) { t.TokenID = "a" },
		"controller nonce": func(t *pki.Transcript) { t.ControllerNonce[0]++ },
		"agent nonce":      func(t *pki.Transcript) { t.AgentNonce[0]++ },
	} {
		changed := base
		change(&changed)
		if _, err := pki.AnswerTag(secret, &changed, want); fault.CodeOf(err) != "pairing_proof_failed" {
			t.Errorf("%s is not covered: %v", name, err)
		}
	}
	answer, err := pki.AnswerTag(secret, &base, want)
	if err != nil {
		t.Fatal(err)
	}
	if err := pki.CheckAnswer(secret, &base, want); err == nil {
		t.Error("the controller's own tag sent back to it was accepted")
	}
	if err := pki.CheckAnswer(secret, &base, answer); err != nil {
		t.Error(err)
	}
	for _, short := range [][]byte{nil, answer[:31], append(bytes.Clone(answer), 0)} {
		if pki.CheckAnswer(secret, &base, short) == nil {
			t.Errorf("a tag of %d bytes was accepted", len(short))
		}
	}
	secret.Zero()
	if _, err := pki.AnswerTag(secret, &base, pki.ControllerTag(secret, &base)); fault.CodeOf(err) != "pairing_secret_used" {
		t.Errorf("a wiped secret: %v", err)
	}
}

func FuzzTranscriptIsInjective(f *testing.F) {
	f.Add("a", "bc", "ab", "c", uint32(1), uint32(1), []byte{1}, []byte{1})
	f.Add("", "", "\x00\x00\x00\x01", "", uint32(0), uint32(1), []byte{}, []byte{})
	f.Add("a\x00\x00\x00\x01b", "", "a", "b", uint32(1), uint32(1), []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, fleet1, token1, fleet2, token2 string, v1, v2 uint32, n1, n2 []byte) {
		a := pki.Transcript{Version: v1, Fleet: fleet1, TokenID: token1}
		b := pki.Transcript{Version: v2, Fleet: fleet2, TokenID: token2}
		copy(a.AgentNonce[:], n1)
		copy(b.AgentNonce[:], n2)
		if (a == b) != (a.Hash() == b.Hash()) {
			t.Fatalf("%+v and %+v: equal hashes %v", a, b, a.Hash() == b.Hash())
		}
	})
}
