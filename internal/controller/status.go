package controller

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	"headgate/handlers"
	"headgate/listener"
	"headgate/web"
)

// status gives the answer of GET /api/v1/status.
func (c *Controller) status() handlers.Status {
	ready, since := c.readiness(), c.ready.entered()
	s := handlers.Status{
		Phase: ready.Phase, Since: since, Ready: ready.Ready, Unmet: ready.Unmet,
		StartedAt: c.began, Version: c.version(),
		Controller: handlers.ControllerRef{ID: c.state.id.String(), Name: c.name()},
		Ports:      portsOf(c.listener.Status()),
	}
	if c.hasJoined() {
		for _, l := range c.parts.manager.Held() {
			s.ShardsOwned = append(s.ShardsOwned, int(l.Shard))
		}
	}
	s.Database, s.Checks = c.databaseStatus(), c.checks()
	return s
}

// hasJoined says whether the parts are there; seeing that makes it safe to
// read them.
func (c *Controller) hasJoined() bool {
	select {
	case <-c.joined:
		return true
	default:
		return false
	}
}

func portsOf(from listener.Status) handlers.Ports {
	p := handlers.Ports{
		Controller: places(from.Controller), Public: places(from.Public), PublicOpen: from.Public.Open,
		State: string(from.State), Since: from.Since, Reason: from.Reason,
		ControllerConns: from.Controller.Conns, PublicConns: from.Public.Conns,
		Waiting: from.Admission.Queue.Known + from.Admission.Queue.Unknown, LimitMode: string(from.Admission.Limits.Mode),
	}
	if !from.OpensAt.IsZero() {
		p.OpensAt = &from.OpensAt
	}
	if from.Error != "" {
		p.Error = &from.Error
	}
	return p
}

// places gives where a port is reached: addresses, or the path of a socket.
func places(p listener.PortStatus) []string {
	out := make([]string, 0, len(p.Addresses)+1)
	for _, a := range p.Addresses {
		out = append(out, a.String())
	}
	if p.Path != "" {
		out = append(out, p.Path)
	}
	return out
}

// pageStatus gives the same to the pages.
func (c *Controller) pageStatus() web.Status {
	ready := c.readiness()
	s := web.Status{
		Name: c.name(), Version: c.opts.Version, Began: c.began, Ready: ready.Ready,
		Since: c.ready.entered(), Phase: ready.Phase,
	}
	for _, p := range c.ready.phases() {
		s.Phases = append(s.Phases, web.Phase{Name: string(p.name), Took: p.took})
	}
	for _, u := range ready.Unmet {
		s.Unmet = append(s.Unmet, web.Unmet{Condition: u.Condition, Detail: u.Detail})
	}
	if c.hasJoined() {
		s.Notes = c.databaseStatus().Notes
	}
	ports := c.listener.Status()
	if here := pagePort("Controller", ports.Controller, "never limited"); len(here.Addresses) > 0 {
		s.Ports = append(s.Ports, here) // with one port alone there is none
	}
	s.Ports = append(s.Ports, pagePort("Public", ports.Public, ""))
	s.Listener = pageListener(ports)
	for _, check := range c.checks() {
		s.Listener.Checks = append(s.Listener.Checks, web.Check{Name: check.Name, OK: check.OK, Since: check.Since, Detail: check.Detail})
	}
	return s
}

// pageListener gives the listener as the pages show it.
func pageListener(from listener.Status) *web.Listener {
	l := &web.Listener{State: string(from.State), Since: from.Since, Reason: from.Reason, OpensAt: from.OpensAt, Error: from.Error}
	if !from.Stable {
		l.Unstable = from.MarkReason
	}
	l.Queue, l.Sources = pageQueue(from.Admission)
	l.Mode, l.Limits = string(from.Admission.Limits.Mode), pageLimits(from.Admission)
	for _, t := range from.Transitions {
		l.Transitions = append(l.Transitions, web.Transition{At: t.At, From: string(t.From), To: string(t.To), Reason: t.Reason})
	}
	return l
}

// pageQueue gives who waits to be let in, and who comes most.
func pageQueue(from listener.Admission) (lanes []web.Lane, sources []web.Source) {
	lanes = []web.Lane{{Name: "known", Count: from.Queue.Known}, {Name: "unknown", Count: from.Queue.Unknown}}
	for _, s := range from.Top {
		sources = append(sources, web.Source{Address: s.Source, Class: string(s.Class), Conns: s.Conns, Refused: int64(s.Refused)}) //nolint:gosec // a count of connections
	}
	return lanes, sources
}

// pageLimits puts the limits into words; with the mode off there are none.
func pageLimits(from listener.Admission) []web.Limit {
	l := from.Limits
	if l.Mode == listener.ModeOff {
		return nil
	}
	rate := func(r listener.Rate) string { return fmt.Sprintf("%g/s, %g at once", r.PerSecond, r.Burst) }
	return []web.Limit{
		{Name: "New connections", Value: rate(l.PublicRate)},
		{Name: "New of one source", Value: fmt.Sprintf("%s; %g times that if it is known", rate(l.SourceRate), l.KnownFactor)},
		{Name: "Held by one source", Value: fmt.Sprintf("%d that have not proved who they are", l.SourceConns)},
		{Name: "Held by one identity", Value: fmt.Sprintf("%d of an agent and %d of a user count no more for their source", l.IdentityConns.Agent, l.IdentityConns.User)},
		{Name: "Queue", Value: fmt.Sprintf("%d, %d of one source, for at most %s", l.Queue, l.QueuePerSource, l.QueueWait)},
		{Name: "Handshakes at once", Value: fmt.Sprintf("%d, %d of one source", l.Handshakes, l.HandshakesPerSource)},
		{Name: "Connections", Value: fmt.Sprintf("%d, above that answered with 429; reset above %d", l.MaxConns, from.HardCap)},
	}
}

func pagePort(name string, p listener.PortStatus, note string) web.Port {
	classes := make([]web.ClassConns, 0, len(p.Classes))
	for _, class := range []listener.Class{listener.ClassController, listener.ClassAgent, listener.ClassUser, listener.ClassKnown, listener.ClassUnknown} {
		if n := p.Classes[class]; n > 0 {
			classes = append(classes, web.ClassConns{Class: string(class), Count: n})
		}
	}
	return web.Port{Name: name, Addresses: places(p), Open: p.Open, Conns: p.Conns, Classes: classes, Note: note}
}

// dashboard makes the pages of a controller that has joined.
func (c *Controller) dashboard() (http.Handler, error) {
	return web.New(web.Config{
		Tasks: c.parts.service, Fleet: c.parts.fleet, Auth: c.parts.auth,
		Status: c.pageStatus, BasePath: c.cfg.BasePath, Counters: c.parts.manager, Hub: c.parts.manager.Hub(), Version: c.opts.Version,
		Logger: c.opts.Logger.With("component", "web"),
	})
}

// notReadyPage is all that browsers see until then.
func (c *Controller) notReadyPage() http.Handler {
	return web.NotReady(c.pageStatus, c.cfg.BasePath)
}

// databaseStatus says what the gate's last probe of the database found; no
// answer waits for the database itself.
func (c *Controller) databaseStatus() handlers.DatabaseStatus {
	if !c.hasJoined() {
		for _, u := range c.readiness().Unmet {
			if u.Condition == checkDatabase {
				return handlers.DatabaseStatus{Detail: &u.Detail}
			}
		}
		return handlers.DatabaseStatus{Reachable: true}
	}
	s := c.gate.database()
	if notes := c.notes.Load(); notes != nil {
		s.Notes = slices.Clone(*notes)
	}
	if outdated := c.parts.fleet.Outdated(time.Now()).Sentence(); outdated != "" {
		s.Notes = append([]string{outdated}, s.Notes...)
	}
	return s
}

// checks gives the gate's checks; none before it is there.
func (c *Controller) checks() []handlers.Check {
	if !c.hasJoined() {
		return nil
	}
	return c.gate.checks()
}
