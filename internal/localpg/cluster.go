package localpg

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// outputGrace is how long the end of the postmaster waits for orphan backends
// that still hold its output open; their last lines are not worth more.
const outputGrace = 500 * time.Millisecond

// Cluster is one running private PostgreSQL cluster. Its methods may be called
// from several goroutines.
type Cluster struct {
	cfg       Config
	place     place
	socketDir string
	lock      *os.File
	log       *serverLog
	proc      *os.Process
	stopping  atomic.Bool

	done chan struct{}
	exit error // written before done is closed
}

// Start starts the cluster in cfg.Dir, making it first if there is none, and
// returns when it answers. What a killed predecessor left running is stopped
// first. ctx bounds the start alone; Stop ends the cluster, and so does the
// end of this process in whatever way (the server gets SIGINT and stops
// cleanly).
//
// Errors to tell apart: *NotFoundError, *VersionError, *LockedError.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	p, err := findPlace(cfg)
	if err != nil {
		return nil, err
	}
	lock, err := p.takeLock()
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		cfg: cfg, place: p, lock: lock,
		log: newServerLog(cfg.Logger), done: make(chan struct{}),
	}
	if err := c.prepare(ctx); err != nil {
		releaseLock(lock)
		return nil, err
	}
	if err := c.spawn(); err != nil {
		releaseLock(lock)
		return nil, err
	}
	if err := c.awaitReady(ctx); err != nil {
		// The caller's context may be over; the server must not stay behind.
		return nil, errors.Join(err, c.abandon())
	}
	cfg.Logger.Info("private PostgreSQL cluster started", "dir", p.dir, "version", p.bin.Version, "pid", c.PID())
	return c, nil
}

// prepare brings the data directory into a state that can be started.
func (c *Cluster) prepare(ctx context.Context) (err error) {
	if err = evict(ctx, c.cfg, c.place.dir); err != nil {
		return err
	}
	if err = c.place.ensureCluster(ctx, c.cfg); err != nil {
		return err
	}
	if c.socketDir, err = c.place.makeSocketDir(); err != nil {
		return err
	}
	if err = c.place.removeLockFiles(c.socketDir); err != nil {
		return err
	}
	return c.place.writeAccess()
}

// spawn starts the server as a direct child.
func (c *Cluster) spawn() error {
	// No context of the start may end the server: that is what Stop is for.
	cmd := exec.CommandContext(context.Background(), c.place.bin.Postgres(), c.cfg.serverArgs(c.place.dir, c.socketDir)...)
	cmd.Dir = "/" // our own may be out of reach for the server's user
	cmd.Env = childEnv()
	cmd.Stdout, cmd.Stderr = c.log, c.log
	cmd.WaitDelay = outputGrace
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: c.place.acc.credential(),
		Pdeathsig:  syscall.SIGINT, // fast shutdown
		Setpgid:    true,           // Ctrl-C is for us; the server ends when we say so
	}
	started := make(chan error)
	go c.supervise(cmd, started)
	if err := <-started; err != nil {
		return fmt.Errorf("start PostgreSQL %s: %w", c.place.bin.Version, err)
	}
	return nil
}

// supervise owns the child: it forks it and waits for its end on one thread,
// since the parent-death signal fires when the forking thread ends.
func (c *Cluster) supervise(cmd *exec.Cmd, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Start()
	c.proc = cmd.Process
	started <- err
	if err != nil {
		return
	}
	err = cmd.Wait()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the server ended well, a backend held its output
	}
	switch {
	case err != nil:
		c.exit = fmt.Errorf("PostgreSQL ended: %w: %s", err, c.log.tail())
	case !c.stopping.Load():
		c.exit = errors.New("PostgreSQL was stopped by somebody else")
	}
	releaseLock(c.lock)
	close(c.done)
}

// awaitReady returns when the database answers, or with the reason why not.
func (c *Cluster) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.StartTimeout,
		fmt.Errorf("PostgreSQL did not accept connections within %v", c.cfg.StartTimeout))
	defer cancel()
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	for {
		err := c.tryReady(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-c.done:
			return c.exit
		case <-ctx.Done():
			return fmt.Errorf("wait for PostgreSQL: %w (last answer: %w)", context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}

// tryReady makes one connection to the database, creating it at first.
func (c *Cluster) tryReady(ctx context.Context) error {
	if pid, status := c.place.pidFile(); pid != c.PID() || status != "ready" {
		return fmt.Errorf("status of the server: %q", status)
	}
	err := c.connect(ctx, databaseName)
	if pq.As(err, pqerror.InvalidCatalogName) == nil {
		return err
	}
	return c.createDatabase(ctx)
}

func (c *Cluster) connect(ctx context.Context, database string) error {
	connector, err := c.connector(database)
	if err != nil {
		return err
	}
	conn, err := connector.Connect(ctx)
	if err != nil {
		return err
	}
	return conn.Close()
}

// connector is built from fields, so that PG* variables of the environment
// have no say.
func (c *Cluster) connector(database string) (*pq.Connector, error) {
	return pq.NewConnectorConfig(pq.Config{
		Host: c.socketDir, Port: socketPort, User: roleName, Database: database, SSLMode: pq.SSLModeDisable,
	})
}

func (c *Cluster) createDatabase(ctx context.Context) error {
	connector, err := c.connector("postgres")
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, "CREATE DATABASE "+pq.QuoteIdentifier(databaseName)); err != nil {
		return fmt.Errorf("create the database: %w", err)
	}
	return nil
}

// pidFile reads who holds the data directory and how far it has come
// ("starting", "ready"); zero values while the file is not complete. A file
// that a killed server left says "ready" too: only the pid tells.
func (p place) pidFile() (pid int, status string) {
	const pidLine, statusLine = 0, 7
	text, err := os.ReadFile(filepath.Join(p.dir, "postmaster.pid"))
	lines := strings.Split(string(text), "\n")
	if err != nil || len(lines) <= statusLine {
		return 0, ""
	}
	pid, _ = strconv.Atoi(lines[pidLine])
	return pid, strings.TrimSpace(lines[statusLine])
}

// DSN gives the connection string of the database headgate for lib/pq. PG*
// variables of the environment that it does not name still apply there.
func (c *Cluster) DSN() string { return c.DSNFor(databaseName) }

// DSNFor gives the connection string of another database of the cluster.
func (c *Cluster) DSNFor(database string) string {
	return fmt.Sprintf("host=%s port=%d user=%s dbname=%s sslmode=disable binary_parameters=yes",
		quoteDSN(c.socketDir), socketPort, roleName, quoteDSN(database))
}

// quoteDSN writes one value of a keyword connection string.
func quoteDSN(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
}

// Dir gives the data directory, which differs from Config.Dir when the
// server's user could not reach that.
func (c *Cluster) Dir() string { return c.place.dir }

// Version gives the version of the server, for example "15.18".
func (c *Cluster) Version() string { return c.place.bin.Version }

// PID gives the process id of the postmaster.
func (c *Cluster) PID() int { return c.proc.Pid }

// Done is closed when the server has ended, for whatever reason.
func (c *Cluster) Done() <-chan struct{} { return c.done }

// Wait blocks until the server has ended. It gives nil only if Stop had been
// called and the server reported a clean end.
func (c *Cluster) Wait() error {
	<-c.done
	return c.exit
}

// Stop shuts the server down: open transactions are rolled back, a checkpoint
// is written. When Config.StopTimeout passes or ctx is done first, the server
// is ended at once; nothing that was committed is lost, the next start
// recovers it. In any case the server has ended when Stop returns.
func (c *Cluster) Stop(ctx context.Context) error {
	c.stopping.Store(true)
	_ = c.proc.Signal(syscall.SIGINT) // fails only when it has ended
	if c.endsWithin(ctx, c.cfg.StopTimeout) {
		return c.exit
	}
	_ = c.proc.Signal(syscall.SIGQUIT)
	if !c.endsWithin(context.WithoutCancel(ctx), quitTimeout) {
		_ = c.proc.Kill()
		<-c.done
	}
	return errors.New("PostgreSQL did not stop in time and was ended without a checkpoint; nothing is lost, the next start takes longer")
}

// abandon ends a server that did not become ready; its error was told already.
func (c *Cluster) abandon() error {
	select {
	case <-c.done:
		return nil
	default:
	}
	return c.Stop(context.Background())
}

func (c *Cluster) endsWithin(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c.done:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}
