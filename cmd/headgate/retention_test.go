package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"headgate/internal/testkit"
)

// runCommand runs a command line in this process.
func runCommand(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := newRootCommand()
	cmd.SetOut(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestRetentionTellsWhatWouldGoAndRemovesIt(t *testing.T) {
	t.Parallel()
	dsn := testkit.NewDatabase(t)
	out, err := runCommand(t, "retention", "--database-url", dsn, "--retention-age", "0", "--retention-tasks", "5")
	if err != nil || !strings.Contains(out, "new tasks may still get its ids") || strings.Contains(out, " go ") {
		t.Errorf("%v\n%s", err, out)
	}
	out, err = runCommand(t, "retention", "--database-url", dsn, "--now")
	if err != nil || !strings.Contains(out, "nothing to remove") {
		t.Errorf("%v\n%s", err, out)
	}
	// The configuration of the service does, whatever it says of the ports.
	file := filepath.Join(t.TempDir(), "headgate.yaml")
	if err := os.WriteFile(file, []byte("public_addr: 0.0.0.0:7440\nproxy_tls: true\nretention_age: 30d\ndatabase_url: \""+dsn+"\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err = runCommand(t, "retention", "--config", file); err != nil || strings.Count(out, "\n") != 3 {
		t.Errorf("%v\n%s", err, out)
	}
	if _, err := runCommand(t, "retention", "--data", t.TempDir()); !isUsage(err) {
		t.Errorf("without a database: %v", err)
	}
}
