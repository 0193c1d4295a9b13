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
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headgate/internal/testkit"
	"headgate/listener"
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

func TestOnePortSpeaksBeforeItIsReady(t *testing.T) {
	t.Parallel()
	proxy := testkit.NewProxy(t, testkit.EmptyDatabase(t))
	proxy.Block()
	m := newManager(t)
	s := startWith(t, proxy.DSN(), t.TempDir(), Options{ServiceManager: ServiceManager{Socket: m.path, Watchdog: 200 * time.Millisecond}}, func(cfg *Config) {
		cfg.TwoPhase = false
	})
	m.await("READY=1")
	m.await("WATCHDOG=1")
	if status, page, _ := s.caller("").get("/"); status != http.StatusServiceUnavailable || !strings.Contains(string(page), "<html") {
		t.Errorf("the page before the join: %d %s", status, page)
	}
	proxy.Heal()
	s.await("readiness", s.c.Opened())
	if at := s.c.advertised(); at != "" {
		t.Errorf("other controllers are told to come to %s", at)
	}
}

// A noisy client on the controller's own machine has used up what its address
// may have; the calls of the controller to itself come from that address too.
func TestOnePortIsNotLockedOutByItsOwnLimits(t *testing.T) {
	t.Parallel()
	m := newManager(t)
	s := startWith(t, testkit.NewDatabase(t), t.TempDir(), Options{ServiceManager: ServiceManager{Socket: m.path, Watchdog: 200 * time.Millisecond}}, func(cfg *Config) {
		cfg.TwoPhase = false
		cfg.Listening.Limits.SourceRate = listener.Rate{PerSecond: 20, Burst: 40}
	})
	s.await("readiness", s.c.Opened())
	at := s.c.listener.Ports().Public[0].String()
	for range 60 { // more than an unknown source may have at once
		conn, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	began := time.Now()
	if err := s.c.selfCall(t.Context()); err != nil {
		t.Errorf("a call to itself after %v: %v", time.Since(began), err)
	}
	s.proxyIsKnown() // its own address is

	// Over the soft cap it is told 429, which is an answer; at the hard cap it
	// is reset, which shows the watchdog that the listener lives.
	const most = 10
	limits := s.c.cfg
	limits.Listening.Limits.MaxConns = most
	if err := s.c.Reload(limits); err != nil {
		t.Fatal(err)
	}
	s.streams(s.toPublic(), s.c.Endpoints().PublicURL, most, make(chan farewell, most))
	until(t, "an answer over the soft cap", func() bool { return s.c.selfCall(t.Context()) == nil })
	until(t, "a reset at the hard cap", func() bool {
		if conn, err := net.Dial("tcp", at); err == nil { // takes the last place, for a while
			t.Cleanup(func() { conn.Close() })
		}
		return s.c.turnedAway(s.c.selfCall(t.Context()))
	})
	m.pending() // what was sent before
	m.await("WATCHDOG=1")
}

func TestOnePortHasNoAddressesOfTheOther(t *testing.T) {
	t.Parallel()
	flags := map[string]string{"database-url": "x", "public-addr": "127.0.0.1:7440", "two-phase": "false"}
	if c, err := LoadConfig(Sources{Flags: flags}); err != nil || c.TwoPhase {
		t.Fatalf("%v %+v", err, c)
	}
	flags["public-addr"] = DefaultControllerAddr // free for it
	if _, err := LoadConfig(Sources{Flags: flags, Environ: []string{"HEADGATE_TWO_PHASE=false"}}); err != nil {
		t.Fatal(err)
	}
	_, err := LoadConfig(Sources{
		File: writeFile(t, "controller_addr: "+DefaultControllerAddr+"\n"), Environ: []string{"HEADGATE_CONTROLLER_ADVERTISE=ctl:7441"}, Flags: flags,
	})
	for _, want := range []string{"controller-addr: with two-phase false there is no controller port", "controller-advertise: with two-phase false"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in: %v", want, err)
		}
	}
}
