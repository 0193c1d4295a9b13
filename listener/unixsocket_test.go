package listener_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"headgate/listener"
)

// shortDir gives a folder whose path leaves room for the name of a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ln")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// askUnix is ask for a path.
func askUnix(path string) (string, error) {
	c, err := net.DialTimeout("unix", path, patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestBothPortsAtPaths(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	controller, public := filepath.Join(dir, "c"), filepath.Join(dir, "p")
	l := start(t, func(c *listener.Config) { c.Controller.Addr, c.Public.Addr = "unix:"+controller, "unix:"+public })
	answer(t, l)
	if got, err := askUnix(controller); err != nil || got != "controller" {
		t.Fatalf("controller answers %q, %v", got, err)
	}
	if got, err := askUnix(public); err == nil {
		t.Fatalf("the closed public port answers %q", got)
	}
	r := l.Ports()
	if r.ControllerPath != "unix:"+controller || r.PublicPath != "unix:"+public || len(r.Controller)+len(r.Public) != 0 {
		t.Errorf("report is %+v", r)
	}
	if s := l.Status(); s.Public.Path != "unix:"+public || s.Controller.Path != "unix:"+controller {
		t.Errorf("status is %+v", s)
	}
	if l.Addr().Network() != "unix" || l.Addr().String() != controller {
		t.Errorf("Addr is %v", l.Addr())
	}
	if got := open(t, l); got != public {
		t.Errorf("public port is at %s", got)
	}
	if got, err := askUnix(public); err != nil || got != "public" {
		t.Fatalf("public answers %q, %v", got, err)
	}
	l.Close()
	for _, path := range []string{controller, public} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left behind: %v", path, err)
		}
	}
}

func TestAbstractSocket(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("a thing of Linux")
	}
	name := "@" + filepath.Base(shortDir(t))
	l := start(t, func(c *listener.Config) { c.Public.Addr = "unix:" + name })
	answer(t, l)
	open(t, l)
	if got, err := askUnix(name); err != nil || got != "public" {
		t.Fatalf("public answers %q, %v", got, err)
	}
	if r := l.Ports(); r.PublicPath != "unix:"+name {
		t.Errorf("report is %+v", r)
	}
	_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Public.Addr = "unix:" + name }))
	wantPortError(t, err, listener.PortPublic, "reserve")
}

// Acceptance 56.
func TestStaleSocketIsRemovedAndALiveOneIsNot(t *testing.T) {
	t.Parallel()
	path := filepath.Join(shortDir(t), "s")
	stale, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	stale.Close() // as a program that was killed leaves it
	for _, port := range []listener.Port{listener.PortController, listener.PortPublic} {
		set := func(c *listener.Config) { c.Public.Addr = "unix:" + path }
		op := "reserve"
		if port == listener.PortController {
			set = func(c *listener.Config) { c.Controller.Addr = "unix:" + path }
			op = "listen"
		}
		first := start(t, set)
		answer(t, first)
		open(t, first)
		_, err := listener.New(t.Context(), config(set))
		wantPortError(t, err, port, op)
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("a live socket gives %v", err)
		}
		if got, err := askUnix(path); err != nil || got != string(port) {
			t.Errorf("after a second start the first answers %q, %v", got, err)
		}
		first.Close()
	}
}

// Acceptance 56.
func TestFileThatIsNoSocketIsKept(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	file, link := filepath.Join(dir, "notes"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, []byte("dear"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link, dir} {
		for _, set := range []func(*listener.Config){
			func(c *listener.Config) { c.Controller.Addr = "unix:" + path },
			func(c *listener.Config) { c.Public.Addr = "unix:" + path },
		} {
			_, err := listener.New(t.Context(), config(set))
			var pe *listener.PortError
			if !errors.As(err, &pe) || !strings.Contains(err.Error(), "no socket") || pe.Hint == "" {
				t.Errorf("New at %s: %v", path, err)
			}
		}
	}
	if b, err := os.ReadFile(link); err != nil || string(b) != "dear" {
		t.Errorf("the file reads %q, %v", b, err)
	}
}

func TestSocketOfAnotherIsNotRemovedAtClose(t *testing.T) {
	t.Parallel()
	path := filepath.Join(shortDir(t), "s")
	l := start(t, func(c *listener.Config) { c.Controller.Addr = "unix:" + path })
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	next, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	l.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the successor's socket is gone: %v", err)
	}
}

func TestUnixAddressesThatCannotBe(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{
		"unix:":                             "names no path",
		"unix:@":                            "names no path",
		"unix:relative":                     "begins with /",
		"unix:/" + strings.Repeat("x", 107): "108 bytes",
		"unix:@" + strings.Repeat("x", 107): "108 bytes",
		"unix:/nul\x00byte":                 "zero byte",
	} {
		_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Public.Addr = addr }))
		var ce *listener.ConfigError
		if !errors.As(err, &ce) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, want %q", addr, err, want)
		}
	}
	_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Public.Addr, c.Controller.Addr = "unix:/a", "unix:/a" }))
	if err == nil || !strings.Contains(err.Error(), "different paths") {
		t.Errorf("one path for both gives %v", err)
	}
}
