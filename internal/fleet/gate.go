package fleet

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// gate admits dials. Its places are meant for the handshake, which costs
// processor time. A dial that has waited longer than a handshake takes is
// waiting for a peer that may never answer and costs nothing but a descriptor:
// it gives its place back and counts as slow from then on, so that thousands
// of unreachable agents do not hold up the others.
type gate struct {
	slowAfter time.Duration
	maxSlow   int

	mu     sync.Mutex // guards all below
	free   int
	slow   int
	urgent list.List // of chan struct{}; agents with work waiting come first
	normal list.List
}

func newGate(l Limits) *gate {
	return &gate{slowAfter: l.SlowAfter, maxSlow: l.SlowDials, free: l.Dials}
}

// pass is one admission.
type pass struct {
	g     *gate
	timer *time.Timer
	slow  bool // guarded by g.mu
	gone  bool // guarded by g.mu
}

// enter waits for a place; it fails only with ctx.
func (g *gate) enter(ctx context.Context, urgent bool) (*pass, error) {
	g.mu.Lock()
	if g.free > 0 {
		g.free--
		g.mu.Unlock()
		return g.admit(), nil
	}
	queue := &g.normal
	if urgent {
		queue = &g.urgent
	}
	turn := make(chan struct{})
	place := queue.PushBack(turn)
	g.mu.Unlock()
	select {
	case <-turn:
		return g.admit(), nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-turn: // given a place at the same moment
		g.release()
	default:
		queue.Remove(place)
	}
	return nil, ctx.Err()
}

func (g *gate) admit() *pass {
	p := &pass{g: g}
	p.timer = time.AfterFunc(g.slowAfter, p.becomeSlow)
	return p
}

func (p *pass) becomeSlow() {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	if p.gone || p.g.slow >= p.g.maxSlow {
		return
	}
	p.slow = true
	p.g.slow++
	p.g.release()
}

// leave ends the dial.
func (p *pass) leave() {
	p.timer.Stop()
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	p.gone = true
	if p.slow {
		p.g.slow--
		return
	}
	p.g.release()
}

// release hands a place on; the caller holds mu.
func (g *gate) release() {
	for _, queue := range []*list.List{&g.urgent, &g.normal} {
		if first := queue.Front(); first != nil {
			close(queue.Remove(first).(chan struct{}))
			return
		}
	}
	g.free++
}
