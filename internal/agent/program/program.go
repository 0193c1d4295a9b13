// Package program provides the running of one program as a child: without a
// shell, in a process group of its own, with an environment from scratch, its
// output copied in order while it runs, and an end that comes in bounded time
// whatever the program and its descendants do. It does not decide which
// programs may run; that is the policy's part.
package program

import (
	"context"
	"errors"
	"io"
	"os"
	"os/user"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// DefaultGrace is how long a program has between SIGTERM and SIGKILL.
	DefaultGrace = 5 * time.Second
	// pipeGrace is how long descendants that hold the output open may go on
	// printing after the program itself has ended.
	pipeGrace = 2 * time.Second
	// closeGrace is how long the end of the output may take to arrive once
	// the whole group has been killed; a descendant that left the group can
	// hold the pipe for ever.
	closeGrace = time.Second
	// readSize is the most that one piece of output has.
	readSize = 64 << 10
)

// Stream tells the two outputs of a program apart.
type Stream int

// The streams.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// Sink takes what a program prints. Write is called by one goroutine for each
// stream, with pieces of at most 64 KiB that it must not keep, and may block:
// the program then feels it. Unblock is called once when the program has
// ended; after it Write must not block.
type Sink interface {
	Write(s Stream, p []byte)
	Unblock()
}

// Command says what to run.
type Command struct {
	Path string
	Args []string // without the program's own name
	Env  []string // all of it
	Dir  string
	User string // "" = our own
	// Grace gives the time between SIGTERM and SIGKILL, by the cause for which
	// the context is done; nil means DefaultGrace.
	Grace func(cause error) time.Duration
	Sink  Sink
}

// Result says how a program ended. Exactly one of SpawnError, Code and Signal
// is set.
type Result struct {
	SpawnError error
	Code       *int
	Signal     string // for example "SIGKILL"
	Ended      bool   // by us, because the context was done
	Cut        bool   // a descendant outside the group held the output open; it was closed
	User       time.Duration
	System     time.Duration
	MaxRSS     int64 // bytes
}

// Run starts the program and waits for its end. When ctx is done the group gets
// SIGTERM and, after the grace, SIGKILL. Whatever the program leaves behind in
// its group is killed when it has ended.
func Run(ctx context.Context, c Command) Result {
	// The parent-death signal is tied to the thread that starts the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	out, err := openOutputs()
	if err != nil {
		return Result{SpawnError: err}
	}
	defer out.close()
	proc, err := start(c, out)
	if err != nil {
		c.Sink.Unblock()
		return Result{SpawnError: err}
	}
	copied := out.copyTo(c.Sink)
	ended := waitForExit(ctx, proc.Pid, c)
	c.Sink.Unblock()

	// The child is not reaped yet, so its number cannot have passed to another
	// process group: this kill can only meet its own.
	cut := ended || !within(copied, pipeGrace)
	killGroup(proc.Pid, syscall.SIGKILL)
	if cut {
		cut = !within(copied, closeGrace)
	}
	out.stop()
	<-copied
	state, err := proc.Wait()
	if err != nil {
		return Result{SpawnError: err, Ended: ended}
	}
	return resultOf(state, ended, cut)
}

func resultOf(state *os.ProcessState, ended, cut bool) Result {
	r := Result{Ended: ended, Cut: cut, User: state.UserTime(), System: state.SystemTime()}
	if usage, ok := state.SysUsage().(*syscall.Rusage); ok {
		r.MaxRSS = usage.Maxrss << 10 // the kernel counts KiB
	}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		r.Signal = unix.SignalName(ws.Signal())
		if r.Signal == "" {
			r.Signal = strconv.Itoa(int(ws.Signal()))
		}
		return r
	}
	code := state.ExitCode()
	r.Code = &code
	return r
}

func start(c Command, out *outputs) (*os.Process, error) {
	sys := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if c.User != "" {
		cred, err := credential(c.User)
		if err != nil {
			return nil, err
		}
		sys.Credential = cred
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close() // the child has its own
	defer out.closeWriters()
	return os.StartProcess(c.Path, append([]string{c.Path}, c.Args...), &os.ProcAttr{
		Dir: c.Dir, Env: c.Env, Files: []*os.File{null, out.w[0], out.w[1]}, Sys: sys,
	})
}

func credential(name string) (*syscall.Credential, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return nil, err
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil, err
	}
	c := &syscall.Credential{}
	for _, id := range append(ids, u.Uid, u.Gid) {
		n, err := strconv.ParseUint(id, 10, 32)
		if err != nil {
			return nil, err
		}
		c.Groups = append(c.Groups, uint32(n))
	}
	n := len(ids)
	c.Uid, c.Gid, c.Groups = c.Groups[n], c.Groups[n+1], c.Groups[:n]
	return c, nil
}

// waitForExit returns when the program has ended and says whether we ended it.
// It leaves the child unreaped.
func waitForExit(ctx context.Context, pid int, c Command) (ended bool) {
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		for {
			err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	select {
	case <-exited:
		return false
	case <-ctx.Done():
	}
	killGroup(pid, syscall.SIGTERM)
	grace := DefaultGrace
	if c.Grace != nil {
		grace = c.Grace(context.Cause(ctx))
	}
	if within(exited, grace) {
		return true
	}
	killGroup(pid, syscall.SIGKILL)
	<-exited
	return true
}

// killGroup signals the child's group; that nobody is left in it is no error.
func killGroup(pid int, sig syscall.Signal) { _ = syscall.Kill(-pid, sig) }

// within waits for the channel to close, at most for d.
func within(done <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// outputs are the two pipes between the child and us.
type outputs struct{ r, w [2]*os.File }

func openOutputs() (*outputs, error) {
	o := &outputs{}
	for i := range o.r {
		var err error
		if o.r[i], o.w[i], err = os.Pipe(); err != nil {
			o.close()
			return nil, err
		}
	}
	return o, nil
}

func (o *outputs) closeWriters() {
	for _, f := range o.w {
		f.Close()
	}
}

// close may be called again; closing twice does nothing.
func (o *outputs) close() {
	for i := range o.r {
		if o.r[i] != nil {
			o.r[i].Close()
			o.w[i].Close()
		}
	}
}

// stop ends the copying, whoever still holds the pipes.
func (o *outputs) stop() {
	for _, f := range o.r {
		_ = f.SetReadDeadline(time.Unix(1, 0)) // a pipe that cannot do it is closed already
	}
}

// copyTo hands all that is printed to the sink; the channel closes at the end
// of both streams.
func (o *outputs) copyTo(sink Sink) <-chan struct{} {
	done := make(chan struct{})
	var wg sync.WaitGroup
	for i, s := range []Stream{Stdout, Stderr} {
		wg.Go(func() { copyStream(o.r[i], s, sink) })
	}
	go func() {
		wg.Wait()
		close(done)
	}()
	return done
}

func copyStream(r io.Reader, s Stream, sink Sink) {
	buf := make([]byte, readSize)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			sink.Write(s, buf[:n])
		}
		if err != nil {
			return
		}
	}
}
