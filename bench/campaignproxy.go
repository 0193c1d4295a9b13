package main

import (
	"context"
	"errors"
	"net"
	"sync"
)

// relay passes connections on, byte for byte, and can cut them, hold them up or
// refuse them: the network between two processes of a campaign. It knows
// nothing of what it carries.
type relay struct {
	mu        sync.Mutex
	listeners []net.Listener
	conns     map[net.Conn]struct{}
	flows     chan struct{} // closed while traffic flows
	refuses   bool
	closed    bool
	wg        sync.WaitGroup
}

func newRelay() *relay {
	r := &relay{conns: map[net.Conn]struct{}{}, flows: make(chan struct{})}
	close(r.flows)
	return r
}

// add lets the relay listen at an address and pass on to another.
func (r *relay) add(ctx context.Context, address, network, target string) (net.Addr, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp4", address)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.listeners = append(r.listeners, l)
	r.mu.Unlock()
	r.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			r.wg.Go(func() { r.pass(in, network, target) })
		}
	})
	return l.Addr(), nil
}

// pass carries one connection until either side ends it.
func (r *relay) pass(in net.Conn, network, target string) {
	if !r.keep(in) {
		reset(in)
		return
	}
	defer r.drop(in)
	if !r.wait(in) {
		return
	}
	out, err := net.Dial(network, target) //nolint:noctx // a port of this machine
	if err != nil {
		reset(in) // nobody listens there
		return
	}
	if !r.keep(out) {
		reset(out)
		return
	}
	defer r.drop(out)
	var both sync.WaitGroup
	both.Go(func() { r.copy(out, in) })
	both.Go(func() { r.copy(in, out) })
	both.Wait()
}

// copy carries one direction, and ends both when it ends.
func (r *relay) copy(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 16<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if !r.wait(from) {
				return
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// wait returns when traffic flows; false when the connection was cut meanwhile.
func (r *relay) wait(c net.Conn) bool {
	r.mu.Lock()
	flows := r.flows
	r.mu.Unlock()
	<-flows
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.conns[c]
	return ok
}

func (r *relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuses || r.closed {
		return false
	}
	r.conns[c] = struct{}{}
	return true
}

func (r *relay) drop(c net.Conn) {
	c.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
}

// cut resets all connections of this moment.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		reset(c)
		delete(r.conns, c)
	}
}

// block cuts all and resets every new one: the other side is gone.
func (r *relay) block() {
	r.mu.Lock()
	r.refuses = true
	r.mu.Unlock()
	r.cut()
}

// stall lets nothing through in either direction while connections stay open
// and new ones are taken: the other side has fallen silent.
func (r *relay) stall() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.flows:
		r.flows = make(chan struct{})
	default:
	}
}

// heal ends block and stall; what was held up arrives late, as in a network.
func (r *relay) heal() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuses = false
	select {
	case <-r.flows:
	default:
		close(r.flows)
	}
}

func (r *relay) close() error {
	r.mu.Lock()
	r.closed = true
	var errs []error
	for _, l := range r.listeners {
		errs = append(errs, l.Close())
	}
	r.mu.Unlock()
	r.heal()
	r.cut()
	r.wg.Wait()
	return errors.Join(errs...)
}

// reset ends a connection as a crash or a firewall would.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // it may be closed already
	}
	c.Close()
}
