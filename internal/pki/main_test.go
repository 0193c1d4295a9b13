package pki_test

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"testing"
	"time"
	"uuid"

	"go.uber.org/goleak"

	"headgate/internal/pki"
)

// netTimeout bounds every read and write of these tests, so that a broken
// handshake fails instead of hanging.
const netTimeout = 10 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// fleet is an authority with one controller and one agent.
type fleet struct {
	ca           *pki.Authority
	roots        *pki.Roots
	controllerID uuid.UUID
	controller   *pki.Identity
	agentID      uuid.UUID
	agent        *pki.Identity
}

func newFleet(t *testing.T, name string) fleet {
	t.Helper()
	now := time.Now()
	f := fleet{ca: must[*pki.Authority](t)(pki.NewAuthority(name, now.AddDate(0, -2, 0))), controllerID: uuid.New(), agentID: uuid.New()}
	f.roots = pki.NewRoots(f.ca.Certificate())
	f.controller = f.newController(t, f.controllerID, now)
	f.agent = f.newAgent(t, f.agentID, now)
	return f
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	return must[*ecdsa.PrivateKey](t)(pki.NewKey())
}

func (f fleet) newAgent(t *testing.T, id uuid.UUID, now time.Time) *pki.Identity {
	t.Helper()
	key := newKey(t)
	return must[*pki.Identity](t)(pki.NewIdentity(key, must[*x509.Certificate](t)(f.ca.IssueAgent(&key.PublicKey, id, now))))
}

func (f fleet) newController(t *testing.T, id uuid.UUID, now time.Time) *pki.Identity {
	t.Helper()
	key := newKey(t)
	leaf := must[*x509.Certificate](t)(f.ca.IssueController(&key.PublicKey, id, now))
	return must[*pki.Identity](t)(pki.NewIdentity(key, leaf, f.ca.Certificate()))
}

func (f fleet) dial() pki.AgentDial {
	return pki.AgentDial{Identity: f.controller, Roots: f.roots, ID: f.agentID, Pins: []pki.Fingerprint{f.agent.SPKI()}}
}

// connect makes a loopback connection with TLS on both ends.
func connect(t *testing.T, server, client *tls.Config) (s, c *tls.Conn) {
	t.Helper()
	l := must[net.Listener](t)(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	raw := must[net.Conn](t)(net.DialTimeout("tcp", l.Addr().String(), netTimeout))
	accepted := must[net.Conn](t)(l.Accept())
	s, c = tls.Server(accepted, server), tls.Client(raw, client)
	for _, conn := range []net.Conn{s, c} {
		if err := conn.SetDeadline(time.Now().Add(netTimeout)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { raw.Close(); accepted.Close() })
	}
	return s, c
}

// shake runs a handshake and one byte from server to client: in TLS 1.3 the
// client learns only then that its certificate was refused.
func shake(t *testing.T, server, client *tls.Config) (s, c *tls.Conn, serverErr, clientErr error) {
	t.Helper()
	s, c = connect(t, server, client)
	done := make(chan error, 1)
	go func() {
		_, err := s.Write([]byte{1})
		if err != nil {
			err = errors.Join(err, s.NetConn().Close())
		}
		done <- err
	}()
	_, clientErr = io.ReadFull(c, make([]byte, 1))
	if clientErr != nil {
		c.NetConn().Close()
	}
	return s, c, <-done, clientErr
}
