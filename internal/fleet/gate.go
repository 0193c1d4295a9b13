package fleet

import (
	"context"
	"sync"
	"time"

	"headgate/listener/admission"
	"headgate/tasks"
)

// gate admits dials: in fair order, at the pace of a ramp, and only so many at
// once. Its places are meant for the handshake, which costs processor time. A
// dial that has waited longer than a handshake takes is waiting for a peer that
// may never answer and costs nothing but a descriptor: it gives its place back
// and counts as slow from then on, so that thousands of unreachable agents do
// not hold up the others. An agent that did not answer the last time counts as
// slow from the beginning, and as a handshake once it does answer.
type gate struct {
	places    int
	slowAfter time.Duration
	maxSlow   int
	waited    func(time.Duration) // hears how long each dial had to wait

	mu     sync.Mutex // guards all below
	queue  *admission.Queue[dialKey, *turn]
	ramp   *ramp
	free   int // below 0 while more agents than expected have answered at once
	slow   int
	waking bool // a timer will call pump
}

// dialKey is whose turn it is. Each agent has its own; those that did not
// answer the last time share one, so that all of them together hold up the
// others as much as one does.
type dialKey struct {
	agent  tasks.AgentNum
	silent bool
}

// caller is who asks for a dial.
type caller struct {
	agent  tasks.AgentNum
	urgent bool // tasks wait for it
	silent bool // it did not answer the last time
}

func (c caller) place() (admission.Lane, dialKey) {
	switch {
	case c.silent:
		return admission.Second, dialKey{silent: true}
	case c.urgent:
		return admission.First, dialKey{agent: c.agent}
	}
	return admission.Second, dialKey{agent: c.agent}
}

// turn is a caller that waits.
type turn struct {
	silent bool
	since  time.Time
	ready  chan struct{} // closed when pass is there
	pass   *pass         // guarded by the gate's mu until ready
}

// pass is one admission.
type pass struct {
	g     *gate
	timer *time.Timer // guarded by g.mu; nil = it began slow
	slow  bool        // guarded by g.mu
	gone  bool        // guarded by g.mu
}

func newGate(l Limits, lag func() time.Duration, waited func(time.Duration)) *gate {
	return &gate{
		places: l.Dials, slowAfter: l.SlowAfter, maxSlow: l.SlowDials, waited: waited, free: l.Dials,
		// No bound of its own: each agent dials once at a time.
		queue: admission.NewQueue[dialKey, *turn](admission.QueueConfig{}),
		ramp:  newRamp(l, lag, time.Now()),
	}
}

// enter waits for the caller's turn; it fails only with ctx.
func (g *gate) enter(ctx context.Context, c caller) (*pass, error) {
	lane, key := c.place()
	t := &turn{silent: c.silent, ready: make(chan struct{})}
	g.mu.Lock()
	t.since = time.Now()
	g.queue.Push(t.since, lane, key, t)
	g.pumpLocked(t.since)
	g.mu.Unlock()
	select {
	case <-t.ready:
		return t.pass, nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	p := t.pass
	if p == nil {
		g.queue.Remove(key, func(o *turn) bool { return o == t })
	}
	g.mu.Unlock()
	if p != nil { // admitted at the same moment
		p.leave()
	}
	return nil, ctx.Err()
}

func (g *gate) pump() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waking = false
	g.pumpLocked(time.Now())
}

// pumpLocked admits whoever may go, and sees to it that it is called again
// when only the pace holds somebody up.
func (g *gate) pumpLocked(now time.Time) {
	for g.free > 0 && !g.queue.NextAt(now).IsZero() {
		if at := g.ramp.readyAt(now); at.After(now) {
			if !g.waking {
				g.waking = true
				time.AfterFunc(at.Sub(now), g.pump)
			}
			return
		}
		t, _, ok := g.queue.Pop(now, g.may)
		if !ok {
			return
		}
		g.ramp.take(now)
		g.admitLocked(t, now)
	}
}

// may parks the agents that did not answer until there is a place for them.
func (g *gate) may(k dialKey) (ok bool, at time.Time) {
	return !k.silent || g.slow < g.maxSlow, time.Time{}
}

func (g *gate) admitLocked(t *turn, now time.Time) {
	p := &pass{g: g, slow: t.silent}
	if p.slow {
		g.slow++
	} else {
		g.free--
		p.timer = time.AfterFunc(g.slowAfter, p.becomeSlow)
	}
	t.pass = p
	close(t.ready)
	g.waited(now.Sub(t.since))
}

func (p *pass) becomeSlow() {
	g := p.g
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.gone || p.slow || g.slow >= g.maxSlow {
		return
	}
	p.slow = true
	g.slow++
	g.free++
	g.pumpLocked(time.Now())
}

// answered notes that the peer has taken the connection. A slow dial is at its
// handshake now and needs a place; it takes one also when none is free, and
// nobody new is admitted until that is made good.
func (p *pass) answered() {
	g := p.g
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.gone || !p.slow {
		return
	}
	p.slow = false
	g.free--
	if p.timer == nil {
		p.timer = time.AfterFunc(g.slowAfter, p.becomeSlow)
	} else {
		p.timer.Reset(g.slowAfter)
	}
	g.leaveSlowLocked()
}

// leave ends the dial.
func (p *pass) leave() {
	g := p.g
	g.mu.Lock()
	defer g.mu.Unlock()
	p.gone = true
	if p.timer != nil {
		p.timer.Stop()
	}
	if p.slow {
		g.leaveSlowLocked()
		return
	}
	g.free++
	g.pumpLocked(time.Now())
}

func (g *gate) leaveSlowLocked() {
	g.slow--
	g.queue.Unpark(dialKey{silent: true})
	g.pumpLocked(time.Now())
}

// DialLoad is what dialling agents asks of this controller at a moment.
type DialLoad struct {
	Waiting  int     // agents whose turn has not come, without those in Silent
	Urgent   int     // those of Waiting with tasks
	Silent   int     // agents that did not answer the last time and wait for another try
	InFlight int     // handshakes under way
	Slow     int     // dials without an answer
	Rate     float64 // dials that may begin in a second
}

func (g *gate) load() DialLoad {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := DialLoad{
		Urgent: g.queue.Len(admission.First), Silent: g.queue.LenKey(dialKey{silent: true}),
		InFlight: g.places - g.free, Slow: g.slow, Rate: g.ramp.rate,
	}
	l.Waiting = g.queue.Total() - l.Silent
	return l
}

// DialLoad tells how much dialling is under way. Agents that cannot be reached
// count only as Silent and Slow: they are no work.
func (f *Fleet) DialLoad() DialLoad { return f.gate.load() }
