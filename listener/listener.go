package listener

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Listener is one net.Listener over a controller and a public port. Its
// methods may be called from any goroutine. Make it by New.
type Listener struct {
	cfg   Config
	met   *metrics
	state *machine
	note  *notifier // nil without OnPorts
	began time.Time

	controller, public *port
	door               *door // the public port's
	addr               net.Addr
	conSock            *controllerSocket // runController's; nil with one port
	pubSock            *publicSocket     // runPublic's

	// life ends at Close; it is the lifetime of the goroutines below, not the
	// context of any call.
	life   context.Context
	end    context.CancelFunc
	wg     sync.WaitGroup
	closed sync.Once
	fatal  atomic.Pointer[FatalError] // for the next Accept

	// onOpening is called before the public port begins to accept, onShed when
	// it is to take known clients alone, and when no more. Both may be nil;
	// they must not block.
	onOpening func()
	onShed    func(bool)

	openedOnce  sync.Once
	refusedOnce sync.Once
	refused     chan struct{} // closed when a drain has made the public port refuse
}

// assemble puts the parts together; nothing runs yet.
func assemble(cfg Config, met *metrics, s sockets) *Listener {
	l := &Listener{cfg: cfg, met: met, addr: s.addr(), conSock: s.controller, pubSock: s.public, began: time.Now(), refused: make(chan struct{})}
	l.life, l.end = context.WithCancel(context.Background())
	l.state = newMachine(cfg.rules(), l.changed)
	if cfg.OnPorts != nil {
		l.note = newNotifier(cfg.OnPorts, met.callback.Observe)
	}
	l.controller = l.newPort(PortController, cfg.Controller)
	l.public = l.newPort(PortPublic, cfg.Public)
	l.public.slots.set(cfg.Limits.Handshakes)
	l.door = newDoor(l.public, cfg.Limits, cfg.OpenRamp, l.began)
	l.public.door = l.door
	l.onOpening, l.onShed = l.door.opening, l.door.onlyKnown
	met.live.watch(l)
	l.state.bound(s.controller.addr(), s.public.at)
	return l
}

func (l *Listener) newPort(name Port, cfg PortConfig) *port {
	p := &port{
		name: name, cfg: cfg, life: l.life, log: l.cfg.Logger, met: l.met, wg: &l.wg,
		ready: make(chan net.Conn), classify: l.cfg.Classify,
		conns: make(map[*conn]bool), classes: make(map[Class]int),
	}
	p.slots.set(cfg.MaxHandshakes)
	return p
}

// start runs the goroutines. Close waits for all but the notifier.
func (l *Listener) start() {
	if l.note != nil {
		go l.note.run() // ends after the report of StateClosed
	}
	l.wg.Go(func() { l.door.run(l.life) })
	if l.cfg.OnePort {
		loop := l.acceptPublic()
		l.apply(event{kind: evOpened, reason: "the one port accepts"})
		l.wg.Go(func() { l.runPublic(loop) })
		return
	}
	l.wg.Go(l.runController)
	l.wg.Go(func() { l.runPublic(nil) })
	l.apply(event{kind: evBound, reason: "controller port accepts"})
}

// firstReport waits for the first call of OnPorts.
func (l *Listener) firstReport(ctx context.Context) error {
	if l.note == nil {
		return nil
	}
	select {
	case <-l.note.first:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// apply lets an event happen, and logs the change of state that came of it.
// It reports whether there was one.
func (l *Listener) apply(e event) bool {
	from, r, ok := l.state.apply(e)
	if !ok {
		return false
	}
	level := slog.LevelInfo
	switch r.State {
	case StatePublicFailed:
		level = slog.LevelError
	case StateShedding, StateReclosed:
		level = slog.LevelWarn
	}
	l.cfg.Logger.Log(l.life, level, "listener state", "from", from, "to", r.State, "reason", r.Reason)
	return true
}

// changed is told of every change of state, in order and under the machine's
// lock, so it only counts and queues.
func (l *Listener) changed(from State, r PortReport) {
	l.met.entered(from, r)
	if r.PublicOpen {
		l.openedOnce.Do(func() { l.met.opened(r.Since.Sub(l.began)) })
	}
	if l.note != nil {
		l.note.push(r)
	}
}

// runController accepts on the controller port until Close. A socket that is
// lost is made again; if that does not succeed in time the listener ends with
// a *FatalError.
func (l *Listener) runController() {
	defer l.conSock.close()
	for ln := l.conSock.ln; ln != nil; {
		err := l.acceptController(ln)
		if l.life.Err() != nil {
			return
		}
		if err == nil {
			err = net.ErrClosed // somebody closed a listener made by Config.Listen
		}
		l.cfg.Logger.Error("controller port lost; trying to have it again", "addr", l.addr, "err", err)
		ln = l.relisten(err)
	}
}

// acceptController accepts on ln until Close or until ln is lost. When it
// returns ln is closed, also in the kernel.
func (l *Listener) acceptController(ln net.Listener) error {
	lost, gone := make(chan struct{}), make(chan struct{})
	l.wg.Go(func() {
		defer close(gone)
		select {
		case <-lost:
		case <-l.life.Done():
		}
		ln.Close()
	})
	err := l.controller.acceptLoop(ln)
	close(lost)
	<-gone
	return err
}

// relisten makes the controller port's socket again. It returns nil when the
// listener has ended.
func (l *Listener) relisten(cause error) net.Listener {
	giveUp := time.Now().Add(l.cfg.Retry.ControllerLoss)
	for pause := acceptPauseMin; ; pause = min(2*pause, acceptPauseMax) {
		ln, err := l.conSock.listen(l.life)
		if err == nil {
			l.cfg.Logger.Info("controller port is back", "addr", l.addr)
			return ln
		}
		if l.life.Err() != nil {
			return nil
		}
		if time.Now().After(giveUp) {
			l.cfg.Logger.Error("controller port lost for good", "addr", l.addr, "err", err)
			fatal := &FatalError{Err: newPortError(PortController, l.conSock.want, "listen", err)}
			l.fatal.Store(fatal)
			l.shut("controller port lost: " + cause.Error())
			return nil
		}
		sleep(l.life, pause)
	}
}

// Accept returns the next connection of either port, the controller port's
// first: a *tls.Conn where the port has TLS. After Close or Drain it returns
// net.ErrClosed at once; see FatalError for the one other error.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case <-l.life.Done():
		return nil, l.closedErr()
	default:
	}
	select {
	case c := <-l.controller.ready:
		l.controller.handedOut(c)
		return c, nil
	default:
	}
	select {
	case c := <-l.controller.ready:
		l.controller.handedOut(c)
		return c, nil
	case c := <-l.public.ready:
		l.public.handedOut(c)
		return c, nil
	case <-l.life.Done():
		return nil, l.closedErr()
	}
}

func (l *Listener) closedErr() error {
	if fatal := l.fatal.Swap(nil); fatal != nil {
		return fatal
	}
	return net.ErrClosed
}

// Addr is the address of the controller port, with Config.OnePort that of the
// public one; it never changes.
func (l *Listener) Addr() net.Addr { return l.addr }

// Close frees both ports at once, resets every connection that Accept has not
// returned, and waits for its own goroutines (not for a running OnPorts).
// Connections that Accept has returned are their owner's. It may be called
// repeatedly and always returns nil.
func (l *Listener) Close() error {
	l.shut("closed")
	l.wg.Wait()
	return nil
}

// shut begins the end; it does not wait.
func (l *Listener) shut(reason string) {
	l.closed.Do(func() {
		l.apply(event{kind: evClose, reason: reason})
		l.end()
		l.controller.abortPending()
		l.public.abortPending()
	})
}

// MarkStable says that the program can serve the public. A public port that
// has not been open opens after OpenDelay and OpenBarrier, one that sheds
// admits everybody again after 5 s, one that was closed again opens after a
// delay that doubles each time. Repeated calls do nothing.
func (l *Listener) MarkStable(reason string) { l.apply(event{kind: evStable, reason: reason}) }

// MarkUnstable says that the program cannot serve the public now. It calls off
// an opening at once. An open port goes on for UnstableGrace, then sheds: it
// admits only clients it knows; after ReclosePeriod of that it refuses, and
// live connections are kept. MarkStable ends it. Repeated calls do nothing but
// change the reason shown.
func (l *Listener) MarkUnstable(reason string) { l.apply(event{kind: evUnstable, reason: reason}) }

// SetKnown replaces the list of addresses whose connections are known: those
// of paired agents and trusted proxies, for example. They are served first, and
// have a higher rate. Sources of a login are known without being listed.
func (l *Listener) SetKnown(known []netip.Prefix) { l.door.setKnown(known) }

// WaitPublic waits until the public port accepts and gives its address. It
// returns ctx's error, or net.ErrClosed when the port will not open any more.
func (l *Listener) WaitPublic(ctx context.Context) (net.Addr, error) {
	for {
		r, changed := l.state.watch()
		switch r.State {
		case StateOpen, StateShedding:
			return l.pubSock.at, nil
		case StateDraining, StateClosed:
			return nil, net.ErrClosed
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Refuse is the first part of Drain: when it returns, the public port refuses
// for good, while both ports' connections and the controller port go on. Drain
// must follow.
func (l *Listener) Refuse() {
	l.apply(event{kind: evDrain, reason: "drain asked for"})
	select {
	case <-l.refused:
	case <-l.life.Done():
	}
}

// Drain ends the listener gently: the public port refuses, its connections are
// waited for, then the controller port closes. The caller makes the
// connections end (by http.Server.SetKeepAlivesEnabled and its own farewells).
// When ctx ends first, the public connections that are left are reset and
// ctx's error is returned. At the end Accept returns net.ErrClosed, and so does
// http.Server.Serve if Shutdown was not called before. Close during Drain ends it with net.ErrClosed; a
// second Drain waits for the first; Drain after Close does nothing.
func (l *Listener) Drain(ctx context.Context) error {
	l.Refuse()
	if l.state.report().State == StateClosed {
		return nil
	}
	var err error
	if !l.public.awaitEmpty(ctx) {
		if l.life.Err() != nil {
			return net.ErrClosed
		}
		err = ctx.Err()
		l.public.abortAll()
	}
	l.shut("drained")
	l.wg.Wait()
	return err
}
