package fleet

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/internal/pki"
	"headgate/tasks"
)

// arrange makes the member's loop run or end as rows and leases demand. It
// may be called by anybody at any time and never waits.
func (f *Fleet) arrange(m *member) {
	m.mu.Lock()
	h := f.holdingOf(m)
	lease, ours := h.lease, h.owned
	want := ours && h.read && m.row.Status == Active
	if m.stop != nil && (!want || m.lease.Epoch != lease.Epoch) {
		m.stop(&trouble{cause: CauseReconnect, sentence: "the session was ended by this controller"})
		m.stop = nil
	}
	start := want && m.stop == nil
	removed := m.row.Status == Removed
	health := HealthConnecting
	switch {
	case m.row.Status == Quarantined:
		health = HealthQuarantined
	case !ours:
		health = HealthElsewhere
	}
	if start {
		f.startLocked(m, lease)
	}
	m.mu.Unlock()
	if removed {
		return
	}
	if !want || start {
		f.setHealth(context.Background(), m, health, func(l *Live) {
			l.Cause, l.Sentence, l.Failures, l.NextTry = "", "", 0, time.Time{}
			if health == HealthQuarantined {
				l.Sentence = m.row.StatusWhy // setHealth holds m.mu
			}
		})
	}
}

// startLocked begins a new loop behind the one that is ending.
func (f *Fleet) startLocked(m *member, lease tasks.Lease) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return
	}
	ctx, stop := context.WithCancelCause(f.ctx)
	before, done := m.done, make(chan struct{})
	m.lease, m.stop, m.done = lease, stop, done
	m.settled = false // under another lease, others may have recorded ledgers
	f.loops.Go(func() {
		defer close(done)
		defer stop(nil)
		if before != nil {
			<-before
		}
		f.keep(ctx, m, lease)
	})
}

// keep holds a connection to one agent until ctx ends.
func (f *Fleet) keep(ctx context.Context, m *member, lease tasks.Lease) {
	failures, silent := 0, false
	for ctx.Err() == nil {
		s, t := f.open(ctx, m, lease, silent)
		silent = s == nil && t.cause == CauseTimeout
		if s != nil {
			f.setHealth(ctx, m, HealthConnected, func(l *Live) {
				l.Address, l.Kinds = s.address, s.kinds
				l.Cause, l.Sentence, l.Failures, l.NextTry = "", "", 0, time.Time{}
			})
			began := time.Now()
			t = s.serve()
			if time.Since(began) >= steadyAfter {
				failures = 0
			}
		}
		if ctx.Err() != nil {
			return
		}
		failures++
		wait := delay(f.cfg.Limits, failures)
		if f.cfg.HasWork(m.num) {
			wait = min(wait, f.eager())
		}
		next := time.Now().Add(wait)
		f.setHealth(ctx, m, HealthUnreachable, func(l *Live) {
			l.Address, l.Cause, l.Sentence = t.address, t.cause, t.sentence
			l.NextTry = next
			if s == nil {
				l.Failures++
			} else {
				l.LastHeard, l.RTT, l.ClockSkew = time.Unix(0, s.heard.Load()), time.Duration(s.rtt.Load()), s.skew.Load()
			}
		})
		if s == nil && failures == 1 {
			f.log.Info("agent cannot be reached", "agent", m.id, "cause", t.cause, "err", t)
		}
		if f.rest(ctx, m, wait) {
			silent = false // somebody has reason to think that it will answer
		}
	}
}

// rest waits for d, or less if it is kicked or tasks have come for the agent.
func (f *Fleet) rest(ctx context.Context, m *member, d time.Duration) (kicked bool) {
	f.away.Add(1)
	defer f.away.Add(-1)
	for d > 0 {
		step := min(d, f.eager())
		d -= step
		t := time.NewTimer(step)
		select {
		case <-ctx.Done():
			t.Stop()
			return false
		case <-m.kick:
			t.Stop()
			return true
		case <-t.C:
		}
		if f.cfg.HasWork(m.num) {
			return false
		}
	}
	return false
}

// eager is the pause between dials to an agent for which tasks wait. It grows
// with the number of agents that are away, so that a dead site costs about
// eagerDials a second and no more.
func (f *Fleet) eager() time.Duration {
	d := max(f.cfg.Limits.BackoffWork, time.Duration(f.away.Load())*time.Second/eagerDials)
	return time.Duration(float64(d) * (1 - backoffJitter*rand.Float64()))
}

// delay is the pause after so many failures in a row. The random part is
// taken off after the cap.
func delay(l Limits, failures int) time.Duration {
	d := min(float64(l.BackoffMax), float64(l.BackoffBase)*math.Pow(backoffFactor, float64(failures-1)))
	return time.Duration(d * (1 - backoffJitter*rand.Float64()))
}

// open dials the agent's addresses in order until a session stands; silent says
// that the last dial had no answer.
func (f *Fleet) open(ctx context.Context, m *member, lease tasks.Lease, silent bool) (*session, *trouble) {
	p, err := f.gate.enter(ctx, caller{agent: m.num, urgent: f.cfg.HasWork(m.num), silent: silent})
	if err != nil {
		return nil, endOf(ctx)
	}
	defer p.leave()
	at := attempt{m: m, lease: lease, answered: p.answered}
	m.mu.Lock()
	addresses := m.row.Addresses
	at.pin = m.row.SPKI
	m.mu.Unlock()
	t := &trouble{cause: CauseNoAddress, sentence: "no address is known"}
	for _, address := range addresses {
		var s *session
		at.address = address
		if s, t = f.openAt(ctx, at); s != nil {
			f.metrics.dials.WithLabelValues("connected").Inc()
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, endOf(ctx)
		}
		f.metrics.dials.WithLabelValues(t.cause).Inc()
	}
	return nil, t
}

// endOf gives the reason for which ctx was cancelled.
func endOf(ctx context.Context) *trouble {
	if t, ok := errors.AsType[*trouble](context.Cause(ctx)); ok {
		return t
	}
	return &trouble{cause: CauseReconnect, sentence: "this controller is stopping", err: context.Cause(ctx)}
}

func (f *Fleet) agentDial(m *member, pin [32]byte) pki.AgentDial {
	return pki.AgentDial{Identity: f.identity, Roots: f.roots, ID: m.id, Pins: []pki.Fingerprint{pin}}
}

func sameAddresses(a, b []string) bool { return slices.Equal(a, b) }

// leaveAddress ends a session at an address that is not the agent's any more
// and tries new ones at once.
func (m *member) leaveAddress() {
	m.mu.Lock()
	left := m.live.Health == HealthConnected && !slices.Contains(m.row.Addresses, m.live.Address)
	m.mu.Unlock()
	if left {
		m.end(&trouble{cause: CauseReconnect, sentence: "the agent's address was changed"})
	}
	m.nudge()
}
