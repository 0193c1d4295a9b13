package listener

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"headgate/listener/admission"
)

// Port names one of the two ports.
type Port string

// The two ports.
const (
	PortController Port = "controller"
	PortPublic     Port = "public"
)

// ConnInfo is what the listener knows of a connection.
type ConnInfo struct {
	Port          Port
	Source        admission.Key // whom it came from, by address
	Class         Class         // what is held of the peer by now
	Identity      string        // whom the peer has proved to be by now; "" before
	Shed          bool          // the port is too full: answer 429 with RetryAfter and "Connection: close"
	AcceptedAt    time.Time     // when the kernel handed it over
	TLS           bool          // a handshake was made
	HandshakeTook time.Duration // from the first byte to the end of the handshake; 0 without TLS
}

// keepAlive notices a peer that is gone within 75 s.
func keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 4}
}

// conn counts and tags a connection. It lies directly on the socket, below
// TLS, so that *tls.Conn can be handed out unwrapped.
type conn struct {
	net.Conn
	port *port
	info ConnInfo            // complete when Accept returns it, unchanged afterwards
	who  atomic.Pointer[who] // what the peer has proved; nil before

	// What the door goes by; guarded by the port's mu.
	source  *admission.Source
	charged bool // counts among the connections of source
	budget  bool // counts among those of who
	busy    bool // has a handshake place of source

	// first holds the byte that was read to see whether the client speaks;
	// the handshake reads it again. Only the one reader touches both.
	first    byte
	hasFirst bool

	closed atomic.Bool
}

// Read gives the byte that was read ahead, then the socket's.
func (c *conn) Read(b []byte) (int, error) {
	if c.hasFirst && len(b) > 0 {
		b[0] = c.first
		c.hasFirst = false
		return 1, nil
	}
	return c.Conn.Read(b)
}

// class gives what is held of the peer by now.
func (c *conn) class() Class {
	if w := c.who.Load(); w != nil {
		return w.class
	}
	return c.info.Class
}

// awaitFirst waits until the client has sent something.
func (c *conn) awaitFirst() error {
	var b [1]byte
	if _, err := io.ReadFull(c.Conn, b[:]); err != nil {
		return err
	}
	c.first, c.hasFirst = b[0], true
	return nil
}

// ReadFrom keeps the socket's fast ways of sending files.
func (c *conn) ReadFrom(r io.Reader) (int64, error) {
	if rf, ok := c.Conn.(io.ReaderFrom); ok {
		return rf.ReadFrom(r)
	}
	return io.Copy(struct{ io.Writer }{c.Conn}, r)
}

// Close closes the socket and ends the counting; only the first call does.
func (c *conn) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return net.ErrClosed
	}
	c.port.forget(c)
	return c.Conn.Close()
}

// abort closes with a reset: the client learns at once, and no TIME_WAIT is
// left on this side.
func (c *conn) abort() {
	reset(c.Conn)
	_ = c.Close()
}

// reset makes the next Close of c send RST.
func reset(c net.Conn) {
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0) // a dead socket cannot be reset, nor need it be
	}
}

// NetConn gives the socket's own connection.
func (c *conn) NetConn() net.Conn { return c.Conn }

// CloseWrite ends the sending side, as http.Server wants to before it closes.
func (c *conn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// SyscallConn gives access to the socket.
func (c *conn) SyscallConn() (syscall.RawConn, error) {
	if sc, ok := c.Conn.(syscall.Conn); ok {
		return sc.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

type infoKey struct{}

// ConnContext is for http.Server.ConnContext: it adds what is known
// of c to ctx. A connection that is not from a Listener leaves ctx as it is.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	for c != nil {
		if own, ok := c.(*conn); ok {
			return context.WithValue(ctx, infoKey{}, own)
		}
		outer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return ctx
		}
		c = outer.NetConn()
	}
	return ctx
}

// InfoFrom gives what is known by now of the connection that ConnContext added.
func InfoFrom(ctx context.Context) (ConnInfo, bool) {
	c, ok := ctx.Value(infoKey{}).(*conn)
	if !ok {
		return ConnInfo{}, false
	}
	info := c.info
	if w := c.who.Load(); w != nil {
		info.Class, info.Identity = w.class, w.id
	}
	return info, true
}
