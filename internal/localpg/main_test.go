package localpg

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	_ "github.com/lib/pq"
	"go.uber.org/goleak"
)

// helperArg as first argument turns the test binary into a helper program.
const helperArg = "localpg-helper"

// patience bounds every wait of these tests; nothing should come near it.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == helperArg {
		if err := helper(os.Args[2], os.Args[3:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// helper does one job in a process of its own.
func helper(job string, args []string) error {
	ctx := context.Background()
	switch job {
	case "hold": // start, write a row, say so, run until killed
		c, err := Start(ctx, Config{Dir: args[0]})
		if err != nil {
			return err
		}
		if err := exec1(c.DSN(), "CREATE TABLE IF NOT EXISTS kept (n int); INSERT INTO kept VALUES (1)"); err != nil {
			return err
		}
		fmt.Println(c.PID())
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	case "cycle": // start, write a row, stop, and the same again
		for range 2 {
			c, err := Start(ctx, Config{Dir: args[0]})
			if err != nil {
				return err
			}
			if err := exec1(c.DSN(), "CREATE TABLE IF NOT EXISTS kept (n int); INSERT INTO kept VALUES (1)"); err != nil {
				return err
			}
			if err := c.Stop(ctx); err != nil {
				return err
			}
		}
		return nil
	case "connect":
		return exec1(args[0], "SELECT 1")
	}
	return fmt.Errorf("unknown job %q", job)
}

func exec1(dsn, query string) error {
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.Exec(query)
	return err
}

// baseDir makes a folder that an unprivileged user can pass through.
func baseDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "headgate-localpg-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// testConfig describes a cluster of this test's own.
func testConfig(t *testing.T) Config {
	t.Helper()
	base := baseDir(t)
	return Config{
		Dir:         filepath.Join(base, "pg"),
		FallbackDir: filepath.Join(base, "fallback"),
		InitCache:   filepath.Join(os.TempDir(), fmt.Sprintf("headgate-initcache-%d", os.Geteuid())),
		Settings:    map[string]string{"shared_buffers": "16MB"},
	}
}

func start(t *testing.T, cfg Config) *Cluster {
	t.Helper()
	c, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		select {
		case <-c.Done():
		default:
			if err := c.Stop(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	return c
}

func stop(t *testing.T, c *Cluster) {
	t.Helper()
	if err := c.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func run(t *testing.T, db *sql.DB, query string) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func text(t *testing.T, db *sql.DB, query string) string {
	t.Helper()
	var s string
	if err := db.QueryRowContext(t.Context(), query).Scan(&s); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return s
}

// keep writes n rows that must be there later.
func keep(t *testing.T, c *Cluster) {
	t.Helper()
	db := open(t, c.DSN())
	run(t, db, "CREATE TABLE kept AS SELECT generate_series(1, 1000) n")
	db.Close()
}

func requireKept(t *testing.T, c *Cluster) {
	t.Helper()
	if got := text(t, open(t, c.DSN()), "SELECT count(*) FROM kept"); got != "1000" {
		t.Errorf("rows kept: %s, want 1000", got)
	}
}

// until looks again and again, for things that cannot report by themselves.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline.C:
			t.Fatalf("waited %v for: %s", patience, what)
		case <-tick.C:
		}
	}
}

// needRoot skips a test of what only root can do.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can change the user")
	}
}

// unprivileged finds an ordinary user.
func unprivileged(t *testing.T, name string) *syscall.Credential {
	t.Helper()
	u, err := user.Lookup(name)
	if err != nil {
		t.Skipf("no user %s on this system", name)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

// helperCommand runs the test binary as a helper; with a credential from a
// copy that this user can execute.
func helperCommand(t *testing.T, cred *syscall.Credential, args ...string) *exec.Cmd {
	t.Helper()
	binary, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if cred != nil {
		copied := filepath.Join(baseDir(t), "helper")
		data, err := os.ReadFile(binary)
		if err != nil {
			t.Fatal(err)
		}
		writeProgram(t, copied, data)
		binary = copied
	}
	cmd := exec.Command(binary, append([]string{helperArg}, args...)...)
	cmd.Dir = "/"
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	return cmd
}

// writeProgram writes a file that is to be executed. No child may be started
// meanwhile: it would hold the file open for writing until it runs its own
// program, and the kernel does not execute such a file ("text file busy").
func writeProgram(t *testing.T, name string, data []byte) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(name, data, 0o755); err != nil {
		t.Fatal(err)
	}
}
