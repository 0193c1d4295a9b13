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
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

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
		pgid, _ := syscall.Getpgid(0)
		fmt.Printf("args=%q stdin=%d dir=%s leader=%v env=%q\n", os.Args[1:], len(null), dir, pgid == os.Getpid(), os.Environ())
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
	case "grandchild", "grandchild_out_of_group":
		attr := &os.ProcAttr{Env: []string{roleEnv + "=wait"}, Files: []*os.File{nil, os.Stdout, os.Stderr}}
		if role == "grandchild_out_of_group" {
			attr.Sys = &syscall.SysProcAttr{Setsid: true}
		}
		p, err := os.StartProcess(os.Args[0], os.Args[:1], attr)
		if err != nil {
			panic(err)
		}
		fmt.Printf("pid %d\n", p.Pid)
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

func command(role string, s program.Sink) program.Command {
	return program.Command{Path: os.Args[0], Env: []string{roleEnv + "=" + role, "LANG=C"}, Dir: "/", Sink: s}
}

func TestAProgramRunsInItsOwnGroupWithNothingInherited(t *testing.T) {
	t.Parallel()
	s := newSink()
	c := command("show", s)
	c.Args = []string{"a b", "$HOME; id", ""}
	r := program.Run(t.Context(), c)
	if r.Code == nil || *r.Code != 0 || r.SpawnError != nil || r.Signal != "" || r.Ended || r.Cut || r.MaxRSS == 0 {
		t.Errorf("result %+v", r)
	}
	want := fmt.Sprintf("args=%q stdin=0 dir=/ leader=true env=%q\n", c.Args, c.Env)
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
	if r := program.Run(t.Context(), command("exit7", newSink())); r.Code == nil || *r.Code != 7 {
		t.Errorf("exit code: %+v", r)
	}
	if r := program.Run(t.Context(), command("kill9", newSink())); r.Signal != "SIGKILL" || r.Code != nil || r.Ended {
		t.Errorf("signal: %+v", r)
	}
	c := command("", newSink())
	c.Path = "/nowhere/program"
	if r := program.Run(t.Context(), c); r.SpawnError == nil || r.Code != nil || r.Signal != "" {
		t.Errorf("missing program: %+v", r)
	}
	c = command("exit7", newSink())
	c.Dir = "/nowhere"
	if r := program.Run(t.Context(), c); r.SpawnError == nil {
		t.Errorf("missing directory: %+v", r)
	}
	c = command("exit7", newSink())
	c.User = "no-such-user"
	if r := program.Run(t.Context(), c); r.SpawnError == nil {
		t.Errorf("missing user: %+v", r)
	}
}

func TestFiftyMegabytesArriveByteForByte(t *testing.T) {
	t.Parallel()
	want := sha256.New()
	flood(want)
	s := newSink()
	if r := program.Run(t.Context(), command("flood", s)); r.Code == nil || *r.Code != 0 {
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
	r := program.Run(endWhenReady(t, s), command("on_term", s))
	if !r.Ended || r.Code == nil || *r.Code != 3 {
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
	r := program.Run(endWhenReady(t, s), c)
	if !r.Ended || r.Signal != "SIGKILL" {
		t.Errorf("result %+v", r)
	}
	if d := time.Since(start); d < grace {
		t.Errorf("killed after %s, before the grace of %s", d, grace)
	}
}

func TestADescendantInTheGroupHoldsNothingUp(t *testing.T) {
	t.Parallel()
	s := newSink()
	r := program.Run(t.Context(), command("grandchild", s))
	if r.Code == nil || *r.Code != 0 || r.Ended || r.Cut {
		t.Errorf("result %+v", r)
	}
	expectGone(t, pidOf(t, s))
}

func TestADescendantOutsideTheGroupIsCutOff(t *testing.T) {
	t.Parallel()
	s := newSink()
	r := program.Run(t.Context(), command("grandchild_out_of_group", s))
	if r.Code == nil || *r.Code != 0 || !r.Cut {
		t.Errorf("result %+v", r)
	}
	// It left the group on purpose and lives on; the test ends it.
	if err := syscall.Kill(pidOf(t, s), syscall.SIGKILL); err != nil {
		t.Errorf("the descendant is gone: %v", err)
	}
}

func pidOf(t *testing.T, s *sink) int {
	t.Helper()
	for line := range strings.Lines(s.text(program.Stdout)) {
		if n, ok := strings.CutPrefix(strings.TrimSpace(line), "pid "); ok {
			pid, err := strconv.Atoi(n)
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("no pid in %q", s.text(program.Stdout))
	return 0
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
	s := newSink()
	r := program.Run(t.Context(), program.Command{Path: "/usr/bin/id", Args: []string{"-u"}, Dir: "/", User: "nobody", Sink: s})
	if r.Code == nil || *r.Code != 0 || s.text(program.Stdout) != "65534\n" {
		t.Errorf("result %+v, output %q, %q", r, s.text(program.Stdout), s.text(program.Stderr))
	}
}

// TestTheChildDiesWithItsParent kills a parent with SIGKILL while its child runs.
func TestTheChildDiesWithItsParent(t *testing.T) {
	t.Parallel()
	if os.Getenv("HEADGATE_PROGRAM_TEST_PARENT") != "" {
		s := &printer{}
		program.Run(t.Context(), command("wait", s))
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
