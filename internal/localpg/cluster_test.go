package localpg

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestStartMakesAPrivateDurableClusterAndKeepsItsData(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.InitCache = "" // the real initdb, once
	begin := time.Now()
	c := start(t, cfg)
	t.Logf("cold start %v", time.Since(begin))
	if c.Dir() != cfg.Dir {
		t.Errorf("Dir() = %s, want %s", c.Dir(), cfg.Dir)
	}
	db := open(t, c.DSN())
	got := map[string]string{}
	want := map[string]string{
		"listen_addresses": "", "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on",
		"data_checksums": "on", "lc_collate": "C", "server_encoding": "UTF8", "shared_buffers": "16MB",
		"unix_socket_permissions": "0700", "TimeZone": "UTC",
	}
	for key := range want {
		got[key] = text(t, db, "SELECT current_setting('"+key+"')")
	}
	got["TimeZone"] = strings.TrimPrefix(got["TimeZone"], "Etc/")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("settings (-want +got):\n%s", diff)
	}
	if got := text(t, db, "SELECT current_user || '/' || current_database()"); got != "headgate/headgate" {
		t.Errorf("user and database: %s", got)
	}
	for _, dir := range []string{c.Dir(), c.socketDir} {
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: mode %v, error %v, want 0700", dir, info.Mode(), err)
		}
	}
	keep(t, c)
	begin = time.Now()
	stop(t, c)
	t.Logf("stop %v", time.Since(begin))

	begin = time.Now()
	c = start(t, cfg)
	t.Logf("warm start %v", time.Since(begin))
	requireKept(t, c)
}

func TestSettingsCannotWeakenTheCluster(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"fsync", "FSYNC", "full-page-writes", "synchronous_commit", "listen_addresses", "hba_file", "work_mem = 1 "} {
		cfg := testConfig(t)
		cfg.Settings = map[string]string{key: "off"}
		if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%q accepted: %v", key, err)
		}
		if _, err := os.Stat(cfg.Dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: something was made: %v", key, err)
		}
	}
}

func TestPinnedSettingsWinOverTheConfigurationFile(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	c := start(t, cfg)
	db := open(t, c.DSN())
	run(t, db, "ALTER SYSTEM SET fsync = off")
	db.Close()
	stop(t, c)
	c = start(t, cfg)
	if got := text(t, open(t, c.DSN()), "SHOW fsync"); got != "on" {
		t.Errorf("fsync = %s after ALTER SYSTEM", got)
	}
}

func TestSecondStarterIsRefused(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	c := start(t, cfg)
	_, err := Start(t.Context(), cfg)
	locked, ok := errors.AsType[*LockedError](err)
	if !ok || locked.PID != os.Getpid() || locked.Dir != cfg.Dir {
		t.Fatalf("second start: %v", err)
	}
	link := cfg.Dir + "-link" // another name of the same directory
	if err := os.Symlink(cfg.Dir, link); err != nil {
		t.Fatal(err)
	}
	cfg.Dir = link
	if _, err := Start(t.Context(), cfg); !isLocked(err) {
		t.Fatalf("start by another name: %v", err)
	}
	if err := exec1(c.DSN(), "SELECT 1"); err != nil {
		t.Errorf("the first was disturbed: %v", err)
	}
}

func isLocked(err error) bool {
	_, ok := errors.AsType[*LockedError](err)
	return ok
}

func TestManyStartersGiveOneCluster(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	type result struct {
		c   *Cluster
		err error
	}
	results := make(chan result)
	const starters = 4
	for range starters {
		go func() {
			c, err := Start(context.Background(), cfg)
			results <- result{c, err}
		}()
	}
	var winners []*Cluster
	for range starters {
		r := <-results
		switch {
		case r.err == nil:
			winners = append(winners, r.c)
		case !isLocked(r.err):
			t.Errorf("loser: %v", r.err)
		}
	}
	if len(winners) != 1 {
		t.Errorf("%d winners", len(winners))
	}
	for _, c := range winners {
		stop(t, c)
	}
}

func TestStopEndsOpenTransactionsQuickly(t *testing.T) {
	t.Parallel()
	c := start(t, testConfig(t))
	keep(t, c)
	db := open(t, c.DSN())
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("INSERT INTO kept VALUES (0)"); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	stop(t, c)
	took := time.Since(begin)
	t.Logf("stop with an open transaction %v", took)
	if took > 5*time.Second {
		t.Errorf("stop took %v", took)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("Wait after a clean stop: %v", err)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Errorf("second Stop: %v", err)
	}
	_ = tx.Rollback()
	requireKept(t, start(t, c.cfg))
}

func TestStopWithoutPatienceLosesNothing(t *testing.T) {
	t.Parallel()
	c := start(t, testConfig(t))
	keep(t, c)
	// A stopped (SIGSTOP) backend keeps a fast shutdown from ending.
	db := open(t, c.DSN())
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if err := conn.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Stop(ctx); err == nil {
		t.Error("a stop that had to be forced was reported as clean")
	}
	select {
	case <-c.Done():
	default:
		t.Error("Stop returned before the server had ended")
	}
	_ = conn.Close()
	requireKept(t, start(t, c.cfg))
}

func TestServerThatEndsByItselfIsReported(t *testing.T) {
	t.Parallel()
	c := start(t, testConfig(t))
	if err := syscall.Kill(c.PID(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil {
		t.Error("Wait gave nil for an end that nobody asked for")
	}
}

func TestStartFailureTellsTheServersReason(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Settings = map[string]string{"shared_buffers": "nonsense"}
	_, err := Start(t.Context(), cfg)
	if err == nil || !strings.Contains(err.Error(), "shared_buffers") {
		t.Fatalf("error does not tell the reason: %v", err)
	}
	cfg.Settings = nil
	start(t, cfg) // and the failed start left no lock behind
}

func TestStartGivesUpWhenTheCallerDoes(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	c := start(t, cfg)
	keep(t, c)
	stop(t, c)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("changed my mind")
	cancel(why)
	if _, err := Start(ctx, cfg); !errors.Is(err, why) {
		t.Fatalf("start with a done context: %v", err)
	}
	requireKept(t, start(t, cfg))
}

func TestPathThatDoesNotDoForASocketGetsAnother(t *testing.T) {
	t.Parallel()
	for name, sub := range map[string]string{
		"long":  filepath.Join(strings.Repeat("long", 40), `it's a \ folder, with "quotes"`),
		"comma": "a,b",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig(t)
			cfg.Dir = filepath.Join(filepath.Dir(cfg.Dir), sub)
			c := start(t, cfg)
			t.Cleanup(func() { os.RemoveAll(c.socketDir) })
			if c.socketDir == cfg.Dir+".run" || len(socketPath(c.socketDir)) > maxSocketPath {
				t.Errorf("socket in %s", c.socketDir)
			}
			if err := exec1(c.DSN(), "SELECT 1"); err != nil {
				t.Error(err)
			}
			if info, err := os.Stat(c.socketDir); err != nil || info.Mode().Perm() != 0o700 {
				t.Errorf("socket directory: %v, %v", info, err)
			}
		})
	}
}

func TestOddPathBesideTheData(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Dir += ` it's "a" \b`
	c := start(t, cfg)
	if want := cfg.Dir + ".run"; c.socketDir != want {
		t.Errorf("socket directory %s, want %s", c.socketDir, want)
	}
	if err := exec1(c.DSN(), "SELECT 1"); err != nil {
		t.Error(err)
	}
}
