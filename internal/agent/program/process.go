package program

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Process is a process as a result names it.
type Process struct {
	PID  int
	Name string // as the kernel has it: at most 15 bytes of the program's name
}

// process is what /proc tells of one process. Its number and its start
// together name it: a number alone may pass to another one at any time.
type process struct {
	Process
	parent, group, session int
	start                  uint64 // clock ticks since the machine was started
	dead                   bool   // a zombie without any living thread
}

// same says whether both are one process.
func (p *process) same(o *process) bool { return p.PID == o.PID && p.start == o.start }

// alive says whether this very process still lives.
func (p *process) alive() bool {
	now, err := readProcess(p.PID)
	return err == nil && now.same(p) && !now.dead
}

// readProcess gives a process by its number, or an error when there is none.
func readProcess(pid int) (process, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return process{}, err
	}
	return parseStat(data)
}

// parseStat reads one line of /proc/PID/stat. The name stands in parentheses
// and may itself contain any.
func parseStat(data []byte) (process, error) {
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 1 || end < open {
		return process{}, fmt.Errorf("%.40q is no line of a process", data)
	}
	const parent, group, session, threads, start = 1, 2, 3, 17, 19 // counted from the state
	f := strings.Fields(string(data[end+1:]))
	if len(f) <= start {
		return process{}, fmt.Errorf("%.40q has too few fields", data)
	}
	// The first thread can end before the others, and looks like a zombie then.
	p := process{dead: (f[0] == "Z" || f[0] == "X") && (f[threads] == "0" || f[threads] == "1")}
	p.Name = string(data[open+1 : end])
	var bad [5]error
	p.PID, bad[0] = strconv.Atoi(strings.TrimSpace(string(data[:open])))
	p.parent, bad[1] = strconv.Atoi(f[parent])
	p.group, bad[2] = strconv.Atoi(f[group])
	p.session, bad[3] = strconv.Atoi(f[session])
	p.start, bad[4] = strconv.ParseUint(f[start], 10, 64)
	return p, errors.Join(bad[:]...)
}

// processes gives all processes of the machine, zombies included. What ends
// while it is read is left out.
func processes() []process {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close() // read only
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	var list []process
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue // not a process
		}
		if p, err := readProcess(pid); err == nil {
			list = append(list, p)
		}
	}
	return list
}

// signal sends a signal to exactly this process: through a descriptor whose
// process is compared after it was opened, so that a number that has passed to
// another process meets nobody.
func (p *process) signal(sig syscall.Signal) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err != nil {
		return // it is gone
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written through it
	if now, err := readProcess(p.PID); err == nil && now.same(p) {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // an error means that it has ended, or is not ours to end: it is looked for again
	}
}

// The answers of marked.
const (
	unmarked  = iota // its environment carries no mark, or may not be read
	ours             // it carries the mark that was asked for
	othersRun        // it carries the mark of another run
)

// marked looks for a mark of the form NAME=value in the environment with which
// a process was started.
func marked(pid int, mark string) int {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil || mark == "" {
		return unmarked
	}
	name, _, _ := strings.Cut(mark, "=")
	answer := unmarked
	for entry := range bytes.SplitSeq(data, []byte{0}) {
		switch {
		case string(entry) == mark:
			return ours
		case bytes.HasPrefix(entry, []byte(name+"=")):
			answer = othersRun
		}
	}
	return answer
}

// named gives processes as a result names them.
func named(list []process) []Process {
	var all []Process
	for _, p := range list {
		all = append(all, p.Process)
	}
	return all
}
