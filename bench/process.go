package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a child that ends with this program, also when that is killed.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended
	err   error         // why; readable after ended
}

// startProcess starts a command. The parent-death signal is sent when the
// creating thread ends, so one goroutine keeps its thread until the end.
func startProcess(cmd *exec.Cmd) (*process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	}
	p := &process{cmd: cmd, ended: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer close(p.ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// stopWait is how long a process may take to stop before it is killed.
const stopWait = 15 * time.Second

// stop ends the process, by force if it does not obey.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended meanwhile
	timer := time.NewTimer(stopWait)
	defer timer.Stop()
	select {
	case <-p.ended:
		return nil
	case <-timer.C:
		_ = p.cmd.Process.Kill() // likewise
		<-p.ended
		return fmt.Errorf("%s did not stop within %s", filepath.Base(p.cmd.Path), stopWait)
	}
}

// worker is a process of this program that obeys orders: one JSON document a
// line on its standard input, one answer a line on its standard output. It
// ends when its standard input does.
type worker struct {
	*process
	in  io.WriteCloser
	out *bufio.Reader
}

// answer is one line from a worker.
type answer struct {
	Error string          `json:"error,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// startWorker runs this program with a subcommand; its first answer goes to v.
func startWorker(v any, env []string, args ...string) (*worker, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, args...) //nolint:noctx // it ends with its standard input
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), env...)
	w := &worker{}
	if w.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.out = bufio.NewReader(out)
	if w.process, err = startProcess(cmd); err != nil {
		return nil, err
	}
	if err := w.read(v); err != nil {
		return nil, errors.Join(fmt.Errorf("start %q: %w", args[0], err), w.stop())
	}
	return w, nil
}

// order gives one order and reads its answer into v.
func (w *worker) order(order, v any) error {
	line, err := json.Marshal(order)
	if err != nil {
		return err
	}
	if _, err := w.in.Write(append(line, '\n')); err != nil {
		return err
	}
	return w.read(v)
}

func (w *worker) read(v any) error {
	line, err := w.out.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the process ended: %w", err)
	}
	var a answer
	if err := json.Unmarshal(line, &a); err != nil {
		return err
	}
	if a.Error != "" {
		return errors.New(a.Error)
	}
	return json.Unmarshal(a.Value, v)
}

// obey is the worker's side: it announces itself with first and then obeys
// until its standard input or ctx ends.
func obey[O, V any](ctx context.Context, first V, do func(O) (V, error)) error {
	out := json.NewEncoder(os.Stdout)
	say := func(v V, err error) error {
		if err != nil {
			return out.Encode(answer{Error: err.Error()})
		}
		data, err := json.Marshal(v)
		if err != nil {
			return err
		}
		return out.Encode(answer{Value: data})
	}
	if err := say(first, nil); err != nil {
		return err
	}
	orders := make(chan O)
	read := make(chan error, 1)
	go func() {
		in := json.NewDecoder(os.Stdin)
		for {
			var o O
			if err := in.Decode(&o); err != nil {
				read <- err
				return
			}
			orders <- o
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-read:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case o := <-orders:
			if err := say(do(o)); err != nil {
				return err
			}
		}
	}
}

// ticksPerSecond is the unit of processor times in /proc; Linux fixes it.
const ticksPerSecond = 100

// cpuOf gives the processor time of a process and of its ended children.
func cpuOf(pid int) (time.Duration, error) {
	fields, err := statOf(pid)
	if err != nil {
		return 0, err
	}
	var ticks int64
	for _, text := range fields[11:15] { // utime, stime, cutime, cstime
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// statOf gives the fields of /proc/PID/stat that follow the name.
func statOf(pid int) ([]string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	_, rest, ok := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 15 {
		return nil, errors.New("the process table cannot be read")
	}
	return fields, nil
}

// cpuOfTree is cpuOf for a process with all its living children.
func cpuOfTree(pid int) (time.Duration, error) {
	sum, err := cpuOf(pid)
	if err != nil {
		return 0, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		fields, err := statOf(child)
		if err != nil || fields[1] != strconv.Itoa(pid) {
			continue // ended meanwhile, or somebody else's
		}
		if cpu, err := cpuOf(child); err == nil {
			sum += cpu
		}
	}
	return sum, nil
}

// residentKiB gives the resident memory of a process.
func residentKiB(pid int) (float64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strconv.ParseFloat(strings.Fields(rest)[0], 64)
		}
	}
	return 0, fmt.Errorf("process %d has no resident memory", pid)
}

// release closes what was only read from or is thrown away; that its closing
// fails changes no figure.
func release(c io.Closer) { _ = c.Close() }
