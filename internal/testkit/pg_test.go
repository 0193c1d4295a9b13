package testkit_test

import (
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/lib/pq"

	"headgate/internal/localpg"
	"headgate/internal/testkit"
)

// helperEnv makes the test binary a helper that uses a database and is killed.
const helperEnv = "HEADGATE_TESTKIT_HELPER"

// patience bounds every wait of these tests; nothing should come near it.
const patience = 60 * time.Second

func TestMain(m *testing.M) { testkit.Main(m) }

func open(tb testing.TB, dsn string) *sql.DB {
	tb.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { db.Close() })
	return db
}

func text(tb testing.TB, db *sql.DB, query string) string {
	tb.Helper()
	var s string
	if err := db.QueryRow(query).Scan(&s); err != nil {
		tb.Fatalf("%s: %v", query, err)
	}
	return s
}

func run(tb testing.TB, db *sql.DB, query string) {
	tb.Helper()
	if _, err := db.Exec(query); err != nil {
		tb.Fatalf("%s: %v", query, err)
	}
}

func TestDatabasesAreSeparateAndMigrated(t *testing.T) {
	t.Parallel()
	const parallel = 4
	var wg sync.WaitGroup
	for range parallel {
		dsn := testkit.NewDatabase(t)
		wg.Go(func() {
			db := open(t, dsn)
			if got := text(t, db, "SELECT to_regclass('agent_queue') IS NOT NULL"); got != "true" {
				t.Error("no schema")
			}
			if _, err := db.Exec("CREATE TABLE mine (n int)"); err != nil {
				t.Errorf("another test's table is here: %v", err)
			}
		})
	}
	wg.Wait()
	empty := open(t, testkit.EmptyDatabase(t))
	if got := text(t, empty, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"); got != "0" {
		t.Errorf("the empty database has %s tables", got)
	}
	for _, key := range []string{"fsync", "full_page_writes", "synchronous_commit"} {
		if got := text(t, empty, "SELECT current_setting('"+key+"')"); got != "on" {
			t.Errorf("%s = %s", key, got)
		}
	}
}

func TestDatabaseIsDroppedWithItsTest(t *testing.T) {
	t.Parallel()
	var db *sql.DB
	var name string
	t.Run("user", func(t *testing.T) {
		var err error
		if db, err = sql.Open("postgres", testkit.NewDatabase(t)); err != nil {
			t.Fatal(err)
		}
		name = text(t, db, "SELECT current_database()") // and stays connected
	})
	defer db.Close()
	admin := open(t, testkit.Postgres(t).DSN("postgres"))
	if got := text(t, admin, "SELECT count(*) FROM pg_database WHERE datname = '"+name+"'"); got != "0" {
		t.Errorf("database %s is still there", name)
	}
}

func TestOwnClusterCanBeRestarted(t *testing.T) {
	t.Parallel()
	cfg := testkit.ClusterConfig(t)
	for _, want := range []string{"0", "1"} {
		c, err := localpg.Start(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		db := open(t, c.DSN())
		run(t, db, "CREATE TABLE IF NOT EXISTS kept (n int)")
		if got := text(t, db, "SELECT count(*) FROM kept"); got != want {
			t.Errorf("rows: %s, want %s", got, want)
		}
		run(t, db, "INSERT INTO kept VALUES (1)")
		if err := c.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHelperHoldsADatabase is not a test of its own: the next one runs it in
// another process and kills that.
func TestHelperHoldsADatabase(t *testing.T) {
	if os.Getenv(helperEnv) == "" {
		t.Skip("helper of the next test")
	}
	testkit.NewDatabase(t)
	if _, err := os.Stdout.WriteString("READY " + testkit.Postgres(t).Cluster().Dir() + "\n"); err != nil {
		t.Fatal(err)
	}
	select {}
}

func TestKilledTestRunLeavesNothingForTheNext(t *testing.T) {
	t.Parallel()
	parent := filepath.Dir(filepath.Dir(testkit.Postgres(t).Cluster().Dir()))
	temp, err := os.MkdirTemp(parent, "headgate-testkit-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(temp) })
	if err := os.Chmod(temp, 0o711); err != nil {
		t.Fatal(err)
	}
	killed := holder(t, temp)
	if _, err := os.Stat(killed); err != nil {
		t.Fatalf("it left nothing at all, so nothing is tested: %v", err)
	}
	young := holder(t, temp)
	if _, err := os.Stat(killed); err != nil {
		t.Errorf("a folder that may be in the making was removed: %v", err)
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Dir(killed), old, old); err != nil {
		t.Fatal(err)
	}
	holder(t, temp)
	if _, err := os.Stat(killed); !os.IsNotExist(err) {
		t.Errorf("the rest of the killed run is still there: %v", err)
	}
	if _, err := os.Stat(young); err != nil {
		t.Errorf("a younger one was removed: %v", err)
	}
}

// holder runs the helper until it is ready and kills it; it gives the data
// directory that the helper used.
func holder(t *testing.T, temp string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperHoldsADatabase$")
	cmd.Env = append(os.Environ(), helperEnv+"=1", "HEADGATE_TEST_DIR="+temp)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	var seen string
	for !strings.Contains(seen, "\n") {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("helper: %v, %s", err, seen)
		}
		seen += string(buf[:n])
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed"
	_, dir, _ := strings.Cut(seen, "READY ")
	dir, _, _ = strings.Cut(dir, "\n")
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for { // the server, which stops cleanly, removes that file last
		if _, err := os.Stat(filepath.Join(dir, "postmaster.pid")); os.IsNotExist(err) {
			return dir
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatal("the server of the killed helper did not end")
		}
	}
}
