package pki

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strings"

	"headgate/internal/fault"
)

const (
	tokenPrefix = "hg1_"
	secretSize  = 32 // bytes; nothing shorter than 128 bits may go without a PAKE
	tokenIDSize = 8  // bytes; names the token, is no secret
	// maxTokenText bounds what Parse looks at; a token has exactly 100 characters.
	maxTokenText = 256
)

// tokenCoding refuses spare bits, so that a token has one spelling only.
func tokenCoding() *base64.Encoding { return base64.RawURLEncoding.Strict() }

// Secret is what both sides of a pairing have to know.
type Secret [secretSize]byte

// Zero wipes the secret; it cannot be used afterwards.
func (s *Secret) Zero() { clear(s[:]) }

// Format hides the secret from every verb of package fmt.
func (Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte("[hidden]")) }

// LogValue hides the secret in logs.
func (Secret) LogValue() slog.Value { return slog.StringValue("[hidden]") }

// MarshalText refuses: a secret is never part of a document by accident.
func (Secret) MarshalText() ([]byte, error) {
	return nil, fault.New(fault.Internal, "secret_not_serialized", "A secret is not written into documents.")
}

// Token lets machines enrol without a person: it carries the secret that both
// sides prove, and names the one authority that the agent is to trust. It is
// printed masked; only Reveal gives the text to hand out.
type Token struct {
	ca     Fingerprint
	secret Secret
	id     [tokenIDSize]byte
}

// NewToken makes a token for the fleet whose authority has that fingerprint.
func NewToken(ca Fingerprint) *Token {
	t := &Token{ca: ca}
	_, _ = rand.Read(t.secret[:]) // documented never to fail
	_, _ = rand.Read(t.id[:])
	return t
}

// ParseToken reads the text of a token; white space around it, as a file has
// it at its end, is ignored. The fault never repeats the text.
func ParseToken(text string) (*Token, error) {
	bad := fault.New(fault.Invalid, "invalid_enrolment_token", "The text is not a complete Headgate enrolment token.").
		WithHint("Copy the whole token, from hg1_ to its end; it has 100 characters.")
	if len(text) > maxTokenText {
		return nil, bad
	}
	body, ok := strings.CutPrefix(strings.TrimSpace(text), tokenPrefix)
	if !ok || strings.ContainsAny(body, "\r\n") { // which the decoder would skip
		return nil, bad
	}
	raw, err := tokenCoding().DecodeString(body)
	defer clear(raw)
	t := &Token{}
	if err != nil || len(raw) != len(t.ca)+secretSize+tokenIDSize {
		return nil, bad
	}
	rest := raw[copy(t.ca[:], raw):]
	rest = rest[copy(t.secret[:], rest):]
	copy(t.id[:], rest)
	return t, nil
}

// Reveal gives the text of the token in clear. Show it once, store it nowhere.
func (t *Token) Reveal() string {
	raw := bytes.Join([][]byte{t.ca[:], t.secret[:], t.id[:]}, nil)
	defer clear(raw)
	return tokenPrefix + tokenCoding().EncodeToString(raw)
}

// CA gives the fingerprint of the authority that the agent is to trust.
func (t *Token) CA() Fingerprint { return t.ca }

// ID names the token in logs and tables; it is no secret.
func (t *Token) ID() string { return hex.EncodeToString(t.id[:]) }

// Secret gives the secret itself, not a copy, so that Zero reaches it.
func (t *Token) Secret() *Secret { return &t.secret }

// Zero wipes the secret when the token has been used.
func (t *Token) Zero() { t.secret.Zero() }

func (t Token) masked() string { return tokenPrefix + "[hidden, id " + t.ID() + "]" }

// String gives a masked form, for people.
func (t Token) String() string { return t.masked() }

// Format gives the masked form for every verb of package fmt.
func (t Token) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(t.masked())) }

// LogValue gives the masked form.
func (t Token) LogValue() slog.Value { return slog.StringValue(t.masked()) }

// MarshalText refuses, see Secret.
func (t Token) MarshalText() ([]byte, error) { return t.secret.MarshalText() }
