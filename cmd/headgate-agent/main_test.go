package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/agent/ledger"
	"headgate/internal/agent/policy"
)

func call(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(args, &out, &err)
	return code, out.String(), err.String()
}

func TestMistakesOnTheCommandLineAreExplained(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"version"}, 0, ""},
		{[]string{"--no-such-flag"}, exitUsage, "unknown flag"},
		{[]string{"serve"}, exitUsage, "unexpected argument"},
		{[]string{"policy", "check"}, exitUsage, "name one policy file"},
		{[]string{"policy", "init"}, exitUsage, "--dir is missing"},
		{[]string{"policy", "check", "/nowhere/policy.yaml"}, exitFailure, "policy_unreadable"},
		{[]string{"ledger", "dump", "--data", "/nowhere"}, exitFailure, "ledger_unusable"},
		{[]string{"--listen", "127.0.0.1:0", "--data", t.TempDir()}, exitFailure, "--enrol-token-file"},
		{[]string{"--listen", "127.0.0.1:0", "--data", t.TempDir(), "--enrol-token-file", "/nowhere"}, exitFailure, "enrol_token_unreadable"},
	} {
		code, _, stderr := call(c.args...)
		if code != c.code || !strings.Contains(stderr, c.want) {
			t.Errorf("%q: code %d, %q", c.args, code, stderr)
		}
	}
}

func TestInitWritesAPolicyThatCheckAccepts(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "p")
	file := filepath.Join(dir, "ids")
	code, path, stderr := call("policy", "init", "--dir", dir, "--append-file", file)
	path = strings.TrimSpace(path)
	if code != 0 || path != filepath.Join(dir, "policy.yaml") {
		t.Fatalf("code %d, %q, %q", code, path, stderr)
	}
	code, out, stderr := call("policy", "check", path)
	if code != 0 || stderr != "" || !strings.Contains(out, "program append-id") || !strings.Contains(out, "append-id "+file) {
		t.Errorf("check: code %d, %q, %q", code, out, stderr)
	}
	own := []byte("version: 1\nkinds: [core.ping]\n")
	if err := os.WriteFile(path, own, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, _ := call("policy", "init", "--dir", dir); code != 0 {
		t.Errorf("again: code %d", code)
	}
	if got, _ := os.ReadFile(path); !bytes.Equal(got, own) {
		t.Errorf("a person's file was replaced by %q", got)
	}
}

func TestAppendIDAddsOneLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ids")
	if code, _, _ := call(policy.AppendName, file); code != exitFailure {
		t.Error("it runs without a task id")
	}
	for _, id := range []string{"17", "18"} {
		t.Setenv("HEADGATE_TASK_ID", id)
		if code, _, stderr := call(policy.AppendName, file); code != 0 {
			t.Fatal(stderr)
		}
	}
	if got, _ := os.ReadFile(file); string(got) != "17\n18\n" {
		t.Errorf("the file holds %q", got)
	}
}

func TestTheEnvironmentStandsInForFlags(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HEADGATE_AGENT_DATA", dir)
	t.Setenv("HEADGATE_AGENT_LISTEN", "127.0.0.1:0")
	t.Setenv("HEADGATE_AGENT_ENROL_TOKEN_FILE", "/nowhere/else")
	if code, _, stderr := call(); code != exitFailure || !strings.Contains(stderr, "/nowhere/else") {
		t.Errorf("code %d, %q", code, stderr)
	}
	t.Setenv("HEADGATE_AGENT_DEMO_DELAY", "soon")
	if code, _, stderr := call(); code != exitUsage || !strings.Contains(stderr, "HEADGATE_AGENT_DEMO_DELAY") {
		t.Errorf("code %d, %q", code, stderr)
	}
}

func TestDumpPrintsOneLineAnAttempt(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l, err := ledger.Open(filepath.Join(dir, "ledger"), ledger.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(1_800_000_000, 0)
	for id := int64(1); id <= 3; id++ {
		e := &ledger.Entry{TaskID: id, Attempt: 1, Epoch: 2, Kind: "cmd.run", Once: id == 1}
		if err := l.Accept(e, at, []int64{id - 2}); err != nil {
			t.Fatal(err)
		}
		if id < 3 {
			if err := l.Finish(e, ledger.Ending{StartedAt: at, EndedAt: at, Outcome: "failed", Reason: "exit_nonzero"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	code, out, stderr := call("ledger", "dump", "--data", dir) // beside the one that has it open
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if code != 0 {
		t.Fatal(stderr)
	}
	var got []dumped
	d := json.NewDecoder(strings.NewReader(out))
	for d.More() {
		var line dumped
		if err := d.Decode(&line); err != nil {
			t.Fatal(err)
		}
		got = append(got, line)
	}
	utc := at.UTC()
	base := dumped{Attempt: 1, Kind: "cmd.run", Epoch: 2, AcceptedAt: utc}
	want := []dumped{base, base, base}
	want[0].TaskID, want[0].Delivery, want[0].State, want[0].AcceptedOrder, want[0].DoneOrder = "1", "once", "forgotten", 1, 2
	want[1].TaskID, want[1].Delivery, want[1].State, want[1].AcceptedOrder, want[1].DoneOrder = "2", "repeatable", "done", 3, 4
	want[2].TaskID, want[2].Delivery, want[2].State, want[2].AcceptedOrder = "3", "repeatable", "accepted", 5
	for i := range 2 {
		want[i].StartedAt, want[i].DoneAt, want[i].Outcome, want[i].Reason = &utc, &utc, "failed", "exit_nonzero"
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
