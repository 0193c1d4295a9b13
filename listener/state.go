package listener

import (
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
	StateSettling       State = "settling"        // public port refuses; opens when the delay has passed
	StateOpen           State = "open"            // both ports accept
	StatePublicFailed   State = "public-failed"   // public port cannot be opened and is tried again
	StateDraining       State = "draining"        // public port refuses; waits for its connections to end
	StateClosed         State = "closed"          // final
)

// legal reports whether the machine may go from one state to another. It is
// the whole rule: everything else asks and takes no for an answer.
func legal(from, to State) bool {
	switch from {
	case StateStarting:
		return to == StateControllerOnly || to == StateClosed
	case StateControllerOnly:
		return to == StateSettling || to == StateDraining || to == StateClosed
	case StateSettling:
		return to == StateOpen || to == StatePublicFailed || to == StateDraining || to == StateClosed
	case StateOpen:
		return to == StatePublicFailed || to == StateDraining || to == StateClosed
	case StatePublicFailed:
		return to == StateOpen || to == StateDraining || to == StateClosed
	case StateDraining:
		return to == StateClosed
	case StateClosed:
	}
	return false
}

// PortReport is one moment of the listener. It is a value; its slices are not
// changed after it was given out.
type PortReport struct {
	State      State
	Since      time.Time        // of this state
	Controller []netip.AddrPort // where the controller port accepts
	Public     []netip.AddrPort // where the public port accepts, or will
	PublicOpen bool
	OpensAt    time.Time // when the public port is opened, or tried again; zero when not planned
	Reason     string    // why this state was entered
	Err        error     // why the public port could not be opened; nil otherwise
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

// machine holds the state. Readers take the snapshot without a lock; changes
// are made under mu, which is never held across I/O or a callback.
type machine struct {
	snap atomic.Pointer[PortReport]

	mu      sync.Mutex
	history []Transition
	changed chan struct{} // closed at every change of the snapshot, then replaced
	// onChange is called under mu and therefore in order; it must not block.
	onChange func(from State, r PortReport)
}

// move is a wish to enter another state.
type move struct {
	to      State
	reason  string
	opensAt time.Time
	err     error
}

func newMachine(onChange func(State, PortReport)) *machine {
	m := &machine{changed: make(chan struct{}), onChange: onChange}
	m.snap.Store(&PortReport{State: StateStarting, Since: time.Now()})
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

// bound notes the addresses; it is called before the first move.
func (m *machine) bound(controller, public netip.AddrPort) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := *m.snap.Load()
	r.Controller, r.Public = addrs(controller), addrs(public)
	m.snap.Store(&r)
}

// addrs gives the list of the one address, empty when it is not known.
func addrs(a netip.AddrPort) []netip.AddrPort {
	if !a.IsValid() {
		return nil
	}
	return []netip.AddrPort{a}
}

// move enters the state that is asked for if that is legal from here. It
// gives the state left, and whether it did.
func (m *machine) move(w move) (from State, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := *m.snap.Load()
	from = r.State
	if !legal(from, w.to) {
		return from, false
	}
	r.State, r.Since, r.Reason = w.to, time.Now(), w.reason
	r.OpensAt, r.Err, r.PublicOpen = w.opensAt, w.err, w.to == StateOpen
	m.history = append(m.history, Transition{At: r.Since, From: from, To: w.to, Reason: w.reason})
	if over := len(m.history) - keptTransitions; over > 0 {
		m.history = slices.Delete(m.history, 0, over)
	}
	m.publish(&r)
	m.onChange(from, r)
	return from, true
}

// failedAgain notes another failure of the public port; it is no change of
// state and therefore not reported to OnPorts.
func (m *machine) failedAgain(err error, next time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := *m.snap.Load()
	if r.State != StatePublicFailed {
		return
	}
	r.Err, r.OpensAt = err, next
	m.publish(&r)
}

// publish stores r and wakes the watchers; the caller holds mu.
func (m *machine) publish(r *PortReport) {
	m.snap.Store(r)
	close(m.changed)
	m.changed = make(chan struct{})
}

// transitions gives the history, oldest first.
func (m *machine) transitions() []Transition {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.history)
}
