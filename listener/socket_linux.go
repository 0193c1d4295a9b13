package listener

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// backlog is cut by the kernel to net.core.somaxconn.
	backlog = 65535
	// userTimeoutMillis ends a connection whose data nobody acknowledges.
	userTimeoutMillis = 60_000
	// freePortTries bounds the search for a free number: between learning a
	// number and binding it, somebody else can take it.
	freePortTries = 8
)

// reservation is a socket that owns a port all the time and listens only
// between open and refuse. While it does not listen, clients are refused.
//
// SO_REUSEADDR must be off while it does not listen: with it on, any program
// that sets it too (all of Go does) could take the port. It must be on while
// it listens, so that connections which outlive the socket do not keep the next
// start from binding.
type reservation struct {
	fd   int
	addr netip.AddrPort
}

// reserve binds the port at; an invalid address means all of this machine's,
// port 0 a free one.
func reserve(at netip.AddrPort) (*reservation, error) {
	if at.Addr().IsValid() {
		return reserveNumber(at)
	}
	r, err := reserveNumber(netip.AddrPortFrom(netip.IPv6Unspecified(), at.Port()))
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL) { // a machine without IPv6
		return reserveNumber(netip.AddrPortFrom(netip.IPv4Unspecified(), at.Port()))
	}
	return r, err
}

// reserveNumber is reserve for a known address. A number that the kernel chose
// is bound again by name, because a chosen one is lost at the first refuse.
func reserveNumber(at netip.AddrPort) (*reservation, error) {
	if at.Port() != 0 {
		return bindExactly(at)
	}
	for try := 1; ; try++ {
		probe, err := bindExactly(at)
		if err != nil {
			return nil, err
		}
		found := probe.addr
		probe.close()
		r, err := bindExactly(netip.AddrPortFrom(at.Addr(), found.Port()))
		if err == nil || try == freePortTries || !errors.Is(err, unix.EADDRINUSE) {
			return r, err
		}
	}
}

func bindExactly(at netip.AddrPort) (*reservation, error) {
	sa, family, err := sockaddr(at)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	r := &reservation{fd: fd}
	if err := r.bind(sa, at); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// bind binds the socket and reads where.
func (r *reservation) bind(sa unix.Sockaddr, at netip.AddrPort) error {
	if at.Addr().Is6() {
		only := 1
		if at.Addr().IsUnspecified() {
			only = 0 // both families, as net.Listen does
		}
		if err := unix.SetsockoptInt(r.fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if err := setUserTimeout(r.fd); err != nil {
		return err
	}
	err := unix.Bind(r.fd, sa)
	if errors.Is(err, unix.EADDRINUSE) && at.Port() != 0 {
		// Connections of an earlier start in TIME_WAIT need the option; a
		// live owner refuses us all the same.
		if err := r.reuse(true); err != nil {
			return err
		}
		err = unix.Bind(r.fd, sa)
		if err == nil {
			err = r.reuse(false)
		}
	}
	if err != nil {
		return os.NewSyscallError("bind", err)
	}
	if r.addr, err = r.name(); err != nil {
		return err
	}
	return r.check(false)
}

// open starts listening and gives a listener over it. Closing that listener
// leaves the port listening and ours.
func (r *reservation) open() (net.Listener, error) {
	if err := r.reuse(true); err != nil {
		return nil, err
	}
	if err := unix.Listen(r.fd, backlog); err != nil {
		_ = r.reuse(false) // the error that matters is listen's
		return nil, os.NewSyscallError("listen", err)
	}
	if err := r.check(true); err != nil {
		return nil, err
	}
	dup, err := unix.FcntlInt(uintptr(r.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("dup", err), r.refuse())
	}
	f := os.NewFile(uintptr(dup), "public port")
	defer f.Close()
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("use the socket: %w", err), r.refuse())
	}
	return ln, nil
}

// refuse stops listening and keeps the port. Connections that wait in the
// kernel are reset, accepted ones live on. It does nothing when it does not
// listen.
func (r *reservation) refuse() error {
	listening, err := r.listening()
	if err != nil {
		return err
	}
	if listening {
		if err := unix.Shutdown(r.fd, unix.SHUT_RD); err != nil {
			return os.NewSyscallError("shutdown", err)
		}
	}
	if err := r.reuse(false); err != nil {
		return err
	}
	return r.check(false)
}

// check makes sure that the kernel sees the socket as we do.
func (r *reservation) check(want bool) error {
	listening, err := r.listening()
	if err != nil {
		return err
	}
	at, err := r.name()
	if err != nil {
		return err
	}
	if listening != want || at != r.addr {
		return fmt.Errorf("%w: listening is %t, wanted %t; address is %v, wanted %v", errNotReserved, listening, want, at, r.addr)
	}
	return nil
}

func (r *reservation) listening() (bool, error) {
	v, err := unix.GetsockoptInt(r.fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return v == 1, os.NewSyscallError("getsockopt", err)
}

func (r *reservation) reuse(on bool) error {
	v := 0
	if on {
		v = 1
	}
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(r.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, v))
}

// name asks the kernel for the socket's address.
func (r *reservation) name() (netip.AddrPort, error) {
	sa, err := unix.Getsockname(r.fd)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), nil
	case *unix.SockaddrInet6:
		ip := netip.AddrFrom16(sa.Addr)
		if sa.ZoneId != 0 {
			ip = ip.WithZone(zoneName(sa.ZoneId))
		}
		return netip.AddrPortFrom(ip, uint16(sa.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("getsockname: unexpected address %T", sa)
}

func (r *reservation) close() {
	if r.fd >= 0 {
		_ = unix.Close(r.fd) // nothing was written to it
		r.fd = -1
	}
}

// sockaddr gives the kernel's form of at and its family.
func sockaddr(at netip.AddrPort) (unix.Sockaddr, int, error) {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}, unix.AF_INET, nil
	}
	sa := &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	if zone := at.Addr().Zone(); zone != "" {
		n, err := zoneIndex(zone)
		if err != nil {
			return nil, 0, err
		}
		sa.ZoneId = n
	}
	return sa, unix.AF_INET6, nil
}

func zoneIndex(zone string) (uint32, error) {
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n), nil
	}
	ifc, err := net.InterfaceByName(zone)
	if err != nil {
		return 0, err
	}
	return uint32(ifc.Index), nil
}

func zoneName(index uint32) string {
	if ifc, err := net.InterfaceByIndex(int(index)); err == nil {
		return ifc.Name
	}
	return strconv.FormatUint(uint64(index), 10)
}

// tuneSocket sets what accepted connections inherit; it is for
// net.ListenConfig.Control.
func tuneSocket(_, _ string, raw syscall.RawConn) error {
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = setUserTimeout(int(fd)) }); err != nil {
		return err
	}
	return inner
}

func setUserTimeout(fd int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, userTimeoutMillis))
}
