package agent_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/agent"
	"headgate/internal/agent/ledger"
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
)

func lines(t testing.TB, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	check(t, err)
	return strings.Fields(string(data))
}

func flipByte(t testing.TB, path string, at int64) {
	t.Helper()
	data, err := os.ReadFile(path)
	check(t, err)
	data[at] ^= 0x10
	check(t, os.WriteFile(path, data, 0o600))
}

func programArgs(name string) string { return fmt.Sprintf(`{"program":%q}`, name) }

// TestProgramsEndAsTheyEnd tells each end apart, also that by a signal which
// nobody asked for here.
// Cases P40.
func TestProgramsEndAsTheyEnd(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.TermGrace = 100 * time.Millisecond
	a := newFleet(t).paired(t, agent.Config{Limits: limits, PolicyFile: policyWith(t, "show", "exit7", "kill9", "limited", "short", "missing", "grandchild", "ignore_term")})
	c := a.session(t, 1)
	run := func(id int64, name string, timeout time.Duration) (string, string, *agentpb.Final) {
		j := c.job(id, "cmd.run", programArgs(name))
		if timeout > 0 {
			j.TimeoutMs = timeout.Milliseconds()
		}
		c.execute(j)
		stdout, stderr, f := c.finish()
		return string(stdout), string(stderr), f
	}
	stdout, stderr, f := run(1, "show", 0)
	me, err := program.Lookup("", "", nil)
	check(t, err)
	want := fmt.Sprintf(`[] ["AGENT_TEST_ROLE=show" "HEADGATE_ATTEMPT=1" "HEADGATE_TASK_ID=1" "HOME=%s" "LANG=C.UTF-8" "LOGNAME=%s" `+
		`"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "TZ=:/etc/localtime" "USER=%[2]s"]`+"\n", me.Home, me.Name)
	if stdout != want || stderr != "on stderr\n" || f.GetOutcome() != "succeeded" || f.GetExit().GetCode() != 0 || f.GetExit().Code == nil || f.GetOutputBytes() != int64(len(want)+10) {
		t.Errorf("show: %q, %q, %v", stdout, stderr, f)
	}
	if _, _, f := run(2, "exit7", 0); f.GetOutcome() != "failed" || f.GetReason() != "exit_nonzero" || f.GetExit().GetCode() != 7 {
		t.Errorf("exit7: %v", f)
	}
	if _, _, f := run(3, "kill9", 0); f.GetOutcome() != "failed" || f.GetReason() != "killed_by_signal" || f.GetExit().GetSignal() != "SIGKILL" || f.GetExit().Code != nil {
		t.Errorf("kill9: %v", f)
	} else if f.GetExit().GetKilledBy() != "" || f.GetDetail() != "The program was killed by SIGKILL, which was not requested here." {
		t.Errorf("kill9: %v", f)
	}
	if _, _, f := run(4, "missing", 0); f.GetOutcome() != "failed" || f.GetReason() != "spawn_failed" || f.GetExit().GetSpawnError() == "" {
		t.Errorf("missing: %v", f)
	}
	stdout, _, f = run(5, "limited", 0)
	if len(stdout) != 1000 || f.GetOutcome() != "succeeded" || !strings.Contains(f.GetDetail(), "49999000 were dropped") {
		t.Errorf("limited: %d bytes, %v", len(stdout), f)
	}
	if _, _, f := run(6, "short", 0); f.GetOutcome() != "timed-out" || f.GetReason() != "deadline_exceeded" || f.GetExit().GetSignal() != "SIGTERM" || f.GetExit().GetKilledBy() != "term" {
		t.Errorf("short: %v", f)
	}
	c.execute(c.job(7, "cmd.run", programArgs("ignore_term")))
	for c.recv().GetOutput() == nil { // it ignores SIGTERM from here on
	}
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Cancel{Cancel: &agentpb.Cancel{TaskId: 7, Attempt: 1}}})
	if _, _, f := c.finish(); f.GetOutcome() != "cancelled" || f.GetExit().GetSignal() != "SIGKILL" || f.GetExit().GetKilledBy() != "kill" || f.GetExit().GetGraceMs() != 100 {
		t.Errorf("ignore_term: %v", f)
	}
	if _, _, f := run(8, "grandchild", 0); f.GetOutcome() != "succeeded" || len(f.GetExit().GetLeftBehind()) != 1 || f.GetExit().GetReleased() {
		t.Errorf("grandchild: %v", f)
	}
}

func TestOutputArrivesByteForByteAcrossSessions(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "flood")})
	c := a.session(t, 1)
	j := c.job(1, "cmd.run", programArgs("flood"))
	j.TimeoutMs = (10 * time.Minute).Milliseconds()
	c.execute(j)
	got := sha256.New()
	total, next := int64(0), int32(0)
	var final *agentpb.Final
	for n := 1; final == nil; n++ {
		if n%200 == 0 { // the session is lost with chunks under way
			c.cancel()
			c = a.session(t, int64(n))
			if c.welcome.GetRunning().GetTaskId() != 1 || len(c.welcome.GetFinished()) != 0 {
				t.Fatalf("Welcome %v", c.welcome)
			}
		}
		m := c.recv()
		final = m.GetFinal()
		o := m.GetOutput()
		if o == nil || o.GetSeq() < next { // sent again although it had arrived
			if o != nil {
				c.ack(o)
			}
			continue
		}
		if o.GetOffset() != total || len(o.GetData()) > 64<<10 {
			t.Fatalf("chunk %d at %d with %d bytes, want chunk %d at %d", o.GetSeq(), o.GetOffset(), len(o.GetData()), next, total)
		}
		next = o.GetSeq() + 1
		total += int64(len(o.GetData()))
		got.Write(o.GetData())
		c.ack(o)
	}
	want := sha256.New()
	flood(want, floodBytes)
	if total != floodBytes || !bytes.Equal(got.Sum(nil), want.Sum(nil)) || final.GetOutputBytes() != floodBytes || final.GetOutcome() != "succeeded" {
		t.Errorf("%d bytes, equal %v, %v", total, bytes.Equal(got.Sum(nil), want.Sum(nil)), final)
	}
}

func TestAtMostFourChunksAreUnacknowledged(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "small_flood")})
	c := a.session(t, 1)
	c.execute(c.job(1, "cmd.run", programArgs("small_flood")))
	var unacked []*agentpb.Output
	size, most := 0, 0
	for len(unacked) < 4 { // without any Ack four come, however slow the program is
		if o := c.recv().GetOutput(); o != nil {
			unacked = append(unacked, o)
			size += len(o.GetData())
		}
	}
	for {
		// While chunks are unacknowledged the answer to a status request
		// overtakes what would come next: then nothing more was sent.
		c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_StatusRequest{StatusRequest: &agentpb.StatusRequest{}}})
		done := false
		for answered := false; !answered; {
			m := c.recv()
			answered = m.GetStatus() != nil
			if o := m.GetOutput(); o != nil {
				unacked = append(unacked, o)
				size += len(o.GetData())
			}
			done = done || m.GetFinal() != nil
		}
		most = max(most, len(unacked))
		if len(unacked) > 4 {
			t.Fatalf("%d chunks are unacknowledged", len(unacked))
		}
		if done {
			break
		}
		if len(unacked) > 0 {
			c.ack(unacked[0])
			unacked = unacked[1:]
		}
	}
	if size != smallFloodBytes || most != 4 {
		t.Errorf("%d bytes, at most %d chunks unacknowledged", size, most)
	}
}

func TestAFinishedTaskWithUnsentOutputStillCountsAsRunning(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "show", "small_flood")})
	c := a.session(t, 1)
	c.execute(c.job(1, "cmd.run", programArgs("show")))
	for c.recv().GetFinal() == nil { // nothing is acknowledged
	}
	c = a.session(t, 1)
	if c.welcome.GetRunning().GetTaskId() != 1 || len(c.welcome.GetFinished()) != 0 {
		t.Fatalf("Welcome %v", c.welcome)
	}
	stdout, stderr, f := c.finish()
	if len(stdout) == 0 || string(stderr) != "on stderr\n" || f.GetOutcome() != "succeeded" {
		t.Errorf("%q, %q, %v", stdout, stderr, f)
	}
	c.status() // the last acknowledgement has arrived
	c = a.session(t, 1)
	if c.welcome.GetRunning() != nil || len(c.welcome.GetFinished()) != 1 {
		t.Errorf("Welcome %v", c.welcome)
	}
	// The same when the result is known to be stored.
	c.execute(c.job(2, "cmd.run", programArgs("show")))
	for c.recv().GetFinal() == nil {
	}
	c.forget(1, 2)
	c.status()
	c = a.session(t, 1)
	if c.welcome.GetRunning() != nil || len(c.welcome.GetFinished()) != 0 {
		t.Errorf("Welcome %v", c.welcome)
	}
}

func TestAStoppedAgentEndsItsTask(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.StopGrace = 300 * time.Millisecond
	a := newFleet(t).paired(t, agent.Config{Limits: limits, PolicyFile: policyWith(t, "ignore_term")})
	c := a.session(t, 1)
	c.execute(c.job(1, "cmd.run", programArgs("ignore_term")))
	for c.recv().GetOutput() == nil {
	}
	start := time.Now()
	a.stop()
	_, _, f := c.finish()
	if f.GetOutcome() != "failed" || f.GetReason() != "agent_stopped" || f.GetExit().GetSignal() != "SIGKILL" {
		t.Errorf("once: %v", f)
	}
	check(t, a.wait(t))
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("the stop took %s", d)
	}
	a.restart(t)
	c = a.session(t, 1)
	if c.welcome.GetRunning() != nil { // its last acknowledgement had not arrived
		if _, _, again := c.finish(); again.GetReason() != f.GetReason() || again.GetInterrupted() {
			t.Errorf("after the restart: %v", again)
		}
	} else if len(c.welcome.GetFinished()) != 1 || len(c.welcome.GetInterrupted()) != 0 {
		t.Errorf("Welcome %v", c.welcome)
	}
	c.execute(c.job(2, "core.sleep", `{"seconds":3600}`))
	if c.recv().GetAccepted() == nil {
		t.Fatal("not accepted")
	}
	check(t, a.end(t))
	a.restart(t)
	c = a.session(t, 1)
	if w := c.welcome.GetInterrupted(); len(w) != 1 || w[0].GetTaskId() != 2 {
		t.Errorf("a repeatable task is %v", c.welcome)
	}
	j := c.job(2, "core.sleep", `{"seconds":3600}`)
	j.Attempt, j.TimeoutMs = 2, 20
	c.execute(j)
	if _, _, f := c.finish(); f.GetAttempt() != 2 || f.GetOutcome() != "timed-out" {
		t.Errorf("run again: %v", f)
	}
}

func TestATaskOfDeliveryOnceThatWasInterruptedIsNotRunAgain(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "wait")})
	check(t, a.end(t))
	victim := a.startChild(t)
	c := victim.session(t, 2)
	c.execute(c.job(1, "cmd.run", programArgs("wait")))
	for c.recv().GetOutput() == nil {
	}
	victim.kill(t)
	a.restart(t)
	c = a.session(t, 3)
	if w := c.welcome.GetRunning(); w.GetTaskId() != 1 || w.GetAttempt() != 1 {
		t.Fatalf("Welcome %v", c.welcome)
	}
	// What it had printed and nobody had acknowledged comes before the word
	// that nobody knows its end.
	if out, _, f := c.finish(); string(out) != "ready\n" || !f.GetInterrupted() || f.GetOutputBytes() != int64(len(out)) {
		t.Fatalf("%q, then %v", out, f)
	}
	c.status() // the acknowledgement has arrived
	c = a.session(t, 3)
	if w := c.welcome.GetInterrupted(); c.welcome.GetRunning() != nil || len(w) != 1 || w[0].GetTaskId() != 1 || w[0].GetAttempt() != 1 {
		t.Fatalf("Welcome %v", c.welcome)
	}
	j := c.job(1, "cmd.run", programArgs("wait"))
	j.Attempt = 2
	c.execute(j)
	if f := c.final(); f.GetOutcome() != "unknown" || f.GetReason() != "agent_restarted" || f.GetAttempt() != 2 {
		t.Errorf("got %v", f)
	}
	c.forget(1)
	c.execute(j)
	if f := c.final(); f.GetOutcome() != "unknown" {
		t.Errorf("forgotten and asked again: %v", f)
	}
}

// TestKilledAtRandomMomentsNoEffectHappensTwice kills the agent again and
// again while it runs programs that leave a line each, and settles every task
// as a controller does.
func TestKilledAtRandomMomentsNoEffectHappensTwice(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	a := newFleet(t).paired(t, agent.Config{PolicyFile: policyWith(t, "append")})
	check(t, a.end(t))
	file := filepath.Join(t.TempDir(), "ids")
	args := fmt.Sprintf(`{"program":"append","args":{"file":%q}}`, file)
	outcome := map[int64]string{}
	next := int64(1)
	const kills = 25
	for kill := range kills {
		victim := a.startChild(t)
		c := victim.session(t, int64(kill+2))
		if c.welcome.GetRunning() != nil {
			t.Fatalf("a new process runs a task: %v", c.welcome)
		}
		settled := map[int64]bool{}
		for _, f := range c.welcome.GetFinished() {
			outcome[f.GetTaskId()], settled[f.GetTaskId()] = f.GetOutcome(), true
		}
		for _, r := range c.welcome.GetInterrupted() {
			outcome[r.GetTaskId()], settled[r.GetTaskId()] = "unknown", true
		}
		for id := range settled {
			c.forget(id)
		}
		die := func() { _ = victim.cmd.Process.Kill() }
		lives := rnd.IntN(5) // so many tasks, and then a moment more
		for alive := true; alive; {
			for outcome[next] != "" {
				next++
			}
			if lives == 0 {
				time.AfterFunc(time.Duration(rnd.IntN(100_000))*time.Microsecond, die)
			}
			lives--
			c.execute(c.job(next, "cmd.run", args))
			for alive && outcome[next] == "" {
				select {
				case m, ok := <-c.in:
					alive = ok
					if f := m.GetFinal(); f != nil {
						outcome[f.GetTaskId()] = f.GetOutcome()
						c.forget(f.GetTaskId())
					}
				case <-time.After(patience):
					t.Fatal("no message arrives")
				}
			}
		}
		victim.reap()
	}
	count := map[string]int{}
	for _, id := range lines(t, file) {
		count[id]++
	}
	tally := map[string]int{}
	for id, o := range outcome {
		tally[o]++
		n := count[strconv.FormatInt(id, 10)]
		if n > 1 || (o == "succeeded" && n != 1) {
			t.Errorf("task %d is %s and ran %d times", id, o, n)
		}
	}
	t.Logf("outcomes %v", tally)
	if tally["unknown"] > kills || tally["succeeded"] == 0 {
		t.Errorf("outcomes %v", tally)
	}
}

// reap waits for a process that was told to die.
func (c *child) reap() { _ = c.cmd.Wait() }

func readLedger(t testing.TB, a *running) []*ledger.Entry {
	t.Helper()
	_, entries, err := ledger.Read(filepath.Join(a.config.DataDir, "ledger"))
	check(t, err)
	return entries
}

func TestAnEndedTaskIsOrderedInTheLedger(t *testing.T) {
	t.Parallel()
	a := newFleet(t).paired(t, agent.Config{})
	c := a.session(t, 1)
	for id := int64(1); id <= 500; id++ {
		j := c.job(id, "core.echo", `{}`)
		j.Forget = []int64{id - 1}
		c.execute(j)
		c.finish()
	}
	check(t, a.end(t))
	entries := readLedger(t, a)
	var got, want []uint64
	for i, e := range entries {
		got = append(got, e.AcceptedOrder, e.DoneOrder)
		want = append(want, uint64(2*i+1), uint64(2*i+2))
	}
	if diff := cmp.Diff(want, got); diff != "" || len(entries) != 500 {
		t.Errorf("%d entries, orders (-want +got):\n%s", len(entries), diff)
	}
}
