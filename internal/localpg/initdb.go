package localpg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// initArgs are the arguments of initdb besides the directory. Locale C keeps
// indexes valid when the C library's collations change under the data.
func initArgs() []string {
	return []string{
		"--username=" + roleName, "--auth-local=peer", "--auth-host=reject",
		"--encoding=UTF8", "--locale=C", "--data-checksums", "--no-instructions",
	}
}

// ensureCluster makes the cluster unless it exists. It is made under another
// name and renamed when complete, so that a half-made one is never started.
func (p place) ensureCluster(ctx context.Context, cfg Config) error {
	if hasCluster(p.dir) {
		if _, err := os.Lstat(filepath.Join(p.dir, "global", "pg_control")); err != nil {
			return fmt.Errorf("the PostgreSQL cluster in %s is incomplete and was not touched; "+
				"move it away to start with a new one: %w", p.dir, err)
		}
		return nil
	}
	if err := p.requireEmpty(); err != nil {
		return err
	}
	if err := p.clearTmp(ctx, cfg); err != nil {
		return err
	}
	if err := os.Mkdir(p.tmp(), 0o700); err != nil {
		return fmt.Errorf("make the data directory: %w", err)
	}
	if err := p.acc.own(p.tmp()); err != nil {
		return fmt.Errorf("give the data directory to %s: %w", p.acc.name, err)
	}
	if err := p.fill(ctx, cfg); err != nil {
		return err
	}
	if err := os.Rename(p.tmp(), p.dir); err != nil {
		return fmt.Errorf("put the new PostgreSQL cluster in place: %w", err)
	}
	return syncDir(filepath.Dir(p.dir))
}

// requireEmpty accepts a missing or an empty directory, which it removes to
// make room for the rename. Anything else is somebody's data.
func (p place) requireEmpty() error {
	err := os.Remove(p.dir)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("%s is neither empty nor a PostgreSQL cluster and was not touched; choose another directory: %w", p.dir, err)
}

// clearTmp removes what an interrupted initdb left, once it has ended.
func (p place) clearTmp(ctx context.Context, cfg Config) error {
	if err := evict(ctx, cfg, p.tmp()); err != nil {
		return err
	}
	if err := os.RemoveAll(p.tmp()); err != nil {
		return fmt.Errorf("remove a half-made PostgreSQL cluster: %w", err)
	}
	return nil
}

// fill runs initdb in the temporary directory, or copies a cached result.
func (p place) fill(ctx context.Context, cfg Config) error {
	if cfg.InitCache == "" {
		return p.initdb(ctx)
	}
	c := initCache{place: p, base: cfg.InitCache}
	if hit, err := c.fetch(ctx); hit || err != nil {
		return err
	}
	if err := p.initdb(ctx); err != nil {
		return err
	}
	if err := c.store(ctx); err != nil {
		cfg.Logger.Warn("fresh PostgreSQL cluster not cached", "err", err)
	}
	return nil
}

func (p place) initdb(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, p.bin.Initdb(), append(initArgs(), "--pgdata="+p.tmp())...)
	cmd.Dir = "/"
	cmd.Env = childEnv()
	// SIGTERM lets initdb end its own child and clean up.
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.acc.credential(), Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = quitTimeout
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	done := make(chan error, 1)
	go func() {
		// The parent-death signal fires when the thread that forked ends, so
		// this goroutine keeps its thread until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- cmd.Run()
	}()
	if err := <-done; err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("initdb of PostgreSQL %s: %w: %s", p.bin.Version, err, lastLines(out.String()))
	}
	return nil
}

// childEnv is the whole environment of initdb and the server: nothing of ours
// (PGDATA, PGPORT, LANG) may change what they do.
func childEnv() []string {
	return []string{"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
}

// lastLines gives the end of a program's output, where the reason stands.
func lastLines(text string) string {
	const keep = 5
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if len(lines) > keep {
		lines = lines[len(lines)-keep:]
	}
	return strings.Join(lines, "; ")
}

// writeAccess rewrites pg_hba.conf and pg_ident.conf: the one role may come in
// over the socket, for this process's user and the server's. That is done at
// each start, since root may start it today and the service user tomorrow.
func (p place) writeAccess() error {
	root, err := os.OpenRoot(p.dir) // the folder belongs to another user: no link leads us out of it
	if err != nil {
		return fmt.Errorf("open the data directory: %w", err)
	}
	defer func() { _ = root.Close() }()
	names := []string{p.acc.name}
	if self, err := user.LookupId(strconv.Itoa(os.Geteuid())); err == nil && self.Username != p.acc.name {
		names = append(names, self.Username)
	}
	ident := ""
	for _, name := range names {
		ident += fmt.Sprintf("%s %s %s\n", mapName, quoteIdent(name), roleName)
	}
	hba := fmt.Sprintf("local all %s peer map=%s\n", roleName, mapName)
	return errors.Join(p.replaceFile(root, "pg_hba.conf", hba), p.replaceFile(root, "pg_ident.conf", ident))
}

// quoteIdent quotes a name in pg_ident.conf; a quoted name is never a pattern
// unless it begins with a slash, which no user name does.
func quoteIdent(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

func (p place) replaceFile(root *os.Root, name, text string) error {
	tmp := name + ".headgate"
	_ = root.Remove(tmp) // of an interrupted start
	f, err := root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.WriteString(text)
	if err == nil && p.acc.drop {
		err = f.Chown(p.acc.uid, p.acc.gid)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}
