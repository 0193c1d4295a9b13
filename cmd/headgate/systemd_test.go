package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"headgate/internal/testkit"
)

// forSystemd is the folder of what is shipped for systemd.
const forSystemd = "../../deploy/systemd"

func TestTheShippedUnitsAreRight(t *testing.T) {
	t.Parallel()
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		testkit.Lacks(t, "there is no systemd-analyze on this machine; install systemd")
	}
	files, err := filepath.Glob(filepath.Join(forSystemd, "*.*"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var units []string
	for _, file := range files {
		if !slices.Contains([]string{".service", ".socket"}, filepath.Ext(file)) {
			continue
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// systemd-analyze looks for the programs.
		text := strings.ReplaceAll(string(data), "/usr/local/bin/", programs+"/")
		units = append(units, filepath.Join(dir, filepath.Base(file)))
		if err := os.WriteFile(units[len(units)-1], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if len(units) != 4 {
		t.Fatalf("units: %q", units)
	}
	out, err := exec.CommandContext(t.Context(), analyze, append([]string{"verify", "--man=no"}, units...)...).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "headgate") { // it also speaks of units of this machine
			t.Errorf("systemd-analyze verify: %s", line)
		}
	}
	if err != nil {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	// Exposure by its own scale, from 0 to 100 here. The agent's unit is left
	// out: it has to leave its programs room.
	security := exec.CommandContext(t.Context(), analyze, "security", "--offline=true", "--threshold=20", filepath.Join(dir, "headgate.service"))
	if out, err := security.CombinedOutput(); err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
}
