package program

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// record is the note of the program that runs. It outlives the process that
// made it, not the machine's start, so it need not be synced to the disk.
type record struct {
	Label  string `json:"label"`
	Mark   string `json:"mark"`
	Cgroup string `json:"cgroup,omitempty"`
	Boot   string `json:"boot"`
	PID    int    `json:"pid,omitempty"`
	Start  uint64 `json:"start,omitempty"`
}

// Leftover is what Recover has found of one program.
type Leftover struct {
	Label     string    // of its command, "" when nobody knows
	Ended     []Process // were alive and are ended
	Survivors []Process // cannot be ended

	survivors []process
}

// Alive says whether one of the survivors lives still.
func (l *Leftover) Alive() bool {
	for i := range l.survivors {
		if l.survivors[i].alive() {
			return true
		}
	}
	return false
}

// note writes the record: before the start, so that a program that was just
// started is found by its mark, and again with its process.
func (t *tree) note(label string) error {
	if t.k.o.Record == "" {
		return nil
	}
	data, err := json.Marshal(record{
		Label: label, Mark: t.mark, Cgroup: t.cgroup, Boot: bootID(), PID: t.main.PID, Start: t.main.start,
	})
	tmp := t.k.o.Record + ".new"
	if err == nil {
		err = os.WriteFile(tmp, data, 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, t.k.o.Record)
	}
	if err != nil {
		return fmt.Errorf("note the program that is started: %w", err)
	}
	return nil
}

// forget removes the record.
func (k *Keeper) forget() error {
	if k.o.Record == "" {
		return nil
	}
	if err := os.Remove(k.o.Record); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// Recover ends what programs of an earlier process with the same name and
// record have left behind, and says what it was. It is called before the first
// Run, by the only process that uses the record.
func (k *Keeper) Recover() ([]Leftover, error) {
	var found []Leftover
	old, err := k.readRecord()
	if err != nil {
		return nil, err
	}
	var was string // the cgroup of the record
	if old != nil {
		t := &tree{k: k, old: true, mark: old.Mark, cgroup: old.Cgroup, main: process{Process: Process{PID: old.PID}, start: old.Start}}
		was = old.Cgroup
		found = append(found, t.recover(old.Label))
		err = k.forget()
	}
	for _, dir := range k.cgroups() {
		if dir != was {
			t := &tree{k: k, old: true, cgroup: dir}
			found = append(found, t.recover(""))
		}
	}
	return found, err
}

// cgroups gives those that carry this keeper's name.
func (k *Keeper) cgroups() []string {
	if k.base == "" {
		return nil
	}
	dirs, _ := filepath.Glob(filepath.Join(k.base, k.prefix+"*")) // the pattern is ours
	return dirs
}

// readRecord gives what an earlier process has noted, nil when that is nothing
// or is from before the machine's start. A note that cannot be read counts as
// none: it comes from a power cut, after which nothing is left running.
func (k *Keeper) readRecord() (*record, error) {
	if k.o.Record == "" {
		return nil, nil //nolint:nilnil // nothing was noted
	}
	data, err := os.ReadFile(k.o.Record)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // nothing was noted
	}
	if err != nil {
		return nil, fmt.Errorf("read the note of the program that ran: %w", err)
	}
	r := &record{}
	if err := json.Unmarshal(data, r); err != nil || r.Boot != bootID() {
		return nil, k.forget()
	}
	return r, nil
}

// recover ends the tree of an earlier process.
func (t *tree) recover(label string) Leftover {
	before := t.members(true)
	l := Leftover{Label: label, Ended: named(before)}
	if len(before) > 0 {
		l.survivors = t.kill(true, killWait)
		l.Survivors = named(l.survivors)
	}
	if t.cgroup != "" {
		_ = removeCgroup(t.cgroup) // stays for the next start while a survivor is in it
	}
	return l
}
