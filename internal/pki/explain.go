package pki

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"slices"
	"time"

	"headgate/internal/fault"
)

// alertProtocolVersion is TLS alert 70: the other side speaks no TLS 1.3.
const alertProtocolVersion = tls.AlertError(70)

// Codes of the faults that a dial to an agent ends with.
const (
	CodeNotAnAgent         = "not_an_agent"
	CodeOtherAgent         = "agent_identity_other"
	CodeKeyChanged         = "agent_key_changed"
	CodeAgentExpired       = "agent_certificate_expired"
	CodeAgentNotYetValid   = "agent_certificate_not_yet_valid"
	CodeAgentNotOurs       = "agent_not_ours"
	CodeRefusedByAgent     = "agent_refused_controller"
	CodeHandshakeTimeout   = "agent_handshake_timeout"
	CodeHandshakeFailed    = "agent_handshake_failed"
	hintPairAgain          = "Pair the agent again; if nobody has reinstalled it, find out who answers at this address."
	hintCheckAddress       = "Check the agent's address and port."
	messageNotAnAgent      = "What answers at this address is not a Headgate agent."
	messageHandshakeFailed = "The connection to the agent could not be secured."
)

func notAnAgent(err error) error {
	return fault.Wrap(err, fault.Conflict, CodeNotAnAgent, messageNotAnAgent).WithHint(hintCheckAddress)
}

// checkPin compares the key of a certificate that has passed verification.
func (d AgentDial) checkPin(leaf *x509.Certificate) error {
	if slices.Contains(d.Pins, SPKI(leaf)) {
		return nil
	}
	return fault.Newf(fault.Conflict, CodeKeyChanged,
		"Agent %s answers with a certificate of this fleet, but not with the key it was enrolled with.", d.ID).WithHint(hintPairAgain)
}

// Explain tells apart why a handshake by the configuration of DialAgent, or the
// first read after it, has failed. It needs the error as crypto/tls gave it;
// a library that flattens errors to text must be asked before it does so.
func (d AgentDial) Explain(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	if v, ok := errors.AsType[*tls.CertificateVerificationError](err); ok && len(v.UnverifiedCertificates) > 0 {
		return d.explainCertificate(v.UnverifiedCertificates[0], err, time.Now())
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return notAnAgent(err)
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" {
		if op.Err.Error() == alertProtocolVersion.Error() {
			return notAnAgent(err)
		}
		return fault.Wrap(err, fault.Conflict, CodeRefusedByAgent,
			"The agent does not accept this controller's certificate.").
			WithHint("Check the clocks of both machines; an agent that was paired with another fleet must be paired again.")
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return fault.Wrap(err, fault.Unavailable, CodeHandshakeTimeout,
			"Something accepts connections at this address but did not finish the TLS handshake in time.").WithHint(hintCheckAddress)
	}
	return fault.Wrap(err, fault.Unavailable, CodeHandshakeFailed, messageHandshakeFailed)
}

// explainCertificate looks at a certificate that was refused. The order is
// from "who is that at all" to "the right agent, but": crypto/x509 reports the
// first thing it finds, which would call a stranger a wrong name.
func (d AgentDial) explainCertificate(leaf *x509.Certificate, err error, now time.Time) error {
	peer, perr := PeerOf(leaf)
	if perr != nil || peer.Role != RoleAgent {
		return notAnAgent(errors.Join(err, perr))
	}
	if !d.signedByUs(leaf) {
		return fault.Wrap(err, fault.Conflict, CodeAgentNotOurs,
			"The agent that answers has not been enrolled in this fleet, or has lost its enrolment.").WithHint(hintPairAgain)
	}
	if peer.ID != d.ID {
		return fault.Wrap(err, fault.Conflict, CodeOtherAgent,
			"Agent "+peer.ID.String()+" answers at the address of agent "+d.ID.String()+".").
			WithHint("Correct the addresses of the two agents.")
	}
	if now.Before(leaf.NotBefore) {
		return fault.Wrap(err, fault.Conflict, CodeAgentNotYetValid,
			"The agent's certificate is valid only from "+leaf.NotBefore.UTC().Format(time.RFC3339)+" on.").
			WithHint("Set the clocks of the controllers; they differ.")
	}
	if now.After(leaf.NotAfter) {
		return fault.Wrap(err, fault.Conflict, CodeAgentExpired,
			"The agent's certificate expired on "+leaf.NotAfter.UTC().Format(time.RFC3339)+".").
			WithHint("Pair the agent again, and check the clock of this controller.")
	}
	return fault.Wrap(err, fault.Conflict, CodeHandshakeFailed, messageHandshakeFailed)
}

// signedByUs checks the signature alone: at the end of its life no leaf is
// outlived by its authority, so the time cannot spoil the answer.
func (d AgentDial) signedByUs(leaf *x509.Certificate) bool {
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots:       d.Roots.pool(),
		CurrentTime: leaf.NotAfter,
		KeyUsages:   []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	return err == nil
}
