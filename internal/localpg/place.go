package localpg

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// maxSocketPath is the longest path of a unix socket in bytes, without the
// closing zero, that Linux takes.
const maxSocketPath = 107

// account is the OS user that runs the server.
type account struct {
	name     string
	uid, gid int
	drop     bool // this process is root and must become that user
}

// credential is what a child process needs to become the account.
func (a account) credential() *syscall.Credential {
	if !a.drop {
		return nil
	}
	return &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid), Groups: []uint32{uint32(a.gid)}}
}

// own gives a path that root made to the account.
func (a account) own(path string) error {
	if !a.drop {
		return nil
	}
	return os.Lchown(path, a.uid, a.gid)
}

// place is where everything of one cluster lies.
type place struct {
	dir string // the data directory
	bin Binaries
	acc account
}

func (p place) tmp() string  { return p.dir + ".tmp" }
func (p place) lock() string { return p.dir + ".lock" }

// findPlace decides on directory, binaries and user. A cluster that exists
// decides for itself; it is never passed over in favour of a new one.
func findPlace(cfg Config) (place, error) {
	dir, err := realPath(cfg.Dir)
	if err != nil {
		return place{}, err
	}
	fallback := fallbackFor(cfg.FallbackDir, dir)
	root := os.Geteuid() == 0
	existing := hasCluster(dir)
	if !existing && root && hasCluster(fallback) {
		existing, dir = true, fallback
	}
	acc, err := chooseAccount(cfg.User, dir, existing)
	if err != nil {
		return place{}, err
	}
	bin, err := binariesFor(cfg.BinDir, dir)
	if err != nil {
		return place{}, err
	}
	// 0711: the server's user may pass through a folder that it cannot list.
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return place{}, fmt.Errorf("make the folder of the private PostgreSQL cluster: %w", err)
	}
	reachErr := acc.canReach(bin, filepath.Dir(dir))
	switch {
	case reachErr == nil:
		return place{dir: dir, bin: bin, acc: acc}, nil
	case existing || !root || dir == fallback:
		return place{}, reachErr
	}
	cfg.Logger.Info("private PostgreSQL cluster lies elsewhere, its user cannot reach the folder",
		"wanted", dir, "dir", fallback, "user", acc.name)
	if err := os.MkdirAll(filepath.Dir(fallback), 0o711); err != nil {
		return place{}, fmt.Errorf("make the folder of the private PostgreSQL cluster: %w", err)
	}
	if err := acc.canReach(bin, filepath.Dir(fallback)); err != nil {
		return place{}, err
	}
	return place{dir: fallback, bin: bin, acc: acc}, nil
}

// realPath makes a path absolute and resolves links in the part that exists,
// so that two names of one directory share one lock.
func realPath(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("find the folder of the private PostgreSQL cluster: %w", err)
	}
	rest := ""
	for head := abs; ; head = filepath.Dir(head) {
		real, err := filepath.EvalSymlinks(head)
		if err == nil {
			return filepath.Join(real, rest), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || head == filepath.Dir(head) {
			return "", fmt.Errorf("find the folder of the private PostgreSQL cluster: %w", err)
		}
		rest = filepath.Join(filepath.Base(head), rest)
	}
}

func fallbackFor(base, dir string) string {
	return filepath.Join(base, shortHash(dir))
}

// shortHash names something after a path; 64 bits are enough to keep the few
// paths of one machine apart.
func shortHash(path string) string {
	sum := sha256.Sum256([]byte(path))
	return hex.EncodeToString(sum[:8])
}

// hasCluster says whether dir holds a cluster, complete or not.
func hasCluster(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, "PG_VERSION"))
	return err == nil
}

// chooseAccount decides which user runs the server.
func chooseAccount(wanted, dir string, existing bool) (account, error) {
	owner := -1
	if existing {
		var st syscall.Stat_t
		if err := syscall.Stat(dir, &st); err != nil {
			return account{}, fmt.Errorf("look at the data directory %s: %w", dir, err)
		}
		owner = int(st.Uid)
	}
	if self := os.Geteuid(); self != 0 {
		return selfAccount(self, wanted, dir, owner)
	}
	if owner == 0 {
		return account{}, fmt.Errorf("the data directory %s belongs to root, and PostgreSQL refuses to run as root; "+
			"give it to an unprivileged user (chown -R postgres %s)", dir, dir)
	}
	if owner > 0 {
		acc := account{name: strconv.Itoa(owner), uid: owner, gid: owner, drop: true}
		if u, err := user.LookupId(acc.name); err == nil {
			acc = accountOf(u)
		}
		if wanted != "" && wanted != acc.name {
			return account{}, fmt.Errorf("the data directory %s belongs to the user %s, not to %s; "+
				"start with that user or change the owner (chown -R)", dir, acc.name, wanted)
		}
		return acc, nil
	}
	return freshAccount(wanted)
}

// selfAccount is the case without root: the server runs as we do.
func selfAccount(self int, wanted, dir string, owner int) (account, error) {
	acc := account{name: strconv.Itoa(self), uid: self, gid: os.Getegid()}
	if u, err := user.LookupId(acc.name); err == nil {
		acc.name = u.Username
	}
	if wanted != "" && wanted != acc.name {
		return account{}, fmt.Errorf("only root can run PostgreSQL as the user %s; this process is %s", wanted, acc.name)
	}
	if owner >= 0 && owner != self {
		return account{}, fmt.Errorf("the data directory %s belongs to the user with id %d, this process is %s; "+
			"start as that user or as root", dir, owner, acc.name)
	}
	return acc, nil
}

// freshAccount is the case of root without data: a named user is needed.
func freshAccount(wanted string) (account, error) {
	names := []string{"headgate", "postgres"}
	if wanted != "" {
		names = []string{wanted}
	}
	for _, name := range names {
		if u, err := user.Lookup(name); err == nil {
			acc := accountOf(u)
			if acc.uid == 0 {
				return account{}, errors.New("PostgreSQL refuses to run as root; name another user")
			}
			return acc, nil
		}
	}
	return account{}, fmt.Errorf("PostgreSQL refuses to run as root and there is no user %s; "+
		"run: useradd --system --no-create-home %s", names[0], names[0])
}

func accountOf(u *user.User) account {
	uid, _ := strconv.Atoi(u.Uid) // numeric on Linux
	gid, _ := strconv.Atoi(u.Gid)
	return account{name: u.Username, uid: uid, gid: gid, drop: true}
}

// canReach asks the kernel, not the mode bits, whether the account can run the
// server and pass into dir: a child changes to the account and to dir.
func (a account) canReach(bin Binaries, dir string) error {
	if !a.drop {
		return nil // what this process may do shows by itself
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	try := func(cwd string) error {
		cmd := exec.CommandContext(ctx, bin.Postgres(), "-V")
		cmd.Dir = cwd
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: a.credential()}
		return cmd.Run()
	}
	err := try(dir)
	if err == nil {
		return nil
	}
	if plain := try("/"); plain != nil {
		return fmt.Errorf("the user %s cannot run %s: %w", a.name, bin.Postgres(), plain)
	}
	return fmt.Errorf("the user %s, which is to run PostgreSQL, cannot reach %s; "+
		"let it pass (chmod a+x on each parent folder) or choose another folder: %w", a.name, dir, err)
}

// makeSocketDir makes the directory of the socket: beside the data, or, where
// that path does not do for a socket, under /run or /tmp with a hashed name.
// Only the server's user (and root) gets in.
func (p place) makeSocketDir() (string, error) {
	beside := p.dir + ".run"
	// A comma would separate two hosts in a connection string.
	if len(socketPath(beside)) <= maxSocketPath && !strings.Contains(beside, ",") {
		return beside, p.privateDir(beside)
	}
	if os.Geteuid() == 0 {
		if err := os.MkdirAll("/run/headgate", 0o711); err == nil {
			dir := filepath.Join("/run/headgate", shortHash(p.dir))
			return dir, p.privateDir(dir)
		}
	}
	dir := filepath.Join("/tmp", fmt.Sprintf("headgate-%d-%s", p.acc.uid, shortHash(p.dir)))
	return dir, p.privateDir(dir)
}

// privateDir makes a directory of mode 0700 that belongs to the account, or
// accepts one that is exactly that. In /tmp anybody may have been there first.
func (p place) privateDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if err == nil {
		return p.acc.own(dir)
	}
	if !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the directory of the socket: %w", err)
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(dir, &st); err != nil {
		return fmt.Errorf("look at the directory of the socket: %w", err)
	}
	if st.Uid == 0 && p.acc.drop { // an earlier start ended between mkdir and chown
		if err := p.acc.own(dir); err != nil {
			return fmt.Errorf("give the directory of the socket to %s: %w", p.acc.name, err)
		}
		st.Uid = uint32(p.acc.uid)
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFDIR || int(st.Uid) != p.acc.uid || st.Mode&0o077 != 0 {
		return fmt.Errorf("%s exists and is not a directory of mode 0700 that belongs to %s; remove it", dir, p.acc.name)
	}
	return nil
}

func socketPath(dir string) string {
	return filepath.Join(dir, fmt.Sprintf(".s.PGSQL.%d", socketPort))
}
