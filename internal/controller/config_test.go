package controller

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headgate/internal/store"
	"headgate/listener"
)

func writeFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "headgate.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestFlagsWinOverEnvironmentOverFile(t *testing.T) {
	t.Parallel()
	c, err := LoadConfig(Sources{
		File:    writeFile(t, "database_url: from-file\nfleet: from-file\nopen_delay: 1s\npublic_addr: 127.0.0.1:0\nallowed_hosts: [a.example, b.example]\n"),
		Environ: []string{"HEADGATE_FLEET=from-env", "HEADGATE_OPEN_DELAY=2s", "HEADGATE_AGENT_NAME=x", "PATH=/bin"},
		Flags:   map[string]string{"open-delay": "3s"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.DatabaseURL != "from-file" || c.Fleet != "from-env" || c.OpenDelay != 3*time.Second {
		t.Fatalf("got %+v", c)
	}
	if strings.Join(c.AllowedHosts, " ") != "a.example b.example" {
		t.Fatalf("allowed hosts %q", c.AllowedHosts)
	}
}

func TestAllProblemsAreReportedTogether(t *testing.T) {
	t.Parallel()
	_, err := LoadConfig(Sources{
		File:    writeFile(t, "pubic_addr: x\nopen_delay: soon\n"),
		Environ: []string{"HEADGATE_COLOUR=red"},
		Flags:   map[string]string{"log-level": "loud", "controller-addr": "127.0.0.1:70000", "public-addr": "0.0.0.0:7440"},
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"line 1: pubic_addr: no such setting", "line 2: open_delay: \"soon\" is not a duration",
		"HEADGATE_COLOUR: no such setting", "log-level: \"loud\"", "port \"70000\"",
		"database-url: must name a PostgreSQL server", "without TLS beyond this machine",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
}

func TestEveryKeyHasThreeNamesAndItsDefault(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, k := range Keys() {
		if seen[k.Name] || k.Help == "" {
			t.Errorf("key %q is doubled or has no help", k.Name)
		}
		seen[k.Name] = true
		c := DefaultConfig()
		if err := k.set(&c, k.Default()); err != nil {
			t.Errorf("%s: its own default %q is refused: %v", k.Name, k.Default(), err)
		}
	}
}

func TestTheTwoPortsMustDiffer(t *testing.T) {
	t.Parallel()
	_, err := LoadConfig(Sources{Flags: map[string]string{
		"database-url": "x", "public-addr": "127.0.0.1:7441",
	}})
	if err == nil || !strings.Contains(err.Error(), "must differ") {
		t.Fatalf("err = %v", err)
	}
	if _, err := LoadConfig(Sources{Flags: map[string]string{
		"database-url": "x", "public-addr": "127.0.0.1:0", "controller-addr": "127.0.0.1:0",
	}}); err != nil {
		t.Fatalf("both 0: %v", err)
	}
}

func TestSettingsOfTheListenerAreCheckedTogether(t *testing.T) {
	t.Parallel()
	_, err := LoadConfig(Sources{
		Flags: map[string]string{"database-url": "x", "public-addr": "127.0.0.1:0"},
		File: writeFile(t, "limit_mode: strict\npublic_rate: -1\npublic_burst: 0.5\nsource_rate: NaN\nsource_burst: 0\nsource_conns: 0\nqueue: 10\nqueue_per_source: 11\n"+
			"queue_wait: 0s\nhandshakes: 4\nhandshakes_per_source: 5\nhandshake_timeout: 1s\nfirst_byte_timeout: 2s\nunstable_grace: 0s\nmin_open: -1s\nmax_conns: many\nfd_reserve: 1e3\n"),
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`limit_mode: "strict" is not enforce, observe or off`, `public_rate: "-1" is negative`, "public-burst: 0.5 is less than one",
		`source_rate: "NaN" is not a number`, `source_burst: "0" must be at least 1`, `source_conns: "0" is not a whole number from 1`,
		"queue-per-source: 11 is more than queue", `queue_wait: "0s" must be more than 0`, "handshakes-per-source: 5 is more than handshakes",
		"first-byte-timeout: 2s is more than handshake-timeout", `unstable_grace: "0s" must be more than 0`, `min_open: "-1s" is not a duration`,
		`max_conns: "many" is not a whole number`, `fd_reserve: "1e3" is not a whole number`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
	c, err := LoadConfig(Sources{Flags: map[string]string{
		"database-url": "x", "public-addr": "127.0.0.1:0", "limit-mode": "observe", "public-rate": "1500", "public-burst": "10", "max-conns": "7", "open-barrier-timeout": "0s", "open-ramp": "0s",
	}})
	if err != nil {
		t.Fatal(err)
	}
	l := c.Listening
	if l.Limits.Mode != listener.ModeObserve || l.Limits.PublicRate != (listener.Rate{PerSecond: 1500, Burst: 10}) || l.Limits.MaxConns != 7 || l.OpenBarrierTimeout != 0 || l.OpenRamp != 0 {
		t.Errorf("got %+v", l)
	}
}

func TestTheDocumentListsEverySetting(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range Keys() {
		row := "| `--" + k.Name + "` | `" + k.FileName() + "` | `" + k.EnvName() + "` |"
		if !strings.Contains(string(doc), row) {
			t.Errorf("docs/operations.md has no row %s", row)
		}
	}
}

func TestHowMuchHistoryIsKeptIsSetInDaysAndBytes(t *testing.T) {
	t.Parallel()
	load := func(age, count, bytes string) (store.Retention, error) {
		c, err := LoadConfig(Sources{Flags: map[string]string{
			"database-url": "x", "public-addr": "127.0.0.1:0", "retention-age": age, "retention-tasks": count, "retention-bytes": bytes,
		}})
		return c.Retention, err
	}
	for _, c := range []struct {
		age, count, bytes string
		want              store.Retention
	}{
		{"90d", "0", "0", store.Retention{Age: 90 * day}},
		{"1d12h", "1000000", "50GiB", store.Retention{Age: 36 * time.Hour, Tasks: 1_000_000, Bytes: 50 << 30}},
		{"36h", "1", "1.5TB", store.Retention{Age: 36 * time.Hour, Tasks: 1, Bytes: 1_500_000_000_000}},
		{"0", "0", "4096", store.Retention{Bytes: 4096}},
	} {
		got, err := load(c.age, c.count, c.bytes)
		if err != nil || got != c.want {
			t.Errorf("%s, %s, %s: %+v, %v", c.age, c.count, c.bytes, got, err)
		}
	}
	for _, bad := range [][3]string{
		{"90", "0", "0"},
		{"-1d", "0", "0"},
		{"1h", "0", "0"},
		{"d", "0", "0"},
		{"1d-1h", "0", "0"},
		{"99999d", "0", "0"},
		{"0", "-1", "0"},
		{"0", "1e3", "0"},
		{"0", "0", "-1"},
		{"0", "0", "5 apples"},
		{"0", "0", "NaN"},
		{"0", "0", "GiB"},
	} {
		if got, err := load(bad[0], bad[1], bad[2]); err == nil {
			t.Errorf("%v became %+v", bad, got)
		}
	}
}
