package controller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/internal/pki"
	"headgate/internal/store"
	"headgate/migrations"
	"headgate/openapi"
	"headgate/tasks"
)

// parts are what exists only when the database answers.
type parts struct {
	db        *store.DB
	fleet     *fleet.Fleet
	authority *pki.Authority
	manager   *tasks.Manager
	service   *tasks.Service
	peers     *peerClient // other controllers; nil without a controller port
	auth      *auth.Service
}

// Intervals of the join and of what follows it.
const (
	readyPoll  = 20 * time.Millisecond // cheap, and felt in every start
	beat       = 5 * time.Second       // a quarter of what others allow
	wakeTopic  = "headgate_wake"       // LISTEN channel of all controllers
	adminToken = "up"                  // name of the token in admin-token-file

	firstTokenFile = "admin-token" // in the state directory of a new installation
	// minRenewPause keeps a renewal that fails from being tried without pause.
	minRenewPause = time.Minute
)

// worthAnotherTry says whether waiting can help: a database that is down or
// starting, yes; a wrong connection string or a newer schema, no.
func worthAnotherTry(err error) bool {
	if _, wrong := errors.AsType[*migrations.VersionError](err); wrong {
		return false
	}
	switch fault.KindOf(err) {
	case fault.Invalid, fault.Malformed, fault.Precondition:
		return false
	}
	return true
}

// away says whether an error is of a database that is away for now. While a
// controller joins, nothing else is worth another try: a key that must be
// copied by hand does not come by waiting, and whoever starts the controller is to see
// what is missing.
func away(err error) bool {
	return fault.KindOf(err) == fault.Unavailable && fault.CodeOf(err) != pki.CodeCAKeyMissing
}

// sentence gives what a user may read of an error. The hint of what is
// unavailable is left out: it tells callers to try again, which the controller
// does by itself.
func sentence(err error) string {
	e, ok := errors.AsType[*fault.Error](err)
	switch {
	case !ok:
		return err.Error()
	case e.Hint == "" || e.Kind == fault.Unavailable:
		return e.Message
	}
	return strings.TrimSuffix(e.Message, ".") + ": " + e.Hint
}

// prepareDatabase checks that the server keeps what it acknowledges and
// brings the schema up to date.
func (c *Controller) prepareDatabase(ctx context.Context, db *store.DB) error {
	if !c.cfg.UnsafeDurability {
		if err := db.CheckDurability(ctx); err != nil {
			c.ready.explain("database", sentence(err))
			return err
		}
	}
	c.ready.met("database")
	c.ready.explain("migrations", "being applied")
	if why := db.Pooled(); why != "" {
		c.log.Warn("the way to the database is not direct", "why", why)
	}
	if err := migrate(ctx, db); err != nil {
		c.ready.explain("migrations", sentence(err))
		return err
	}
	c.ready.met("migrations")
	return nil
}

// join makes this process a controller among its peers: it takes shards,
// connects to their agents, has the queue swept once and calls itself.
func (c *Controller) join(ctx context.Context, sup *supervisor) error {
	c.ready.enter(phaseJoin)
	for _, step := range []func(context.Context, *supervisor) error{c.makeFleet, c.makeQueue, c.makeAuth, c.makeGate, c.startParts, c.openAPI} {
		if err := step(ctx, sup); err != nil {
			return err
		}
	}
	close(c.joined)
	if err := c.awaitQueue(ctx); err != nil {
		return err
	}
	c.gate.begin()
	select {
	case <-c.gate.first:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Controller) makeFleet(ctx context.Context, _ *supervisor) error {
	f, err := fleet.New(fleet.Config{
		Store: c.parts.db, Dir: c.state.dir, ControllerID: c.state.id, FleetName: c.cfg.Fleet, Version: c.opts.Version,
		AllowLoopback: c.cfg.AllowLoopbackAgents, Deny: c.isOurs,
		Logger: c.opts.Logger, Registerer: c.registry,
		Publish: c.publishAgent, ProbeLag: c.probeLag, PingElsewhere: c.pingElsewhere,
		HasWork: func(n tasks.AgentNum) bool { return c.parts.manager.HasWork(n) },
	})
	if err != nil {
		return err
	}
	var authority *pki.Authority
	err = c.insist(ctx, away, func() (err error) {
		authority, err = f.EnsureCA(ctx)
		return err
	})
	if err != nil {
		return err
	}
	c.parts.fleet, c.parts.authority = f, authority
	return c.state.adopt(authority, listeningOn(c.cfg.ControllerAddr), time.Now())
}

// probeLag sets the pace of dials after a start. The fleet asks only while it
// runs, when the gate is there.
func (c *Controller) probeLag() time.Duration { return c.gate.lag() }

// isOurs keeps the fleet from dialling our own ports.
func (c *Controller) isOurs(to netip.AddrPort) bool {
	ports := c.listener.Ports()
	same := func(a netip.AddrPort) bool {
		return a.Port() == to.Port() && (a.Addr() == to.Addr() || a.Addr().IsUnspecified() && to.Addr().IsLoopback())
	}
	return slices.ContainsFunc(ports.Controller, same) || slices.ContainsFunc(ports.Public, same)
}

// publishAgent tells pages and event streams that an agent changed.
func (c *Controller) publishAgent(e fleet.Event) {
	select {
	case c.agents <- struct{}{}:
	default: // it is known already that something changed
	}
	if e.What != fleet.EventHealth {
		c.wakeOthers(wakeAgents)()
	}
	if m := c.parts.manager; m != nil {
		m.Hub().Publish(tasks.Event{Type: tasks.EventAgent, Agent: e.View.ID, State: tasks.State(e.View.Live.Health)})
	}
}

func (c *Controller) makeQueue(ctx context.Context, _ *supervisor) error {
	p := &c.parts
	owner := tasks.Owner{ID: c.state.owner, Addr: c.advertised(), Name: c.name()}
	cfg := tasks.Config{
		Store: p.db, Runner: p.fleet, Owner: owner, Former: c.state.former, Released: c.wakeOthers(wakeShards),
		Loops: c.cfg.Queueing.loops(), Limits: c.cfg.Queueing.Limits,
		Logger: c.opts.Logger, Registerer: c.registry,
	}
	if c.cfg.TwoPhase {
		p.peers = newPeers(p.fleet.Identity(), p.fleet.Roots(), c.log)
		cfg.Peers = p.peers
	}
	p.manager = tasks.NewManager(cfg)
	p.service = tasks.NewService(tasks.ServiceConfig{Manager: p.manager, Kinds: kinds.Default()})
	p.manager.OnCompleted(kinds.Inventory, c.keepFacts)
	p.fleet.Attach(p.manager)
	return c.insist(ctx, away, func() error { return c.register(ctx) })
}

// register reads what there is and makes this controller known to the others.
// It may be done again when the database goes away in the middle.
func (c *Controller) register(ctx context.Context) error {
	if err := c.parts.fleet.Load(ctx); err != nil {
		return err
	}
	if err := c.checkAdvertised(ctx); err != nil {
		return err
	}
	return c.parts.db.RegisterController(ctx, store.Controller{
		ID: c.state.owner, Name: c.name(), Addr: c.advertised(), Version: c.opts.Version, StartedAt: c.began,
		Identity: c.state.id, Host: hostIdentity(),
	}, c.state.former)
}

// makeGate prepares what decides whether this controller may serve the public.
func (c *Controller) makeGate(context.Context, *supervisor) error {
	c.gate = newStability(stabilityConfig{
		Marker: c.listener, Ready: c.ready, Database: c.parts.db.Probe, SelfCall: c.selfCall,
		Resources: ownResources, Dials: func() int { return c.parts.fleet.DialLoad().Waiting }, Leaving: c.leaves, Log: c.log, Registry: c.registry,
	})
	return nil
}

// awaitMajority is the listener's barrier before each opening of the public
// port, which the gate has then allowed.
func (c *Controller) awaitMajority(ctx context.Context) error {
	return barrier{peers: c.parts.db, id: c.state.owner, log: c.log}.wait(ctx)
}

// advertised is where other controllers reach this one.
func (c *Controller) advertised() string {
	if c.cfg.ControllerAdvertise != "" {
		return c.cfg.ControllerAdvertise
	}
	return reachable(c.listener.Ports().Controller)
}

// name is for people: the host's name.
func (c *Controller) name() string { return hostname() }

func hostname() string {
	host, err := os.Hostname()
	if err != nil {
		return "controller"
	}
	return host
}

func (c *Controller) makeAuth(ctx context.Context, _ *supervisor) error {
	var err error
	c.parts.auth, err = auth.New(auth.Config{
		Store: c.parts.db, Logger: c.opts.Logger.With("component", "auth"),
		AllowedHosts: c.cfg.AllowedHosts, SecureCookie: c.cfg.ProxyTLS, CookiePath: c.cfg.BasePath + "/",
	})
	if err != nil {
		return err
	}
	return c.insist(ctx, away, func() error {
		file, err := c.adminTokenFile(ctx)
		if err != nil || file == "" {
			return err
		}
		_, err = c.parts.auth.EnsureTokenFile(ctx, file, adminToken, auth.Admin)
		return err
	})
}

// adminTokenFile gives the file that the configuration names. Without one, a
// new installation gets a token in the state directory, since otherwise there
// would be no way in.
func (c *Controller) adminTokenFile(ctx context.Context) (string, error) {
	if c.cfg.AdminTokenFile != "" {
		return c.cfg.AdminTokenFile, nil
	}
	tokens, err := c.parts.auth.Tokens(ctx)
	if err != nil || len(tokens) > 0 {
		return "", err
	}
	file := filepath.Join(c.state.path, firstTokenFile)
	c.log.Warn("nobody can sign in yet; made a first API token of role admin", "file", file)
	return file, nil
}

// startParts starts the loops; they stop in the reverse order, so that agents
// can still answer while the last turn is written.
func (c *Controller) startParts(_ context.Context, sup *supervisor) error {
	p := c.parts
	sup.onStop("registration", c.unregister)
	sup.run("auth", p.auth.Run)
	sup.run("heartbeat", c.heartbeat)
	sup.run("upkeep", c.upkeep)
	sup.run("retention", c.retention)
	sup.run("facts", c.catchUpFacts)
	sup.run("queue upkeep", c.tendQueue)
	sup.run("database watch", c.watchDatabase)
	sup.run("certificate", c.renewPort)
	sup.run("wake-ups", c.listen)
	sup.run("wake others", c.wake)
	sup.run("epochs", c.watchEpochs)
	if p.peers != nil {
		sup.run("peers", c.followPeers)
	}
	sup.run("known sources", c.keepKnown)
	sup.run("fleet", p.fleet.Run)
	sup.run("manager", p.manager.Run)
	sup.run("gate", c.gate.run)
	return nil
}

// unregister tells other controllers that this one has gone. They find out by
// its silence too, so a database that is down does not spoil a clean stop.
func (c *Controller) unregister(ctx context.Context) error {
	if err := c.parts.db.Unregister(ctx, c.state.owner); err != nil {
		c.log.Warn("tell the other controllers that this one stops", "err", err)
	}
	return nil
}

// heartbeat tells other controllers that this one lives, and whether it is fit
// to serve, which they hear at once when it changes.
func (c *Controller) heartbeat(ctx context.Context) error {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c.leaves: // drain has signed this controller off
			<-ctx.Done()
			return nil
		case <-tick.C:
		case <-c.gate.turn:
		}
		if _, err := c.parts.db.Heartbeat(ctx, c.state.owner, c.gate.isStable()); err != nil && ctx.Err() == nil {
			c.log.Warn("tell the other controllers that this one lives", "err", err)
		}
	}
}

// renewPort gives the controller port a new certificate when half the life of
// the present one is over; connections that are open stay.
func (c *Controller) renewPort(ctx context.Context) error {
	for {
		wait := time.Until(pki.RenewAt(c.state.port.Leaf()))
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(wait, minRenewPause)):
		}
		if err := c.state.adopt(c.parts.authority, listeningOn(c.cfg.ControllerAddr), time.Now()); err != nil {
			c.log.Error("renew the certificate of the controller port", "err", err)
		}
	}
}

// listen takes wake-ups from other controllers: somebody changed the agents, or
// gave shards back. Whatever was sent while nobody listened is made good by
// looking at both.
func (c *Controller) listen(ctx context.Context) error {
	n := c.parts.db.NewNotifier(wakeTopic)
	hear := func(what string) {
		if what != wakeAgents {
			c.parts.manager.LookAtShards()
		}
		if what != wakeShards {
			c.parts.fleet.Reload()
		}
	}
	for ctx.Err() == nil {
		err := n.Run(ctx, hear, func() { hear("") })
		if ctx.Err() != nil {
			return nil
		}
		c.log.Warn("listening for wake-ups ended; trying again", "err", err)
		select {
		case <-time.After(maxDatabasePause):
		case <-ctx.Done():
		}
	}
	return nil
}

// openAPI puts the whole API in place of what was served during the start.
func (c *Controller) openAPI(context.Context, *supervisor) error {
	dashboard, err := c.dashboard()
	if err != nil {
		return err
	}
	cfg := c.handlersConfig()
	cfg.Auth, cfg.Tasks, cfg.Manager, cfg.Fleet = c.parts.auth, c.parts.service, c.parts.manager, c.parts.fleet
	cfg.Hub = c.parts.manager.Hub()
	cfg.Manager = c.parts.manager
	cfg.Web, cfg.OpenAPI, cfg.Swagger, cfg.Reference = dashboard, openapi.Document(c.cfg.BasePath), openapi.Swagger(), openapi.Reference(c.cfg.BasePath)
	cfg.Registerer = c.registry
	handler := handlers.New(cfg)
	c.handler.Store(&handler)
	return nil
}

func (c *Controller) metricsHandler() http.Handler {
	return promhttp.HandlerFor(c.registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// awaitQueue waits until the shards are held, the queue was swept once and
// the agents are being asked.
func (c *Controller) awaitQueue(ctx context.Context) error {
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		unmet := c.parts.manager.Ready()
		still := map[string]bool{}
		for _, u := range unmet {
			still[u.Name] = true
			c.ready.explain(u.Name, u.Detail)
		}
		for _, name := range []string{"shards", "first_sweep", "reconcile"} {
			if !still[name] {
				c.ready.met(name)
			}
		}
		if len(unmet) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// openPublic waits until the listener has opened the public port, which the
// gate has allowed.
func (c *Controller) openPublic(ctx context.Context, _ *supervisor) error {
	c.ready.enter(phaseOpening)
	if _, err := c.listener.WaitPublic(ctx); err != nil {
		return fmt.Errorf("open the public port: %w", err)
	}
	c.ready.enter(phaseServing)
	close(c.opened)
	c.log.Info("serving", "took", time.Since(c.began), "public", c.Endpoints().PublicURL, "controller", c.Endpoints().ControllerURL)
	return nil
}
