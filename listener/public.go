package listener

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
)

// errNotReserved means that this system cannot hold a port without listening.
var errNotReserved = errors.New("port cannot be reserved on this system")

// lastQuietPort is the highest port that outgoing connections are usually not
// given; above it an unreserved number can be taken while it is closed.
const lastQuietPort = 32767

// publicSocket is the public port's place in the kernel. Where the system
// allows it, the port is reserved from the start; otherwise its number is only
// known, and bound again at each opening. Its methods are called by New and
// then by one goroutine.
type publicSocket struct {
	addr   netip.AddrPort // real, constant
	want   string         // host as configured with the real port
	listen func(ctx context.Context, network, address string) (net.Listener, error)
	log    *slog.Logger

	held *reservation // nil: not reserved
	ln   net.Listener // nil: refusing
}

// newPublicSocket finds out whether the port can be had, and keeps it if the
// system allows.
func newPublicSocket(ctx context.Context, cfg Config) (*publicSocket, error) {
	s := &publicSocket{listen: cfg.listenFunc(), log: cfg.Logger}
	if cfg.Listen == nil {
		at, err := resolve(ctx, cfg.Public.Addr)
		if err != nil {
			return nil, err
		}
		held, err := reserve(at)
		if err == nil {
			s.held, s.addr = held, held.addr
			s.want = withPort(cfg.Public.Addr, s.addr)
			return s, nil
		}
		if !errors.Is(err, errNotReserved) {
			return nil, err
		}
	}
	ln, err := s.listen(ctx, "tcp", cfg.Public.Addr)
	if err != nil {
		return nil, err
	}
	s.addr, _ = addrPortOf(ln.Addr())
	s.want = withPort(cfg.Public.Addr, s.addr)
	if err := ln.Close(); err != nil {
		return nil, err
	}
	s.warnUnreserved()
	return s, nil
}

func (s *publicSocket) warnUnreserved() {
	if s.addr.Port() > lastQuietPort {
		s.log.Warn("public port is not reserved while it is closed and outgoing connections may take its number; choose one below 32768", "addr", s.addr)
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
	ln, err := s.listen(ctx, "tcp", s.want)
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
	s.log.Warn("public port could not be kept reserved; it is bound anew at each opening", "addr", s.addr, "err", err)
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
