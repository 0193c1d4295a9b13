package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/testkit"
)

// The tests here run the real programs: they are built once, and `up` is
// started as a user starts it.

// programs is the folder of both programs, built once by TestMain.
var programs string

func TestMain(m *testing.M) {
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "headgate-up-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	programs = dir
	out, err := exec.Command("go", "build", "-o", dir+"/", "headgate/cmd/headgate", "headgate/cmd/headgate-agent").CombinedOutput()
	if err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		return 1
	}
	return testkit.Run(m)
}

// instance is one directory in which `up` is started, stopped and killed.
type instance struct {
	*testing.T
	dir string
	cmd *exec.Cmd
	out *strings.Builder
	log *os.File // standard error of every start
	run runFile
}

// readyWithin is generous: the machine may be busy with other tests.
const readyWithin = 90 * time.Second

func newInstance(t *testing.T) *instance {
	t.Helper()
	dir, err := os.MkdirTemp(os.Getenv("HEADGATE_TEST_DIR"), "headgate-up-data-") // a folder that an unprivileged user can reach
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	i := &instance{T: t, dir: filepath.Join(dir, "data"), log: log, out: &strings.Builder{}}
	t.Cleanup(func() {
		if i.cmd != nil {
			i.interrupt()
		}
		if t.Failed() {
			log, err := os.ReadFile(i.log.Name())
			t.Logf("output of up:\n%s\nits log (%v):\n%.20000s", i.out, err, log)
		}
		i.log.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return i
}

// up starts the program and waits until run.json is there.
func (i *instance) up(args ...string) {
	i.Helper()
	all := append([]string{"up", "--data", i.dir, "--public-addr", "127.0.0.1:0", "--open-delay", "100ms"}, args...)
	if !slices.Contains(args, "--two-phase=false") {
		all = append(all, "--controller-addr", "127.0.0.1:0")
	}
	i.cmd = exec.Command(filepath.Join(programs, "headgate"), all...)
	stdout, err := i.cmd.StdoutPipe()
	if err != nil {
		i.Fatal(err)
	}
	i.out = &strings.Builder{}
	i.cmd.Stderr = i.log
	if err := i.cmd.Start(); err != nil {
		i.Fatal(err)
	}
	greeted := make(chan error, 1)
	go func() {
		lines := bufio.NewScanner(stdout)
		for lines.Scan() {
			i.out.WriteString(lines.Text() + "\n")
			if strings.Contains(lines.Text(), "/tasks?limit=10") { // the last line of the greeting
				greeted <- nil
				_, _ = io.Copy(io.Discard, stdout)
				return
			}
		}
		greeted <- errors.New("up ended before it was ready")
	}()
	select {
	case err = <-greeted:
	case <-time.After(readyWithin):
		err = errors.New("up was not ready in time")
	}
	if err != nil {
		i.Fatalf("%v\n%s", err, i.out)
	}
	if i.run, err = readRunFile(i.dir); err != nil {
		i.Fatal(err)
	}
}

// interrupt is Ctrl-C; it gives how long the end took.
func (i *instance) interrupt() time.Duration {
	i.Helper()
	began := time.Now()
	if err := i.cmd.Process.Signal(os.Interrupt); err != nil {
		i.Fatal(err)
	}
	err := i.cmd.Wait()
	i.cmd = nil
	if err != nil {
		i.Errorf("up ended with %v", err)
	}
	return time.Since(began)
}

func (i *instance) kill() {
	i.Helper()
	if err := i.cmd.Process.Kill(); err != nil {
		i.Fatal(err)
	}
	_ = i.cmd.Wait()
	i.cmd = nil
}

func (i *instance) client() *client {
	i.Helper()
	c, err := newClient(i.run.ControllerURL, i.run.CAFile, i.run.TokenFile)
	if err != nil {
		i.Fatal(err)
	}
	return c
}

type resultTask struct {
	ID      string          `json:"id"`
	State   string          `json:"state"`
	Outcome *string         `json:"outcome"`
	Result  json.RawMessage `json:"result"`
}

func (i *instance) submit(kind string, args any) resultTask {
	i.Helper()
	var task resultTask
	body := map[string]any{"agent": i.run.Agents[0].Name, "kind": kind, "args": args}
	if err := i.client().call(context.Background(), "POST", "/api/v1/tasks?wait=20s", body, &task); err != nil {
		i.Fatal(err)
	}
	return task
}

func outcome(t resultTask) string {
	if t.Outcome == nil {
		return t.State
	}
	return *t.Outcome
}

func TestUpServesStopsAndContinues(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	i.up()
	if got := i.submit("core.echo", map[string]any{"n": json.Number("9007199254740993")}); outcome(got) != "succeeded" || !strings.Contains(string(got.Result), "9007199254740993") {
		t.Fatalf("echo: %s %s", outcome(got), got.Result)
	}
	if got := i.submit("cmd.run", map[string]any{"program": "uname"}); outcome(got) != "succeeded" {
		t.Fatalf("uname: %s", outcome(got))
	}
	i.pasteCommands()
	agent := i.run.Agents[0].ID
	if took := i.interrupt(); took > 10*time.Second {
		t.Errorf("Ctrl-C took %v", took)
	}
	if _, err := os.Stat(filepath.Join(i.dir, runFileName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("run.json after a clean stop: %v", err)
	}
	i.up()
	if i.run.Agents[0].ID != agent {
		t.Errorf("agent %s came back as %s", agent, i.run.Agents[0].ID)
	}
	var page struct{ Items []resultTask }
	if err := i.client().call(t.Context(), "GET", "/api/v1/tasks", nil, &page); err != nil {
		t.Fatal(err)
	}
	if len(page.Items) != 3 {
		t.Errorf("%d tasks after the restart, want 3", len(page.Items))
	}
	i.inventoryBecomesFacts()
}

// inventoryBecomesFacts asks the real agent for its inventory: the completion
// hook makes it the agent's facts.
func (i *instance) inventoryBecomesFacts() {
	i.Helper()
	got := i.submit("core.inventory", map[string]any{})
	if outcome(got) != "succeeded" {
		i.Fatalf("inventory: %s", outcome(got))
	}
	var agent struct {
		Facts json.RawMessage `json:"facts"`
	}
	for end := time.Now().Add(readyWithin); time.Now().Before(end); {
		if err := i.client().call(i.Context(), "GET", "/api/v1/agents/local", nil, &agent); err != nil {
			i.Fatal(err)
		}
		if string(agent.Facts) == string(got.Result) {
			return
		}
	}
	i.Fatalf("the facts are %s, the inventory %s", agent.Facts, got.Result)
}

// pasteCommands runs the three printed commands as they stand, each in a shell
// of its own.
func (i *instance) pasteCommands() {
	i.Helper()
	var commands []string
	for line := range strings.Lines(i.out.String()) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "curl ") {
			commands = append(commands, line)
		}
	}
	if len(commands) != 3 {
		i.Fatalf("%d commands printed", len(commands))
	}
	var answers []string
	for _, c := range commands {
		out, err := exec.Command("sh", "-c", c).CombinedOutput()
		if err != nil {
			i.Fatalf("%s: %v: %s", c, err, out)
		}
		answers = append(answers, string(out))
	}
	var first, second resultTask
	if err := errors.Join(json.Unmarshal([]byte(answers[0]), &first), json.Unmarshal([]byte(answers[1]), &second)); err != nil {
		i.Fatal(err)
	}
	if first.ID == "" || first.ID != second.ID || outcome(second) != "succeeded" {
		i.Errorf("submitted %q, then waited for %q: %s", first.ID, second.ID, outcome(second))
	}
	if !strings.Contains(answers[2], `"id":"`+first.ID+`"`) {
		i.Errorf("task %s is not in the list", first.ID)
	}
}

func TestKilledUpTakesEverythingAlongAndLosesNothing(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	i.up()
	const n = 200
	var batch []map[string]any
	for k := range n {
		task := map[string]any{"agent": "local", "kind": "core.echo", "args": map[string]any{"k": k}}
		if k%10 == 0 {
			task["kind"], task["args"] = "cmd.run", map[string]any{"program": "append-id"}
		}
		batch = append(batch, task)
	}
	var stored struct{ Items []resultTask }
	if err := i.client().call(t.Context(), "POST", "/api/v1/tasks/batch", map[string]any{"tasks": batch}, &stored); err != nil {
		t.Fatal(err)
	}
	agent := i.run.Agents[0]
	i.kill()
	i.up()
	if i.run.Agents[0].ID != agent.ID {
		t.Errorf("agent %s came back as %s", agent.ID, i.run.Agents[0].ID)
	}
	seen := i.awaitAll(stored.Items)
	counts := map[string]int{}
	for _, task := range seen {
		counts[outcome(task)]++
	}
	if counts["succeeded"]+counts["failed"]+counts["unknown"] != n || counts["succeeded"] < n-1 {
		t.Errorf("outcomes %v", counts)
	}
	data, err := os.ReadFile(filepath.Join(filepath.Dir(agent.DataDir), "appended-ids"))
	if err != nil {
		t.Fatal(err)
	}
	ids := strings.Fields(string(data))
	slices.Sort(ids)
	if once := slices.Compact(slices.Clone(ids)); len(once) != len(ids) {
		t.Errorf("%d ids in the file, %d different ones", len(ids), len(once))
	}
}

// awaitAll waits for every task by long-polling, and gives how they ended.
func (i *instance) awaitAll(items []resultTask) []resultTask {
	i.Helper()
	c := i.client()
	seen := make([]resultTask, len(items))
	for k, item := range items {
		for outcome(seen[k]) == "" || seen[k].State != "completed" {
			if err := c.call(i.Context(), "GET", "/api/v1/tasks/"+item.ID+"?wait=20s", nil, &seen[k]); err != nil {
				i.Fatal(err)
			}
		}
	}
	return seen
}

func TestKilledChildrenComeBack(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	i.up()
	for _, pid := range []int{i.run.Agents[0].PID, i.postmaster()} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		i.submitUntilServed()
	}
}

// postmaster gives the process id of the private cluster's server.
func (i *instance) postmaster() int {
	i.Helper()
	files, err := filepath.Glob(filepath.Join(i.dir, "postgres", "postmaster.pid"))
	if err != nil || len(files) != 1 {
		i.Fatalf("postmaster.pid: %v %v", files, err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		i.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(data), &pid); err != nil {
		i.Fatal(err)
	}
	return pid
}

// submitUntilServed submits one task under one key until it has succeeded: a
// part that was killed may refuse for a while, but the task runs once.
func (i *instance) submitUntilServed() {
	i.Helper()
	key := fmt.Sprint(time.Now().UnixNano())
	ctx, cancel := context.WithTimeout(i.Context(), readyWithin)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		task, err := i.submitKeyed(ctx, key)
		if err == nil && outcome(task) == "succeeded" {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			i.Fatalf("not served again: %v, task %+v", err, task)
		}
	}
}

func (i *instance) submitKeyed(ctx context.Context, key string) (resultTask, error) {
	var task resultTask
	token, err := os.ReadFile(i.run.TokenFile)
	if err != nil {
		return task, err
	}
	req, err := http.NewRequestWithContext(ctx, "POST", i.run.PublicURL+"/api/v1/tasks?wait=5s", strings.NewReader(`{"agent":"local","kind":"core.ping"}`))
	if err != nil {
		return task, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return task, err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return task, errors.New(resp.Status)
	}
	return task, json.NewDecoder(resp.Body).Decode(&task)
}

func TestStatusAndMigrateSpeakToARunningUp(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	i.up("--agents", "2")
	second := exec.Command(filepath.Join(programs, "headgate"), "up", "--data", i.dir, "--public-addr", "127.0.0.1:0", "--controller-addr", "127.0.0.1:0")
	if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "in use") {
		t.Errorf("a second up on the same data: %v\n%s", err, out)
	}
	out, err := exec.Command(filepath.Join(programs, "headgate"), "status", "--data", i.dir).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ready") {
		t.Errorf("status: %v\n%s", err, out)
	}
	out, err = exec.Command(filepath.Join(programs, "headgate"), "migrate", "status", "--database-url", i.run.DatabaseURL).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "schema") {
		t.Errorf("migrate status: %v\n%s", err, out)
	}
	if len(i.run.Agents) != 2 || i.run.Agents[1].Name != "local-2" {
		t.Errorf("agents %+v", i.run.Agents)
	}
}

func TestWrongCommandLineIsAUsageError(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"frobnicate"}, {"serve", "extra"}, {"up", "--agents", "-1"}, {"up", "--no-such-flag"}, {"serve"}, {"migrate", "up"}, {"serve", "--public-addr", "nonsense", "--database-url", "x"},
	} {
		cmd := exec.Command(filepath.Join(programs, "headgate"), args...)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != exitUsage {
			t.Errorf("%v: exit code %d, %v: %s", args, code, err, out)
		}
	}
}
