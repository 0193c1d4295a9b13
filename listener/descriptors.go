package listener

import (
	"errors"
	"net"
	"os"
	"syscall"
	"time"
)

// Descriptors gives how many file descriptors this process has open and how
// many it may have. Each is 0 when it cannot be known, the limit also when
// there is none.
func Descriptors() (used, limit int) { return usedFiles(), openFiles() }

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
	// refuseInARow bounds the clients that are refused by the spare descriptor
	// before accept pauses.
	refuseInARow = 64
	// spareWait bounds the wait for a client that was there already.
	spareWait = 10 * time.Millisecond
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

// accept gives the spare up to accept the client that waits at ln. If there is
// a descriptor to spare by then, the client is returned; else it is refused.
func (s *spare) accept(ln net.Listener) (c net.Conn, refused bool) {
	bounded, ok := ln.(interface{ SetDeadline(t time.Time) error })
	if !ok || s.file == nil || bounded.SetDeadline(time.Now().Add(spareWait)) != nil {
		s.open()
		return nil, false
	}
	s.close()
	c, err := ln.Accept()
	_ = bounded.SetDeadline(time.Time{}) // a closed listener says so at the next Accept
	s.open()
	if err != nil {
		return nil, false
	}
	if s.file != nil {
		return c, false
	}
	reset(c)
	c.Close()
	s.open()
	return nil, true
}

// outOfFiles takes in that accept found no descriptor: the client that waits
// is let in after all or refused, so that it does not hang. It reports whether
// accept should pause; row counts what was refused since it last did.
func (p *port) outOfFiles(ln net.Listener, row *int) bool {
	nc, refused := p.spare.accept(ln)
	if nc != nil {
		*row = 0
		p.admit(nc)
		return false
	}
	if *row++; refused {
		p.refuse(refusedFD, 1)
		if *row < refuseInARow {
			return false
		}
	}
	*row = 0
	return true
}

// noFiles reports whether err says that no descriptor is left.
func noFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}
