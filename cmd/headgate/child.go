package main

import (
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// child keeps one program running: it starts it, starts it again with a
// growing delay when it ends by itself, and ends with the parent even if the
// parent is killed (parent-death signal).
type child struct {
	name    string
	command func() *exec.Cmd
	log     *slog.Logger
	started func(pid int) // called after each start, from run's goroutine

	mu  sync.Mutex
	pid int
}

// Delays of a restart: quick at first, since a killed agent shall be back at
// once; bounded, so that a broken one does not spin.
const (
	restartDelay    = 200 * time.Millisecond
	maxRestartDelay = 10 * time.Second
	steadyAfter     = 30 * time.Second // a run this long resets the delay
	childStop       = 6 * time.Second  // then it is killed; `up` promises 10 s in all
)

// run blocks until ctx ends and the program with it.
func (c *child) run(ctx context.Context) error {
	delay := restartDelay
	for {
		began := time.Now()
		err := c.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > steadyAfter {
			delay = restartDelay
		}
		c.log.Warn("a program ended; starting it again", "program", c.name, "err", err, "delay", delay)
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return nil
		}
		delay = min(2*delay, maxRestartDelay)
	}
}

// once starts the program and waits for its end. The parent-death signal is
// sent when the creating thread ends, so one goroutine keeps its thread from
// start to end.
func (c *child) once(ctx context.Context) error {
	cmd := c.command()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	done := make(chan error, 1)
	ready := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		ready <- err
		if err == nil {
			done <- cmd.Wait()
		}
	}()
	if err := <-ready; err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	c.setPID(cmd.Process.Pid)
	if c.started != nil {
		c.started(cmd.Process.Pid)
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	return endProcess(cmd, done)
}

// endProcess asks the program to stop, and kills it when it does not.
func endProcess(cmd *exec.Cmd, done <-chan error) error {
	_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended meanwhile
	select {
	case err := <-done:
		return err
	case <-time.After(childStop):
		_ = cmd.Process.Kill() // likewise
		return fmt.Errorf("killed after it did not stop in time: %w", <-done)
	}
}

func (c *child) setPID(pid int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pid = pid
}

// PID gives the process id of the running or last program.
func (c *child) PID() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pid
}
