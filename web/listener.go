package web

import (
	"strings"
	"time"

	"headgate/internal/auth"
)

// Listener is the gate in full: both ports as the listener sees them.
type Listener struct {
	State       string // its exact word, for example open or reclosed
	Since       time.Time
	Reason      string    // why it entered that state
	OpensAt     time.Time // of the public port, when planned
	Error       string    // why the public port could not be opened
	Unstable    string    // why the controller is not stable; "" = it is
	Checks      []Check
	Queue       []Lane   // connections that wait to be let in
	Mode        string   // of the limits: enforce, observe or off; "" = there are none
	Limits      []Limit  // in force
	Sources     []Source // with the most connections and refusals
	Transitions []Transition
}

// Check is one condition of the stability gate.
type Check struct {
	Name   string // stable code
	OK     bool
	Since  time.Time
	Detail string // sentence
}

// Lane is one lane of the fair queue.
type Lane struct {
	Name  string
	Count int
}

// Limit is one limit in force.
type Limit struct{ Name, Value string }

// Source is an address that connections come from.
type Source struct {
	Address string
	Class   string
	Conns   int
	Refused int64
}

// Transition is one past change of state; the list has the oldest first.
type Transition struct {
	At       time.Time
	From, To string
	Reason   string
}

// States of the listener that the pages speak of.
const (
	gateOpen     = "open"
	gateSettling = "settling"
	gateShedding = "shedding"
	gateReclosed = "reclosed"
	gateFailed   = "public-failed"
	gateDraining = "draining"
	gateClosed   = "closed"
)

// gateGlyphs names the glyph and colour of each state of the listener.
func gateGlyphs() map[string]string {
	return map[string]string{
		gateOpen: "gate-open", gateShedding: "degraded", gateFailed: "failed", gateSettling: "waiting-for-agent-response",
	}
}

// gateBox says what the reader should know when the gate is not simply open;
// nil when it is, or when it is not known. Its title is the plain sentence.
func (s Status) gateBox(now time.Time) *because {
	l := s.Listener
	if l == nil || l.State == gateOpen && l.Unstable == "" {
		return nil
	}
	b := &because{State: gateClosed, Title: "The public port is closed: the controller is not ready for it yet", Does: "It opens by itself when everything stands.", Code: l.State}
	switch l.State {
	case gateOpen:
		b.State = "degraded"
		b.Title = "The controller is under strain; the public port is still open"
		b.Does = clause(l.Unstable) + "If that lasts, the public port lets in only those it knows, and later nobody."
		b.Code = ""
	case gateSettling:
		b.Title = "The public port opens in a moment"
		b.Does = "The controller is stable and waits a little, so that it stays so."
		if !l.OpensAt.IsZero() {
			b.Title = "The public port opens at " + clockAt(l.OpensAt, now)
		}
	case gateShedding:
		b.State = "degraded"
		b.Title = "The controller is under strain: the public port lets in only those it knows"
		b.Does = clause(l.Reason) + "All others are refused and may try again. It lets everybody in again when it is stable for 5 s."
	case gateReclosed:
		b.Title = "The public port is closed: the controller has not been stable"
		b.Does = clause(l.Reason) + "Connections that are open go on, and the controller port serves as ever. The public port opens again by itself when the controller is stable."
	case gateFailed:
		b.State = "failed"
		b.Title = "The public port cannot be opened"
		b.Does = clause(orElse(l.Error, l.Reason)) + "Headgate tries again by itself; the controller port serves as ever."
	case gateDraining, gateClosed:
		b.Title = "The controller is stopping"
		b.Does = "The public port refuses; requests under way end. Running tasks go on at their agents."
	}
	return b
}

// clause makes a sentence of a reason, with a space behind it.
func clause(reason string) string {
	if reason == "" {
		return ""
	}
	return strings.TrimRight(strings.ToUpper(reason[:1])+reason[1:], ". ") + ". "
}

// peer says in plain words what connections of a class are.
func peer(class string) string {
	switch class {
	case "user":
		return "signed in"
	case "agent":
		return "of agents"
	case "controller":
		return "of controllers"
	case "known":
		return "from known addresses"
	case "unknown":
		return "from others"
	}
	return class
}

// Gate is the box of the page about the gate, nil when it is open.
func (p *page) Gate() *because {
	if p.User.Kind == "" {
		return nil // for a stranger the not-ready page says enough
	}
	return p.Status.gateBox(p.Now)
}

// GateOpen says whether the public port takes connections.
func (p *page) GateOpen() bool {
	if l := p.Status.Listener; l != nil {
		return l.State == gateOpen || l.State == gateShedding
	}
	return p.Status.Ready
}

// MaySeeSources says whether the reader may see where connections come from:
// those who may read the listener's status by the API.
func (p *page) MaySeeSources() bool { return p.May[auth.ReadMetrics] }

// Failing are the checks that are not met.
func (l *Listener) Failing() (list []Check) {
	for _, c := range l.Checks {
		if !c.OK {
			list = append(list, c)
		}
	}
	return list
}

// Recent are the last changes, the newest first.
func (l *Listener) Recent() (list []Transition) {
	for i := len(l.Transitions) - 1; i >= 0; i-- {
		list = append(list, l.Transitions[i])
	}
	return list
}
