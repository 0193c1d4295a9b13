package localpg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a live PostgreSQL process that works in a data directory.
type process struct {
	pid        int
	postmaster bool
}

// processesIn finds the PostgreSQL processes whose working directory is dir.
// That is the one reliable sign of life: a pid file may name a zombie or a
// number that was given to somebody else, whereas every postmaster and backend
// works in its data directory and a zombie works nowhere. Other programs (a
// shell that stands in dir) do not count.
func processesIn(dir string) ([]process, error) {
	want, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at the data directory: %w", err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []process
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && worksIn(pid, want) {
			found = append(found, process{pid: pid, postmaster: !isBackend(pid)})
		}
	}
	return found, nil
}

// worksIn says whether pid is a live PostgreSQL process in that directory.
func worksIn(pid int, dir os.FileInfo) bool {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	comm, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil || strings.TrimSpace(string(comm)) != "postgres" {
		return false
	}
	cwd, err := os.Stat(filepath.Join(proc, "cwd"))
	return err == nil && os.SameFile(cwd, dir)
}

// isBackend tells a child of the postmaster by the title that it gives itself,
// "postgres: headgate headgate [local] idle". A child that has not yet set it
// is taken for a postmaster, which only means a milder signal.
func isBackend(pid int) bool {
	cmdline, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	return err == nil && bytes.HasPrefix(cmdline, []byte("postgres: "))
}

// signalIn sends sig to the processes found that still are what they were:
// the handle is taken first and the check made after, so that a number given
// to somebody else in between is never hit.
func signalIn(dir string, procs []process, sig syscall.Signal) {
	want, err := os.Stat(dir)
	if err != nil {
		return
	}
	for _, p := range procs {
		h, err := os.FindProcess(p.pid)
		if err != nil {
			continue
		}
		if worksIn(p.pid, want) {
			_ = h.Signal(sig) // gone meanwhile is what we want
		}
		_ = h.Release()
	}
}

// evict makes sure that no PostgreSQL process works in dir: one that a killed
// predecessor left, or that somebody started by hand. A postmaster is asked to
// stop cleanly (SIGINT: the same signal that parent death sends, so asking
// twice does no harm), then told to (SIGQUIT); it takes its children along.
// Backends without a postmaster are given time to notice, then told to quit.
// Nothing may be removed from dir while one of them lives: they still hold the
// shared memory that the lock files stand for.
func evict(ctx context.Context, cfg Config, dir string) error {
	procs, err := processesIn(dir)
	if err != nil || len(procs) == 0 {
		return err
	}
	cfg.Logger.Warn("PostgreSQL of an earlier start still runs, waiting for its end", "dir", dir, "processes", len(procs))
	steps := []struct {
		sig  syscall.Signal
		wait time.Duration
		only func(process) bool
	}{
		{syscall.SIGINT, cfg.StopTimeout, func(p process) bool { return p.postmaster }},
		{syscall.SIGQUIT, quitTimeout, func(p process) bool { return p.postmaster }},
		{syscall.SIGQUIT, quitTimeout, func(process) bool { return true }},
		{syscall.SIGKILL, quitTimeout, func(process) bool { return true }},
	}
	if postmasters(procs) == nil {
		steps[0].wait, steps[1].wait = cfg.OrphanTimeout, 0
	}
	for _, step := range steps {
		if step.wait == 0 {
			continue
		}
		gone, err := signalAndWait(ctx, dir, step.sig, step.wait, step.only)
		if err != nil || gone {
			return err
		}
	}
	procs, err = processesIn(dir)
	if err != nil || len(procs) == 0 {
		return err
	}
	return fmt.Errorf("PostgreSQL process %d still works in %s and does not end; end it, then start again", procs[0].pid, dir)
}

func postmasters(procs []process) []process {
	var out []process
	for _, p := range procs {
		if p.postmaster {
			out = append(out, p)
		}
	}
	return out
}

// signalAndWait signals once, then looks until nobody is left or time is over.
func signalAndWait(ctx context.Context, dir string, sig syscall.Signal, wait time.Duration, only func(process) bool) (gone bool, err error) {
	procs, err := processesIn(dir)
	if err != nil {
		return false, err
	}
	var targets []process
	for _, p := range procs {
		if only(p) {
			targets = append(targets, p)
		}
	}
	signalIn(dir, targets, sig)
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	tick := time.NewTicker(evictInterval)
	defer tick.Stop()
	for {
		if procs, err = processesIn(dir); err != nil || len(procs) == 0 {
			return err == nil, err
		}
		select {
		case <-ctx.Done():
			return false, fmt.Errorf("wait for the end of an earlier PostgreSQL: %w", context.Cause(ctx))
		case <-deadline.C:
			return false, nil
		case <-tick.C:
		}
	}
}

// removeLockFiles clears what a killed postmaster left. To be called only when
// evict has said that nobody works in the data directory.
func (p place) removeLockFiles(socketDir string) error {
	socket := socketPath(socketDir)
	for _, path := range []string{filepath.Join(p.dir, "postmaster.pid"), socket, socket + ".lock"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the lock file of a killed PostgreSQL: %w", err)
		}
	}
	return nil
}
