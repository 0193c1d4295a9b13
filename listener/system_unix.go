//go:build unix

package listener

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// openFiles gives the limit of open files of this process; 0 when there is
// none.
func openFiles() int {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil || lim.Cur > 1<<30 {
		return 0
	}
	return int(lim.Cur)
}

// descriptor gives the number of the socket of c.
func descriptor(c net.Conn) (n int, ok bool) {
	raw := rawOf(c)
	if raw == nil {
		return 0, false
	}
	err := raw.Control(func(fd uintptr) { n = int(fd) })
	return n, err == nil
}

// gone reports whether the peer has closed or reset the connection without
// having sent anything. It does not wait and takes nothing from the socket.
func gone(c net.Conn) bool {
	raw := rawOf(c)
	if raw == nil {
		return false
	}
	n, err := 0, error(nil)
	var b [1]byte
	if raw.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return true
	}) != nil {
		return true // it is closed on our side
	}
	if err != nil {
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	}
	return n == 0
}

func rawOf(c any) syscall.RawConn {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}
