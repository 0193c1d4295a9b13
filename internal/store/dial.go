package store

import (
	"context"
	"net"
	"time"
)

// deadlineDialer makes connections on which every single read and write ends
// after limit. lib/pq forgets a context's deadline while the server is silent
// (a frozen host, a path that drops packets), so that the socket itself must
// have one: limit is statement_timeout and a few seconds, after which the
// server would have answered if it could.
type deadlineDialer struct{ limit time.Duration }

// DialContext implements pq.DialerContext.
func (d deadlineDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	var nd net.Dialer
	c, err := nd.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &deadlineConn{Conn: c, limit: d.limit}, nil
}

// Dial implements pq.Dialer; lib/pq prefers DialContext.
func (d deadlineDialer) Dial(network, address string) (net.Conn, error) {
	return d.DialTimeout(network, address, d.limit)
}

// DialTimeout implements pq.Dialer.
func (d deadlineDialer) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return d.DialContext(ctx, network, address)
}

// deadlineConn rolls its deadline forward before each read and write. One
// goroutine reads and one writes at a time, as lib/pq does.
type deadlineConn struct {
	net.Conn
	limit time.Duration
}

// Read implements net.Conn.
func (c *deadlineConn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

// Write implements net.Conn.
func (c *deadlineConn) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.limit)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}
