package localpg

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestKilledParentTakesTheServerAlong(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cmd := helperCommand(t, nil, "hold", cfg.Dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		_ = cmd.Wait()
		t.Fatalf("helper: %v", err)
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(line))
	if procs, err := processesIn(cfg.Dir); err != nil || len(procs) < 2 {
		t.Fatalf("the helper's server was not found: %v, %v", procs, err)
	}

	_, err = Start(t.Context(), cfg)
	if locked, ok := errors.AsType[*LockedError](err); !ok || locked.PID != cmd.Process.Pid {
		t.Fatalf("start beside a living one: %v", err)
	}

	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	_ = cmd.Wait() // "signal: killed"
	until(t, "the end of the orphaned server", func() bool {
		procs, err := processesIn(cfg.Dir)
		return err == nil && len(procs) == 0
	})
	t.Logf("server %d ended %v after its parent", pid, time.Since(killed))
	if _, err := os.Stat(filepath.Join(cfg.Dir, "postmaster.pid")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it did not stop cleanly: %v", err)
	}
	c := start(t, cfg)
	if got := text(t, open(t, c.DSN()), "SELECT count(*) FROM kept"); got != "1" {
		t.Errorf("rows kept: %s", got)
	}
}

func TestRestartRightAfterTheKillTakesOver(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cmd := helperCommand(t, nil, "hold", cfg.Dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, err = bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("helper: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	begin := time.Now()
	c := start(t, cfg)
	t.Logf("start right after the kill %v", time.Since(begin))
	if got := text(t, open(t, c.DSN()), "SELECT count(*) FROM kept"); got != "1" {
		t.Errorf("rows kept: %s", got)
	}
}

func TestKilledPostmasterIsRecoveredDespiteABusyOrphan(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.OrphanTimeout = 200 * time.Millisecond
	c := start(t, cfg)
	keep(t, c)
	db := open(t, c.DSN())
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var backend int
	if err := conn.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&backend); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { // computes for long without ever waiting, so it notices nothing
		_, err := conn.ExecContext(t.Context(), "SELECT count(*) FROM generate_series(1, 300000) a, generate_series(1, 1000000) b")
		ended <- err
	}()
	watch := open(t, c.DSN())
	until(t, "the long query to run", func() bool {
		return text(t, watch, fmt.Sprintf("SELECT state FROM pg_stat_activity WHERE pid = %d", backend)) == "active"
	})
	if err := syscall.Kill(c.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil {
		t.Error("Wait gave nil for a killed server")
	}
	if procs, err := processesIn(cfg.Dir); err != nil || !containsPID(procs, backend) {
		t.Errorf("the orphan is not there, nothing is tested: %v, %v", procs, err)
	}
	begin := time.Now()
	again := start(t, cfg)
	t.Logf("recovery with a busy orphan %v", time.Since(begin))
	if err := <-ended; err == nil {
		t.Error("the orphan finished its query")
	}
	requireKept(t, again)
}

func containsPID(procs []process, pid int) bool {
	for _, p := range procs {
		if p.pid == pid {
			return true
		}
	}
	return false
}

func TestServerStartedByHandIsStoppedCleanly(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	c := start(t, cfg)
	keep(t, c)
	stop(t, c)
	cmd := exec.Command(c.place.bin.Postgres(), cfg.serverArgs(c.Dir(), c.socketDir)...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.place.acc.credential()}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	until(t, "the foreign server", func() bool { return exec1(c.DSN(), "SELECT 1") == nil })
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	again := start(t, cfg)
	if err := <-ended; err != nil {
		t.Errorf("the foreign server did not stop cleanly: %v", err)
	}
	requireKept(t, again)
}

// TestPidFileThatLies covers what a crash or a reboot leaves: files that name
// a process which is not the server. PostgreSQL by itself refuses to start in
// the last three cases.
func TestPidFileThatLies(t *testing.T) {
	t.Parallel()
	for name, pidOf := range map[string]func(*testing.T, account) int{
		"nobody":       func(*testing.T, account) int { return 4194303 },
		"stranger":     sleeper,
		"zombie":       zombie,
		"this process": func(*testing.T, account) int { return os.Getpid() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig(t)
			c := start(t, cfg)
			keep(t, c)
			if err := syscall.Kill(c.PID(), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if err := c.Wait(); err == nil {
				t.Fatal("Wait gave nil for a killed server")
			}
			pid := pidOf(t, c.place.acc)
			for _, path := range []string{filepath.Join(c.Dir(), "postmaster.pid"), socketPath(c.socketDir) + ".lock"} {
				rewriteFirstLine(t, path, strconv.Itoa(pid))
			}
			again := start(t, cfg)
			requireKept(t, again)
			if name == "stranger" && isZombie(pid) {
				t.Error("the process that the file named was ended")
			}
		})
	}
}

func rewriteFirstLine(t *testing.T, path, line string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "\n")
	if err := os.WriteFile(path, []byte(line+"\n"+rest), 0o600); err != nil {
		t.Fatal(err)
	}
}

// sleeper is a living process of the server's user with that number.
func sleeper(t *testing.T, acc account) int {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: acc.credential()}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// zombie is a process that ended and that nobody has waited for, as in a
// container whose first process does not reap.
func zombie(t *testing.T, acc account) int {
	t.Helper()
	pid := sleeper(t, acc)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "the zombie", func() bool { return isZombie(pid) })
	return pid
}

func isZombie(pid int) bool {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return strings.Contains(string(stat), ") Z ")
}

func TestHalfMadeClusterIsMadeAnew(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	half := cfg.Dir + ".tmp"
	if err := os.MkdirAll(filepath.Join(half, "base"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(half, "PG_VERSION"), []byte("15\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, cfg)
	if _, err := os.Stat(half); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the half-made cluster is still there: %v", err)
	}
}

func TestEmptyDirectoryIsUsed(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	if err := os.Mkdir(cfg.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	start(t, cfg)
}

// TestForeignDataIsNeverTouched covers everything in the way that is not a
// cluster we can run: refused, and afterwards as it was.
func TestForeignDataIsNeverTouched(t *testing.T) {
	t.Parallel()
	isVersion := func(err error) bool {
		v, ok := errors.AsType[*VersionError](err)
		return ok && strings.Contains(v.Error(), "not touched") && strings.Contains(v.Error(), strconv.Itoa(v.DataMajor))
	}
	other := func(err error) bool { return strings.Contains(err.Error(), "not touched") }
	for name, tc := range map[string]struct {
		files map[string]string
		want  func(error) bool
	}{
		"older version":     {map[string]string{"PG_VERSION": "12\n", "global/pg_control": "x"}, isVersion},
		"newer version":     {map[string]string{"PG_VERSION": "99\n", "global/pg_control": "x"}, isVersion},
		"ancient version":   {map[string]string{"PG_VERSION": "9.6\n", "global/pg_control": "x"}, other},
		"half a cluster":    {map[string]string{"PG_VERSION": "MAJOR\n", "base/1/1": "x"}, other},
		"something else":    {map[string]string{"letters/to-mother": "x"}, other},
		"a single dot file": {map[string]string{".keep": ""}, other},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig(t)
			bin, err := FindBinaries("")
			if err != nil {
				t.Fatal(err)
			}
			for path, data := range tc.files {
				path = filepath.Join(cfg.Dir, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
					t.Fatal(err)
				}
				data = strings.ReplaceAll(data, "MAJOR", strconv.Itoa(bin.Major))
				if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			giveToServerUser(t, cfg.Dir)
			before := snapshot(t, cfg.Dir)
			_, err = Start(t.Context(), cfg)
			if err == nil || !tc.want(err) {
				t.Fatalf("Start: %v", err)
			}
			if diff := cmp.Diff(before, snapshot(t, cfg.Dir)); diff != "" {
				t.Errorf("touched (-before +after):\n%s", diff)
			}
		})
	}
}

// giveToServerUser makes the files look like those of a real cluster.
func giveToServerUser(t *testing.T, dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		return
	}
	acc, err := freshAccount("")
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, acc.own(path))
	})
	if err != nil {
		t.Fatal(err)
	}
}

func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var data []byte
		if !d.IsDir() {
			data, err = os.ReadFile(path)
		}
		got[path] = fmt.Sprint(info.Mode(), info.ModTime().UnixNano(), string(data))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}
