package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"

	"headgate/internal/localpg"
)

// node is a process of a campaign that is killed and started again. One that
// ends without having been told to has crashed, which breaks a promise.
type node struct {
	name    string
	logFile string
	command func() *exec.Cmd

	mu      sync.Mutex
	proc    *process
	told    *atomic.Bool // its end is wanted
	crashes []string
	watched sync.WaitGroup
}

func (n *node) start() error { return n.startWith("") }

// startWith starts the process with something more in its environment; then it
// may end by itself, since that is what is put there.
func (n *node) startWith(env string) error {
	log, err := os.OpenFile(n.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := n.command()
	cmd.Stdout, cmd.Stderr = log, log
	if env != "" {
		cmd.Env = append(os.Environ(), env)
	}
	// A process that is stopped would not hear of a softer signal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p, err := startProcess(cmd)
	if err != nil {
		return err
	}
	n.mu.Lock()
	told := &atomic.Bool{}
	told.Store(env != "")
	n.proc, n.told = p, told
	n.mu.Unlock()
	n.watched.Go(func() {
		<-p.ended
		n.mu.Lock()
		defer n.mu.Unlock()
		if !told.Load() {
			n.crashes = append(n.crashes, fmt.Sprintf("%s ended by itself: %v", n.name, p.err))
		}
	})
	return nil
}

func (n *node) signal(s syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.proc.cmd.Process.Signal(s)
}

// kill ends the process at once.
func (n *node) kill() {
	n.mu.Lock()
	p := n.proc
	if p == nil {
		n.mu.Unlock()
		return
	}
	n.told.Store(true)
	n.mu.Unlock()
	_ = p.cmd.Process.Kill() // it may have ended already
	<-p.ended
	n.watched.Wait()
}

// terminate asks the process to end.
func (n *node) terminate() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.told.Store(true)
	_ = n.proc.cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
}

// ended gives what is closed when the present process has ended.
func (n *node) ended() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.proc.ended
}

func (n *node) pid() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.proc.pid()
}

func (n *node) crashed() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.crashes
}

// database is the PostgreSQL server of a campaign.
type database struct {
	config localpg.Config

	mu      sync.Mutex
	cluster *localpg.Cluster
}

func newDatabase(dir string) *database {
	return &database{config: localpg.Config{
		Dir: filepath.Join(dir, "pg"), FallbackDir: filepath.Join(dir, "fallback"),
		Settings: map[string]string{"max_connections": "200"},
	}}
}

func (d *database) start(ctx context.Context) error {
	c, err := localpg.Start(ctx, d.config)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cluster = c
	return nil
}

func (d *database) now() *localpg.Cluster {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cluster
}

// end sends a signal to the postmaster and waits for its end.
func (d *database) end(s syscall.Signal) error {
	c := d.now()
	if err := syscall.Kill(c.PID(), s); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	<-c.Done()
	return nil
}

// endBackend kills one backend, which brings the whole server into recovery.
func (d *database) endBackend(ctx context.Context, choose func(int) int) error {
	db, err := openDB(d.now().DSN())
	if err != nil {
		return err
	}
	defer release(db)
	var pids []int
	rows, err := db.QueryContext(ctx, `SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var pid int
		if err := rows.Scan(&pid); err != nil {
			return err
		}
		pids = append(pids, pid)
	}
	if err := rows.Err(); err != nil || len(pids) == 0 {
		return err
	}
	err = syscall.Kill(pids[choose(len(pids))], syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}

// endSessions ends all connections in good order.
func (d *database) endSessions(ctx context.Context) error {
	db, err := openDB(d.now().DSN())
	if err != nil {
		return err
	}
	defer release(db)
	_, err = db.ExecContext(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`)
	return err
}
