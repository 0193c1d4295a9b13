package listener

import (
	"fmt"
	"time"
)

const (
	// stableFor is how long the program must have been stable before a
	// shedding port admits everybody again.
	stableFor = 5 * time.Second
	// maxOpenDelay bounds what the delay doubles to.
	maxOpenDelay = 60 * time.Second
	// steadyTime is how long the public port must have been open without
	// shedding for earlier re-closings to be forgotten.
	steadyTime = 10 * time.Minute
)

// rules are the durations that phases goes by; they are those of Config.
type rules struct {
	openDelay, grace, reclose, minOpen time.Duration

	barrier bool // an opening waits for a barrier too
	onePort bool // there is no controller port and marks mean nothing
}

// event is something that happened to the listener. Time alone is evTick.
type event struct {
	kind   eventKind
	reason string
	err    error     // evFailed, evLost, evBarrierFailed
	next   time.Time // evFailed, evLost: when the port is tried again
	epoch  uint64    // evOpened, evFailed, evBarrier...: of the phases that it answers
}

type eventKind int

const (
	evTick eventKind = iota
	evBound
	evStable
	evUnstable
	evBarrierPassed
	evBarrierFailed
	evOpened // the public socket listens
	evFailed // it could not be made to
	evLost   // it listened, and is broken
	evDrain
	evClose
)

// phases is the state machine, and a value: it has no clock, no lock and no
// socket. apply says what an event makes of it, plan what time alone will.
//
// Who is admitted to the public port changes at most twice in twice MinOpen,
// however often the marks change, and an opened port stays open for MinOpen.
type phases struct {
	rules rules
	state State
	since time.Time // of the state
	epoch uint64    // counts the changes of state

	reason string // why the state was entered
	err    error  // what keeps the public port from opening

	stable bool // as last marked
	marked time.Time
	why    string // given with the mark

	opensAt time.Time     // settling: the end of the delay; public-failed: the next try
	barrier bool          // settling: the barrier has still to be passed
	wasOpen bool          // the public port has been open before
	delay   time.Duration // of the next settling
	settled time.Time     // the last settling began
	opened  time.Time     // the port last began to listen
	turns   [2]time.Time  // the last two changes of who is admitted, oldest first
}

func newPhases(r rules, now time.Time) phases {
	return phases{rules: r, state: StateStarting, since: now, marked: now, delay: r.openDelay}
}

// accepting reports whether the public port shall take connections.
func (p *phases) accepting() bool { return p.state == StateOpen || p.state == StateShedding }

// ending reports whether no more than the end is to come.
func (p *phases) ending() bool { return p.state == StateDraining || p.state == StateClosed }

// plan gives the next change that time alone brings; the state is empty when
// there is none.
func (p *phases) plan() (at time.Time, to State) {
	if p.rules.onePort {
		return time.Time{}, ""
	}
	turn := p.turns[0].Add(2 * p.rules.minOpen)
	switch p.state {
	case StateControllerOnly:
		if p.stable {
			return p.marked, StateSettling
		}
	case StateSettling:
		if !p.stable {
			return p.marked, p.shut()
		}
	case StateOpen:
		if !p.stable {
			return latest(p.marked.Add(p.rules.grace), p.opened.Add(p.rules.minOpen), turn), StateShedding
		}
	case StateShedding:
		if p.stable {
			return latest(p.marked.Add(stableFor), turn), StateOpen
		}
		return latest(p.marked.Add(p.rules.reclose), p.since.Add(p.rules.reclose), turn), StateReclosed
	case StateReclosed:
		if p.stable { // one that was cut short is not begun again at once
			return latest(p.marked, p.settled.Add(2*p.rules.minOpen)), StateSettling
		}
	case StateStarting, StatePublicFailed, StateDraining, StateClosed:
	}
	return time.Time{}, ""
}

// shut is the state of a public port that refuses because the program is not
// stable.
func (p *phases) shut() State {
	if p.wasOpen {
		return StateReclosed
	}
	return StateControllerOnly
}

// wantsOpen gives when the public socket is to be opened; false means that
// something else must happen first.
func (p *phases) wantsOpen() (time.Time, bool) {
	switch p.state {
	case StateSettling:
		return p.opensAt, !p.barrier
	case StatePublicFailed:
		return p.opensAt, p.stable || p.rules.onePort
	}
	return time.Time{}, false
}

// outcome says what an event did to the phases.
type outcome int

const (
	nothing outcome = iota
	noted           // something that reports show
	moved           // the state
)

// apply makes of p what follows from e. What is not legal, or answers phases
// that are past, does nothing.
func (p *phases) apply(now time.Time, e event) outcome {
	switch e.kind {
	case evTick:
		return p.tick(now)
	case evBound:
		return p.enter(now, StateControllerOnly, e.reason)
	case evStable, evUnstable:
		return p.mark(now, e.kind == evStable, e.reason)
	case evDrain:
		return p.enter(now, StateDraining, e.reason)
	case evClose:
		return p.enter(now, StateClosed, e.reason)
	case evLost:
		if p.accepting() {
			return p.fail(now, e)
		}
	case evOpened, evFailed, evBarrierPassed, evBarrierFailed:
		if e.epoch == p.epoch {
			return p.answer(now, e)
		}
	}
	return nothing
}

// answer takes in how something ended that these phases asked for.
func (p *phases) answer(now time.Time, e event) outcome {
	switch {
	case e.kind == evOpened:
		return p.enter(now, StateOpen, p.reason)
	case e.kind == evFailed:
		return p.fail(now, e)
	case p.state == StateSettling:
		p.barrier, p.err = e.kind == evBarrierFailed, e.err
		return noted
	}
	return nothing
}

// mark notes what the program says of itself.
func (p *phases) mark(now time.Time, stable bool, why string) outcome {
	if p.rules.onePort || p.ending() || (p.stable == stable && p.why == why) {
		return nothing
	}
	p.why = why
	if p.stable == stable {
		return noted
	}
	p.stable, p.marked = stable, now
	if p.state == StatePublicFailed && stable { // it is not opened sooner than a sound one
		p.opensAt = latest(p.opensAt, now.Add(p.rules.openDelay))
	}
	return max(noted, p.tick(now))
}

// tick makes the planned change if its time has come.
func (p *phases) tick(now time.Time) outcome {
	at, to := p.plan()
	if to == "" || now.Before(at) {
		return nothing
	}
	reason := p.why
	switch {
	case to == StateShedding, to == StateReclosed && p.state == StateShedding:
		reason = fmt.Sprintf("unstable for %v: %s", now.Sub(p.marked).Round(time.Second), p.why)
	case to == StateOpen:
		reason = "stable again: " + p.why
	}
	return p.enter(now, to, reason)
}

// fail notes that the public port is not to be had.
func (p *phases) fail(now time.Time, e event) outcome {
	result := noted // once more
	if p.state != StatePublicFailed {
		if result = p.enter(now, StatePublicFailed, e.reason); result == nothing {
			return nothing
		}
	}
	p.err, p.opensAt = e.err, e.next
	return result
}

// enter changes the state if that is legal.
func (p *phases) enter(now time.Time, to State, reason string) outcome {
	from := p.state
	if !legal(from, to) {
		return nothing
	}
	switch {
	case to == StateSettling:
		p.settled, p.barrier = now, p.rules.barrier
		p.opensAt = latest(now.Add(p.delay), p.turns[1].Add(p.rules.minOpen))
	case from == StateSettling || from == StatePublicFailed:
		p.opensAt = time.Time{}
	case to == StateShedding && now.Sub(p.since) >= steadyTime:
		p.delay = p.rules.openDelay
	case to == StateReclosed:
		p.delay = min(max(2*p.delay, DefaultOpenDelay), max(maxOpenDelay, p.rules.openDelay))
	}
	if to == StateOpen && from != StateShedding {
		p.opened, p.wasOpen = now, true
	}
	if to == StateOpen || to == StateShedding || (to == StateReclosed && from == StateShedding) {
		p.turns = [2]time.Time{p.turns[1], now}
	}
	p.state, p.since, p.reason, p.err = to, now, reason, nil
	p.epoch++
	return moved
}

// latest gives the last of some moments.
func latest(list ...time.Time) time.Time {
	last := list[0]
	for _, t := range list[1:] {
		if t.After(last) {
			last = t
		}
	}
	return last
}
