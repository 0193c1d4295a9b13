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

// wordsOf maps what the certificate checks say to our causes and short
// sentences; %s is the address.
var wordsOf = map[string]struct{ cause, sentence string }{
	CodeAddressRefused:       {CauseAddressRefused, "%s may not be dialled"},
	pki.CodeNotAnAgent:       {CauseNotAnAgent, "what answers at %s is not a Headgate agent"},
	pki.CodeOtherAgent:       {CauseOtherAgent, "another agent answers at %s"},
	pki.CodeKeyChanged:       {CauseKeyChanged, "the agent at %s has not the key it was enrolled with"},
	pki.CodeAgentExpired:     {CauseExpired, "the certificate of the agent at %s has expired"},
	pki.CodeAgentNotYetValid: {CauseNotYetValid, "the certificate of the agent at %s is not valid yet"},
	pki.CodeAgentNotOurs:     {CauseUnknownCA, "the agent at %s is not enrolled in this fleet"},
	pki.CodeRefusedByAgent:   {CauseControllerDenied, "the agent at %s does not accept this controller's certificate"},
	pki.CodeHandshakeTimeout: {CauseTimeout, "%s accepts connections but did not finish the TLS handshake"},
	pki.CodeHandshakeFailed:  {CauseNotAnAgent, "the connection to %s could not be secured"},
}

// explain says why a dial failed, from the first error of its transport.
func (d *dialer) explain(l *link, dial pki.AgentDial) *trouble {
	err, where := l.failure()
	t := &trouble{address: where, err: err}
	say := func(cause, format string, args ...any) *trouble {
		t.cause, t.sentence = cause, fmt.Sprintf(format, args...)
		return t
	}
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.As(err, &dns):
		return say(CauseNoSuchHost, "the name %s does not resolve", dns.Name)
	case errors.Is(err, syscall.ECONNREFUSED):
		return say(CauseRefused, "connection refused by %s", where)
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return say(CauseUnreachable, "there is no way to %s in the network", where)
	case errors.As(err, &op) && op.Op == "dial" && (op.Timeout() || errors.Is(err, context.DeadlineExceeded)):
		return say(CauseTimeout, "no answer from %s within %s", where, d.limits.ConnectTimeout)
	case errors.Is(err, errNoH2):
		return say(CauseNotAnAgent, wordsOf[pki.CodeNotAnAgent].sentence, where)
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return say(CauseEnded, "%s closed the connection", where)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return say(CauseTimeout, wordsOf[pki.CodeHandshakeTimeout].sentence, where)
	case errors.Is(err, net.ErrClosed): // by gRPC, when it had waited long enough
		return say(CauseTimeout, "%s accepts connections but does not speak", where)
	}
	if w, ok := wordsOf[fault.CodeOf(dial.Explain(err))]; ok {
		t.err = dial.Explain(err)
		return say(w.cause, w.sentence, where)
	}
	return say(CauseUnreachable, "the connection to %s failed", where)
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
