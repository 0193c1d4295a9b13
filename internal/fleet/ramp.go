package fleet

import (
	"time"

	"headgate/listener/admission"
)

// The pace of dials.
const (
	// rampFloor is the pace at rest and at which a storm begins. A burst of
	// Limits.Dials goes at once before it, so a few lost agents never wait.
	rampFloor = 100.0
	// rampStep is how often the pace is looked at: it doubles while dials wait
	// for it, so that 2,000 a second are reached within five.
	rampStep = time.Second
	// rampRest is how long there must have been less to do than rampFloor
	// allows for the next storm to begin slowly again.
	rampRest = 10 * time.Second
	// holdLag and brakeLag are delays of the self-probe: from the first on the
	// pace does not grow, from the second on it halves.
	holdLag  = 100 * time.Millisecond
	brakeLag = 500 * time.Millisecond
)

// ramp is the pace at which dials begin. At rest it lets a burst through and
// then rampFloor a second; only when more wait, as after a start or when many
// agents were lost at once, does the pace grow, and it does so step by step
// while this controller keeps answering itself quickly. It has no clock and no
// lock: the gate brings both.
type ramp struct {
	floor, ceiling float64
	burst          float64
	lag            func() time.Duration // nil = no brake

	pacer admission.Pacer
	rate  float64
	began time.Time // of the step that runs; zero at rest
	busy  time.Time // when there was last as much to do as floor allows
	taken int       // in this step
	short bool      // somebody had to wait in this step
}

func newRamp(l Limits, lag func() time.Duration, now time.Time) *ramp {
	ceiling := float64(l.DialRate)
	r := &ramp{floor: min(rampFloor, ceiling), ceiling: ceiling, burst: float64(l.Dials), lag: lag}
	r.set(now, r.floor)
	return r
}

func (r *ramp) set(now time.Time, rate float64) {
	r.rate = rate
	r.pacer.SetRate(now, admission.Rate{PerSecond: rate, Burst: r.burst})
}

// readyAt gives when the next dial may begin: now, or a later moment for which
// somebody has to wait.
func (r *ramp) readyAt(now time.Time) time.Time {
	r.step(now)
	at := r.pacer.ReadyAt(now)
	if at.After(now) {
		r.short = true
		r.start(now)
	}
	return at
}

// take begins a dial; readyAt has said that it may.
func (r *ramp) take(now time.Time) {
	r.pacer.Take(now)
	r.taken++
	r.start(now)
}

func (r *ramp) start(now time.Time) {
	if r.began.IsZero() {
		r.began, r.busy = now, now
	}
}

// step looks at the pace when a step is over. It is called by those who ask, so
// a step in which nobody asks goes on, and a long one is rest.
func (r *ramp) step(now time.Time) {
	gone := now.Sub(r.began)
	if r.began.IsZero() || gone < rampStep {
		return
	}
	if r.short || float64(r.taken) >= r.floor*gone.Seconds() {
		r.busy = now
	}
	if gone >= rampRest || now.Sub(r.busy) >= rampRest {
		r.set(now, r.floor)
		r.began, r.taken, r.short = time.Time{}, 0, false
		return
	}
	var lag time.Duration
	if r.lag != nil {
		lag = r.lag()
	}
	switch {
	case lag >= brakeLag:
		r.set(now, max(r.floor, r.rate/2))
	case lag >= holdLag:
	case r.short:
		r.set(now, min(r.ceiling, 2*r.rate))
	}
	r.began, r.taken, r.short = now, 0, false
}
