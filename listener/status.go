package listener

import (
	"net/netip"
	"time"
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
	Transitions []Transition `json:"transitions"` // the last 20, oldest first
}

// PortStatus is one port of a Status.
type PortStatus struct {
	Addresses   []netip.AddrPort `json:"addresses"`
	Path        string           `json:"path,omitempty"` // of a unix socket, as unix:/path; then there are no addresses
	Open        bool             `json:"open"`
	Conns       int              `json:"conns"`       // held now, those below included
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
		Addresses: at, Path: path, Open: open, Conns: held, Pending: pending,
		Handshaking: int(p.shakes.Load()), Accepted: p.total.Load(),
	}
}
