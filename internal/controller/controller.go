package controller

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"headgate/handlers"
	"headgate/internal/pki"
	"headgate/internal/store"
	"headgate/listener"
	"headgate/tasks"
)

// Options are what the program around a controller gives it.
type Options struct {
	Version string
	Logger  *slog.Logger // nil = discard

	ServiceManager ServiceManager
	// Activation takes the sockets that the service manager passed to this
	// process in place of the addresses of the settings.
	Activation bool
}

// Endpoints says where a controller is reached. URLs have no trailing slash;
// the public one ends with the base path.
type Endpoints struct {
	PublicURL     string
	ControllerURL string
	CAFile        string
}

// Controller is one start of `headgate serve`. New reads the state directory
// and binds the ports; Run does the rest until its context ends.
type Controller struct {
	cfg      Config
	loaded   Config // with the settings that Reload has applied; its own
	opts     Options
	log      *slog.Logger
	began    time.Time
	ready    *readiness
	herald   *herald
	registry *prometheus.Registry
	state    *state
	public   *tls.Config // of the public port; nil = plain HTTP
	listener *listener.Listener
	server   *http.Server
	handler  atomic.Pointer[http.Handler] // replaced when the controller has joined
	farewell *handlers.Farewell           // ends streams and waits in drain
	parting  atomic.Bool                  // drain has begun to tell connections that they end

	parts  parts                    // set by join
	gate   *stability               // set by join
	leaves chan struct{}            // closed when the stop begins
	agents chan struct{}            // capacity 1: an agent has changed
	wakes  map[string]chan struct{} // to other controllers, by what they are about
	notes  atomic.Pointer[[]string] // about the database, for operators
	joined chan struct{}
	opened chan struct{}
}

// HTTP limits of both ports.
const (
	headerTimeout = 10 * time.Second  // a client that sends no header in this time is gone
	idleTimeout   = 120 * time.Second // of a kept connection
	maxHeader     = 64 << 10
	maxStreams    = 100 // requests at one time over one HTTP/2 connection
)

// New takes the phases parse (done by LoadConfig), open and bind: when it
// returns, the controller port is bound and the public port reserved, so that
// every conflict shows now. Run must follow.
func New(cfg Config, opts Options) (*Controller, error) {
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Controller{
		cfg: cfg, loaded: cfg, opts: opts, log: opts.Logger.With("component", "controller"),
		began: time.Now(), registry: newRegistry(),
		farewell: handlers.NewFarewell(), joined: make(chan struct{}), leaves: make(chan struct{}), agents: make(chan struct{}, 1), opened: make(chan struct{}),
		wakes: newWakes(),
	}
	c.ready = newReadiness(c.began)
	c.herald = newHerald(opts.ServiceManager, c.log)
	c.ready.enter(phaseOpen)
	var err error
	if c.state, err = openState(cfg.Data, listeningOn(cfg.ControllerAddr), c.began); err != nil {
		return nil, err
	}
	c.ready.enter(phaseBind)
	if err := c.bind(); err != nil {
		return nil, errors.Join(err, c.state.close())
	}
	return c, nil
}

func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// listeningOn gives the address of the controller port for its certificate,
// when it is one address and not all of them.
func listeningOn(addr string) []netip.Addr {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil
	}
	ip, err := netip.ParseAddr(host)
	if err != nil || ip.IsUnspecified() {
		return nil
	}
	return []netip.Addr{ip}
}

// bind takes both ports and prepares the HTTP server, which at first answers
// only what needs no database.
func (c *Controller) bind() error {
	if c.cfg.publicTLS() {
		var err error
		if c.public, err = pki.PublicPort(c.cfg.TLSCertFile, c.cfg.TLSKeyFile, c.log); err != nil {
			return err
		}
	}
	c.server = &http.Server{
		Handler:           http.HandlerFunc(c.answer),
		ConnContext:       listener.ConnContext,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ErrorLog:          slog.NewLogLogger(c.log.Handler(), slog.LevelDebug),
	}
	var passed []listener.Socket
	if c.opts.Activation {
		var err error
		if passed, err = listener.ActivatedFromEnv(); err != nil {
			return err
		}
	}
	l, err := listener.New(context.Background(), c.listenerConfig(passed))
	if err != nil {
		return err
	}
	c.listener = l
	l.SetKnown(c.alwaysKnown())
	if err := c.checkPassed(); err != nil {
		return errors.Join(err, l.Close())
	}
	starting, err := c.startingHandler()
	if err != nil {
		return errors.Join(err, l.Close())
	}
	c.handler.Store(&starting)
	return nil
}

// listenerConfig gives what the settings say of the two ports.
func (c *Controller) listenerConfig(passed []listener.Socket) listener.Config {
	var own listener.PortConfig
	if c.cfg.TwoPhase {
		own = listener.PortConfig{Addr: c.cfg.ControllerAddr, TLS: pki.ControllerPort(c.state.port, c.state.roots)}
	}
	return listener.Config{
		Controller: own,
		OnePort:    !c.cfg.TwoPhase,
		Public: listener.PortConfig{
			Addr: c.cfg.PublicAddr, TLS: c.public,
			HandshakeTimeout: c.cfg.Listening.HandshakeTimeout, FirstByteTimeout: c.cfg.Listening.FirstByteTimeout,
		},
		OpenDelay:     c.cfg.OpenDelay,
		OpenRamp:      c.cfg.Listening.OpenRamp,
		OpenWarnAfter: c.cfg.Listening.OpenWarnAfter,
		UnstableGrace: c.cfg.Listening.UnstableGrace,
		ReclosePeriod: c.cfg.Listening.RecloseAfter,
		MinOpen:       c.cfg.Listening.MinOpen,
		Limits:        c.cfg.Listening.Limits,

		OpenBarrier:        c.awaitMajority,
		OpenBarrierTimeout: c.cfg.Listening.OpenBarrierTimeout,

		OnPorts:       c.onPorts,
		Activated:     passed,
		ActivatedHold: c.cfg.ActivatedHold,
		Logger:        c.log,
		Registerer:    c.registry,
	}
}

// checkPassed refuses plain HTTP beyond this machine as validate does, for the
// address that counts: a passed socket may have another one than the settings.
// The port where the controller calls itself must have one at all.
func (c *Controller) checkPassed() error {
	at := c.listener.Ports()
	own, name, path := at.Controller, "controller", at.ControllerPath
	if !c.cfg.TwoPhase {
		own, name, path = at.Public, "public", at.PublicPath
	}
	if len(own) == 0 {
		return fmt.Errorf("the socket that was passed for the %s port is %s; it must be one of TCP (ListenStream= with a port)", name, path)
	}
	if c.cfg.publicTLS() || c.cfg.ProxyTLS {
		return nil
	}
	for _, at := range c.listener.Ports().Public {
		if !at.Addr().IsLoopback() {
			return fmt.Errorf("the public port would be served at %s, without TLS beyond this machine; give tls-cert-file and tls-key-file, or proxy-tls if a proxy ends TLS", at)
		}
	}
	return nil
}

// onPorts logs each change of the listener with the real port numbers, and
// tells pages, event streams and the service manager of it.
func (c *Controller) onPorts(r listener.PortReport) {
	if c.hasJoined() {
		c.parts.manager.Hub().Publish(tasks.Event{Type: tasks.EventController})
	}
	c.log.Info("ports", "state", r.State, "controller", r.Controller, "public", r.Public, "public_open", r.PublicOpen, "reason", r.Reason, "err", r.Err)
	c.herald.portsChanged(r, c.readiness())
}

// Run takes the phases database, join and open public, serves until ctx ends
// or a part fails, and then drains. It returns nil after a clean stop.
func (c *Controller) Run(ctx context.Context) error {
	sup := newSupervisor(ctx, c.log)
	sup.onStop("state", func(context.Context) error { return c.state.close() })
	sup.onStop("listener", func(context.Context) error { return c.listener.Close() })
	sup.run("http", c.serve)
	c.keepServiceManager(sup)
	runErr := c.startAndWait(ctx, sup)
	c.herald.stopping(c.cfg.DrainLead + c.cfg.DrainTimeout + stopTimeout + stopMargin)
	return errors.Join(runErr, c.drain(ctx, sup))
}

// startAndWait takes the phases one after the other, then waits.
func (c *Controller) startAndWait(ctx context.Context, sup *supervisor) error {
	for _, phase := range []func(context.Context, *supervisor) error{c.database, c.join, c.openPublic} {
		phaseCtx, cancel := context.WithCancelCause(ctx)
		stop := make(chan struct{})
		go func() { // a part that fails during a phase ends the phase
			select {
			case err := <-sup.failed:
				cancel(err)
			case <-stop:
			}
		}()
		err := phase(phaseCtx, sup)
		close(stop)
		cause := context.Cause(phaseCtx)
		cancel(nil)
		if ctx.Err() != nil {
			return nil // told to stop during the start
		}
		if err != nil {
			return errors.Join(err, ignoreCancel(cause))
		}
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-sup.failed:
		return err
	}
}

// ignoreCancel drops the plain cancellation that carries no news.
func ignoreCancel(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// serve runs the HTTP server on both ports until drain has shut it down.
func (c *Controller) serve(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- c.server.Serve(c.listener) }()
	select {
	case err := <-done:
		if closed(err) {
			<-ctx.Done() // shut down by drain, which ends this part next
			return nil
		}
		return err
	case <-ctx.Done():
		err := c.server.Close()
		if end := <-done; !closed(end) {
			err = errors.Join(err, end)
		}
		return err
	}
}

// closed says whether Serve ended because it was told to.
func closed(err error) bool {
	return errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed)
}

// Pauses between tries to reach the database: quick at first, since a server
// that restarts is back soon; bounded, so that it is found within seconds.
const (
	firstDatabasePause = 100 * time.Millisecond
	maxDatabasePause   = 3 * time.Second
)

// database connects without end and brings the schema up to date.
func (c *Controller) database(ctx context.Context, sup *supervisor) error {
	c.ready.enter(phaseDatabase)
	return c.insist(ctx, worthAnotherTry, func() error {
		db, err := c.openDatabase(ctx)
		if err != nil {
			return err
		}
		c.parts.db = db
		sup.onStop("database", func(context.Context) error { return db.Close() })
		return nil
	})
}

// insist does something with the database again and again until it succeeds or
// fails in a way for which waiting does not help.
func (c *Controller) insist(ctx context.Context, passes func(error) bool, do func() error) error {
	pause, last := firstDatabasePause, ""
	for {
		err := do()
		if err == nil || !passes(err) {
			return err
		}
		if text := err.Error(); text != last {
			c.log.Warn("the database is not usable yet; trying again until it is", "err", err)
			last = text
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		pause = min(2*pause, maxDatabasePause)
	}
}

func (c *Controller) openDatabase(ctx context.Context) (*store.DB, error) {
	metrics := prometheus.NewRegistry() // a try that fails leaves none behind
	db, err := store.Open(ctx, store.Config{DSN: c.cfg.DatabaseURL, DirectDSN: c.cfg.DatabaseDirectURL, Log: c.log, Metrics: metrics})
	if err != nil {
		c.ready.explain("database", sentence(err))
		return nil, err
	}
	if err := c.prepareDatabase(ctx, db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, c.registry.Register(metrics)
}

// Joined is closed when the controller port serves the whole API.
func (c *Controller) Joined() <-chan struct{} { return c.joined }

// Opened is closed when the public port is open.
func (c *Controller) Opened() <-chan struct{} { return c.opened }

// Endpoints gives the real addresses; the public one is known since New,
// also while that port refuses.
func (c *Controller) Endpoints() Endpoints {
	ports := c.listener.Ports()
	scheme := "http"
	if c.cfg.publicTLS() {
		scheme = "https"
	}
	public := scheme + "://" + reachable(ports.Public)
	e := Endpoints{
		PublicURL:     public + c.cfg.BasePath,
		ControllerURL: "https://" + reachable(ports.Controller),
		CAFile:        c.state.path + "/" + caFile,
	}
	if !c.cfg.TwoPhase {
		e.ControllerURL = public
		if c.cfg.publicTLS() {
			e.CAFile = absolute(c.cfg.TLSCertFile)
		}
	}
	return e
}

// absolute gives a path that means the same in every folder.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// reachable gives host:port for this machine: a port on all addresses is
// reached by loopback.
func reachable(addrs []netip.AddrPort) string {
	if len(addrs) == 0 {
		return ""
	}
	a := addrs[0]
	if a.Addr().IsUnspecified() {
		a = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.Port())
	}
	return a.String()
}
