package program_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"headgate/internal/agent/program"
)

// roleEnv makes the test binary one of the programs that are run.
const roleEnv = "HEADGATE_PROGRAM_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		play(role)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func play(role string) {
	switch role {
	case "exit7":
		os.Exit(7)
	case "show":
		null, _ := io.ReadAll(os.Stdin)
		dir, _ := os.Getwd()
		sid, _ := unix.Getsid(0)
		env := slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, program.MarkName+"=") })
		fmt.Printf("args=%q stdin=%d dir=%s leader=%v umask=%04o env=%q\n", os.Args[1:], len(null), dir, sid == os.Getpid(), unix.Umask(0), env)
		fmt.Fprintln(os.Stderr, "on stderr")
	case "flood":
		flood(os.Stdout)
	case "kill9":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "wait", "ignore_term", "on_term":
		c := make(chan os.Signal, 1)
		if role != "wait" {
			signal.Notify(c, syscall.SIGTERM)
		}
		fmt.Println("ready")
		for {
			<-c
			if role == "on_term" {
				fmt.Println("bye")
				os.Exit(3)
			}
		}
	default:
		playTree(role)
	}
}

const floodBytes = 50_000_000

func flood(w io.Writer) {
	b := bufio.NewWriterSize(w, 10_000)
	for i, n := 0, 0; n < floodBytes; i++ {
		line := strconv.Itoa(i) + "\n"
		if n+len(line) > floodBytes {
			line = line[:floodBytes-n]
		}
		n += len(line)
		_, _ = b.WriteString(line)
	}
	_ = b.Flush()
}

// sink collects what is printed.
type sink struct {
	mu        sync.Mutex
	out       [3]bytes.Buffer
	unblocked int
	ready     chan struct{} // closed at the first output
	once      sync.Once
}

func newSink() *sink { return &sink{ready: make(chan struct{})} }

func (s *sink) Write(stream program.Stream, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out[stream].Write(p)
	s.once.Do(func() { close(s.ready) })
}

func (s *sink) Unblock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unblocked++
}

func (s *sink) text(stream program.Stream) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out[stream].String()
}

// run runs a program with a keeper of its own.
func run(t *testing.T, ctx context.Context, c program.Command) program.Result {
	t.Helper()
	return program.NewKeeper(program.Options{Name: t.Name()}).Run(ctx, c)
}

func command(role string, s program.Sink) program.Command {
	return program.Command{Path: os.Args[0], Env: []string{roleEnv + "=" + role, "LANG=C"}, Dir: "/", Umask: program.DefaultUmask, Sink: s}
}

func TestAProgramRunsInItsOwnSessionWithNothingInherited(t *testing.T) {
	t.Parallel()
	s := newSink()
	c := command("show", s)
	c.Args = []string{"a b", "$HOME; id", ""}
	r := run(t, t.Context(), c)
	if r.Code == nil || *r.Code != 0 || r.SpawnError != nil || r.Signal != "" || r.Ended || r.Cut {
		t.Errorf("result %+v", r)
	}
	want := fmt.Sprintf("args=%q stdin=0 dir=/ leader=true umask=0022 env=%q\n", c.Args, c.Env)
	if diff := cmp.Diff(want, s.text(program.Stdout)); diff != "" {
		t.Errorf("stdout (-want +got):\n%s", diff)
	}
	if got := s.text(program.Stderr); got != "on stderr\n" {
		t.Errorf("stderr %q", got)
	}
	if s.unblocked != 1 {
		t.Errorf("unblocked %d times", s.unblocked)
	}
}

func TestEachEndIsToldApart(t *testing.T) {
	t.Parallel()
	if r := run(t, t.Context(), command("exit7", newSink())); r.Code == nil || *r.Code != 7 {
		t.Errorf("exit code: %+v", r)
	}
	if r := run(t, t.Context(), command("kill9", newSink())); r.Signal != "SIGKILL" || r.Code != nil || r.Ended {
		t.Errorf("signal: %+v", r)
	}
	c := command("", newSink())
	c.Path = "/nowhere/program"
	if r := run(t, t.Context(), c); r.SpawnError == nil || r.Code != nil || r.Signal != "" {
		t.Errorf("missing program: %+v", r)
	}
	c = command("exit7", newSink())
	c.Dir = "/nowhere"
	if r := run(t, t.Context(), c); r.SpawnError == nil {
		t.Errorf("missing directory: %+v", r)
	}
	for name, as := range map[string][3]string{"user": {"no-such-user"}, "group": {"", "no-such-group"}, "groups": {"", "", "no-such-group"}} {
		if id, err := program.Lookup(as[0], as[1], strings.Fields(as[2])); err == nil {
			t.Errorf("missing %s: %+v", name, id)
		}
	}
}

func TestFiftyMegabytesArriveByteForByte(t *testing.T) {
	t.Parallel()
	want := sha256.New()
	flood(want)
	s := newSink()
	if r := run(t, t.Context(), command("flood", s)); r.Code == nil || *r.Code != 0 {
		t.Fatalf("result %+v", r)
	}
	if n := len(s.text(program.Stdout)); n != floodBytes {
		t.Fatalf("%d bytes, want %d", n, floodBytes)
	}
	if got := sha256.Sum256([]byte(s.text(program.Stdout))); !bytes.Equal(got[:], want.Sum(nil)) {
		t.Error("the bytes differ")
	}
}

// endWhenReady ends the context once the program has printed something.
func endWhenReady(t *testing.T, s *sink) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-s.ready
		cancel()
	}()
	return ctx
}

func TestAProgramMayEndByItselfOnTerm(t *testing.T) {
	t.Parallel()
	s := newSink()
	r := run(t, endWhenReady(t, s), command("on_term", s))
	if !r.Ended || r.Code == nil || *r.Code != 3 || r.KilledBy != program.ByTerm {
		t.Errorf("result %+v", r)
	}
	if got := s.text(program.Stdout); got != "ready\nbye\n" {
		t.Errorf("stdout %q", got)
	}
}

func TestAProgramThatIgnoresTermIsKilledAfterTheGrace(t *testing.T) {
	t.Parallel()
	s := newSink()
	c := command("ignore_term", s)
	const grace = 200 * time.Millisecond
	c.Grace = func(cause error) time.Duration {
		if !errors.Is(cause, context.Canceled) {
			t.Errorf("cause %v", cause)
		}
		return grace
	}
	start := time.Now()
	r := run(t, endWhenReady(t, s), c)
	if !r.Ended || r.Signal != "SIGKILL" || r.KilledBy != program.ByKill || r.Grace != grace {
		t.Errorf("result %+v", r)
	}
	if d := time.Since(start); d < grace {
		t.Errorf("killed after %s, before the grace of %s", d, grace)
	}
}

// expectGone waits for the end of a process that was sent SIGKILL.
func expectGone(t *testing.T, pid int) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for range 1000 {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		<-tick.C
	}
	t.Errorf("process %d lives on", pid)
}

func TestARootAgentCanRunAProgramAsAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	for _, c := range []struct {
		group  string
		groups []string
		want   string
	}{
		{"", nil, "uid=65534(nobody) gid=65534(nogroup) groups=65534(nogroup)\n"},
		{"daemon", []string{"adm", "mail"}, "uid=65534(nobody) gid=1(daemon) groups=1(daemon),4(adm),8(mail)\n"},
	} {
		as, err := program.Lookup("nobody", c.group, c.groups)
		if err != nil {
			t.Fatal(err)
		}
		s := newSink()
		r := run(t, t.Context(), program.Command{Path: "/usr/bin/id", Dir: "/", As: as, Sink: s})
		if r.Code == nil || *r.Code != 0 || s.text(program.Stdout) != c.want {
			t.Errorf("result %+v, output %q, %q", r, s.text(program.Stdout), s.text(program.Stderr))
		}
	}
}

// TestTheChildDiesWithItsParent kills a parent with SIGKILL while its child runs.
func TestTheChildDiesWithItsParent(t *testing.T) {
	t.Parallel()
	if os.Getenv("HEADGATE_PROGRAM_TEST_PARENT") != "" {
		s := &printer{}
		run(t, t.Context(), command("wait", s))
		return
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	parent, err := os.StartProcess(os.Args[0], []string{os.Args[0], "-test.run=^TestTheChildDiesWithItsParent$"}, &os.ProcAttr{
		Env: append(os.Environ(), "HEADGATE_PROGRAM_TEST_PARENT=1"), Files: []*os.File{nil, w, os.Stderr},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(r).ReadString('\n') // the child of the child is ready
	if err != nil {
		t.Fatal(err)
	}
	var child int
	if _, err := fmt.Sscanf(line, "child %d", &child); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	if err := parent.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = parent.Wait()
	expectGone(t, child)
	if _, err := program.NewKeeper(program.Options{Name: t.Name()}).Recover(); err != nil {
		t.Error(err)
	}
}

// printer tells the number of the only child once it is ready.
type printer struct{}

func (*printer) Write(program.Stream, []byte) {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	if len(bytes.TrimSpace(data)) == 0 { // another thread has started it
		tasks, _ := os.ReadDir("/proc/self/task")
		for _, t := range tasks {
			more, _ := os.ReadFile("/proc/self/task/" + t.Name() + "/children")
			data = append(data, more...)
		}
	}
	fmt.Printf("child %s\n", strings.Fields(string(data))[0])
}

func (*printer) Unblock() {}
