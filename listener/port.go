package listener

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// acceptPauseMin and acceptPauseMax pace accept while the machine is out of
// something (files, memory); the pause is of one port only.
const (
	acceptPauseMin = 5 * time.Millisecond
	acceptPauseMax = 1 * time.Second
)

// Reasons of refused_total.
const (
	refusedPendingFull = "pending_full" // MaxPending connections wait already
	refusedAcceptWait  = "accept_wait"  // the program did not call Accept in time
)

// port is what both ports have in common: it takes connections from the
// kernel, makes the handshake, and offers them to Accept.
type port struct {
	name   Port
	cfg    PortConfig
	life   context.Context // the listener's; ended by Close. It bounds goroutines, not calls.
	log    *slog.Logger
	met    *metrics
	ready  chan net.Conn // to Accept
	slots  chan struct{} // one for each handshake under way
	total  atomic.Uint64 // accepted so far
	shakes atomic.Int64  // connections in or before their handshake
	wg     *sync.WaitGroup

	mu      sync.Mutex
	conns   map[*conn]bool // every connection held; true once Accept returned it
	pending int            // how many of them are false
	empty   chan struct{}  // if not nil, closed when conns becomes empty
	ended   bool           // abortPending was called; newcomers are refused
}

// acceptLoop takes connections from ln until ln is closed (nil) or lost.
func (p *port) acceptLoop(ln net.Listener) error {
	pause := time.Duration(0)
	for {
		nc, err := ln.Accept()
		if err == nil {
			pause = 0
			p.admit(nc)
			continue
		}
		if errors.Is(err, net.ErrClosed) || p.life.Err() != nil {
			return nil
		}
		name, verdict := judge(err)
		p.met.acceptErrors.WithLabelValues(string(p.name), name).Inc()
		switch verdict {
		case acceptNext:
		case acceptPause:
			if pause == 0 { // the first of a row, so that a flood is one line
				p.log.Warn("accept pauses", "port", p.name, "err", err)
			}
			pause = min(max(2*pause, acceptPauseMin), acceptPauseMax)
			if !sleep(p.life, pause) {
				return nil
			}
		case acceptLost:
			return err
		}
	}
}

// What to do after an error of accept.
type verdict int

const (
	acceptNext  verdict = iota // one connection broke, the socket is fine
	acceptPause                // the machine is out of something
	acceptLost                 // the socket itself is of no more use
)

// judge names an error of accept and says what follows from it.
func judge(err error) (string, verdict) {
	for _, k := range []struct {
		errno syscall.Errno
		name  string
		verdict
	}{
		{syscall.ECONNABORTED, "econnaborted", acceptNext},
		{syscall.EPROTO, "eproto", acceptNext},
		{syscall.EINTR, "eintr", acceptNext},
		{syscall.EMFILE, "emfile", acceptPause},
		{syscall.ENFILE, "enfile", acceptPause},
		{syscall.ENOBUFS, "enobufs", acceptPause},
		{syscall.ENOMEM, "enomem", acceptPause},
		{syscall.EPERM, "eperm", acceptPause}, // a packet filter's word
		{syscall.ENETDOWN, "enetdown", acceptPause},
		{syscall.ENETUNREACH, "enetunreach", acceptPause},
		{syscall.EHOSTUNREACH, "ehostunreach", acceptPause},
	} {
		if errors.Is(err, k.errno) {
			return k.name, k.verdict
		}
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return "timeout", acceptPause
	}
	return "other", acceptLost
}

// admit takes a connection in, or resets it when too many wait.
func (p *port) admit(nc net.Conn) {
	p.total.Add(1)
	p.met.accepted.WithLabelValues(string(p.name)).Inc()
	if t, ok := nc.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(keepAlive()) // a socket that refuses it is broken, and its reads will say so
	}
	c := &conn{Conn: nc, port: p, info: ConnInfo{Port: p.name, AcceptedAt: time.Now()}}
	if !p.remember(c) {
		p.refuse(refusedPendingFull)
		reset(nc)
		nc.Close()
		return
	}
	p.wg.Go(func() { p.prepare(c) })
}

// prepare makes the handshake where there is one and offers the connection.
func (p *port) prepare(c *conn) {
	if p.cfg.TLS == nil {
		p.deliver(c, c)
		return
	}
	p.shakes.Add(1)
	tc, err := p.handshake(c)
	p.shakes.Add(-1)
	if err != nil {
		p.handshakeFailed(c, err)
		return
	}
	p.deliver(c, tc)
}

// deliver offers out, which lies on c, to Accept for a limited time.
func (p *port) deliver(c *conn, out net.Conn) {
	timer := time.NewTimer(p.cfg.AcceptTimeout)
	defer timer.Stop()
	select {
	case p.ready <- out:
	case <-timer.C:
		p.refuse(refusedAcceptWait)
		c.abort()
	case <-p.life.Done():
		c.abort()
	}
}

func (p *port) refuse(reason string) {
	p.met.refused.WithLabelValues(string(p.name), reason).Inc()
}

// remember notes a new connection; false means that there is no room for it.
func (p *port) remember(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || p.pending >= p.cfg.MaxPending {
		return false
	}
	p.conns[c] = false
	p.pending++
	p.met.conns.WithLabelValues(string(p.name)).Inc()
	return true
}

// handedOut notes that Accept returned the connection that carries nc.
func (p *port) handedOut(nc net.Conn) {
	c, ok := nc.(*conn)
	if !ok {
		c = nc.(*tls.Conn).NetConn().(*conn) // deliver knows no third sort
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if out, held := p.conns[c]; held && !out {
		p.conns[c] = true
		p.pending--
	}
}

// forget ends the counting of a connection.
func (p *port) forget(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out, held := p.conns[c]
	if !held {
		return
	}
	delete(p.conns, c)
	if !out {
		p.pending--
	}
	p.met.conns.WithLabelValues(string(p.name)).Dec()
	if len(p.conns) == 0 && p.empty != nil {
		close(p.empty)
		p.empty = nil
	}
}

// awaitEmpty waits until no connection is held; it reports whether that came
// before ctx or the listener ended.
func (p *port) awaitEmpty(ctx context.Context) bool {
	p.mu.Lock()
	if len(p.conns) == 0 {
		p.mu.Unlock()
		return true
	}
	if p.empty == nil {
		p.empty = make(chan struct{})
	}
	empty := p.empty
	p.mu.Unlock()
	select {
	case <-empty:
	case <-ctx.Done():
	case <-p.life.Done():
	}
	held, _ := p.counts()
	return held == 0
}

// abortPending resets what Accept has not returned, for good: from here on
// every newcomer is refused. abortAll resets the others too.
func (p *port) abortPending() { p.abort(false) }

func (p *port) abortAll() { p.abort(true) }

func (p *port) abort(all bool) {
	p.mu.Lock()
	p.ended = true
	var list []*conn
	for c, out := range p.conns {
		if all || !out {
			list = append(list, c)
		}
	}
	p.mu.Unlock()
	for _, c := range list {
		c.abort()
	}
}

// counts gives the connections held and those not yet returned by Accept.
func (p *port) counts() (held, pending int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns), p.pending
}

// sleep waits; false means that ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
