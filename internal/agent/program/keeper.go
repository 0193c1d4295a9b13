package program

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
	"uuid"

	"golang.org/x/sys/unix"
)

// The ways in which the processes of a program are held together.
const (
	// ByCgroup: in a cgroup (version 2) of their own, which none leaves that
	// does not mean to.
	ByCgroup = "cgroup"
	// ByGroup: by what can be read of them: session, process group, descent
	// and the mark in their environment.
	ByGroup = "process_group"
)

// Options are how a Keeper works; the zero value will do.
type Options struct {
	// Name tells the cgroups of this keeper from those of others.
	Name string
	// Record is the file that notes which program runs, "" for none. With it
	// Recover finds what an earlier process has left behind.
	Record string
	// NoCgroup leaves cgroups alone, as where they cannot be used.
	NoCgroup bool
	// Adopt makes this process the parent of those whose parents have ended.
	// It is for a process that starts programs through one keeper alone, one
	// at a time: whoever comes to it then belongs to the program that runs.
	Adopt bool
}

// Keeper runs programs and holds together what each of them starts.
type Keeper struct {
	o      Options
	prefix string // of the cgroups' names
	base   string // where they are made, "" when they cannot be
	why    string // why they cannot
	adopts bool
	umask  sync.Mutex // held while that of the whole process is a program's
}

// NewKeeper finds out what this machine offers.
func NewKeeper(o Options) *Keeper {
	k := &Keeper{o: o, prefix: "headgate." + o.Name + ".", why: "it is switched off"}
	if !o.NoCgroup {
		base, err := findCgroup(k.prefix)
		if err != nil {
			k.why = err.Error()
		} else {
			k.base, k.why = base, ""
		}
	}
	if o.Adopt && k.base == "" {
		k.adopts = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == nil
	}
	return k
}

// Confinement says how processes are held together, and why not better.
func (k *Keeper) Confinement() (method, why string) {
	if k.base != "" {
		return ByCgroup, ""
	}
	return ByGroup, k.why
}

// tree is one program with all that it has started.
type tree struct {
	k      *Keeper
	mark   string
	cgroup string    // its directory, or ""
	dir    *os.File  // the same, open for the start
	main   process   // zero until the program is started
	seen   []process // what members gave last
	// old: it is what an earlier process has left. Numbers of groups and
	// sessions may belong to others by now, so only marks and descent count.
	old bool
}

// plant prepares the place of a program.
func (k *Keeper) plant(c *Command) (*tree, error) {
	id := uuid.NewV4().String()
	t := &tree{k: k, mark: MarkName + "=" + id}
	if k.base != "" {
		t.cgroup = filepath.Join(k.base, k.prefix+id)
		if err := os.Mkdir(t.cgroup, 0o755); err != nil {
			return nil, fmt.Errorf("make the program's cgroup: %w", err)
		}
		var err error
		if t.dir, err = os.OpenFile(t.cgroup, unix.O_PATH|syscall.O_DIRECTORY, 0); err != nil {
			return nil, errors.Join(fmt.Errorf("open the program's cgroup: %w", err), t.fell())
		}
	}
	if err := t.note(c.Label); err != nil {
		return nil, errors.Join(err, t.fell())
	}
	return t, nil
}

// started notes the program's process, which is not yet reaped. Its number is
// kept though nothing else of it can be read, as without a free descriptor:
// number 0 would mean our own group, and that of the kernel.
func (t *tree) started(pid int, label string) error {
	if t.dir != nil {
		t.dir.Close()
		t.dir = nil
	}
	main, err := readProcess(pid)
	if err != nil {
		t.main.PID = pid
		return err
	}
	t.main = main
	return t.note(label)
}

// members gives the living processes of the tree. For a cgroup that is one
// small file; all looks further, for those that have left it.
func (t *tree) members(all bool) []process {
	var list []process
	if t.cgroup != "" {
		list = cgroupMembers(t.cgroup)
	}
	if t.cgroup == "" || all {
		for _, p := range t.family(processes()) {
			if !holds(list, &p) {
				list = append(list, p)
			}
		}
	}
	// One that is dying has lost its cgroup and its environment before it is
	// dead, and may still do what it was about to do.
	for i := range t.seen {
		if t.seen[i].alive() && !holds(list, &t.seen[i]) {
			list = append(list, t.seen[i])
		}
	}
	t.seen = list
	return slices.Clone(list)
}

func holds(list []process, p *process) bool {
	for i := range list {
		if list[i].same(p) {
			return true
		}
	}
	return false
}

// family picks the living processes of the tree out of all: those of the
// program's session and group, those that carry its mark, those that have come
// to us when their parents ended, and the descendants of all these.
func (t *tree) family(list []process) []process {
	if t.main.PID == 0 && t.mark == "" {
		return nil
	}
	in := make([]bool, len(list))
	byPID := make(map[int]int, len(list))
	self := os.Getpid()
	for i := range list {
		p := &list[i]
		byPID[p.PID] = i
		switch {
		case p.start < t.main.start || p.PID == self:
		case p.same(&t.main), !t.old && (p.group == t.main.PID || p.session == t.main.PID):
			in[i] = true
		default:
			switch marked(p.PID, t.mark) {
			case ours:
				in[i] = true
			case unmarked:
				in[i] = t.k.adopts && !t.old && p.parent == self
			}
		}
	}
	for grown := true; grown; {
		grown = false
		for i := range list {
			if parent, ok := byPID[list[i].parent]; ok && in[parent] && !in[i] {
				in[i], grown = true, true
			}
		}
	}
	var found []process
	for i := range list {
		if in[i] && !list[i].dead {
			found = append(found, list[i])
		}
	}
	return found
}

// terminate asks all processes of the tree to end. A stopped one is let go on,
// so that it hears it.
func (t *tree) terminate(all bool) {
	t.signalGroup(syscall.SIGTERM)
	list := t.members(all)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGCONT} {
		for i := range list {
			if list[i].group != t.main.PID {
				list[i].signal(sig)
			}
		}
	}
	t.signalGroup(syscall.SIGCONT)
}

// signalGroup signals the program's own group. The program is not reaped yet,
// so its number cannot have passed to another group; that nobody is left in it
// is no error.
func (t *tree) signalGroup(sig syscall.Signal) {
	if !t.old {
		_ = syscall.Kill(-t.main.PID, sig)
	}
}

// kill ends all processes of the tree, whatever they do, and gives those that
// are alive after the given time: the kernel holds them.
func (t *tree) kill(all bool, within time.Duration) (survivors []process) {
	waitFor(within, nil, func() bool {
		if t.cgroup != "" {
			_ = killCgroup(t.cgroup) // its members are looked for below
		}
		t.signalGroup(syscall.SIGKILL)
		survivors = t.members(all)
		for i := range survivors {
			survivors[i].signal(syscall.SIGKILL)
		}
		return len(survivors) == 0
	})
	return survivors
}

// gone waits until nobody of the tree is alive, at most for the given time and
// until stop is closed.
func (t *tree) gone(all bool, within time.Duration, stop <-chan struct{}) bool {
	return waitFor(within, stop, func() bool { return len(t.members(all)) == 0 })
}

// waitFor asks again and again, with growing pauses, until the answer is yes,
// the time is over or stop is closed.
func waitFor(within time.Duration, stop <-chan struct{}, reached func() bool) bool {
	const first, most = time.Millisecond, 50 * time.Millisecond
	end := time.NewTimer(within)
	defer end.Stop()
	for pause := first; ; pause = min(2*pause, most) {
		if reached() {
			return true
		}
		next := time.NewTimer(pause)
		select {
		case <-next.C:
		case <-end.C:
			next.Stop()
			return reached()
		case <-stop:
			next.Stop()
			return false
		}
	}
}

// release lets the living processes of the tree go on without us.
func (t *tree) release() error {
	if t.cgroup == "" {
		return nil
	}
	return emptyCgroup(t.cgroup, t.k.base)
}

// fell takes away what plant has made. What is still alive keeps its cgroup,
// which the next start finds.
func (t *tree) fell() error {
	var err error
	if t.dir != nil {
		err = t.dir.Close()
	}
	if t.cgroup != "" {
		err = errors.Join(err, removeCgroup(t.cgroup))
	}
	return errors.Join(err, t.k.forget())
}

// reap takes the exit codes of processes that came to us and have ended. Those
// that we have started ourselves have somebody who waits for them.
func (t *tree) reap() {
	if !t.k.adopts {
		return
	}
	self := os.Getpid()
	for _, p := range processes() {
		if p.dead && p.parent == self && p.PID != t.main.PID {
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
		}
	}
}
