package agent_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"headgate/internal/agent"
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
)

// alive says whether a process lives; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return err == nil && rest != "" && rest[0] != 'Z' && rest[0] != 'X'
}

// family takes the numbers that the program of that name prints.
func (c *control) family() []int {
	c.t.Helper()
	var text string
	for strings.Count(text, "\n") < 2 {
		if o := c.recv().GetOutput(); o != nil {
			text += string(o.GetData())
			c.ack(o)
		}
	}
	var list []int
	for _, field := range strings.Fields(text) {
		pid, err := strconv.Atoi(field)
		check(c.t, err)
		list = append(list, pid)
	}
	return list
}

// eachConfinement runs a test with cgroups, where there are some, and without.
func eachConfinement(t *testing.T, test func(t *testing.T, c agent.Config)) {
	for _, method := range []string{program.ByCgroup, program.ByGroup} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			o := program.Options{Name: "test", NoCgroup: method == program.ByGroup}
			if got, why := program.NewKeeper(o).Confinement(); got != method {
				t.Skip(why)
			}
			limits := quick()
			limits.TermGrace = 200 * time.Millisecond
			test(t, agent.Config{Limits: limits, NoCgroup: o.NoCgroup, PolicyFile: policyWith(t, "family", "show")})
		})
	}
}

// TestWhatAKilledAgentLeavesRunningIsEndedAndTold kills the agent while the
// family of its task lives, and starts it again.
// Cases P13, P37, R20, R22.
func TestWhatAKilledAgentLeavesRunningIsEndedAndTold(t *testing.T) {
	t.Parallel()
	eachConfinement(t, func(t *testing.T, config agent.Config) {
		a := newFleet(t).paired(t, config)
		check(t, a.end(t))
		victim := a.startChild(t)
		c := victim.session(t, 2)
		c.execute(c.job(1, "cmd.run", programArgs("family")))
		list := c.family()
		victim.kill(t)
		a.restart(t)
		for _, pid := range list {
			if alive(pid) {
				t.Errorf("process %d lives beside the agent's next start", pid)
			}
		}
		c = a.session(t, 3)
		if c.welcome.GetRunning() != nil { // an acknowledgement of output had not arrived
			if _, _, f := c.finish(); !f.GetInterrupted() || !strings.Contains(f.GetDetail(), "was alive and was ended: ") {
				t.Errorf("after the rest of the output: %v", f)
			}
			c.status() // all is acknowledged
			c = a.session(t, 3)
		}
		lost := c.welcome.GetInterrupted()
		if len(lost) != 1 || lost[0].GetTaskId() != 1 || !strings.Contains(lost[0].GetNote(), "was alive and was ended: ") {
			t.Fatalf("Welcome %v", c.welcome)
		}
		// Asked again, it is not run, and tells what was found.
		j := c.job(1, "cmd.run", programArgs("family"))
		j.Attempt = 2
		c.execute(j)
		if f := c.final(); f.GetOutcome() != "unknown" || f.GetReason() != "agent_restarted" || !strings.Contains(f.GetDetail(), lost[0].GetNote()) {
			t.Errorf("asked again: %v", f)
		}
		// The agent is as good as before.
		c.execute(c.job(2, "cmd.run", programArgs("show")))
		if _, _, f := c.finish(); f.GetOutcome() != "succeeded" {
			t.Errorf("the next task: %v", f)
		}
	})
}

// TestNoProcessOfACancelledTaskIsAlive when its end is told.
// Cases P36.
func TestNoProcessOfACancelledTaskIsAlive(t *testing.T) {
	t.Parallel()
	eachConfinement(t, func(t *testing.T, config agent.Config) {
		a := newFleet(t).paired(t, config)
		c := a.session(t, 1)
		c.execute(c.job(1, "cmd.run", programArgs("family")))
		list := c.family()
		c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Cancel{Cancel: &agentpb.Cancel{TaskId: 1, Attempt: 1}}})
		_, _, f := c.finish()
		for _, pid := range list {
			if alive(pid) {
				t.Errorf("process %d outlives its task", pid)
			}
		}
		if e := f.GetExit(); f.GetOutcome() != "cancelled" || e.GetKilledBy() != "kill" || e.GetGraceMs() != 200 || len(e.GetSurvivors()) != 0 {
			t.Errorf("end: %v", f)
		}
	})
}

// TestAProgramSeesWhatIsDocumentedAndNothingElse is the golden copy of its
// surroundings.
func TestAProgramSeesWhatIsDocumentedAndNothingElse(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{Limits: quick(), PolicyFile: policyWith(t, "surroundings")})
	check(t, a.end(t))
	// A process of its own, which inherits what the tests' process has open.
	c := a.startChild(t).session(t, 2)
	c.execute(c.job(77, "cmd.run", programArgs("surroundings")))
	stdout, stderr, f := c.finish()
	if f.GetOutcome() != "succeeded" || len(stderr) != 0 {
		t.Fatalf("%v, %q", f, stderr)
	}
	var got []string
	for line := range strings.Lines(string(stdout)) {
		if !strings.HasPrefix(line, program.MarkName+"=") { // new each time
			got = append(got, strings.TrimSuffix(line, "\n"))
		}
	}
	me, err := program.Lookup("", "", nil)
	check(t, err)
	want := []string{
		"GREETING=a b", "HEADGATE_ATTEMPT=1", "HEADGATE_TASK_ID=77", "HOME=" + me.Home, "LANG=C.UTF-8", "LOGNAME=" + me.Name,
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PWD=/", "TZ=UTC", "USER=" + me.Name,
		"/", me.Name, output(t, "id", "-gn"), output(t, "id", "-Gn"), "0022", output(t, "sh", "-c", "ulimit -n"), output(t, "sh", "-c", "ulimit -c"),
		"/dev/null", "4", // the fourth is the list itself
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("surroundings (-want +got):\n%s", diff)
	}
}

// output gives what a program of this machine prints when we start it.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	b, err := exec.CommandContext(t.Context(), name, args...).Output()
	check(t, err)
	return strings.TrimSpace(string(b))
}

// spoilt is an executor that does something before its work.
type spoilt struct {
	agent.Executor
	first *atomic.Pointer[func()]
}

func (s spoilt) Execute(ctx context.Context, task agent.Task) agent.Ending {
	if f := s.first.Load(); f != nil {
		(*f)()
	}
	return s.Executor.Execute(ctx, task)
}

// TestTheSlotIsFreeAfterEachWayOfFailing and the next task runs.
// Cases P11.
func TestTheSlotIsFreeAfterEachWayOfFailing(t *testing.T) {
	t.Parallel()
	config := agent.Config{Limits: quick(), PolicyFile: policyWith(t, "exit7", "kill9", "missing", "show", "short")}
	var first atomic.Pointer[func()]
	config.Around = func(e agent.Executor) agent.Executor { return spoilt{e, &first} }
	a := newFleet(t).paired(t, config)
	c := a.session(t, 1)
	id := int64(0)
	run := func(kind, args string) *agentpb.Final {
		t.Helper()
		id++
		c.execute(c.job(id, kind, args))
		_, _, f := c.finish()
		if s := c.status(); s.GetRunning() != nil {
			t.Errorf("after %v the slot is taken by %v", f, s.GetRunning())
		}
		return f
	}
	for _, x := range []struct{ reason, kind, args string }{
		{"exit_nonzero", "cmd.run", programArgs("exit7")},
		{"killed_by_signal", "cmd.run", programArgs("kill9")},
		{"spawn_failed", "cmd.run", programArgs("missing")},
		{"deadline_exceeded", "cmd.run", programArgs("short")},
		{"unknown_program", "cmd.run", programArgs("nobody-knows-it")},
		{"invalid_args", "core.sleep", `{"seconds":-1}`},
		{"unknown_kind", "no.such", `{}`},
		{"agent_defect", "core.echo", `{}`},
	} {
		if x.reason == "agent_defect" {
			f := func() { panic("on purpose") }
			first.Store(&f)
		}
		if f := run(x.kind, x.args); f.GetReason() != x.reason {
			t.Errorf("%s: %v", x.reason, f)
		}
		first.Store(nil)
		if f := run("cmd.run", programArgs("show")); f.GetOutcome() != "succeeded" {
			t.Errorf("after %s: %v", x.reason, f)
		}
	}
	// The disk is full when the end is to be recorded: it is told all the same.
	fill := func() { check(t, fillLedger(a.config.DataDir)) }
	first.Store(&fill)
	if f := run("cmd.run", programArgs("show")); f.GetOutcome() != "succeeded" {
		t.Errorf("with a full disk: %v", f)
	}
	// From then on nothing starts, and the agent says why.
	c.execute(c.job(id+1, "cmd.run", programArgs("show")))
	if r := c.recv().GetRefused(); r.GetCause() != agentpb.Refusal_REFUSAL_DISK || r.GetRunning() != nil {
		t.Errorf("the next task: %v", r)
	}
}

// TestAFullDiskLetsTasksWait: the records of a task may still fit where the note
// of its program does not, which must not end the task.
func TestAFullDiskLetsTasksWait(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.LeastFree = math.MaxInt64 - 1
	c := newFleet(t).paired(t, agent.Config{Limits: limits}).session(t, 1)
	c.execute(c.job(1, "core.echo", `{}`))
	if r := c.recv().GetRefused(); r.GetTaskId() != 1 || r.GetCause() != agentpb.Refusal_REFUSAL_DISK {
		t.Errorf("got %v", r)
	}
	if s := c.status(); s.GetRunning() != nil || s.GetLedgerEntries() != 0 {
		t.Errorf("status %v", s)
	}
}

// fillLedger puts a full device in the place of the open ledger of an agent of
// this process.
func fillLedger(dir string) error {
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer full.Close()
	fds, err := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if to, lerr := os.Readlink("/proc/self/fd/" + fd.Name()); lerr != nil || to != filepath.Join(dir, "ledger") {
			continue
		}
		n, err := strconv.Atoi(fd.Name())
		if err != nil {
			return err
		}
		return unix.Dup3(int(full.Fd()), n, unix.O_CLOEXEC)
	}
	return errors.Join(err, errors.New("the ledger is not open"))
}
