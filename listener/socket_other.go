//go:build !linux

package listener

import (
	"net"
	"net/netip"
	"syscall"
)

// reservation exists on Linux alone; here every port is bound anew.
type reservation struct{ addr netip.AddrPort }

func reserve(netip.AddrPort) (*reservation, error) { return nil, errNotReserved }

func (*reservation) open() (net.Listener, error) { return nil, errNotReserved }

func (*reservation) refuse() error { return errNotReserved }

func (*reservation) close() {}

// tuneSocket has nothing to set here.
func tuneSocket(string, string, syscall.RawConn) error { return nil }
