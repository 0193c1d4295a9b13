package pki

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"uuid"

	"headgate/internal/fault"
)

const (
	// PairingVersion is the version of HG-PAIR that is spoken here.
	PairingVersion = 1
	// ExporterLabel binds a pairing to the one TLS connection it runs over.
	ExporterLabel = "EXPORTER-headgate-pair-v1"
	exporterSize  = 32
	// pairingDomain separates these MACs from any other use of a secret.
	pairingDomain = "headgate-pair-v1"
)

// Nonce is the random contribution of one side to a pairing.
type Nonce [32]byte

// NewNonce makes a fresh one.
func NewNonce() (n Nonce) {
	_, _ = rand.Read(n[:]) // documented never to fail
	return n
}

// ParseNonce takes one from a message; only the exact length is admitted.
func ParseNonce(b []byte) (Nonce, error) {
	if len(b) != len(Nonce{}) {
		return Nonce{}, fault.Newf(fault.Malformed, "pairing_malformed", "A pairing nonce has %d bytes, not %d.", len(Nonce{}), len(b))
	}
	return Nonce(b), nil
}

// Exporter gives the value that only the two ends of this very connection can
// know. Somebody in the middle has two connections with two different values.
func Exporter(state tls.ConnectionState) ([exporterSize]byte, error) {
	out, err := state.ExportKeyingMaterial(ExporterLabel, nil, exporterSize)
	if err != nil {
		return [exporterSize]byte{}, fault.Wrap(err, fault.Internal, "pairing_no_exporter", "The TLS connection gives no keying material.")
	}
	return [exporterSize]byte(out), nil
}

// Transcript is all that the two sides must agree on, each filled in from what
// it has itself seen on the wire, never from what the other side claims about
// the connection. A later proof by short code takes the same Transcript.
type Transcript struct {
	Version         uint32
	Exporter        [exporterSize]byte
	ControllerSPKI  Fingerprint
	AgentSPKI       Fingerprint
	ControllerID    uuid.UUID
	AgentID         uuid.UUID
	Fleet           string
	TokenID         string
	ControllerNonce Nonce
	AgentNonce      Nonce
}

// bytes writes the values with their lengths before them, so that no two
// transcripts have the same bytes.
func (t *Transcript) bytes() []byte {
	b := lv(nil, []byte(pairingDomain))
	b = lv(b, binary.BigEndian.AppendUint32(nil, t.Version))
	b = lv(b, t.Exporter[:])
	b = lv(b, t.ControllerSPKI[:])
	b = lv(b, t.AgentSPKI[:])
	b = lv(b, t.ControllerID[:])
	b = lv(b, t.AgentID[:])
	b = lv(b, []byte(t.Fleet))
	b = lv(b, []byte(t.TokenID))
	b = lv(b, t.ControllerNonce[:])
	return lv(b, t.AgentNonce[:])
}

// Hash names the run in audit records; it gives nothing away.
func (t *Transcript) Hash() [sha256.Size]byte { return sha256.Sum256(t.bytes()) }

// lv appends the length of v in four bytes and v itself.
func lv(b, v []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(v)))
	return append(b, v...)
}

// tag is HMAC-SHA-256 over role, transcript and exporter. The roles keep one
// side's tag from being sent back as the other's.
func tag(secret *Secret, role Role, t *Transcript) []byte {
	mac := hmac.New(sha256.New, secret[:])
	b := lv(nil, []byte(role))
	b = lv(b, t.bytes())
	mac.Write(lv(b, t.Exporter[:]))
	return mac.Sum(nil)
}

// ControllerTag is the dialler's proof. The dialler confirms first: whoever
// dials an agent gets no tag to test guesses with before it has shown its own.
func ControllerTag(secret *Secret, t *Transcript) []byte {
	return tag(secret, RoleController, t)
}

// AnswerTag checks the dialler's proof and only then gives the agent's.
func AnswerTag(secret *Secret, t *Transcript, controllerTag []byte) ([]byte, error) {
	if err := checkTag(secret, RoleController, t, controllerTag); err != nil {
		return nil, err
	}
	return tag(secret, RoleAgent, t), nil
}

// CheckAnswer is the dialler's check of the agent's proof.
func CheckAnswer(secret *Secret, t *Transcript, agentTag []byte) error {
	return checkTag(secret, RoleAgent, t, agentTag)
}

func checkTag(secret *Secret, role Role, t *Transcript, got []byte) error {
	if *secret == (Secret{}) {
		// A wiped secret is known to everybody and must prove nothing.
		return fault.New(fault.Internal, "pairing_secret_used", "The pairing secret has been used up.")
	}
	if !hmac.Equal(got, tag(secret, role, t)) {
		return fault.New(fault.Unauthenticated, "pairing_proof_failed",
			"Pairing failed: the two sides do not hold the same token, or somebody sits between this controller and the agent.").
			WithHint("Compare the key fingerprints that both sides show; if they agree, make a new token and try again.")
	}
	return nil
}
