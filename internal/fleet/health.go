package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

// Causes of Live.Cause: stable codes for why an agent is not connected.
const (
	CauseRefused          = "refused"             // nobody listens there
	CauseTimeout          = "timeout"             // no answer to TCP or TLS in time
	CauseUnreachable      = "unreachable"         // the network says there is no way
	CauseNoSuchHost       = "no_such_host"        // the name does not resolve
	CauseNoAddress        = "no_address"          // none is configured
	CauseAddressRefused   = "address_refused"     // the dial policy forbids it
	CauseNotAnAgent       = "not_an_agent"        // something else answers
	CauseOtherAgent       = "other_agent"         // another agent answers there
	CauseKeyChanged       = "key_changed"         // a certificate of the fleet, another key
	CauseExpired          = "certificate_expired" // of the agent
	CauseNotYetValid      = "certificate_not_yet_valid"
	CauseUnknownCA        = "unknown_ca"        // enrolled elsewhere, or not any more
	CauseControllerDenied = "controller_denied" // the agent refuses our certificate
	CauseStaleEpoch       = "stale_epoch"       // the agent has seen a newer owner
	CauseSilent           = "silent"            // connected, but not a word
	CauseEnded            = "ended"             // the agent or the network closed the session
	CauseProtocol         = "protocol_broken"   // what the agent sends makes no sense
	CauseDatabase         = "database"          // what the agent said could not be recorded
	CauseReconnect        = "reconnect"         // ended by us, to begin anew
)

// trouble is why a dial or a session ended, for people and for programs.
type trouble struct {
	cause    string
	sentence string
	address  string
	err      error // for the log
}

// Error gives cause, sentence and the hidden reason.
func (t *trouble) Error() string {
	if t.err != nil {
		return t.cause + ": " + t.sentence + ": " + t.err.Error()
	}
	return t.cause + ": " + t.sentence
}

// Unwrap gives the hidden reason.
func (t *trouble) Unwrap() error { return t.err }

// wordsOf maps what the certificate checks say to our causes and to short
// sentences; %s is the address.
func wordsOf(code string) (cause, sentence string) {
	switch code {
	case CodeAddressRefused:
		return CauseAddressRefused, "%s may not be dialled"
	case pki.CodeNotAnAgent:
		return CauseNotAnAgent, "what answers at %s is not a Headgate agent"
	case pki.CodeOtherAgent:
		return CauseOtherAgent, "another agent answers at %s"
	case pki.CodeKeyChanged:
		return CauseKeyChanged, "the agent at %s has not the key it was enrolled with"
	case pki.CodeAgentExpired:
		return CauseExpired, "the certificate of the agent at %s has expired"
	case pki.CodeAgentNotYetValid:
		return CauseNotYetValid, "the certificate of the agent at %s is not valid yet"
	case pki.CodeAgentNotOurs:
		return CauseUnknownCA, "the agent at %s is not enrolled in this fleet"
	case pki.CodeRefusedByAgent:
		return CauseControllerDenied, "the agent at %s does not accept this controller's certificate"
	case pki.CodeHandshakeTimeout:
		return CauseTimeout, "%s accepts connections but did not finish the TLS handshake"
	case pki.CodeHandshakeFailed:
		return CauseNotAnAgent, "the connection to %s could not be secured"
	default:
		return CauseUnreachable, "the connection to %s failed"
	}
}

// explain says why a dial failed, from the first error of its transport.
func (d *dialer) explain(l *link, dial pki.AgentDial) *trouble {
	where, err := l.failure()
	t := &trouble{address: where, err: err}
	if t.cause, t.sentence = d.network(err, where); t.cause == "" {
		t.err = dial.Explain(err)
		cause, sentence := wordsOf(fault.CodeOf(t.err))
		t.cause, t.sentence = cause, fmt.Sprintf(sentence, where)
	}
	return t
}

// network recognizes what the network itself says; "" = nothing of it.
func (d *dialer) network(err error, where string) (cause, sentence string) {
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.As(err, &dns):
		return CauseNoSuchHost, fmt.Sprintf("the name %s does not resolve", dns.Name)
	case errors.Is(err, syscall.ECONNREFUSED):
		return CauseRefused, "connection refused by " + where
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return CauseUnreachable, fmt.Sprintf("there is no way to %s in the network", where)
	case errors.As(err, &op) && op.Op == "dial" && (op.Timeout() || errors.Is(err, context.DeadlineExceeded)):
		return CauseTimeout, fmt.Sprintf("no answer from %s within %s", where, d.limits.ConnectTimeout)
	case errors.Is(err, errNoH2):
		return CauseNotAnAgent, fmt.Sprintf("what answers at %s is not a Headgate agent", where)
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return CauseEnded, where + " closed the connection"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return CauseTimeout, where + " accepts connections but did not finish the TLS handshake"
	case errors.Is(err, net.ErrClosed): // by gRPC, when it had waited long enough
		return CauseTimeout, where + " accepts connections but does not speak"
	}
	return "", ""
}

// sentence completes a cause with its numbers as they are now.
func (l Live) sentence(now time.Time) string {
	if l.Sentence == "" || l.Health != HealthUnreachable {
		return l.Sentence
	}
	var b strings.Builder
	b.WriteString(l.Sentence)
	switch l.Failures {
	case 0:
	case 1:
		b.WriteString(", 1 try")
	default:
		fmt.Fprintf(&b, ", %d tries", l.Failures)
	}
	if wait := l.NextTry.Sub(now); wait > 0 {
		fmt.Fprintf(&b, ", next in %s", roundUp(wait))
	} else if !l.NextTry.IsZero() {
		b.WriteString(", trying now")
	}
	return b.String()
}

// roundUp gives whole seconds, so that a sentence does not flicker.
func roundUp(d time.Duration) string {
	return fmt.Sprintf("%d s", (d+time.Second-1)/time.Second)
}
