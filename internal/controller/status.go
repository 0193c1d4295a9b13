package controller

import (
	"net/http"
	"net/netip"

	"headgate/handlers"
	"headgate/listener"
	"headgate/web"
)

// status gives the answer of GET /api/v1/status.
func (c *Controller) status() handlers.Status {
	ready, since := c.readiness(), c.ready.entered()
	ports := c.listener.Ports()
	s := handlers.Status{
		Phase: ready.Phase, Since: since, Ready: ready.Ready, Unmet: ready.Unmet,
		StartedAt: c.began, Version: c.version(),
		Controller: handlers.ControllerRef{ID: c.state.id.String(), Name: c.name()},
		Ports: handlers.Ports{
			Controller: texts(ports.Controller), Public: texts(ports.Public), PublicOpen: ports.PublicOpen,
			State: string(ports.State), Reason: ports.Reason,
		},
	}
	if !ports.OpensAt.IsZero() {
		s.Ports.OpensAt = &ports.OpensAt
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

func texts(addrs []netip.AddrPort) []string {
	out := make([]string, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, a.String())
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
	ports := c.listener.Status()
	s.Ports = []web.Port{
		pagePort("Controller", ports.Controller, "never limited"),
		pagePort("Public", ports.Public, ""),
	}
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
	for _, t := range from.Transitions {
		l.Transitions = append(l.Transitions, web.Transition{At: t.At, From: string(t.From), To: string(t.To), Reason: t.Reason})
	}
	return l
}

func pagePort(name string, p listener.PortStatus, note string) web.Port {
	return web.Port{Name: name, Addresses: texts(p.Addresses), Open: p.Open, Conns: p.Conns, Note: note}
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
	return c.gate.database()
}

// checks gives the gate's checks; none before it is there.
func (c *Controller) checks() []handlers.Check {
	if !c.hasJoined() {
		return nil
	}
	return c.gate.checks()
}
