package program_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"uuid"

	"headgate/internal/agent/program"
)

// patience bounds every wait of a test.
const patience = 30 * time.Second

// playTree is what the test binary does as a program that starts others. Each
// of them prints its number on the one output once it is what it is to be.
func playTree(role string) {
	switch role {
	case "member":
		sayPID()
		select {}
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		sayPID()
		waitForEver()
	case "family": // each way to go on alone; then it waits itself
		spawnFamily()
		sayPID()
		select {}
	case "family_left":
		spawnFamily()
	case "orphaner": // its child is in a session of its own and has no parent
		spawn("stubborn", os.Stdout, os.Environ(), true)
	case "daemon": // holds no output
		null, err := os.OpenFile(os.Args[1], os.O_WRONLY, 0)
		must(err)
		spawn("member", null, os.Environ(), true)
	case "stranger_left": // nothing in its environment tells of us
		spawn("member", os.Stdout, nil, true)
	case "cleanup": // on SIGTERM it ends when its file is there
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		sayPID()
		<-c
		fmt.Println("cleaning")
		for tick := time.Tick(5 * time.Millisecond); ; <-tick {
			if _, err := os.Stat(os.Args[1]); err == nil {
				os.Exit(3)
			}
		}
	case "keeper": // a process that keeps one program, as an agent does
		playKeeper()
	default:
		panic("no role " + role)
	}
}

func sayPID() { fmt.Printf("pid %d\n", os.Getpid()) }

func waitForEver() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGUSR1)
	<-c
}

// familySize is how many members of spawnFamily wait.
const familySize = 4

func spawnFamily() {
	spawn("member", os.Stdout, os.Environ(), false)
	spawn("stubborn", os.Stdout, os.Environ(), false)
	spawn("member", os.Stdout, os.Environ(), true)
	spawn("orphaner", os.Stdout, os.Environ(), false)
}

func spawn(role string, out *os.File, env []string, session bool) {
	env = slices.DeleteFunc(slices.Clone(env), func(e string) bool { return strings.HasPrefix(e, roleEnv+"=") })
	_, err := os.StartProcess(os.Args[0], os.Args, &os.ProcAttr{
		Env: append(env, roleEnv+"="+role), Files: []*os.File{nil, out, out}, Sys: &syscall.SysProcAttr{Setsid: session},
	})
	must(err)
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// pids collects the numbers that a family prints.
type pids struct {
	mu     sync.Mutex
	text   bytes.Buffer
	want   int
	all    chan struct{} // closed when so many are known
	phrase string        // or when this was printed
}

func newPIDs(want int) *pids { return &pids{want: want, all: make(chan struct{})} }

func (p *pids) Write(_ program.Stream, b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text.Write(b)
	select {
	case <-p.all:
	default:
		if p.phrase != "" && strings.Contains(p.text.String(), p.phrase) || p.phrase == "" && strings.Count(p.text.String(), "\n") >= p.want {
			close(p.all)
		}
	}
}

func (p *pids) Unblock() {}

func (p *pids) list(t *testing.T) []int {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []int
	for line := range strings.Lines(p.text.String()) {
		if n, ok := strings.CutPrefix(strings.TrimSpace(line), "pid "); ok {
			pid, err := strconv.Atoi(n)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, pid)
		}
	}
	if len(list) != p.want {
		t.Fatalf("%d processes, want %d: %q", len(list), p.want, p.text.String())
	}
	return list
}

// alive says whether a process lives; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return err == nil && len(rest) > 0 && rest[0] != 'Z' && rest[0] != 'X'
}

func expectAllGone(t *testing.T, list []int) {
	t.Helper()
	for _, pid := range list {
		if alive(pid) {
			t.Errorf("process %d lives on", pid)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// eachMode runs a test with a cgroup, where there is one, and without.
func eachMode(t *testing.T, test func(t *testing.T, o program.Options)) {
	for _, name := range []string{program.ByCgroup, program.ByGroup} {
		o := program.Options{Name: uuid.NewV4().String(), NoCgroup: name == program.ByGroup}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if method, why := program.NewKeeper(o).Confinement(); method != name {
				t.Skip(why)
			}
			test(t, o)
		})
	}
}

// endAfter gives a context that ends when the sink has seen what it waits for.
func endAfter(t *testing.T, p *pids) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		select {
		case <-p.all:
		case <-t.Context().Done():
		}
	}()
	return ctx
}

func treeCommand(role string, sink program.Sink, grace time.Duration) program.Command {
	return program.Command{
		Path: os.Args[0], Env: []string{roleEnv + "=" + role}, Dir: "/", Sink: sink,
		Grace: func(error) time.Duration { return grace },
	}
}

// TestNobodyOfAFamilyOutlivesItsProgram ends a program that has children, also
// such as ignore SIGTERM, have a session of their own, or have no parent more.
// Cases P36, P37.
func TestNobodyOfAFamilyOutlivesItsProgram(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, o program.Options) {
		s := newPIDs(familySize + 1)
		r := program.NewKeeper(o).Run(endAfter(t, s), treeCommand("family", s, 100*time.Millisecond))
		expectAllGone(t, s.list(t))
		if !r.Ended || r.Signal != "SIGTERM" || r.KilledBy != program.ByKill || len(r.Survivors) != 0 || len(r.LeftBehind) != 0 || r.Cut {
			t.Errorf("result %+v", r)
		}
		expectNoTrace(t, o)
	})
}

// TestWhatAProgramLeavesBehindIsEndedAndTold lets the program itself end well.
// Cases P36.
func TestWhatAProgramLeavesBehindIsEndedAndTold(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, o program.Options) {
		s := newPIDs(familySize)
		// The end of the program may come before its family has begun to print,
		// which has two seconds for it.
		r := program.NewKeeper(o).Run(t.Context(), treeCommand("family_left", s, 100*time.Millisecond))
		if r.Code == nil || *r.Code != 0 || r.Ended || r.KilledBy != "" || r.Released || len(r.Survivors) != 0 || len(r.LeftBehind) < familySize {
			t.Errorf("result %+v", r)
		}
		if !s.complete() {
			t.Skip("this machine is too busy for a family to begin within two seconds")
		}
		expectAllGone(t, s.list(t))
		var told []int
		for _, p := range r.LeftBehind {
			told = append(told, p.PID)
			if p.Name != filepath.Base(os.Args[0])[:min(15, len(filepath.Base(os.Args[0])))] {
				t.Errorf("named %q", p.Name)
			}
		}
		for _, pid := range s.list(t) {
			if !slices.Contains(told, pid) {
				t.Errorf("process %d is not told of in %v", pid, told)
			}
		}
		expectNoTrace(t, o)
	})
}

func (p *pids) complete() bool {
	select {
	case <-p.all:
		return true
	default:
		return false
	}
}

// TestADaemonGoesOnWhereThatIsAllowed ends it when it is not.
func TestADaemonGoesOnWhereThatIsAllowed(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, o program.Options) {
		for _, allowed := range []bool{true, false} {
			out := filepath.Join(t.TempDir(), "out")
			must(os.WriteFile(out, nil, 0o600))
			c := treeCommand("daemon", newPIDs(1), time.Hour)
			c.Args, c.LeaveChildren = []string{out}, allowed
			r := program.NewKeeper(o).Run(t.Context(), c)
			if r.Code == nil || *r.Code != 0 || r.Released != allowed || len(r.LeftBehind) != 1 || r.Cut {
				t.Fatalf("allowed %v: %+v", allowed, r)
			}
			pid := r.LeftBehind[0].PID
			if alive(pid) != allowed {
				t.Errorf("allowed %v: alive %v", allowed, alive(pid))
			}
			_ = syscall.Kill(pid, syscall.SIGKILL)
			expectNoTrace(t, o)
		}
	})
}

// TestTheGraceIsKept ends a program that takes its time to clean up: within
// the grace it ends as it likes, after it by SIGKILL and not before.
// Cases P41.
func TestTheGraceIsKept(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, o program.Options) {
		file := filepath.Join(t.TempDir(), "clean")
		s := newPIDs(1)
		s.phrase = "cleaning"
		go func() {
			<-s.all
			must(os.WriteFile(file, nil, 0o600))
		}()
		started := newPIDs(1)
		c := treeCommand("cleanup", both{started, s}, time.Hour)
		c.Args = []string{file}
		r := program.NewKeeper(o).Run(endAfter(t, started), c)
		if r.Code == nil || *r.Code != 3 || r.KilledBy != program.ByTerm || r.Grace != time.Hour {
			t.Errorf("with time enough: %+v", r)
		}
		const grace = 300 * time.Millisecond
		started = newPIDs(1)
		c = treeCommand("cleanup", started, grace)
		c.Args = []string{file + "-that-never-comes"}
		ctx := endAfter(t, started)
		begin := make(chan time.Time, 1)
		context.AfterFunc(ctx, func() { begin <- time.Now() })
		r = program.NewKeeper(o).Run(ctx, c)
		if took := time.Since(<-begin); took < grace-10*time.Millisecond || took > patience { // AfterFunc may come late
			t.Errorf("SIGKILL came after %s", took)
		}
		if r.Signal != "SIGKILL" || r.KilledBy != program.ByKill || r.Grace != grace {
			t.Errorf("without: %+v", r)
		}
	})
}

// both gives output to two sinks.
type both [2]*pids

func (b both) Write(s program.Stream, p []byte) {
	b[0].Write(s, p)
	b[1].Write(s, p)
}

func (both) Unblock() {}

// expectNoTrace checks that no cgroup of the keeper is left.
func expectNoTrace(t *testing.T, o program.Options) {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		_ = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
			if err == nil && strings.Contains(d.Name(), o.Name) {
				t.Errorf("%s is left", path)
			}
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
				return filepath.SkipDir
			}
			return nil
		})
	}
}
