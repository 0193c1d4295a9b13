package controller

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/pki"
	"headgate/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// started is a controller that runs in this process.
type started struct {
	*testing.T
	c    *Controller
	stop func() error
}

func start(t *testing.T, dsn, data string, change ...func(*Config)) *started {
	t.Helper()
	return startWith(t, dsn, data, Options{Version: "test"}, change...)
}

func startWith(t *testing.T, dsn, data string, opts Options, change ...func(*Config)) *started {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL = data, dsn
	cfg.PublicAddr, cfg.ControllerAddr = "127.0.0.1:0", "127.0.0.1:0"
	cfg.OpenDelay = 50 * time.Millisecond
	cfg.AdminTokenFile = filepath.Join(data, "token")
	for _, f := range change {
		f(&cfg)
	}
	return startConfig(t, cfg, opts)
}

// startConfig starts a controller with settings that are complete.
func startConfig(t *testing.T, cfg Config, opts Options) *started {
	t.Helper()
	c, err := New(cfg, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	s := &started{T: t, c: c}
	s.stop = func() error {
		cancel()
		err := <-done
		done <- nil
		return err
	}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return s
}

// await waits for a signal of the controller.
func (s *started) await(what string, signal <-chan struct{}) {
	s.Helper()
	select {
	case <-signal:
	case <-time.After(time.Minute):
		s.Fatalf("%s did not happen in time", what)
	}
}

// readyz asks the controller port, as a monitor would.
func (s *started) readyz() (int, handlers.Readiness) {
	s.Helper()
	// Before the first CA the port has made its certificate itself.
	roots := pki.NewRoots(append(s.c.state.roots.Certificates(), s.c.state.port.Leaf())...)
	tr := &http.Transport{TLSClientConfig: pki.Client(roots), ForceAttemptHTTP2: true}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr, Timeout: 10 * time.Second}).Get(s.c.Endpoints().ControllerURL + "/readyz")
	if err != nil {
		s.Fatal(err)
	}
	defer resp.Body.Close()
	var r handlers.Readiness
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil {
		s.Fatal(err)
	}
	return resp.StatusCode, r
}

func (s *started) publicRefuses() bool {
	s.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.c.Endpoints().PublicURL, "http://"))
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED)
	}
	conn.Close()
	return false
}

func TestThePublicPortWaitsForTheDatabase(t *testing.T) {
	t.Parallel()
	proxy := testkit.NewProxy(t, testkit.EmptyDatabase(t))
	proxy.Block()
	s := start(t, proxy.DSN(), t.TempDir())
	status, r := s.readyz()
	if status != http.StatusServiceUnavailable || r.Phase != "database" || len(r.Unmet) == 0 || r.Unmet[0].Condition != "database" {
		t.Fatalf("before the database answers: %d %+v", status, r)
	}
	if !s.publicRefuses() {
		t.Fatal("the public port does not refuse")
	}
	proxy.Heal()
	s.await("the opening of the public port", s.c.Opened())
	if status, r := s.readyz(); status != http.StatusOK || !r.Ready || len(r.Unmet) != 0 {
		t.Fatalf("afterwards: %d %+v", status, r)
	}
	resp, err := http.Get(s.c.Endpoints().PublicURL + "/readyz")
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("public /readyz: %v %v", resp, err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
}

func TestASecondStartTakesItsOwnLeasesAtOnce(t *testing.T) {
	t.Parallel()
	dsn, data := testkit.NewDatabase(t), t.TempDir()
	first := start(t, dsn, data)
	first.await("the first join", first.c.Opened())
	fleet, id := first.c.parts.fleet, first.c.state.id
	if len(fleet.Roots().Certificates()) != 1 {
		t.Fatal("no CA")
	}
	// The first one ends without giving anything back, as if it were killed:
	// only its lock goes.
	if err := syscall.Flock(int(first.c.state.lock.Fd()), syscall.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	second := start(t, dsn, data)
	second.await("the second join", second.c.Opened())
	if second.c.state.id != id {
		t.Errorf("the controller's id changed")
	}
	if held := second.c.parts.manager.Held(); len(held) != 16 || held[0].Epoch < 2 {
		t.Errorf("held %+v, want 16 shards under a higher epoch", held)
	}
}

func TestAWrongDatabaseURLEndsTheStart(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL, cfg.PublicAddr, cfg.ControllerAddr = t.TempDir(), "postgres://localhost/x", "127.0.0.1:0", "127.0.0.1:0"
	c, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "sslmode") {
		t.Fatalf("err = %v", err)
	}
}

func TestAConflictOfPortsShowsAtOnce(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL, cfg.PublicAddr, cfg.ControllerAddr = t.TempDir(), "host=/nowhere", taken.Addr().String(), "127.0.0.1:0"
	if _, err := New(cfg, Options{}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatalf("err = %v", err)
	}
	if _, err := os.Stat(filepath.Join(cfg.Data, lockName)); err != nil {
		t.Fatal(err)
	}
	next, err := openState(cfg.Data, nil, time.Now())
	if err != nil {
		t.Fatalf("the directory stayed locked: %v", err)
	}
	next.close()
}

func TestANewInstallationHasAWayIn(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL, cfg.PublicAddr, cfg.ControllerAddr = data, testkit.NewDatabase(t), "127.0.0.1:0", "127.0.0.1:0"
	c, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	<-c.Joined()
	info, err := os.Stat(filepath.Join(data, firstTokenFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("first token: %v %v", info, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
