package localpg

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// initCache keeps the result of initdb for clusters that are made often.
// Entries appear by rename, so a reader sees a whole one or none; the loser of
// a race throws its own copy away.
type initCache struct {
	place place
	base  string
}

// entry names what decides the content: server build, user and our arguments.
func (c initCache) entry() string {
	key := strings.Join(append(initArgs(), c.place.bin.Dir, c.place.bin.Version, c.place.acc.name), "\x00")
	return filepath.Join(c.base, shortHash(key))
}

// trusted makes the folder of the cache, or accepts one that only this user
// can write to: what lies in it becomes a database.
func (c initCache) trusted() error {
	if err := os.Mkdir(c.base, 0o711); err != nil && !os.IsExist(err) {
		return fmt.Errorf("make the cache of fresh clusters: %w", err)
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(c.base, &st); err != nil {
		return fmt.Errorf("look at the cache of fresh clusters: %w", err)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("the cache of fresh clusters %s can be written by others", c.base)
	}
	return nil
}

// fetch copies the entry, if there is one, into the (empty) temporary
// directory of the place.
func (c initCache) fetch(ctx context.Context) (hit bool, err error) {
	if err := c.trusted(); err != nil {
		return false, nil // store says why
	}
	if _, err := os.Stat(c.entry()); err != nil {
		return false, nil
	}
	return true, copyTree(ctx, c.entry(), c.place.tmp())
}

// store copies a fresh cluster into the cache.
func (c initCache) store(ctx context.Context) error {
	if err := c.trusted(); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(c.base, "new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if err := copyTree(ctx, c.place.tmp(), filepath.Join(tmp, "data")); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(tmp, "data"), c.entry()); err != nil && !os.IsExist(err) {
		return err
	}
	return nil
}

// copyTree copies a directory with owners and modes; as root the server's
// user owns all of it, and links in it are copied, not followed.
func copyTree(ctx context.Context, from, to string) error {
	out, err := exec.CommandContext(ctx, "cp", "-a", "-T", "--reflink=auto", from, to).CombinedOutput()
	if err != nil {
		return fmt.Errorf("copy a fresh cluster: %w: %s", err, lastLines(string(out)))
	}
	return nil
}
