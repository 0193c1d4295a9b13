package listener

import (
	"errors"
	"net"
	"os"
	"syscall"
	"time"
)

// lookEvery is how many connections are accepted between two looks at the
// descriptors while there are plenty.
const lookEvery = 32

// fdLook tells from the number of a new socket how many descriptors are in
// use: the system gives the lowest that is free, so all below it are taken. It
// belongs to one accept loop.
type fdLook struct {
	accepted int
	near     bool // the reserve is so near that every connection is looked at
}

// scarce reports whether c has taken a descriptor of the reserve.
func (l *fdLook) scarce(c net.Conn, reserve int) bool {
	if l.accepted++; !l.near && l.accepted%lookEvery != 1 {
		return false
	}
	files := openFiles()
	fd, ok := descriptor(c)
	if !ok || files == 0 {
		return false
	}
	edge := files - min(reserve, files/2)
	l.near = fd >= edge-4*lookEvery
	return fd >= edge
}

const (
	// refuseAtOnce bounds the clients that one use of the spare descriptor
	// refuses.
	refuseAtOnce = 64
	// refuseWithin bounds the time that it takes; a client that waits is
	// accepted at once.
	refuseWithin = 10 * time.Millisecond
)

// spare is one descriptor kept so that clients can be refused when there are
// no others: otherwise they would hang in the kernel's queue.
type spare struct{ file *os.File }

func (s *spare) open() {
	if s.file == nil {
		s.file, _ = os.Open(os.DevNull) // without it clients wait; the next round tries again
	}
}

func (s *spare) close() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// refuseWaiting gives the spare up, refuses who waits at ln, and takes it back.
// It gives the number refused.
func (s *spare) refuseWaiting(ln net.Listener) (n int) {
	bounded, ok := ln.(interface{ SetDeadline(t time.Time) error })
	if !ok || s.file == nil || bounded.SetDeadline(time.Now().Add(refuseWithin)) != nil {
		return 0
	}
	s.close()
	for n < refuseAtOnce {
		c, err := ln.Accept()
		if err != nil {
			break
		}
		reset(c)
		c.Close()
		n++
	}
	s.open()
	_ = bounded.SetDeadline(time.Time{}) // a closed listener says so at the next Accept
	return n
}

// outOfFiles reports whether err says that no descriptor is left.
func outOfFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}
