package listener

import (
	"context"
	"errors"
	"log/slog"
	"net"
)

// errNotReserved means that this system cannot hold a port without listening.
var errNotReserved = errors.New("port cannot be reserved on this system")

// lastQuietPort is the highest port that outgoing connections are usually not
// given; above it an unreserved number can be taken while it is closed.
const lastQuietPort = 32767

// publicSocket is the public port's place in the kernel. Where the system
// allows it, the port is reserved from the start; otherwise its number is only
// known, and bound again at each opening. A passed socket listens all the time.
// Its methods are called by New and then by one goroutine.
type publicSocket struct {
	at     net.Addr // real, constant
	want   string   // as configured, with the real port
	listen func(ctx context.Context, address string) (net.Listener, error)
	log    *slog.Logger

	held   held         // nil: bound anew at each opening
	passed bool         // held is a passed socket
	ln     net.Listener // nil: refusing
}

// held is a socket that exists also while the port refuses.
type held interface {
	open() (net.Listener, error)
	refuse() error
	close()
}

// newPublicSocket finds out whether the port can be had, and keeps it if the
// system allows.
func newPublicSocket(ctx context.Context, cfg Config, given *passedSocket) (*publicSocket, error) {
	s := &publicSocket{listen: cfg.listenAt, log: cfg.Logger, want: cfg.Public.Addr}
	if given != nil {
		s.at, s.want, s.held, s.passed = given.addr, display(given.addr), given, true
		return s, nil
	}
	if _, isUnix := unixPath(s.want); cfg.Listen == nil && !isUnix {
		at, err := resolve(ctx, s.want)
		if err != nil {
			return nil, err
		}
		r, err := reserve(at)
		if err == nil {
			s.held, s.at = r, net.TCPAddrFromAddrPort(r.addr)
			s.want = withPort(s.want, s.at)
			return s, nil
		}
		if !errors.Is(err, errNotReserved) {
			return nil, err
		}
	}
	ln, err := s.listen(ctx, s.want)
	if err != nil {
		return nil, err
	}
	s.at = ln.Addr()
	s.want = withPort(s.want, s.at)
	if err := ln.Close(); err != nil {
		return nil, err
	}
	s.warnUnreserved()
	return s, nil
}

func (s *publicSocket) warnUnreserved() {
	if at, ok := addrPortOf(s.at); ok && at.Port() > lastQuietPort {
		s.log.Warn("public port is not reserved while it is closed and outgoing connections may take its number; choose one below 32768", "addr", display(s.at))
	}
}

// open starts listening.
func (s *publicSocket) open(ctx context.Context) error {
	if s.held != nil {
		ln, err := s.held.open()
		if err == nil {
			s.ln = ln
			return nil
		}
		if !errors.Is(err, errNotReserved) {
			return err
		}
		s.giveUpReservation(err)
	}
	ln, err := s.listen(ctx, s.want)
	if err != nil {
		return err
	}
	s.ln = ln
	return nil
}

// refuse stops listening; where possible the port stays ours. The caller has
// waited for its accept loop to end after stop.
func (s *publicSocket) refuse() {
	s.stop()
	if s.held == nil {
		return
	}
	if err := s.held.refuse(); err != nil {
		s.giveUpReservation(err)
	}
}

// stop ends the accept loop over the socket.
func (s *publicSocket) stop() {
	if s.ln != nil {
		s.ln.Close() // closing twice, or a lost socket, is no matter
		s.ln = nil
	}
}

func (s *publicSocket) giveUpReservation(err error) {
	s.held.close()
	s.held = nil
	s.log.Warn("public port could not be kept reserved; it is bound anew at each opening", "addr", display(s.at), "err", err)
	s.warnUnreserved()
}

// close gives the port up.
func (s *publicSocket) close() {
	s.stop()
	if s.held != nil {
		s.held.close()
		s.held = nil
	}
}
