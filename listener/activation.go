package listener

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
)

// Socket is a listening socket that whoever started the program passed to it.
type Socket struct {
	// Name is "controller" or "public"; a socket with another name is matched
	// with a port by its address.
	Name string
	// File is the socket. New takes it over, also when it fails: it is closed
	// at the end, but never shut down or unlinked, for it is not ours alone.
	File *os.File
}

// errActivation is wrapped by what is wrong with passed sockets.
var errActivation = errors.New("passed sockets cannot be used")

// passed are the sockets of Config.Activated, each at its port; nil where the
// port has none.
type passed struct{ controller, public *passedSocket }

// assign finds out which port each passed socket is for. Every socket must
// have one: a socket that nobody accepts on would swallow its clients.
func (c Config) assign() (passed, error) {
	var (
		p        passed
		problems []string
		listed   []string
	)
	say := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	for _, s := range c.Activated {
		addr, err := inspectSocket(s.File)
		if err != nil {
			listed = append(listed, s.Name)
			say("socket %q: %v", s.Name, err)
			continue
		}
		listed = append(listed, fmt.Sprintf("%s at %s", s.Name, display(addr)))
		slot := &p.public
		switch c.portFor(s.Name, addr) {
		case PortController:
			slot = &p.controller
		case PortPublic:
		default:
			say("socket %q at %s is for neither port", s.Name, display(addr))
			continue
		}
		if *slot != nil {
			say("socket %q at %s: the port has one already", s.Name, display(addr))
			continue
		}
		*slot = &passedSocket{file: s.File, addr: addr}
	}
	if len(problems) == 0 {
		return p, nil
	}
	for _, s := range c.Activated {
		s.File.Close()
	}
	return passed{}, fmt.Errorf("%w: %s; passed were: %s; name them %q and %q (FileDescriptorName=), or let their addresses be those configured",
		errActivation, strings.Join(problems, "; "), strings.Join(listed, ", "), PortController, PortPublic)
}

// portFor gives the port that a passed socket is for, by its name or else by
// its address; empty when there is none.
func (c Config) portFor(name string, addr net.Addr) Port {
	ports := []Port{PortPublic}
	if !c.OnePort {
		ports = append(ports, PortController)
	}
	for _, p := range ports {
		if name == string(p) {
			return p
		}
	}
	if name == string(PortController) {
		return "" // there is no such port with OnePort
	}
	for _, p := range ports {
		cfg := c.Public
		if p == PortController {
			cfg = c.Controller
		}
		if sameAddress(cfg.Addr, addr) {
			return p
		}
	}
	return ""
}

// sameAddress reports whether a configured address is the one that a socket
// has. A configured host that is a name, or none, is not compared.
func sameAddress(want string, have net.Addr) bool {
	if path, ok := unixPath(want); ok {
		u, isUnix := have.(*net.UnixAddr)
		return isUnix && u.Name == path
	}
	at, ok := addrPortOf(have)
	if n := portNumber(want); !ok || n == 0 || n != int(at.Port()) {
		return false
	}
	host, err := hostAddr(want)
	return err != nil || !host.IsValid() || host == at.Addr() || host.IsUnspecified() == at.Addr().IsUnspecified()
}

// passedSocket is a socket that somebody else made and keeps. It listens all
// the time; while the port refuses nobody accepts on it.
type passedSocket struct {
	file *os.File
	addr net.Addr
}

// open gives a listener over the socket; closing it leaves the socket as it is.
func (s *passedSocket) open() (net.Listener, error) {
	if _, ok := s.addr.(*net.TCPAddr); ok {
		if raw, err := s.file.SyscallConn(); err == nil {
			_ = tuneSocket("", "", raw) // it serves without, only less well
		}
	}
	ln, err := net.FileListener(s.file)
	if err != nil {
		return nil, fmt.Errorf("use the passed socket: %w", err)
	}
	return ln, nil
}

// refuse has nothing to do: a passed socket cannot refuse.
func (*passedSocket) refuse() error { return nil }

func (s *passedSocket) close() { s.file.Close() }
