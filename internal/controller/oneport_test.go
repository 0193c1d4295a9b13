package controller

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headgate/internal/testkit"
)

// certificateFor makes the two files of a public port that is known under a
// name which this machine does not have.
func certificateFor(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "public.crt"), filepath.Join(dir, "public.key")
	err = errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	return certFile, keyFile
}

// With two_phase off one port serves everything from the start, also what only
// the controller port has otherwise, to those who may. Acceptance 9.
func TestOnePortServesEverything(t *testing.T) {
	t.Parallel()
	certFile, keyFile := certificateFor(t, "headgate.example.org")
	for name, change := range map[string]func(*Config){
		"plain": func(*Config) {},
		"TLS": func(c *Config) {
			c.TLSCertFile, c.TLSKeyFile, c.AllowedHosts = certFile, keyFile, []string{"headgate.example.org"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy := testkit.NewProxy(t, testkit.EmptyDatabase(t))
			proxy.Block()
			s := start(t, proxy.DSN(), t.TempDir(), change, func(c *Config) {
				c.TwoPhase, c.ControllerAddr = false, DefaultControllerAddr
			})
			e := s.c.Endpoints()
			if e.ControllerURL != e.PublicURL || e.CAFile == "" {
				t.Fatalf("endpoints %+v", e)
			}
			transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
			defer transport.CloseIdleConnections()
			get := func(path, token string) (int, string) {
				t.Helper()
				req, err := http.NewRequest(http.MethodGet, e.PublicURL+path, nil)
				if err != nil {
					t.Fatal(err)
				}
				if token != "" {
					req.Header.Set("Authorization", "Bearer "+token)
				}
				res, err := (&http.Client{Transport: transport}).Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				body, err := io.ReadAll(res.Body)
				if err != nil {
					t.Fatal(err)
				}
				return res.StatusCode, string(body)
			}
			if status, body := get("/readyz", ""); status != http.StatusServiceUnavailable || !strings.Contains(body, `"database"`) {
				t.Errorf("without a database /readyz answers %d %s", status, body)
			}
			proxy.Heal()
			s.await("the opening", s.c.Opened())
			token, err := os.ReadFile(s.c.cfg.AdminTokenFile)
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range []string{"/metrics", "/status/listener", "/api/v1/status"} {
				if status, _ := get(path, ""); status != http.StatusUnauthorized {
					t.Errorf("%s answers %d to a stranger", path, status)
				}
				if status, body := get(path, strings.TrimSpace(string(token))); status != http.StatusOK || body == "" {
					t.Errorf("%s answers %d %s", path, status, body)
				}
			}
			if status, body := get("/readyz", ""); status != http.StatusOK {
				t.Errorf("/readyz answers %d %s", status, body)
			}
			if err := s.c.selfCall(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSettingsOfAPortThatIsNotToBe(t *testing.T) {
	t.Parallel()
	cfg, err := LoadConfig(Sources{Flags: map[string]string{
		"database-url": "postgres:///x", "public-addr": "127.0.0.1:0", "two-phase": "false",
		"controller-addr": "127.0.0.1:9", "controller-advertise": "host:9",
	}})
	if err == nil || strings.Count(err.Error(), "with two-phase false") != 2 {
		t.Errorf("%v", err)
	}
	if cfg.TwoPhase {
		t.Error("two-phase is on")
	}
}
