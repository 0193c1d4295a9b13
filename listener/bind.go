package listener

import (
	"context"
	"net"
	"net/netip"
)

// New binds the controller port, which accepts at once, and reserves the
// public one, which refuses until MarkStable. It fails with a *ConfigError or a
// *PortError; then nothing is left behind. ctx bounds New alone.
func New(ctx context.Context, cfg Config) (*Listener, error) {
	given, err := cfg.assign()
	if err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(given); err != nil {
		given.close()
		return nil, err
	}
	met := newMetrics()
	if err := met.register(cfg.Registerer); err != nil {
		given.close()
		return nil, err
	}
	socks, err := cfg.bind(ctx, given)
	if err != nil {
		given.close()
		met.unregister(cfg.Registerer)
		return nil, err
	}
	l := assemble(cfg, met, socks)
	l.start()
	if err := l.firstReport(ctx); err != nil {
		_ = l.Close()
		met.unregister(cfg.Registerer)
		return nil, err
	}
	return l, nil
}

// sockets are those of both ports.
type sockets struct {
	controller *controllerSocket // nil with one port
	public     *publicSocket
}

// addr is the address that stands for the listener.
func (s sockets) addr() net.Addr {
	if s.controller == nil {
		return s.public.at
	}
	return s.controller.ln.Addr()
}

// bind has the ports, or gives a *PortError. With one port that one is open.
func (c Config) bind(ctx context.Context, given passed) (sockets, error) {
	var s sockets
	if !c.OnePort {
		s.controller = &controllerSocket{given: given.controller, want: c.Controller.Addr, make: c.listenAt}
		ln, err := s.controller.listen(ctx)
		if err != nil {
			return s, newPortError(PortController, c.Controller.Addr, "listen", err)
		}
		s.controller.ln, s.controller.want = ln, withPort(c.Controller.Addr, ln.Addr())
		if given.controller != nil {
			s.controller.want = display(ln.Addr())
		}
	}
	var err error
	if s.public, err = newPublicSocket(ctx, c, given.public); err != nil {
		if s.controller != nil {
			s.controller.ln.Close()
		}
		return s, newPortError(PortPublic, c.Public.Addr, "reserve", err)
	}
	if c.OnePort {
		if err := s.public.open(ctx); err != nil {
			s.public.close()
			return s, newPortError(PortPublic, c.Public.Addr, "listen", err)
		}
	}
	return s, nil
}

// listenAt listens at an address in any form that PortConfig takes.
func (c Config) listenAt(ctx context.Context, addr string) (net.Listener, error) {
	path, isUnix := unixPath(addr)
	switch {
	case c.Listen != nil && isUnix:
		return c.Listen(ctx, "unix", path)
	case c.Listen != nil:
		return c.Listen(ctx, "tcp", addr)
	case isUnix:
		return listenUnix(ctx, path)
	}
	return (&net.ListenConfig{Control: tuneSocket}).Listen(ctx, "tcp", addr)
}

// controllerSocket is the controller port's place in the kernel.
type controllerSocket struct {
	given *passedSocket // nil: made by ourselves
	want  string        // as configured, with the real port once it is known
	make  func(ctx context.Context, address string) (net.Listener, error)
	ln    net.Listener // the first
}

// listen makes the socket, or makes it again after it was lost.
func (s *controllerSocket) listen(ctx context.Context) (net.Listener, error) {
	if s.given != nil {
		return s.given.open()
	}
	return s.make(ctx, s.want)
}

// close lets go of a passed socket.
func (s *controllerSocket) close() {
	if s.given != nil {
		s.given.close()
	}
}

// addr gives the address; nil when there is no such port.
func (s *controllerSocket) addr() net.Addr {
	if s == nil {
		return nil
	}
	return s.ln.Addr()
}

// close lets go of the passed sockets.
func (p passed) close() {
	for _, s := range []*passedSocket{p.controller, p.public} {
		if s != nil {
			s.close()
		}
	}
}

// addrs gives the list of the one address; empty when it has no number.
func addrs(a net.Addr) []netip.AddrPort {
	if a == nil {
		return nil
	}
	at, ok := addrPortOf(a)
	if !ok {
		return nil
	}
	return []netip.AddrPort{at}
}

// pathOf gives the address of a unix socket as Config takes it; empty for
// others.
func pathOf(a net.Addr) string {
	if u, ok := a.(*net.UnixAddr); ok {
		return display(u)
	}
	return ""
}
