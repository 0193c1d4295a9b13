package testkit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lib/pq"
	"go.uber.org/goleak"

	"headgate/internal/localpg"
	"headgate/migrations"
)

const (
	// dirPrefix begins the name of every folder that this package makes.
	dirPrefix = "headgate-test-"
	// templateName is the migrated database that NewDatabase copies.
	templateName = "headgate_template"
	// abandonedAfter is the age from which a folder that no process has locked
	// is taken for the rest of a killed test run. A folder is locked within
	// seconds after it was made.
	abandonedAfter = 10 * time.Minute
	// memoryDir is used if it is a tmpfs (tmpfsMagic, from statfs(2)) that we
	// may write to, with room for several test processes of about 0.5 GiB.
	memoryDir   = "/dev/shm"
	tmpfsMagic  = 0x01021994
	memoryRoom  = 4 << 30 // bytes
	accessWrite = 0x2     // W_OK of access(2)
	// setupTimeout bounds what has to end even if the test forgot a deadline.
	setupTimeout = 2 * time.Minute
)

// PG is a running cluster together with its template database.
type PG struct {
	cluster *localpg.Cluster
	base    string // folder of the cluster
	admin   *sql.DB
	clone   string // CREATE DATABASE options of this server version

	migrate sync.Once
	failed  error // written by migrate
	names   atomic.Int64
}

// shared is the one cluster of this process. Starting one for each test would
// cost a second each; sharing it is safe because every test has a database of
// its own. It is the only package variable, and Main is what ends it.
var shared struct {
	once sync.Once
	pg   *PG
	err  error
}

// Main runs the tests, ends the shared cluster, removes its folder, looks for
// leaked goroutines, and exits. Call it from TestMain.
func Main(m *testing.M, opts ...goleak.Option) { os.Exit(Run(m, opts...)) }

// Run is Main without the exit: it gives the exit code, for a TestMain that
// has something of its own to remove.
func Run(m *testing.M, opts ...goleak.Option) int {
	code := m.Run()
	if err := closeShared(); err != nil {
		fmt.Fprintln(os.Stderr, "testkit:", err)
		code = max(code, 1)
	}
	if code == 0 {
		if err := goleak.Find(opts...); err != nil {
			fmt.Fprintln(os.Stderr, "testkit: goroutines left behind:", err)
			code = 1
		}
	}
	return code
}

// Postgres gives the shared cluster of this test process and starts it at the
// first call.
func Postgres(tb testing.TB) *PG {
	tb.Helper()
	shared.once.Do(func() { shared.pg, shared.err = startShared() })
	if shared.err != nil {
		tb.Fatalf("start PostgreSQL for the tests: %v", shared.err)
	}
	return shared.pg
}

func startShared() (*PG, error) {
	removeAbandoned(tempDir())
	base, err := makeBase()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	cluster, err := localpg.Start(ctx, config(base))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(base))
	}
	pg := &PG{cluster: cluster, base: base}
	pg.admin, err = sql.Open("postgres", cluster.DSNFor("postgres"))
	if err == nil {
		err = pg.readVersion(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, pg.close())
	}
	return pg, nil
}

// readVersion chooses how databases are copied. Copying through the WAL, with
// the DROP that follows, takes half the time of the old way, which needs
// checkpoints (210 ms against 390 ms for Headgate's schema on a busy machine).
func (p *PG) readVersion(ctx context.Context) error {
	var num int
	if err := p.admin.QueryRowContext(ctx, "SELECT current_setting('server_version_num')::int").Scan(&num); err != nil {
		return fmt.Errorf("ask for the server's version: %w", err)
	}
	if num >= 150000 {
		p.clone = " STRATEGY wal_log"
	}
	return nil
}

func closeShared() error {
	if shared.pg == nil {
		return nil
	}
	return shared.pg.close()
}

// close ends the server at once: the checkpoint of a clean stop would write
// for seconds what is removed right afterwards.
func (p *PG) close() error {
	var err error
	if p.admin != nil {
		err = p.admin.Close()
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = p.cluster.Stop(ctx) // says that it was not clean, which is wanted
	return errors.Join(err, os.RemoveAll(p.base))
}

// Cluster gives the server itself. Do not stop it: other tests use it too.
func (p *PG) Cluster() *localpg.Cluster { return p.cluster }

// DSN gives the connection string of a database of the cluster.
func (p *PG) DSN(database string) string { return p.cluster.DSNFor(database) }

// NewDatabase makes a database with Headgate's schema for this test alone and
// gives its connection string. It is dropped at the end of the test, whoever
// is still connected.
func NewDatabase(tb testing.TB) string {
	tb.Helper()
	p := Postgres(tb)
	p.migrate.Do(func() { p.failed = p.makeTemplate() })
	if p.failed != nil {
		tb.Fatalf("make the template database: %v", p.failed)
	}
	return p.create(tb, templateName)
}

// EmptyDatabase makes a database without any schema.
func EmptyDatabase(tb testing.TB) string {
	tb.Helper()
	return Postgres(tb).create(tb, "template0")
}

func (p *PG) makeTemplate() error {
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	if _, err := p.admin.ExecContext(ctx, "CREATE DATABASE "+templateName); err != nil {
		return err
	}
	db, err := sql.Open("postgres", p.DSN(templateName))
	if err != nil {
		return err
	}
	// A template cannot be copied while somebody is connected to it.
	return errors.Join(migrations.Up(ctx, db), db.Close())
}

func (p *PG) create(tb testing.TB, template string) string {
	tb.Helper()
	name := fmt.Sprintf("test_%d", p.names.Add(1))
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	query := "CREATE DATABASE " + pq.QuoteIdentifier(name) + " TEMPLATE " + pq.QuoteIdentifier(template) + p.clone
	if _, err := p.admin.ExecContext(ctx, query); err != nil {
		tb.Fatalf("make a database for the test: %v", err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
		defer cancel()
		if _, err := p.admin.ExecContext(ctx, "DROP DATABASE IF EXISTS "+pq.QuoteIdentifier(name)+" WITH (FORCE)"); err != nil {
			tb.Errorf("drop the database of the test: %v", err)
		}
	})
	return p.DSN(name)
}

// ClusterConfig describes a cluster for one test alone, for tests that kill or
// restart PostgreSQL: pass it to localpg.Start as often as needed. The folder
// is removed at the end of the test; the test stops what it started.
func ClusterConfig(tb testing.TB) localpg.Config {
	tb.Helper()
	base, err := makeBase()
	if err != nil {
		tb.Fatalf("make a folder for PostgreSQL: %v", err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(base); err != nil {
			tb.Errorf("remove the folder of PostgreSQL: %v", err)
		}
	})
	return config(base)
}

// config keeps every durability setting as in production. What differs is
// small memory and room for the pools of many parallel tests.
func config(base string) localpg.Config {
	return localpg.Config{
		Dir:         filepath.Join(base, "pg"),
		FallbackDir: filepath.Join(base, "fallback"),
		InitCache:   filepath.Join(tempDir(), fmt.Sprintf("headgate-initdb-%d", os.Geteuid())),
		Settings: map[string]string{
			"shared_buffers": "32MB", "max_connections": "300", "max_wal_size": "256MB",
		},
	}
}

// tempDir is where test clusters lie. HEADGATE_TEST_DIR names it. Otherwise it
// is the memory file system, if there is room: all settings of the server stay
// as in production, and a killed process loses nothing there either, but its
// many syncs cost nothing (first database after 3 s instead of 19 s on a busy
// machine; name a disk to measure anything). Only a loss of power is not covered, which no test causes.
func tempDir() string {
	if dir := os.Getenv("HEADGATE_TEST_DIR"); dir != "" {
		return dir
	}
	var st syscall.Statfs_t
	err := syscall.Statfs(memoryDir, &st)
	if err == nil && st.Type == tmpfsMagic && st.Bavail*uint64(st.Bsize) >= memoryRoom && syscall.Access(memoryDir, accessWrite) == nil {
		return memoryDir
	}
	return os.TempDir()
}

// makeBase makes a folder that the unprivileged user of the server can pass
// through, which testing.TB.TempDir of root does not give.
func makeBase() (string, error) {
	base, err := os.MkdirTemp(tempDir(), dirPrefix)
	if err != nil {
		return "", err
	}
	return base, os.Chmod(base, 0o711)
}

// removeAbandoned removes what killed test runs left: old folders of ours
// whose lock nobody holds. Their servers ended with them. Failure only costs
// disk space, so it is not reported.
func removeAbandoned(temp string) {
	dirs, _ := filepath.Glob(filepath.Join(temp, dirPrefix+"*"))
	for _, dir := range dirs {
		var st syscall.Stat_t
		if syscall.Lstat(dir, &st) != nil || int(st.Uid) != os.Geteuid() || time.Since(time.Unix(st.Mtim.Unix())) < abandonedAfter {
			continue
		}
		lock, err := os.OpenFile(filepath.Join(dir, "pg.lock"), os.O_RDWR|syscall.O_NOFOLLOW, 0)
		if err != nil { // killed before it started anything
			_ = os.RemoveAll(dir)
			continue
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.RemoveAll(dir)
		}
		_ = lock.Close()
	}
}
