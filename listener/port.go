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
	refusedHardCap     = "hard_cap"     // the port holds as many as it may
	refusedFD          = "fd"           // the descriptors left are for other things
	refusedShedding    = "shedding"     // only known sources are admitted now
	refusedSourceConns = "source_conns" // the source holds as many as it may
	refusedRateSource  = "rate_source"  // the source comes faster than it may, for too long
	refusedQueueFull   = "queue_full"   // too many wait, and others have fewer
	refusedQueueWait   = "queue_wait"   // it waited too long
	refusedNotOpen     = "not_open"     // the listener ends
)

// softCap is a reason of would_refuse_total alone: above the soft cap
// connections are delivered, and counted by shed_total.
const softCap = "soft_cap"

// reasons lists what a port refuses for.
func reasons(p Port) []string {
	if p == PortController {
		return []string{refusedPendingFull, refusedAcceptWait, refusedHardCap, refusedFD, refusedNotOpen}
	}
	return append(doorReasons(), refusedAcceptWait, refusedNotOpen, refusedNotStable)
}

// doorReasons lists what the limits refuse for.
func doorReasons() []string {
	return []string{refusedHardCap, refusedFD, refusedShedding, refusedSourceConns, refusedRateSource, refusedQueueFull, refusedQueueWait}
}

// port is what both ports have in common: it takes connections from the
// kernel, makes the handshake, and offers them to Accept.
type port struct {
	name   Port
	cfg    PortConfig
	life   context.Context // the listener's; ended by Close. It bounds goroutines, not calls.
	log    *slog.Logger
	met    *metrics
	ready  chan net.Conn // to Accept
	door   *door         // nil: everybody is admitted, within MaxConns and MaxPending
	spare  spare         // the accept loop's
	slots  slots         // one for each handshake under way
	total  atomic.Uint64 // accepted so far
	shakes atomic.Int64  // connections in or before their handshake
	wg     *sync.WaitGroup
	socket atomic.Pointer[net.Listener] // the one accepted from now

	classify func(tls.ConnectionState) (Class, string) // may be nil

	mu      sync.Mutex     // guards what follows, and the door
	conns   map[*conn]bool // every connection held; true once Accept returned it
	pending int            // how many of them are false
	classes map[Class]int  // how many are of which class
	empty   chan struct{}  // if not nil, closed when conns becomes empty
	ended   bool           // abortPending was called; newcomers are refused
}

// acceptLoop takes connections from ln until ln is closed (nil) or lost.
func (p *port) acceptLoop(ln net.Listener) error {
	p.socket.Store(&ln)
	defer p.socket.Store(nil)
	p.spare.open()
	defer p.spare.close()
	pause, row := time.Duration(0), 0
	for {
		nc, err := ln.Accept()
		if err == nil {
			pause, row = 0, 0
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
			if noFiles(err) && !p.outOfFiles(ln, &row) {
				pause = max(pause, acceptPauseMin)
				continue
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

// admit takes a connection in, or resets it when there is no room for it.
func (p *port) admit(nc net.Conn) {
	p.total.Add(1)
	p.met.accepted.WithLabelValues(string(p.name)).Inc()
	c := &conn{Conn: nc, port: p, info: ConnInfo{Port: p.name, Source: sourceOf(nc), Class: ClassUnknown, AcceptedAt: time.Now()}}
	if p.door != nil {
		p.door.arrive(c)
		return
	}
	if why := p.remember(c); why != "" {
		p.discard(c, why)
		return
	}
	p.start(c)
}

// start begins what leads an admitted connection to Accept. A plain one goes
// there at once if somebody waits for it.
func (p *port) start(c *conn) {
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(keepAlive()) // a socket that refuses it is broken, and its reads will say so
	}
	if p.cfg.TLS == nil {
		p.judge(c)
		select {
		case p.ready <- c:
			return
		default:
		}
	}
	p.wg.Go(func() { p.prepare(c) })
}

// judge sets the last of what a connection's info says before it is delivered.
func (p *port) judge(c *conn) {
	if p.door != nil {
		p.door.full(c)
	}
}

// discard resets a connection before the program has seen it.
func (p *port) discard(c *conn, why string) {
	p.refuse(why, 1)
	c.abort()
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
	p.met.shook(p.name, c.info.HandshakeTook, err)
	if p.door != nil {
		p.door.handshakeEnded(c, err != nil && p.life.Err() == nil)
	}
	if err != nil {
		p.handshakeFailed(c, err)
		return
	}
	p.judge(c)
	p.deliver(c, tc)
}

// deliver offers out, which lies on c, to Accept for a limited time.
func (p *port) deliver(c *conn, out net.Conn) {
	timer := time.NewTimer(p.cfg.AcceptTimeout)
	defer timer.Stop()
	select {
	case p.ready <- out:
	case <-timer.C:
		p.refuse(refusedAcceptWait, 1)
		c.abort()
	case <-p.life.Done():
		c.abort()
	}
}

func (p *port) refuse(why string, n int) {
	p.met.refused.WithLabelValues(string(p.name), why).Add(float64(n))
}

// remember notes a new connection of a port without a door, or gives the
// reason why there is no room for it.
func (p *port) remember(c *conn) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.ended:
		return refusedNotOpen
	case p.pending >= p.cfg.MaxPending:
		return refusedPendingFull
	case len(p.conns) >= p.cfg.MaxConns:
		return refusedHardCap
	}
	p.keep(c)
	return ""
}

// keep counts a connection from now on; the caller holds mu.
func (p *port) keep(c *conn) {
	p.conns[c] = false
	p.pending++
	p.classes[c.info.Class]++
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
	p.classes[c.class()]--
	if p.door != nil {
		p.door.left(c)
	}
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
