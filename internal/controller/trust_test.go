package controller

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
	"uuid"

	"headgate/internal/pki"
	"headgate/internal/testkit"
)

// with gives a caller that shows a certificate, whichever the server asks for.
func (c *caller) with(key crypto.Signer, chain ...*x509.Certificate) *caller {
	c.t.Helper()
	shown := tls.Certificate{PrivateKey: key}
	for _, cert := range chain {
		shown.Certificate = append(shown.Certificate, cert.Raw)
	}
	tr, ok := c.http.Transport.(*http.Transport)
	if !ok {
		c.t.Fatal("no transport")
	}
	tr = &http.Transport{TLSClientConfig: tr.TLSClientConfig.Clone(), ForceAttemptHTTP2: true}
	tr.TLSClientConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &shown, nil }
	c.t.Cleanup(tr.CloseIdleConnections)
	return &caller{c.t, c.base, c.token, &http.Client{Transport: tr, Timeout: time.Minute}}
}

// refused says whether the handshake fails. In TLS 1.3 a client hears of that
// when it reads for the first time; it says nothing here, so that a server that
// has taken the certificate keeps it waiting.
func (c *caller) refused(waits time.Duration) (bool, error) {
	c.t.Helper()
	tr, ok := c.http.Transport.(*http.Transport)
	if !ok {
		c.t.Fatal("no transport")
	}
	conn, err := tls.Dial("tcp", strings.TrimPrefix(c.base, "https://"), tr.TLSClientConfig.Clone())
	if err != nil {
		return true, err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(waits)); err != nil {
		c.t.Fatal(err)
	}
	_, err = conn.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded), err
}

// Acceptance 32.
func TestTheControllerPortBelievesControllersAndTokensOnly(t *testing.T) {
	t.Parallel()
	s := start(t, testkit.NewDatabase(t), t.TempDir())
	s.await("the opening of the public port", s.c.Opened())
	now, own := time.Now(), s.c.parts.authority
	foreign, err := pki.NewAuthority("other", now)
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	issue := func(sign func(*ecdsa.PublicKey, uuid.UUID, time.Time) (*x509.Certificate, error)) *x509.Certificate {
		t.Helper()
		cert, err := sign(&key.PublicKey, uuid.NewV4(), now)
		if err != nil {
			t.Fatal(err)
		}
		return cert
	}
	self, err := pki.NewPortIdentity(uuid.NewV4(), nil, now)
	if err != nil {
		t.Fatal(err)
	}
	nobody := s.caller("")
	for name, c := range map[string]*caller{
		"an agent":             nobody.with(key, issue(own.IssueAgent), own.Certificate()),
		"a foreign controller": nobody.with(key, issue(foreign.IssueController), foreign.Certificate()),
		"a self-signed one":    nobody.with(self.Key(), self.Leaf()),
	} {
		if refused, err := c.refused(30 * time.Second); !refused {
			t.Errorf("%s is not refused in the handshake: %v", name, err)
		}
	}
	peer := nobody.with(key, issue(own.IssueController), own.Certificate())
	if status, _, _ := peer.get("/api/v1/tasks"); status != http.StatusForbidden {
		t.Errorf("a controller is answered %d for what only people and programs may do, want 403", status)
	}
	for _, path := range openPaths()[:4] {
		if status, _, _ := nobody.get(path); status != http.StatusOK {
			t.Errorf("%s without a credential: %d", path, status)
		}
	}
	closed := append(openPaths()[4:], "/api/v1/tasks", "/api/v1/agents", "/api/v1/tokens", "/api/v1/events")
	owner, wrong := s.caller(s.fileToken()), s.caller("hgt_"+strings.Repeat("0", 49))
	for _, path := range closed {
		if status, _, _ := nobody.get(path); status != http.StatusUnauthorized {
			t.Errorf("%s without a credential: %d, want 401", path, status)
		}
		if status, _, _ := wrong.get(path); status != http.StatusUnauthorized {
			t.Errorf("%s with a wrong token: %d, want 401", path, status)
		}
		if path == "/api/v1/events" {
			continue // has no end
		}
		if status, body, _ := owner.get(path); status != http.StatusOK {
			t.Errorf("%s with a token: %d %s", path, status, body)
		}
	}
}
