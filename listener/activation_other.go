//go:build !linux

package listener

import (
	"net"
	"os"
)

// ActivatedFromEnv gives no sockets: no service manager of this system passes
// any.
func ActivatedFromEnv() ([]Socket, error) { return nil, nil }

// inspectSocket gives the address of a passed socket.
func inspectSocket(f *os.File) (net.Addr, error) {
	ln, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	return ln.Addr(), nil
}
