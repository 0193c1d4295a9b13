package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
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

// activated is `headgate serve` started by the real systemd-socket-activate,
// on a database that does not answer yet.
type activated struct {
	*testing.T
	controller, public string // addresses of the passed sockets
	database           *testkit.Proxy
	cmd                *exec.Cmd
	ended              chan error
}

// startActivated passes both sockets under these names, in this order of
// ports: "public" or "controller". Names and "" follow --fdname.
func startActivated(t *testing.T, order [2]string, names string, env []string, args ...string) *activated {
	t.Helper()
	tool, err := exec.LookPath("systemd-socket-activate")
	if err != nil {
		testkit.Lacks(t, "there is no systemd-socket-activate on this machine; install systemd")
	}
	a := &activated{T: t, controller: freeAddr(t), public: freeAddr(t), database: testkit.NewProxy(t, testkit.NewDatabase(t)), ended: make(chan error, 1)}
	a.database.Block()
	at := map[string]string{"controller": a.controller, "public": a.public}
	all := []string{"--listen=" + at[order[0]], "--listen=" + at[order[1]]}
	if names != "" {
		all = append(all, "--fdname="+names)
	}
	for _, e := range env {
		all = append(all, "--setenv="+e)
	}
	all = append(all, filepath.Join(programs, "headgate"), "serve", "--data", t.TempDir(), "--database-url", a.database.DSN(),
		"--public-addr", a.public, "--controller-addr", a.controller, "--open-delay", "100ms", "--drain-timeout", "5s")
	a.cmd = exec.Command(tool, append(all, args...)...)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	a.cmd.Stderr = log
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { a.ended <- a.cmd.Wait() }()
	t.Cleanup(func() {
		a.stop()
		log.Close()
		if t.Failed() {
			text, err := os.ReadFile(log.Name())
			t.Logf("log (%v):\n%.20000s", err, text)
		}
	})
	a.awaitPhase("database")
	return a
}

// stop ends the program as a service manager does. It may be called again.
func (a *activated) stop() {
	a.Helper()
	_ = a.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-a.ended:
		if err != nil {
			a.Errorf("serve ended with %v", err)
		}
	case <-time.After(readyWithin):
		_ = a.cmd.Process.Kill()
		a.Errorf("serve did not end: %v", <-a.ended)
	}
	a.ended <- nil
}

// awaitPhase asks the controller port until the start is in a phase. The first
// connection is what makes systemd-socket-activate start the program.
func (a *activated) awaitPhase(phase string) {
	a.Helper()
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // it has no CA before the database
	}}
	last := ""
	for end := time.Now().Add(readyWithin); time.Now().Before(end); {
		var ready struct{ Phase string }
		if err := getJSON(client, "https://"+a.controller+"/readyz", &ready); err != nil {
			last = err.Error()
		} else if last = ready.Phase; last == phase {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-a.Context().Done():
		}
	}
	a.Fatalf("phase %s was not reached: %s", phase, last)
}

// visit asks the public port for /livez on a connection of its own.
func (a *activated) visit() (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.Context()), readyWithin)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", a.public)
	if err != nil {
		return "", fmt.Errorf("dial: %w", err)
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	if _, err := fmt.Fprintf(conn, "GET /livez HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", a.public); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	return string(answer), err
}

// TestConnectionsOfTheClosedPhaseAreHeldAndServed passes named sockets in the
// other order. Acceptance 53, 54 with the real programs.
func TestConnectionsOfTheClosedPhaseAreHeldAndServed(t *testing.T) {
	t.Parallel()
	heard, socket := listenForNotices(t)
	a := startActivated(t, [2]string{"public", "controller"}, "public:controller", []string{"NOTIFY_SOCKET=" + socket}, "--activated-hold", "2m")
	heard("READY=1") // with the public port still closed
	type answer struct {
		text string
		err  error
	}
	answers := make(chan answer, 3)
	for range cap(answers) {
		go func() {
			text, err := a.visit()
			answers <- answer{text, err}
		}()
	}
	a.awaitPhase("database")
	select {
	case early := <-answers:
		t.Fatalf("a closed port answered: %q %v", early.text, early.err)
	default:
	}
	a.database.Heal()
	for range cap(answers) {
		if got := <-answers; got.err != nil || !strings.HasPrefix(got.text, "HTTP/1.1 200") {
			t.Errorf("after the opening: %q %v", got.text, got.err)
		}
	}
	a.awaitPhase("serving")
	heard("STATUS=open")
	a.stop()
	heard("STOPPING=1")
}

// TestConnectionsOfALongClosedPhaseAreReset passes sockets without names,
// which are matched by address. Acceptance 53, 54 with the real programs.
func TestConnectionsOfALongClosedPhaseAreReset(t *testing.T) {
	t.Parallel()
	a := startActivated(t, [2]string{"controller", "public"}, "", nil, "--activated-hold", "300ms")
	for range 3 { // the first is held, the others come later
		if text, err := a.visit(); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("a port that is closed for long: %q %v, want a reset", text, err)
		}
	}
	a.database.Heal()
	a.awaitPhase("serving")
	if text, err := a.visit(); err != nil || !strings.HasPrefix(text, "HTTP/1.1 200") {
		t.Errorf("after the opening: %q %v", text, err)
	}
}

// TestAPassedSocketBeyondThisMachineNeedsTLS makes sure that the socket counts
// and not the address in the settings.
func TestAPassedSocketBeyondThisMachineNeedsTLS(t *testing.T) {
	t.Parallel()
	tool, err := exec.LookPath("systemd-socket-activate")
	if err != nil {
		testkit.Lacks(t, "there is no systemd-socket-activate on this machine; install systemd")
	}
	_, port, err := net.SplitHostPort(freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), tool, "--listen=0.0.0.0:"+port, "--fdname=public", filepath.Join(programs, "headgate"), "serve",
		"--data", t.TempDir(), "--database-url", "host=/nowhere", "--public-addr", "127.0.0.1:1", "--controller-addr", freeAddr(t))
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	for waiting := true; waiting; {
		if conn, err := net.Dial("tcp", "127.0.0.1:"+port); err == nil {
			conn.Close()
		}
		select {
		case <-ended:
			waiting = false
		case <-time.After(50 * time.Millisecond):
		}
	}
	if cmd.ProcessState.ExitCode() != exitError || !strings.Contains(out.String(), "without TLS") {
		t.Errorf("exit code %d: %s", cmd.ProcessState.ExitCode(), out.String())
	}
}

// listenForNotices is a service manager: heard waits for a message with a text.
func listenForNotices(t *testing.T) (heard func(text string), socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "hg") // short: the path of a socket has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(dir, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		os.RemoveAll(dir)
	})
	notices := make(chan string, 1000) // the system itself holds no more than about ten
	go func() {
		defer close(notices)
		buf := make([]byte, 64<<10)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			notices <- string(buf[:n])
		}
	}()
	return func(text string) {
		t.Helper()
		timeout := time.After(readyWithin)
		for {
			select {
			case notice := <-notices:
				if strings.Contains(notice, text) {
					return
				}
			case <-timeout:
				t.Fatalf("the service manager did not hear %q", text)
			}
		}
	}, socket
}
