package listener

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"
	"time"
)

// Reasons of handshake_failures_total.
const (
	failTimeout = "timeout"  // silent or slow
	failProbe   = "probe"    // connected and left without a word
	failNotTLS  = "not_tls"  // spoke something else
	failBadCert = "bad_cert" // one side refused the other's certificate
	failOther   = "other"
)

// plainAnswer is what a client gets that speaks HTTP to a TLS port.
const plainAnswer = "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n" +
	"Client sent an HTTP request to an HTTPS server.\n"

const (
	// hurriedHandshake is what an unknown client has for its handshake while
	// places for handshakes are scarce: a round trip to the far end of the
	// world, and an end for those who stall on purpose.
	hurriedHandshake = 500 * time.Millisecond
	// plainAnswerTimeout bounds writing that answer and reading what the
	// client still sends, without which the answer would be lost in a reset.
	plainAnswerTimeout = 1 * time.Second
	// plainAnswerDrain bounds the bytes read then.
	plainAnswerDrain = 64 << 10
)

// errNoFirst means that the client left before its first byte.
var errNoFirst = errors.New("no first byte")

// errNoSlot means that no handshake slot came free in time.
var errNoSlot = errors.New("no handshake slot came free in time")

// handshake makes c a TLS connection. Waiting for the first byte takes no
// slot, so that silent clients do not keep the others from theirs. Its times
// begin now: a client that has waited in the queue has all of them.
func (p *port) handshake(c *conn) (*tls.Conn, error) {
	at := time.Now()
	if err := c.SetDeadline(at.Add(p.cfg.FirstByteTimeout)); err != nil {
		return nil, err
	}
	if err := c.awaitFirst(); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoFirst, err)
	}
	known := c.info.Class != ClassUnknown
	began, end := time.Now(), at.Add(p.cfg.HandshakeTimeout)
	if err := p.slots.take(p.life, end, known); err != nil {
		return nil, err
	}
	defer p.slots.give(known)
	if hurry := time.Now().Add(hurriedHandshake); !known && end.After(hurry) && p.slots.scarce(known) {
		end = hurry
	}
	if err := c.SetDeadline(end); err != nil {
		return nil, err
	}
	tc := tls.Server(c, p.cfg.TLS)
	w, err := p.shake(tc)
	c.info.HandshakeTook = time.Since(began)
	if err != nil {
		return nil, err
	}
	c.info.TLS = true
	if w.id != "" {
		p.identify(c, w)
	}
	return tc, c.SetDeadline(time.Time{})
}

// shake makes the handshake and asks who the peer has proved to be. A panic in
// a callback ends this connection, not the program, as it would under
// http.Server.
func (p *port) shake(tc *tls.Conn) (w who, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &panicError{value: v, stack: debug.Stack()}
		}
	}()
	if err := tc.HandshakeContext(p.life); err != nil {
		return w, err
	}
	if p.classify != nil {
		w.class, w.id = p.classify(tc.ConnectionState())
	}
	return w, nil
}

// panicError carries what a callback of the tls.Config panicked with.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic in the handshake: %v", e.value) }

// handshakeFailed counts the failure and ends the connection.
func (p *port) handshakeFailed(c *conn, err error) {
	if p.life.Err() != nil {
		c.abort() // we ended it ourselves
		return
	}
	reason := failure(err)
	p.met.handshakeFailures.WithLabelValues(reason).Inc()
	if pe, ok := errors.AsType[*panicError](err); ok {
		p.log.Error("callback of the handshake panicked", "port", p.name, "err", err, "stack", string(pe.stack))
	}
	p.log.Debug("handshake not made", "port", p.name, "reason", reason, "remote", c.RemoteAddr().String(), "err", err)
	switch rh, ok := errors.AsType[tls.RecordHeaderError](err); {
	case ok && rh.Conn != nil && looksLikeHTTP(rh.RecordHeader):
		answerPlain(c)
		_ = c.Close()
	case reason == failTimeout:
		c.abort()
	default:
		_ = c.Close()
	}
}

// failure gives the reason for err.
func failure(err error) string {
	var (
		verify *tls.CertificateVerificationError
		x      x509.UnknownAuthorityError
		header tls.RecordHeaderError
	)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, errNoSlot), errors.Is(err, context.DeadlineExceeded):
		return failTimeout
	case errors.Is(err, errNoFirst):
		return failProbe
	case errors.As(err, &header):
		return failNotTLS
	case errors.As(err, &verify), errors.As(err, &x), refusedCert(err):
		return failBadCert
	}
	return failOther
}

// refusedCert reports whether the handshake ended over a certificate: the
// peer's alert about ours, or ours because it gave none. Package tls has no
// other way to tell than its text.
func refusedCert(err error) bool {
	s := err.Error()
	return strings.Contains(s, "certificate") || strings.Contains(s, "unknown authority")
}

// looksLikeHTTP reports whether a record header is the start of a request.
func looksLikeHTTP(h [5]byte) bool {
	switch string(h[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO", "DELET", "PATCH", "PRI *":
		return true
	}
	return false
}

// answerPlain tells a plain HTTP client what is wrong.
func answerPlain(c *conn) {
	if err := c.SetDeadline(time.Now().Add(plainAnswerTimeout)); err != nil {
		return
	}
	if _, err := io.WriteString(c, plainAnswer); err != nil {
		return
	}
	if err := c.CloseWrite(); err != nil {
		return
	}
	_, _ = io.CopyN(io.Discard, c, plainAnswerDrain) // how it ends changes nothing
}
