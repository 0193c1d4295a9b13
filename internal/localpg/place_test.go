package localpg

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFolderOutOfReachIsReplaced(t *testing.T) {
	t.Parallel()
	needRoot(t)
	cfg := testConfig(t)
	closed := filepath.Join(filepath.Dir(cfg.Dir), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	cfg.Dir = filepath.Join(closed, "pg")
	c := start(t, cfg)
	if want := fallbackFor(cfg.FallbackDir, cfg.Dir); c.Dir() != want {
		t.Errorf("Dir() = %s, want %s", c.Dir(), want)
	}
	keep(t, c)
	stop(t, c)
	// Once made it stays where it is, even if the folder opens later.
	if err := os.Chmod(closed, 0o711); err != nil {
		t.Fatal(err)
	}
	c = start(t, cfg)
	requireKept(t, c)
	stop(t, c)
	// A cluster that exists in its own folder is not passed over for a new one.
	other := testConfig(t)
	o := start(t, other)
	stop(t, o)
	if err := os.Chmod(filepath.Dir(other.Dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), other); err == nil || !strings.Contains(err.Error(), "cannot reach") {
		t.Errorf("start of a cluster out of reach: %v", err)
	}
}

func TestRunsWithoutRoot(t *testing.T) {
	t.Parallel()
	needRoot(t)
	for _, name := range []string{"postgres", "nobody"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cred := unprivileged(t, name)
			dir := filepath.Join(baseDir(t), "own")
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(dir, int(cred.Uid), int(cred.Gid)); err != nil {
				t.Fatal(err)
			}
			if err := helperCommand(t, cred, "cycle", filepath.Join(dir, "pg")).Run(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(dir, "pg", "PG_VERSION")); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRootTodayServiceUserTomorrowAndBack(t *testing.T) {
	t.Parallel()
	needRoot(t)
	cfg := testConfig(t)
	c := start(t, cfg)
	run(t, open(t, c.DSN()), "CREATE TABLE kept (n int)")
	stop(t, c)
	cred := c.place.acc.credential()
	// The folder beside the data must be writable for whoever starts it.
	if err := os.Chown(filepath.Dir(cfg.Dir), int(cred.Uid), int(cred.Gid)); err != nil {
		t.Fatal(err)
	}
	if err := helperCommand(t, cred, "cycle", cfg.Dir).Run(); err != nil {
		t.Fatal(err)
	}
	c = start(t, cfg)
	if got := text(t, open(t, c.DSN()), "SELECT count(*) FROM kept"); got != "2" {
		t.Errorf("rows: %s", got)
	}
}

func TestOtherUsersAreKeptOut(t *testing.T) {
	t.Parallel()
	needRoot(t)
	c := start(t, testConfig(t))
	cmd := helperCommand(t, unprivileged(t, "nobody"), "connect", c.DSN())
	cmd.Stderr = nil
	if err := cmd.Run(); err == nil {
		t.Fatal("nobody got in")
	}
	// Even with the socket in reach, peer authentication refuses.
	if err := os.Chmod(c.socketDir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(socketPath(c.socketDir), 0o777); err != nil {
		t.Fatal(err)
	}
	cmd = helperCommand(t, unprivileged(t, "nobody"), "connect", c.DSN())
	var out strings.Builder
	cmd.Stderr = &out
	if err := cmd.Run(); err == nil || !strings.Contains(strings.ToLower(out.String()), "peer authentication failed") {
		t.Fatalf("nobody with an open socket: %v, %s", err, out.String())
	}
}

func TestSocketDirectoryOfAStrangerIsRefused(t *testing.T) {
	t.Parallel()
	needRoot(t)
	cfg := testConfig(t)
	cred := unprivileged(t, "nobody")
	if err := os.Mkdir(cfg.Dir+".run", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(cfg.Dir+".run", int(cred.Uid), int(cred.Gid)); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "remove it") {
		t.Fatalf("Start: %v", err)
	}
}

func TestDataOfRootIsExplained(t *testing.T) {
	t.Parallel()
	needRoot(t)
	cfg := testConfig(t)
	if err := os.Mkdir(cfg.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cfg.Dir, "PG_VERSION"), []byte("15\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "chown -R") {
		t.Fatalf("Start: %v", err)
	}
}
