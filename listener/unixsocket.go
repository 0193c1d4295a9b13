package listener

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// unixPrefix marks an address as a path, or, with "@", as a name that has
	// no file.
	unixPrefix = "unix:"
	// maxUnixPath is what fits into the kernel's form of the address.
	maxUnixPath = 107
	// unixProbe bounds asking whether somebody still listens on a socket.
	unixProbe = time.Second
)

// errNotASocket means that something else lies where the socket should be.
var errNotASocket = errors.New("the file is no socket and is left alone")

// unixPath gives the path in an address of the form unix:/path or unix:@name.
func unixPath(addr string) (string, bool) { return strings.CutPrefix(addr, unixPrefix) }

// unixProblem says what is wrong with such a path; empty when nothing is.
func unixProblem(path string) string {
	switch {
	case path == "" || path == "@":
		return "names no path"
	case path[0] != '/' && path[0] != '@':
		return "needs a path that begins with / (or @ for a name without a file)"
	case len(path) > maxUnixPath:
		return fmt.Sprintf("has %d bytes in its path, %d are the most", len(path), maxUnixPath)
	case strings.ContainsRune(path, 0):
		return "has a zero byte in its path"
	}
	return ""
}

// listenUnix listens at a path or an abstract name. A socket file that nobody
// listens on any more is removed first; a live one, and anything that is no
// socket, is left alone.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	abstract := path[0] == '@'
	if !abstract {
		if err := clearStale(ctx, path); err != nil {
			return nil, err
		}
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil || abstract {
		return ln, err
	}
	own := ln.(*net.UnixListener) // what ListenConfig gives for this network
	own.SetUnlinkOnClose(false)   // the path may be another's by then
	made, err := os.Lstat(path)
	if err != nil {
		_ = own.Close() // the error that matters is the one above
		return nil, fmt.Errorf("find the new socket: %w", err)
	}
	return &unixListener{UnixListener: own, path: path, made: made}, nil
}

// clearStale removes the socket file at path if nobody listens on it.
func clearStale(ctx context.Context, path string) error {
	found, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if found.Mode().Type() != os.ModeSocket {
		return &os.PathError{Op: "listen", Path: path, Err: errNotASocket}
	}
	d := net.Dialer{Timeout: unixProbe}
	c, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		c.Close()
		return &os.PathError{Op: "listen", Path: path, Err: syscall.EADDRINUSE}
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("find out whether the socket is in use: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// unixListener removes its socket file at Close, if it is still its own.
type unixListener struct {
	*net.UnixListener
	path string
	made os.FileInfo
	once sync.Once
}

func (l *unixListener) Close() error {
	l.once.Do(func() {
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.made) {
			_ = os.Remove(l.path) // the next start removes it as stale
		}
	})
	return l.UnixListener.Close()
}
