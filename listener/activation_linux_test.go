package listener_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/listener"
)

// childEnv makes TestActivatedChild the program that sockets are passed to;
// it holds the childConfig.
const childEnv = "LISTENER_TEST_CHILD"

// childConfig is what that program is told.
type childConfig struct {
	Controller, Public string
	OnePort            bool
	Hold               time.Duration
}

// childSays is what it answers, one line each.
type childSays struct {
	Err                        string
	State                      string
	Controller, Public         []string
	ControllerPath, PublicPath string
	Inherited                  string // what a child of its own would have
}

// TestActivatedChild is no test but a program: with childEnv set it serves on
// the sockets passed to it and does what its standard input says.
func TestActivatedChild(t *testing.T) {
	var cfg childConfig
	if text := os.Getenv(childEnv); text == "" {
		return
	} else if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		t.Fatal(err)
	}
	say := func(s childSays) {
		b, _ := json.Marshal(s)
		fmt.Printf("child %s\n", b)
	}
	t.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid())) // nobody else could know it before
	activated, err := listener.ActivatedFromEnv()
	if err != nil {
		say(childSays{Err: err.Error()})
		return
	}
	l, err := listener.New(t.Context(), config(func(c *listener.Config) {
		c.Controller.Addr, c.Public.Addr, c.OnePort = cfg.Controller, cfg.Public, cfg.OnePort
		c.Activated, c.ActivatedHold = activated, cfg.Hold
	}))
	if err != nil {
		say(childSays{Err: err.Error()})
		return
	}
	defer l.Close()
	answer(t, l)
	report := func() {
		r := l.Ports()
		s := childSays{State: string(r.State), ControllerPath: r.ControllerPath, PublicPath: r.PublicPath}
		for _, a := range r.Controller {
			s.Controller = append(s.Controller, a.String())
		}
		for _, a := range r.Public {
			s.Public = append(s.Public, a.String())
		}
		say(s)
	}
	report()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "stable":
			open(t, l)
			report()
		case "inherit":
			out, err := exec.Command("sh", "-c", "ls -l /proc/self/fd; env | grep ^LISTEN_").CombinedOutput()
			if err != nil && len(out) == 0 {
				t.Error(err)
			}
			say(childSays{Inherited: string(out)})
		case "drain":
			if err := l.Drain(context.Background()); err != nil {
				t.Error(err)
			}
			report()
		}
	}
}

// child is a running TestActivatedChild.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// passTo starts the program with the sockets of these files, under names as in
// LISTEN_FDNAMES.
func passTo(t *testing.T, cfg childConfig, names string, files ...*os.File) *child {
	t.Helper()
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestActivatedChild$")}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(text), "LISTEN_FDS="+strconv.Itoa(len(files)), "LISTEN_FDNAMES="+names)
	c.cmd.ExtraFiles, c.cmd.Stderr = files, os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	return c
}

// says waits for the next answer.
func (c *child) says() (s childSays) {
	c.t.Helper()
	for c.out.Scan() {
		if text, ok := strings.CutPrefix(c.out.Text(), "child "); ok {
			if err := json.Unmarshal([]byte(text), &s); err != nil {
				c.t.Fatal(err)
			}
			return s
		}
	}
	c.t.Fatal("the child says nothing more")
	return s
}

func (c *child) do(what string) childSays {
	c.t.Helper()
	if _, err := io.WriteString(c.in, what+"\n"); err != nil {
		c.t.Fatal(err)
	}
	return c.says()
}

// end lets the program close its listener and exit.
func (c *child) end() {
	c.in.Close()
	for c.out.Scan() { // or it could not write its last words
	}
	_ = c.cmd.Wait() // a second call, or a child that found fault and said so
}

// socket gives a listening socket as a file, and its address.
func socket(t *testing.T, network, addr string) (*os.File, net.Listener) {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	f, err := ln.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, ln
}

// Acceptance 53.
func TestPassedSocketsFindTheirPorts(t *testing.T) {
	t.Parallel()
	one, ln1 := socket(t, "tcp", "127.0.0.1:0")
	two, ln2 := socket(t, "tcp", "127.0.0.1:0")
	first, second := ln1.Addr().String(), ln2.Addr().String()
	other := childConfig{Controller: "127.0.0.1:0", Public: "127.0.0.1:0"}
	for name, tc := range map[string]struct {
		cfg                childConfig
		names              string
		files              []*os.File
		controller, public string // empty: bound by the program itself
	}{
		"named":                 {other, "controller:public", []*os.File{one, two}, first, second},
		"named, other order":    {other, "public:controller", []*os.File{one, two}, second, first},
		"public alone":          {other, "public", []*os.File{two}, "", second},
		"controller alone":      {other, "controller", []*os.File{one}, first, ""},
		"no names, by address":  {childConfig{Controller: second, Public: first}, "", []*os.File{one, two}, second, first},
		"one name, one address": {childConfig{Controller: "127.0.0.1:0", Public: second}, "controller:headgate.socket", []*os.File{one, two}, first, second},
		"any host, by number":   {childConfig{Controller: "127.0.0.1:0", Public: "localhost" + second[strings.LastIndex(second, ":"):]}, "x", []*os.File{two}, "", second},
		"names, no addresses":   {childConfig{}, "controller:public", []*os.File{one, two}, first, second},
	} {
		t.Run(name, func(t *testing.T) {
			c := passTo(t, tc.cfg, tc.names, tc.files...) // not in parallel: they share the sockets
			got := c.says()
			if got.Err != "" || len(got.Controller) != 1 || len(got.Public) != 1 {
				t.Fatalf("got %+v", got)
			}
			if (tc.controller != "" && got.Controller[0] != tc.controller) || (tc.public != "" && got.Public[0] != tc.public) {
				t.Errorf("ports are %v and %v, want %s and %s", got.Controller, got.Public, tc.controller, tc.public)
			}
			wantAnswer(t, got.Controller[0], listener.PortController)
			c.do("stable")
			wantAnswer(t, got.Public[0], listener.PortPublic)
			c.end()
		})
	}
}

// Acceptance 53.
func TestPassedSocketsThatAreWrong(t *testing.T) {
	t.Parallel()
	good, ln := socket(t, "tcp", "127.0.0.1:0")
	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	udp, err := packets.(*net.UDPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	mine, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer mine.Close()
	connected, err := mine.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer connected.Close()
	plain, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	cfg := childConfig{Controller: "127.0.0.1:0", Public: "127.0.0.1:0"}
	for name, tc := range map[string]struct {
		cfg   childConfig
		names string
		files []*os.File
		want  []string
	}{
		"datagrams":              {cfg, "public", []*os.File{udp}, []string{`"public"`, "no stream socket"}},
		"a connection":           {cfg, "public", []*os.File{connected}, []string{`"public"`, "does not listen"}},
		"a file":                 {cfg, "public", []*os.File{plain}, []string{`"public"`, "no socket"}},
		"neither name nor place": {cfg, "", []*os.File{good}, []string{"for neither port", ln.Addr().String()}},
		"one too many":           {cfg, "public:admin", []*os.File{good, good}, []string{`"admin"`, "for neither port", "public at " + ln.Addr().String()}},
		"twice":                  {cfg, "public:public", []*os.File{good, good}, []string{"has one already"}},
		"two wrong":              {cfg, "public:controller", []*os.File{udp, plain}, []string{"no stream socket", "no socket"}},
		"controller of one port": {childConfig{Public: "127.0.0.1:0", OnePort: true}, "controller", []*os.File{good}, []string{"for neither port"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := passTo(t, tc.cfg, tc.names, tc.files...).says()
			for _, want := range tc.want {
				if !strings.Contains(got.Err, want) {
					t.Errorf("error is %q, want it to say %q", got.Err, want)
				}
			}
		})
	}
}

// Acceptance 53: children of the program get neither the sockets nor the
// variables.
func TestPassedSocketsAreNotInherited(t *testing.T) {
	t.Parallel()
	f, _ := socket(t, "tcp", "127.0.0.1:0")
	c := passTo(t, childConfig{Controller: "127.0.0.1:0"}, "public", f)
	if got := c.says(); got.Err != "" {
		t.Fatal(got.Err)
	}
	got := c.do("inherit").Inherited
	if strings.Contains(got, "socket:") || strings.Contains(got, "LISTEN_") || !strings.Contains(got, "/proc/") {
		t.Errorf("a child of the program has:\n%s", got)
	}
}

// Acceptance 54.
func TestClientsOfAPassedSocketWaitForTheOpening(t *testing.T) {
	t.Parallel()
	f, ln := socket(t, "tcp", "127.0.0.1:0")
	early, err := net.Dial("tcp", ln.Addr().String()) // before the program runs
	if err != nil {
		t.Fatal(err)
	}
	defer early.Close()
	gone, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	gone.Close() // dead when the port opens
	c := passTo(t, childConfig{Controller: "127.0.0.1:0", Hold: time.Hour}, "public", f)
	if got := c.says(); got.State != string(listener.StateControllerOnly) {
		t.Fatalf("got %+v", got)
	}
	late, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	c.do("stable")
	for name, conn := range map[string]net.Conn{"early": early, "late": late} {
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		if b, err := io.ReadAll(conn); err != nil || string(b) != "public" {
			t.Errorf("%s client read %q, %v", name, b, err)
		}
	}
}

// Acceptance 54.
func TestClientsOfAPassedSocketAreResetAfterTheHold(t *testing.T) {
	t.Parallel()
	f, ln := socket(t, "tcp", "127.0.0.1:0")
	began := time.Now()
	c := passTo(t, childConfig{Controller: "127.0.0.1:0", Hold: 500 * time.Millisecond}, "public", f)
	if got := c.says(); got.Err != "" {
		t.Fatal(got.Err)
	}
	for i := range 3 { // the first waits, the others come after the hold
		// A quick reset can end the dial itself.
		if got, err := ask(ln.Addr().String()); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("client %d reads %q, %v; want a reset", i, got, err)
		}
		if took := time.Since(began); took < 500*time.Millisecond {
			t.Errorf("client %d was reset after %v, inside the hold", i, took)
		}
	}
	c.do("stable")
	wantAnswer(t, ln.Addr().String(), listener.PortPublic)
}

// Acceptance 55.
func TestPassedSocketsOutliveTheProgram(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "public")
	f1, controller := socket(t, "tcp", "127.0.0.1:0")
	f2, public := socket(t, "unix", path)
	for _, how := range []string{"stable", "drain", "nothing"} {
		c := passTo(t, childConfig{Hold: time.Hour}, "controller:public", f1, f2)
		if got := c.says(); got.PublicPath != "unix:"+path || len(got.Public) != 0 || got.Controller[0] != controller.Addr().String() {
			t.Fatalf("got %+v", got)
		}
		if how != "nothing" {
			c.do(how)
		}
		c.end()
		for _, ln := range []net.Listener{controller, public} { // a client that comes between two programs
			client, err := net.Dial(ln.Addr().Network(), ln.Addr().String())
			if err != nil {
				t.Fatalf("after %q: %v", how, err)
			}
			server, err := ln.Accept()
			if err != nil {
				t.Fatalf("after %q: %v", how, err)
			}
			client.Close()
			server.Close()
		}
	}
}
