package listener

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
)

// ConfigError names everything that is wrong with a Config.
type ConfigError struct{ Problems []string }

// Error gives all problems in one line.
func (e *ConfigError) Error() string {
	return "listener configuration: " + strings.Join(e.Problems, "; ")
}

// PortError says which port could not be used, and what to do about it.
type PortError struct {
	Port Port
	Addr string
	Op   string // "listen", "reserve", "open" or "accept"
	Err  error
	Hint string // a sentence for the operator; may be empty
}

func (e *PortError) Error() string {
	s := fmt.Sprintf("%s %s port %s: %v", e.Op, e.Port, e.Addr, e.Err)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Unwrap gives the cause.
func (e *PortError) Unwrap() error { return e.Err }

// FatalError comes out of Accept, once, when the controller port was lost and
// could not be had again. The listener is closed then.
type FatalError struct{ Err error }

func (e *FatalError) Error() string { return "controller port lost: " + e.Err.Error() }

// Unwrap gives the cause.
func (e *FatalError) Unwrap() error { return e.Err }

func newPortError(p Port, addr, op string, err error) *PortError {
	return &PortError{Port: p, Addr: addr, Op: op, Err: err, Hint: hint(err)}
}

// hint says what an operator can do about err.
func hint(err error) string {
	var dns *net.DNSError
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return "another program holds this port: stop it, or choose another port"
	case errors.Is(err, errNotASocket):
		return "choose another path, or move the file away"
	case errors.Is(err, syscall.EACCES) && ofPath(err):
		return "this user may not make or use a socket there: check the folder's owner and mode"
	case errors.Is(err, syscall.EACCES):
		return "this user may not use ports below 1024: choose a higher one, or grant CAP_NET_BIND_SERVICE"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "this machine does not have that address: check the host part, or that the interface is up"
	case errors.As(err, &dns):
		return "the host name does not resolve: write the IP address instead"
	}
	return ""
}

// ofPath reports whether err is about a unix socket and its file.
func ofPath(err error) bool {
	if _, ok := errors.AsType[*os.PathError](err); ok {
		return true
	}
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Net == "unix"
}
