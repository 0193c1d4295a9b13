package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/testkit"
)

// served is the real `headgate serve` with a file of settings.
type served struct {
	*testing.T
	dir, public, controller string
	cmd                     *exec.Cmd
	ended                   chan struct{} // closed at its end
}

// startServe starts it and waits until it is ready. settings are lines of its
// file.
func startServe(t *testing.T, env []string, settings string) *served {
	t.Helper()
	return startServeIn(t, t.TempDir(), testkit.NewDatabase(t), env, settings)
}

// startServeIn does so in a state directory and on a database that are there.
func startServeIn(t *testing.T, dir, dsn string, env []string, settings string) *served {
	t.Helper()
	s := &served{T: t, dir: dir, public: freeAddr(t), controller: freeAddr(t), ended: make(chan struct{})}
	s.settings(settings)
	s.cmd = exec.Command(filepath.Join(programs, "headgate"), "serve", "--config", filepath.Join(s.dir, "headgate.yaml"), "--data", s.dir,
		"--public-addr", s.public, "--controller-addr", s.controller, "--database-url", dsn)
	s.cmd.Env = append(os.Environ(), env...)
	log, err := os.Create(s.logFile())
	if err != nil {
		t.Fatal(err)
	}
	s.cmd.Stderr = log
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.ended)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.ended
		log.Close()
		if t.Failed() {
			t.Logf("log:\n%.20000s", s.log())
		}
	})
	s.await("the start", func() bool { return strings.Contains(s.log(), "msg=serving") })
	return s
}

func (s *served) settings(text string) {
	s.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, "headgate.yaml"), []byte("open_delay: 50ms\n"+text), 0o600); err != nil {
		s.Fatal(err)
	}
}

func (s *served) logFile() string { return filepath.Join(s.dir, "log") }

func (s *served) log() string {
	text, err := os.ReadFile(s.logFile())
	if err != nil {
		s.Fatal(err)
	}
	return string(text)
}

func (s *served) await(what string, holds func() bool) {
	s.Helper()
	timeout := time.After(readyWithin)
	for !holds() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-s.ended:
			s.Fatalf("serve ended before %s", what)
		case <-timeout:
			s.Fatalf("%s did not happen in time", what)
		}
	}
}

func (s *served) signal(which os.Signal) {
	s.Helper()
	if err := s.cmd.Process.Signal(which); err != nil {
		s.Fatal(err)
	}
}

func (s *served) client() *client {
	s.Helper()
	c, err := newClient("https://"+s.controller, filepath.Join(s.dir, "ca.pem"), filepath.Join(s.dir, "admin-token"))
	if err != nil {
		s.Fatal(err)
	}
	return c
}

// maxConns gives a limit as it is in force.
func (s *served) maxConns() int {
	s.Helper()
	var raw json.RawMessage
	if err := s.client().call(s.Context(), "GET", "/status/listener", nil, &raw); err != nil {
		s.Fatal(err)
	}
	var status struct {
		Admission struct {
			Limits struct {
				MaxConns int `json:"max_conns"`
			} `json:"limits"`
		} `json:"admission"`
	}
	if err := json.Unmarshal(raw, &status); err != nil {
		s.Fatal(err)
	}
	return status.Admission.Limits.MaxConns
}

func TestHangUpReloadsTheSettings(t *testing.T) {
	t.Parallel()
	heard, socket := listenForNotices(t)
	s := startServe(t, []string{"NOTIFY_SOCKET=" + socket}, "max_conns: 100\n")
	heard("READY=1")
	if got := s.maxConns(); got != 100 {
		t.Fatalf("max_conns is %d at first", got)
	}
	s.settings("max_conns: 123\n")
	s.signal(syscall.SIGHUP)
	heard("RELOADING=1\nMONOTONIC_USEC=")
	heard("READY=1")
	if got := s.maxConns(); got != 123 {
		t.Errorf("max_conns is %d after the reload", got)
	}
	s.settings("max_conns: 77\nmax_cons: 5\n")
	s.signal(syscall.SIGHUP)
	s.await("a word about the broken file", func() bool {
		return strings.Contains(s.log(), "not reloaded and nothing has changed") && strings.Contains(s.log(), "max_cons: no such setting")
	})
	if got := s.maxConns(); got != 123 {
		t.Errorf("max_conns is %d after a broken file", got)
	}
	s.signal(syscall.SIGTERM)
	<-s.ended
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestTheSecondSignalEndsAServeThatDrains(t *testing.T) {
	t.Parallel()
	const timeout = 10 * time.Minute
	s := startServe(t, nil, fmt.Sprintf("drain_timeout: %v\ndrain_spread: %v\n", timeout, timeout/2))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 10 { // each ends at a moment of its own in five minutes: one is there for long
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.public+"/api/v1/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+s.client().token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("stream: %d", resp.StatusCode)
		}
	}
	s.signal(syscall.SIGTERM)
	s.await("the drain", func() bool { return strings.Contains(s.log(), "connections told to close") })
	began := time.Now()
	s.signal(os.Interrupt)
	select {
	case <-s.ended:
	case <-time.After(readyWithin):
		t.Fatal("the second signal does not end it")
	}
	if code := s.cmd.ProcessState.ExitCode(); code != exitSignal+int(syscall.SIGINT) {
		t.Errorf("exit code %d, want %d", code, exitSignal+int(syscall.SIGINT))
	}
	if strings.Contains(s.log(), "streams ended") {
		t.Errorf("the streams did not hold the drain, so that nothing is shown; it took %v", time.Since(began))
	}
}

// TestUpWithOnePort runs all of it with the public port alone, and stops as a
// terminal does that is closed. Acceptance 9.
func TestUpWithOnePort(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	i.up("--two-phase=false")
	if i.run.ControllerURL != i.run.PublicURL || !strings.HasPrefix(i.run.PublicURL, "http://127.0.0.1:") || i.run.CAFile == "" {
		t.Errorf("run.json: %+v", i.run)
	}
	if got := i.submit("core.echo", map[string]any{"n": 1}); outcome(got) != "succeeded" {
		t.Errorf("echo: %s", outcome(got))
	}
	out, err := exec.Command(filepath.Join(programs, "headgate"), "status", "--data", i.dir).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("controller port")) || !bytes.Contains(out, []byte("accepts")) {
		t.Errorf("status: %v\n%s", err, out)
	}
	if err := i.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	err = i.cmd.Wait()
	i.cmd = nil
	if err != nil {
		t.Errorf("up ended with %v", err)
	}
	if _, err := os.Stat(filepath.Join(i.dir, runFileName)); !os.IsNotExist(err) {
		t.Errorf("run.json after a clean stop: %v", err)
	}
}
