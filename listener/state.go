package listener

import (
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// State is where the listener stands.
type State string

// The states.
const (
	StateStarting       State = "starting"        // New has not returned
	StateControllerOnly State = "controller-only" // public port refuses; waits for MarkStable
	StateSettling       State = "settling"        // public port refuses; opens after the delay and the barrier
	StateOpen           State = "open"            // both ports accept
	StateShedding       State = "shedding"        // unstable for a while: the public port admits only those it knows
	StateReclosed       State = "reclosed"        // unstable for long: public port refuses, its live connections are kept
	StatePublicFailed   State = "public-failed"   // public port cannot be opened and is tried again
	StateDraining       State = "draining"        // public port refuses; waits for its connections to end
	StateClosed         State = "closed"          // final
)

// successors lists where each state may lead. It is the whole rule: everything
// else asks and takes no for an answer.
func successors(from State) []State {
	switch from {
	case StateStarting: // open: with one port alone
		return []State{StateControllerOnly, StateOpen, StateClosed}
	case StateControllerOnly:
		return []State{StateSettling, StateDraining, StateClosed}
	case StateSettling:
		return []State{StateOpen, StateControllerOnly, StateReclosed, StatePublicFailed, StateDraining, StateClosed}
	case StateOpen:
		return []State{StateShedding, StatePublicFailed, StateDraining, StateClosed}
	case StateShedding:
		return []State{StateOpen, StateReclosed, StatePublicFailed, StateDraining, StateClosed}
	case StateReclosed:
		return []State{StateSettling, StateDraining, StateClosed}
	case StatePublicFailed:
		return []State{StateOpen, StateDraining, StateClosed}
	case StateDraining:
		return []State{StateClosed}
	case StateClosed:
	}
	return nil
}

// legal reports whether the listener may go from one state to another.
func legal(from, to State) bool { return slices.Contains(successors(from), to) }

// PortReport is one moment of the listener. It is a value; its slices are not
// changed after it was given out.
type PortReport struct {
	State      State
	Since      time.Time        // of this state
	Controller []netip.AddrPort // where the controller port accepts
	Public     []netip.AddrPort // where the public port accepts, or will
	// Where a port is a unix socket its list is empty and its path is set, as
	// unix:/path or unix:@name. With Config.OnePort both of the controller
	// port's are empty.
	ControllerPath, PublicPath string

	PublicOpen bool      // it takes connections, if only some (shedding)
	OpensAt    time.Time // when the public port is opened, or tried again; zero when not planned
	Reason     string    // why this state was entered
	Err        error     // why the public port could not be opened; nil otherwise

	Stable     bool      // as the program last marked itself
	MarkedAt   time.Time // since when
	MarkReason string    // given with the mark
}

// Transition is one past change of state.
type Transition struct {
	At     time.Time `json:"at"`
	From   State     `json:"from"`
	To     State     `json:"to"`
	Reason string    `json:"reason,omitempty"`
}

// keptTransitions bounds the history that Status shows.
const keptTransitions = 20

// machine guards the phases and tells of them. Readers take the snapshot
// without a lock; changes are made under mu, which is never held across I/O or
// a callback.
type machine struct {
	snap atomic.Pointer[PortReport]

	mu      sync.Mutex
	phases  phases
	history []Transition
	changed chan struct{} // closed at every change of the phases, then replaced
	// onChange is called under mu and therefore in order; it must not block.
	onChange func(from State, r PortReport)
}

func newMachine(r rules, onChange func(State, PortReport)) *machine {
	m := &machine{phases: newPhases(r, time.Now()), changed: make(chan struct{}), onChange: onChange}
	m.snap.Store(&PortReport{State: m.phases.state, Since: m.phases.since, MarkedAt: m.phases.marked})
	return m
}

// report gives the present moment.
func (m *machine) report() PortReport { return *m.snap.Load() }

// watch gives the present moment and a channel that closes when it has passed.
func (m *machine) watch() (PortReport, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return *m.snap.Load(), m.changed
}

// follow is watch for the one goroutine that does what the phases ask for.
func (m *machine) follow() (phases, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.phases, m.changed
}

// bound notes the addresses; it is called before the first event.
func (m *machine) bound(controller, public net.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := *m.snap.Load()
	r.Controller, r.Public = addrs(controller), addrs(public)
	r.ControllerPath, r.PublicPath = pathOf(controller), pathOf(public)
	m.snap.Store(&r)
}

// apply lets an event happen. It gives the state left and the report of the
// one entered; ok is false when the state did not change.
func (m *machine) apply(e event) (from State, r PortReport, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	from = m.phases.state
	did := m.phases.apply(time.Now(), e)
	r = *m.snap.Load()
	if did == nothing {
		return from, r, false
	}
	m.phases.describe(&r)
	m.snap.Store(&r)
	close(m.changed)
	m.changed = make(chan struct{})
	if did == noted {
		return from, r, false
	}
	m.history = append(m.history, Transition{At: r.Since, From: from, To: r.State, Reason: r.Reason})
	if over := len(m.history) - keptTransitions; over > 0 {
		m.history = slices.Delete(m.history, 0, over)
	}
	m.onChange(from, r)
	return from, r, true
}

// describe writes the phases into a report.
func (p *phases) describe(r *PortReport) {
	r.State, r.Since, r.Reason, r.Err = p.state, p.since, p.reason, p.err
	r.OpensAt, r.PublicOpen = p.opensAt, p.accepting()
	r.Stable, r.MarkedAt, r.MarkReason = p.stable, p.marked, p.why
	if p.state == StateReclosed && p.stable {
		r.OpensAt, _ = p.plan()
		r.OpensAt = r.OpensAt.Add(p.delay)
	}
}

// transitions gives the history, oldest first.
func (m *machine) transitions() []Transition {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.history)
}
