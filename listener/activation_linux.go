package listener

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// firstPassed is the first descriptor that a service manager passes.
	firstPassed = 3
	// maxPassed bounds what is believed of LISTEN_FDS.
	maxPassed = 64
)

// ActivatedFromEnv gives the sockets that a service manager passed to this
// process (systemd's LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES), for
// Config.Activated; none is no error. It takes the variables out of the
// environment and marks the descriptors, so that no child inherits them. Call
// it once, early, before any file is opened by number.
func ActivatedFromEnv() ([]Socket, error) {
	pid, fds, names := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES") //nolint:forbidigo // not configuration: a protocol with whoever started us
	for _, key := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		if err := os.Unsetenv(key); err != nil {
			return nil, fmt.Errorf("unset %s: %w", key, err)
		}
	}
	if pid != strconv.Itoa(os.Getpid()) {
		return nil, nil // meant for another process, or for none
	}
	n, err := strconv.Atoi(fds)
	if err != nil || n < 0 || n > maxPassed {
		return nil, fmt.Errorf("%w: LISTEN_FDS is %q", errActivation, fds)
	}
	var name []string
	if names != "" {
		name = strings.Split(names, ":")
	}
	var list []Socket
	for i := range n {
		fd := firstPassed + i
		unix.CloseOnExec(fd)
		s := Socket{Name: "unknown", File: os.NewFile(uintptr(fd), "passed socket")}
		if i < len(name) && name[i] != "" {
			s.Name = name[i]
		}
		list = append(list, s)
	}
	return list, nil
}

// inspectSocket gives the address of a passed socket, or says why it is none
// that connections can be accepted on.
func inspectSocket(f *os.File) (net.Addr, error) {
	if f == nil {
		return nil, os.ErrInvalid
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	var kind, listens int
	var inner error
	err = raw.Control(func(fd uintptr) {
		if kind, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TYPE); inner != nil {
			return
		}
		listens, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	})
	switch err = errors.Join(err, inner); {
	case errors.Is(err, syscall.ENOTSOCK):
		return nil, errors.New("it is no socket")
	case err != nil:
		return nil, err
	case kind != unix.SOCK_STREAM:
		return nil, errors.New("it is no stream socket (ListenStream=)")
	case listens == 0:
		return nil, errors.New("it does not listen")
	}
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("it is neither TCP nor unix: %w", err)
	}
	defer ln.Close()
	return ln.Addr(), nil
}
