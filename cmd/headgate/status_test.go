package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestStatusShowsTheListenerAndWhatFails(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	err := printStatus(cmd, json.RawMessage(`{"phase":"serving","ready":false,"version":{"version":"1"},
		"unmet":[{"condition":"database","detail":"failed 3 times"},{"condition":"public_port","detail":"is reclosed"}],
		"ports":{"controller":["127.0.0.1:7441"],"public":["0.0.0.0:7440"],"public_open":false,"state":"reclosed","reason":"unstable for 40 s"},
		"checks":[{"name":"database","ok":false,"since":"2026-01-02T03:04:05Z","detail":"failed 3 times"},{"name":"memory","ok":true,"since":"2026-01-02T03:04:05Z","detail":"no limit is set"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"reclosed: unstable for 40 s", "0.0.0.0:7440, refuses", "failed check", "database since", "waits for", "public_port: is reclosed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "memory") || strings.Count(out.String(), "failed 3 times") != 1 {
		t.Errorf("too much:\n%s", &out)
	}
}

func TestStatusOfAKilledUpSaysSo(t *testing.T) {
	t.Parallel()
	child := exec.Command("true")
	if err := child.Run(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	err := explainNoAnswer(runFile{ControllerURL: "https://127.0.0.1:1", PID: child.Process.Pid}, dir, errNoSuchPort{})
	for _, want := range []string{filepath.Join(dir, runFileName), "is gone", "`headgate up`"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %q", want, err)
		}
	}
	err = explainNoAnswer(runFile{ControllerURL: "https://127.0.0.1:1", PID: child.Process.Pid}, dir, &problem{Status: 503, Code: "starting"})
	if strings.Contains(err.Error(), "gone") {
		t.Errorf("it answered: %q", err)
	}
}

type errNoSuchPort struct{}

func (errNoSuchPort) Error() string { return "connection refused" }
