package program_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/agent/program"
)

// playKeeper runs the role that its arguments name and prints the result.
func playKeeper() {
	var o program.Options
	must(json.Unmarshal([]byte(os.Args[1]), &o))
	c := treeCommand(os.Args[2], echo{}, 50*time.Millisecond)
	if c.Label = "7.1"; os.Args[2][0] == '/' {
		c.Path, c.Args = os.Args[2], os.Args[3:]
	}
	r := program.NewKeeper(o).Run(context.Background(), c)
	must(json.NewEncoder(os.Stdout).Encode(r))
}

// echo prints what the kept program prints.
type echo struct{}

func (echo) Write(_ program.Stream, p []byte) { _, _ = os.Stdout.Write(p) }
func (echo) Unblock()                         {}

// startKeeper starts a process that keeps a program: a role of this binary, or
// a path with arguments.
func startKeeper(t *testing.T, o program.Options, what ...string) (*os.Process, *bufio.Reader) {
	t.Helper()
	text, err := json.Marshal(o)
	must(err)
	r, w, err := os.Pipe()
	must(err)
	t.Cleanup(func() { r.Close() })
	p, err := os.StartProcess(os.Args[0], append([]string{os.Args[0], string(text)}, what...), &os.ProcAttr{
		Env: []string{roleEnv + "=keeper"}, Files: []*os.File{nil, w, os.Stderr},
	})
	w.Close()
	must(err)
	t.Cleanup(func() {
		_ = p.Kill()
		_, _ = p.Wait()
	})
	return p, bufio.NewReader(r)
}

// TestWhatAKilledKeeperLeftBehindIsEndedAtTheNextStart kills the process that
// keeps a program while its family lives.
// Cases P37.
func TestWhatAKilledKeeperLeftBehindIsEndedAtTheNextStart(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, o program.Options) {
		o.Record = filepath.Join(t.TempDir(), "program.json")
		p, out := startKeeper(t, o, "family")
		var list []int
		for range familySize + 1 {
			line, err := out.ReadString('\n')
			must(err)
			var pid int
			if _, err := fmt.Sscanf(line, "pid %d", &pid); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			list = append(list, pid)
		}
		must(p.Kill())
		_, _ = p.Wait()
		found, err := program.NewKeeper(o).Recover()
		must(err)
		expectAllGone(t, list)
		// The program itself may have died with its keeper already.
		if len(found) != 1 || found[0].Label != "7.1" || len(found[0].Ended) < familySize || len(found[0].Survivors) != 0 {
			t.Errorf("found %+v", found)
		}
		if found, err = program.NewKeeper(o).Recover(); len(found) != 0 || err != nil {
			t.Errorf("a second time: %+v, %v", found, err)
		}
		expectNoTrace(t, o)
	})
}

// TestARecordOfAnEarlierStartOfTheMachineMeansNobody: numbers of processes
// begin anew, so nobody is looked for.
func TestARecordOfAnEarlierStartOfTheMachineMeansNobody(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		fmt.Sprintf(`{"label":"1.1","mark":"%s=x","boot":"another","pid":%d}`, program.MarkName, os.Getpid()), "", "\x00\x00",
	} {
		file := filepath.Join(t.TempDir(), "program.json")
		must(os.WriteFile(file, []byte(text), 0o600))
		k := program.NewKeeper(program.Options{Name: uuid.NewV4().String(), Record: file})
		if found, err := k.Recover(); len(found) != 0 || err != nil {
			t.Errorf("%q: %+v, %v", text, found, err)
		}
		if _, err := os.Stat(file); err == nil {
			t.Errorf("%q is left", text)
		}
	}
}

// TestAnAdoptedStrangerIsEnded: without a cgroup, a process with a session of
// its own, no parent and an empty environment is found because it comes to the
// keeper.
// Cases P36.
func TestAnAdoptedStrangerIsEnded(t *testing.T) {
	t.Parallel()
	o := program.Options{Name: uuid.NewV4().String(), NoCgroup: true, Adopt: true}
	r := kept(t, o, "stranger_left")
	if r.Code == nil || *r.Code != 0 || len(r.LeftBehind) != 1 {
		t.Fatalf("result %+v", r)
	}
	expectAllGone(t, []int{r.LeftBehind[0].PID})
}

// kept lets a process of its own keep a program and gives the result.
func kept(t *testing.T, o program.Options, what ...string) program.Result {
	t.Helper()
	_, out := startKeeper(t, o, what...)
	for {
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatalf("no result: %v", err)
		}
		if !strings.HasPrefix(line, "{") {
			continue // the program's own output
		}
		var r program.Result
		must(json.Unmarshal([]byte(line), &r))
		return r
	}
}

// TestTheMemoryOfAProgramIsItsOwn and never that of the process that started it.
func TestTheMemoryOfAProgramIsItsOwn(t *testing.T) {
	t.Parallel()
	const most = 256 << 20
	r := kept(t, program.Options{Name: uuid.NewV4().String()}, "/usr/bin/dd", "if=/dev/zero", "of=/dev/null", "count=1", "bs="+strconv.Itoa(most))
	if r.MaxRSS < most || r.MaxRSS > most+most/2 {
		t.Errorf("a program with %d bytes is said to have had %d: %+v", most, r.MaxRSS, r)
	}
	if r := kept(t, program.Options{Name: uuid.NewV4().String()}, "/usr/bin/true"); r.MaxRSS != 0 {
		t.Errorf("less than our own is said to have been %d", r.MaxRSS)
	}
}

// TestARecordThatCannotBeWrittenLetsNothingStart: it would not be found again.
func TestARecordThatCannotBeWrittenLetsNothingStart(t *testing.T) {
	t.Parallel()
	o := program.Options{Name: uuid.NewV4().String(), Record: filepath.Join(t.TempDir(), "gone", "program.json")}
	s := newSink()
	if r := program.NewKeeper(o).Run(t.Context(), command("show", s)); r.SpawnError == nil || s.text(program.Stdout) != "" || s.unblocked != 1 {
		t.Errorf("result %+v, %q, unblocked %d times", r, s.text(program.Stdout), s.unblocked)
	}
	expectNoTrace(t, o)
}

// TestTheUmaskIsTheProgramsOwn and leaves that of this process alone.
func TestTheUmaskIsTheProgramsOwn(t *testing.T) {
	t.Parallel()
	before := syscall.Umask(0o022)
	syscall.Umask(before)
	s := newSink()
	c := command("show", s)
	c.Umask = 0o077
	if r := run(t, t.Context(), c); r.Code == nil {
		t.Fatalf("result %+v", r)
	}
	if !strings.Contains(s.text(program.Stdout), "umask=0077") {
		t.Errorf("got %q", s.text(program.Stdout))
	}
	after := syscall.Umask(before)
	syscall.Umask(after)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("our own umask:\n%s", diff)
	}
}
