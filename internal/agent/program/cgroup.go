package program

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// ownCgroup gives the directory of the cgroup (version 2) in which this
// process is, wherever that hierarchy is mounted: alone, or beside those of
// version 1.
func ownCgroup(mountinfo, own string) (string, error) {
	path := ""
	for line := range strings.Lines(own) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			path = p
		}
	}
	if path == "" {
		return "", errors.New("this process is in no cgroup of version 2")
	}
	sc := bufio.NewScanner(strings.NewReader(mountinfo))
	for sc.Scan() {
		// number, parent, device, root, mount point, options, ... - type ...
		before, after, ok := strings.Cut(sc.Text(), " - ")
		f := strings.Fields(before)
		if !ok || len(f) < 5 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		root, point := unescape(f[3]), unescape(f[4])
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			continue // the part that is mounted here does not show us
		}
		return filepath.Join(point, rel), nil
	}
	return "", errors.New("no cgroup hierarchy of version 2 is mounted")
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// findCgroup gives the directory below which cgroups for programs can be made,
// after having made and removed one.
func findCgroup(prefix string) (string, error) {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	base, err := ownCgroup(string(mountinfo), string(own))
	if err != nil {
		return "", err
	}
	probe := filepath.Join(base, prefix+"probe")
	if err := os.Mkdir(probe, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	f, err := os.OpenFile(filepath.Join(probe, "cgroup.kill"), os.O_WRONLY, 0)
	if err == nil {
		f.Close()
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.New("the kernel has no cgroup.kill (it came with 5.14)")
	}
	return base, errors.Join(err, os.Remove(probe))
}

// cgroupMembers gives the living processes of a cgroup and of all below it.
func cgroupMembers(dir string) []process {
	var list []process
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil //nolint:nilerr // a cgroup that has just gone has no members
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // as above
		}
		for field := range bytes.FieldsSeq(data) {
			pid, err := strconv.Atoi(string(field))
			if err != nil || pid == 0 {
				continue // of another pid namespace: cgroup.kill reaches it
			}
			if p, err := readProcess(pid); err == nil && !p.dead {
				list = append(list, p)
			}
		}
		return nil
	})
	return list
}

// killCgroup sends SIGKILL to all processes of a cgroup and below it at once,
// and to those that they start at this moment.
func killCgroup(dir string) error {
	return os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
}

// removeCgroup removes a cgroup whose processes have ended, with all that were
// made below it. The kernel may take a moment to see that it is empty.
func removeCgroup(dir string) error {
	var err error
	waitFor(closeGrace, nil, func() bool {
		err = removeCgroups(dir)
		return err == nil || !errors.Is(err, syscall.EBUSY)
	})
	return err
}

func removeCgroups(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, removeCgroups(filepath.Join(dir, e.Name())))
		}
	}
	if rerr := os.Remove(dir); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	return err
}

// emptyCgroup moves the living processes of a cgroup into another one.
func emptyCgroup(dir, into string) error {
	for range 100 { // they may start others meanwhile
		list := cgroupMembers(dir)
		if len(list) == 0 {
			return nil
		}
		for _, p := range list {
			// One that has just ended needs no move.
			if err := os.WriteFile(filepath.Join(into, "cgroup.procs"), []byte(strconv.Itoa(p.PID)), 0); err != nil {
				if p.alive() {
					return err
				}
			}
		}
	}
	return fmt.Errorf("the processes of %s multiply faster than they can be moved", dir)
}
