// Package program provides the running of one program as a child: without a
// shell, in a session of its own, with an environment from scratch, its output
// copied in order while it runs, and an end that comes in bounded time and to
// everything that it has started. It does not decide which programs may run;
// that is the policy's part.
//
// What a program starts is held together by a cgroup (version 2) of its own
// where the machine lets us make one, and otherwise by what can be read of the
// processes: session, process group, descent, and a mark in the environment
// which is inherited also by those that go their own way (double fork, setsid).
package program

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MarkName is the entry of the environment that tells one run from all others.
const MarkName = "HEADGATE_RUN_ID"

const (
	// DefaultGrace is how long a program has between SIGTERM and SIGKILL.
	DefaultGrace = 5 * time.Second
	// DefaultUmask is for programs of which nobody says more.
	DefaultUmask = 0o022
	// pipeGrace is how long descendants that hold the output open may go on
	// printing after the program itself has ended.
	pipeGrace = 2 * time.Second
	// settle is how long descendants that print no more may take to end by
	// themselves before they count as left behind.
	settle = 200 * time.Millisecond
	// closeGrace is how long the end of the output may take to arrive once
	// everything has been killed; whoever survived that can hold the pipe for
	// ever.
	closeGrace = time.Second
	// killWait is how long the kernel may take to end a process after SIGKILL.
	// One that it does not let go (a dead network file system) is reported.
	killWait = 5 * time.Second
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
	Path  string
	Args  []string // without the program's own name
	Env   []string // all of it but the mark
	Dir   string
	As    Identity
	Umask int
	// Label is what Recover gives back of a program that was left behind.
	Label string
	// Grace gives the time between SIGTERM and SIGKILL, by the cause for which
	// the context is done, nil for what is left behind; nil means DefaultGrace.
	Grace func(cause error) time.Duration
	// LeaveChildren lets what the program has started go on when the program
	// has ended by itself. When it is ended, they are ended with it.
	LeaveChildren bool
	Sink          Sink
}

func (c *Command) grace(cause error) time.Duration {
	if c.Grace == nil {
		return DefaultGrace
	}
	return c.Grace(cause)
}

// The values of Result.KilledBy.
const (
	ByTerm = "term" // SIGTERM was enough for the program and all that it started
	ByKill = "kill" // after the grace, SIGKILL was needed
)

// Result says how a program ended. At most one of SpawnError, Code and Signal
// is set; none when the kernel does not let the program go.
type Result struct {
	SpawnError error
	Code       *int
	Signal     string        // for example "SIGKILL"
	Ended      bool          // by us, because the context was done
	KilledBy   string        // what that took, "" when it was not ended by us
	Grace      time.Duration // that was given, when Ended
	Cut        bool          // the output was still held open at the end; it was closed
	LeftBehind []Process     // alive after the program had ended by itself
	Released   bool          // they may go on; otherwise they were ended
	Survivors  []Process     // could not be ended
	User       time.Duration
	System     time.Duration
	// MaxRSS is the most memory that the program had, in bytes, or 0 when that
	// was less than our own process ever had: the kernel counts a program from
	// the moment in which it still is a copy of its parent.
	MaxRSS int64
}

// Run starts the program and waits for its end and for that of all that it has
// started. When ctx is done they get SIGTERM and, after the grace, SIGKILL.
func (k *Keeper) Run(ctx context.Context, command Command) (r Result) {
	// The parent-death signal is tied to the thread that starts the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	c := &command
	out, err := openOutputs()
	if err != nil {
		return Result{SpawnError: err}
	}
	defer out.close()
	t, err := k.plant(c)
	if err != nil {
		c.Sink.Unblock()
		return Result{SpawnError: err}
	}
	proc, err := start(c, t, out)
	if err != nil {
		c.Sink.Unblock()
		return Result{SpawnError: errors.Join(err, t.fell())}
	}
	ownPeak := peak()
	copied := out.copyTo(c.Sink)
	exited := watch(proc.Pid)
	if err := t.started(proc.Pid, c.Label); err != nil {
		// Unnoted, it could be run a second time beside itself.
		r.SpawnError = err
		_ = proc.Kill() // it is unreaped and ours
	}
	t.attend(ctx, c, &r, exited, copied)
	r.Cut = !within(copied, closeGrace)
	out.stop()
	<-copied
	t.conclude(proc, exited, &r)
	if r.MaxRSS <= ownPeak {
		r.MaxRSS = 0
	}
	return r
}

// attend waits for the end of the program and sees to it that everything ends.
func (t *tree) attend(ctx context.Context, c *Command, r *Result, exited, copied <-chan struct{}) {
	select {
	case <-exited:
		c.Sink.Unblock()
		t.tidy(ctx, c, r, copied)
		return
	case <-ctx.Done():
	}
	if within(exited, 0) { // both at once: it has ended by itself
		c.Sink.Unblock()
		t.tidy(ctx, c, r, copied)
		return
	}
	r.Ended, r.KilledBy, r.Grace = true, ByTerm, c.grace(context.Cause(ctx))
	over := time.Now().Add(r.Grace)
	t.terminate(true)
	if !within(exited, time.Until(over)) || !t.gone(true, time.Until(over), nil) {
		r.KilledBy = ByKill
		r.Survivors = named(t.kill(true, killWait))
	}
	c.Sink.Unblock()
}

// tidy is called when the program has ended by itself: what it leaves behind
// may print to the end, and then is ended, or let go on if that is allowed.
func (t *tree) tidy(ctx context.Context, c *Command, r *Result, copied <-chan struct{}) {
	quiet := within(copied, pipeGrace)
	if !c.LeaveChildren && quiet && t.gone(false, settle, ctx.Done()) {
		return
	}
	left := t.members(false)
	if r.LeftBehind = named(left); len(left) == 0 {
		return
	}
	if c.LeaveChildren && t.release() == nil {
		r.Released = true
		return
	}
	t.terminate(false)
	if !t.gone(false, c.grace(nil), ctx.Done()) {
		r.Survivors = named(t.kill(false, killWait))
	}
}

// conclude reaps the program and takes its place away.
func (t *tree) conclude(proc *os.Process, exited <-chan struct{}, r *Result) {
	if !within(exited, killWait) {
		// The kernel does not let it go. Its number stays taken until it does.
		go func() { _, _ = proc.Wait() }()
	} else if state, err := proc.Wait(); err != nil {
		r.SpawnError = errors.Join(r.SpawnError, err)
	} else if r.SpawnError == nil {
		r.take(state)
	}
	t.reap()
	// What cannot be taken away is found and told by the next start.
	_ = t.fell()
}

// take reads how the program has ended and what it has used.
func (r *Result) take(state *os.ProcessState) {
	r.User, r.System = state.UserTime(), state.SystemTime()
	if usage, ok := state.SysUsage().(*syscall.Rusage); ok {
		r.MaxRSS = usage.Maxrss << 10 // the kernel counts KiB
	}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		r.Signal = unix.SignalName(ws.Signal())
		if r.Signal == "" {
			r.Signal = strconv.Itoa(int(ws.Signal()))
		}
		return
	}
	code := state.ExitCode()
	r.Code = &code
}

// peak gives the most memory that this process has had, in bytes.
func peak() int64 {
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), "VmHWM:")
	var kib int64
	_, _ = fmt.Sscan(rest, &kib) // 0 when there is none
	return kib << 10
}

// start starts the program from the calling goroutine's own thread.
func start(c *Command, t *tree, out *outputs) (*os.Process, error) {
	defer out.closeWriters()
	defer t.k.withUmask(c.Umask)()
	sys := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, Credential: c.As.credential}
	if t.dir != nil {
		sys.UseCgroupFD, sys.CgroupFD = true, int(t.dir.Fd())
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close() // the child has its own
	env := append(c.Env[:len(c.Env):len(c.Env)], t.mark)
	return os.StartProcess(c.Path, append([]string{c.Path}, c.Args...), &os.ProcAttr{
		Dir: c.Dir, Env: env, Files: []*os.File{null, out.w[0], out.w[1]}, Sys: sys,
	})
}

// withUmask lets the next child of the calling thread have the umask, until the
// given function is called. The child inherits that of the thread, once it is
// not the one of the whole process any more. The thread keeps its copy, which
// looks the same afterwards. Where a thread may have none of its own, as in many
// containers, all threads have the child's for that moment: what they make
// meanwhile has modes that do not depend on it, if the child's leaves the owner
// his rights.
func (k *Keeper) withUmask(mask int) (restore func()) {
	if unix.Unshare(unix.CLONE_FS) == nil {
		old := unix.Umask(mask)
		return func() { unix.Umask(old) }
	}
	k.umask.Lock()
	old := unix.Umask(mask)
	return func() {
		unix.Umask(old)
		k.umask.Unlock()
	}
}

// watch closes its channel when the program has ended. It leaves the program
// unreaped, so that its number stays its own.
func watch(pid int) <-chan struct{} {
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
	return exited
}

// within waits for the channel to close, at most for d.
func within(done <-chan struct{}, d time.Duration) bool {
	select {
	case <-done:
		return true
	default:
	}
	if d <= 0 {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}
