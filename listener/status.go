package listener

import (
	"net/netip"
	"time"

	"headgate/listener/admission"
)

// Status is the listener as an operator wants to see it; it encodes to JSON.
type Status struct {
	State       State        `json:"state"`
	Since       time.Time    `json:"since"`
	Reason      string       `json:"reason,omitempty"`
	OpensAt     time.Time    `json:"opens_at,omitzero"`
	Error       string       `json:"error,omitempty"`
	Stable      bool         `json:"stable"`                // as the program last marked itself
	MarkedAt    time.Time    `json:"marked_at"`             // since when
	MarkReason  string       `json:"mark_reason,omitempty"` // given with the mark
	Controller  PortStatus   `json:"controller"`
	Public      PortStatus   `json:"public"`
	Admission   Admission    `json:"admission"`   // who is let in to the public port
	Transitions []Transition `json:"transitions"` // the last 20, oldest first
}

// Admission is the part of a Status that says who is let in.
type Admission struct {
	Limits     Limits         `json:"limits"`     // in force
	QueueWait  float64        `json:"queue_wait"` // of Limits, in seconds
	HardCap    int            `json:"hard_cap"`   // follows from Limits.MaxConns
	OnlyKnown  bool           `json:"only_known"` // sources that are not known are refused now
	Queue      QueueStatus    `json:"queue"`
	Tracked    int            `json:"sources_tracked"`
	Overflows  uint64         `json:"sources_overflow"` // how often a source found no place in the table
	Identities int            `json:"identities"`       // that hold connections
	Top        []SourceStatus `json:"top_sources"`      // the ten with most refusals, then connections
}

// QueueStatus is how many connections wait, by lane.
type QueueStatus struct {
	Known   int `json:"known"`
	Unknown int `json:"unknown"`
}

// SourceStatus is one source. In the mode observe Refused counts what would
// have been refused.
type SourceStatus struct {
	Source  string `json:"source"` // an address, an IPv6 network, or "others" for those that found no place
	Class   Class  `json:"class"`
	Conns   int    `json:"conns"` // charged to the source, not to an identity
	Refused uint64 `json:"refused"`
}

const (
	// topSources is how many sources a Status names.
	topSources = 10
	// fewSources are looked through for each Status. More are only once in
	// topEvery: newcomers wait for that, and everybody can load a page.
	fewSources = 1000
	topEvery   = time.Second
)

// PortStatus is one port of a Status.
type PortStatus struct {
	Addresses   []netip.AddrPort `json:"addresses"`
	Path        string           `json:"path,omitempty"` // of a unix socket, as unix:/path; then there are no addresses
	Open        bool             `json:"open"`
	Conns       int              `json:"conns"`       // held now, those below included
	Classes     map[Class]int    `json:"classes"`     // of them, by what is held of the peer
	Pending     int              `json:"pending"`     // not yet returned by Accept
	Handshaking int              `json:"handshaking"` // in or before their handshake
	Accepted    uint64           `json:"accepted"`    // since the start
}

// Ports gives the present moment without taking a lock.
func (l *Listener) Ports() PortReport { return l.state.report() }

// Status gives the present moment in full. It never waits for a connection.
func (l *Listener) Status() Status {
	r := l.state.report()
	s := Status{
		State: r.State, Since: r.Since, Reason: r.Reason, OpensAt: r.OpensAt,
		Stable: r.Stable, MarkedAt: r.MarkedAt, MarkReason: r.MarkReason,
		Controller:  l.controller.status(r.Controller, r.ControllerPath, r.State != StateClosed && !l.cfg.OnePort),
		Public:      l.public.status(r.Public, r.PublicPath, r.PublicOpen),
		Admission:   l.door.status(),
		Transitions: l.state.transitions(),
	}
	if r.Err != nil {
		s.Error = r.Err.Error()
	}
	return s
}

func (p *port) status(at []netip.AddrPort, path string, open bool) PortStatus {
	held, pending := p.counts()
	return PortStatus{
		Addresses: at, Path: path, Open: open, Conns: held, Pending: pending, Classes: p.byClass(),
		Handshaking: int(p.shakes.Load()), Accepted: p.total.Load(),
	}
}

// byClass gives the connections held of each class.
func (p *port) byClass() map[Class]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := make(map[Class]int)
	for _, class := range allClasses() {
		m[class] = p.classes[class]
	}
	return m
}

// status gives the present moment of the door.
func (d *door) status() Admission {
	now, lim := time.Now(), d.lim.Load()
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	a := Admission{
		Limits: *lim, QueueWait: lim.QueueWait.Seconds(), HardCap: lim.hardCap(), OnlyKnown: d.only,
		Queue:   QueueStatus{Known: d.queue.Len(admission.First), Unknown: d.queue.Len(admission.Second)},
		Tracked: d.sources.Len(), Overflows: d.sources.Overflows(), Identities: len(d.ids),
	}
	if d.sources.Len() <= fewSources || now.Sub(d.topAt) >= topEvery {
		d.top, d.topAt = d.topNow(now), now
	}
	a.Top = d.top
	return a
}

// topNow gives the sources that a Status names; the caller holds mu.
func (d *door) topNow(now time.Time) []SourceStatus {
	list := []SourceStatus{}
	for _, v := range d.sources.Top(now, topSources) {
		s := SourceStatus{Source: v.Key.String(), Class: ClassUnknown, Conns: v.Conns, Refused: v.Refused}
		if v.Known {
			s.Class = ClassKnown
		}
		if v.Overflow {
			s.Source = "others"
		}
		list = append(list, s)
	}
	return list
}
