package listener

import (
	"context"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"headgate/listener/admission"
)

const (
	// failedHandshakeCost is what a handshake that fails costs its source, the
	// token of the connection itself included.
	failedHandshakeCost = 5
	// openRampFrom is the part of the public rate that an opening begins with.
	openRampFrom = 0.25
	// summaryEvery is how often refusals are logged.
	summaryEvery = 10 * time.Second
)

// door admits the connections of the public port: at once, after a wait in the
// fair queue, or never. All its fields but the channels and atomics are guarded
// by the port's mu, because what it decides and what the port holds change
// together. One goroutine, run, serves the queue; a connection that need not
// wait never meets it.
type door struct {
	p    *port
	ramp time.Duration
	wake chan struct{} // capacity 1: the queue, or what holds it up, has changed
	lim  atomic.Pointer[Limits]
	look fdLook // the accept loop's

	only    bool // known sources alone are admitted
	sources *admission.Sources
	queue   *admission.Queue[*admission.Source, waiter]
	pacer   admission.Pacer
	ids     map[who]int // connections charged to identities
	retry   backoff
	tellAt  time.Time // when refusals are logged; zero: there are none
	top     []SourceStatus
	topAt   time.Time // of top
}

// waiter is a connection in the queue. A ghost is let in already: in observe
// mode it stands in the queue only to show what would become of it.
type waiter struct {
	c     *conn
	ghost bool
}

func newDoor(p *port, limits Limits, ramp time.Duration, now time.Time) *door {
	d := &door{
		p: p, ramp: ramp, wake: make(chan struct{}, 1),
		sources: admission.NewSources(0, limits.source()),
		queue:   admission.NewQueue[*admission.Source, waiter](limits.line()),
		ids:     make(map[who]int),
	}
	d.lim.Store(&limits)
	d.pacer.SetRate(now, limits.PublicRate)
	p.slots.onFree, p.slots.shared = d.wakeUp, true
	return d
}

// wakeUp makes run look at the queue again; it never blocks.
func (d *door) wakeUp() {
	select {
	case d.wake <- struct{}{}:
	default: // it has been woken already
	}
}

// update changes the limits.
func (d *door) update(now time.Time, limits Limits) {
	d.p.mu.Lock()
	d.sources.SetRates(now, limits.source())
	d.pacer.SetRate(now, limits.PublicRate)
	d.queue.SetConfig(limits.line())
	d.queue.UnparkAll()
	d.lim.Store(&limits)
	d.p.slots.set(limits.Handshakes)
	d.p.mu.Unlock()
	d.wakeUp()
}

// setKnown replaces the list of known addresses.
func (d *door) setKnown(known []netip.Prefix) {
	d.p.mu.Lock()
	d.sources.SetKnown(known)
	d.queue.UnparkAll()
	d.p.mu.Unlock()
	d.wakeUp()
}

// opening begins the slow start.
func (d *door) opening() {
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	if d.ramp > 0 {
		d.pacer.Ramp(time.Now(), openRampFrom, d.ramp)
	}
}

// onlyKnown says whether known sources alone are admitted.
func (d *door) onlyKnown(only bool) {
	d.p.mu.Lock()
	d.only = only
	d.p.mu.Unlock()
	d.wakeUp()
}

// ruling is what becomes of a newcomer.
type ruling struct {
	refused string // reason; "" when it is let in or waits
	waits   bool
	lost    *conn // the one that lost its place in the queue to it
}

// arrive takes a new connection in. It is called by the accept loop.
func (d *door) arrive(c *conn) {
	scarce := d.look.scarce(c.Conn, d.lim.Load().FDReserve)
	d.p.mu.Lock()
	v := d.decide(c, scarce)
	d.p.mu.Unlock()
	switch {
	case v.refused != "":
		d.p.discard(c, v.refused)
	case v.waits:
		d.wakeUp()
	default:
		d.p.met.queueWait.Observe(0)
		d.p.start(c)
	}
	if v.lost != nil {
		d.p.discard(v.lost, refusedQueueFull)
	}
}

// decide judges a newcomer and notes what becomes of it; the caller holds mu.
func (d *door) decide(c *conn, scarce bool) (v ruling) {
	now, lim := c.info.AcceptedAt, d.lim.Load()
	c.source = d.sources.Get(now, c.info.Source)
	c.info.Class = ClassUnknown
	known := d.sources.Known(now, c.source)
	if known {
		c.info.Class = ClassKnown
	}
	if d.p.ended {
		return ruling{refused: refusedNotOpen}
	}
	if lim.Mode == ModeOff {
		d.p.keep(c)
		return v
	}
	enforce := lim.Mode == ModeEnforce
	if why := d.objection(c, lim, known, scarce); why != "" {
		d.objected(now, c.source, why, enforce)
		if enforce {
			return ruling{refused: why}
		}
	} else if !d.straight(now, c.source, lim) {
		v = d.enqueue(now, c, known, enforce)
	}
	if v.refused != "" {
		d.uncharge(c)
		return v
	}
	d.p.keep(c)
	if !v.waits {
		d.begin(c)
	}
	return v
}

// objection gives the reason not even to let c wait. Without one c is charged
// to its source.
func (d *door) objection(c *conn, lim *Limits, known, scarce bool) string {
	switch {
	case len(d.p.conns) >= lim.hardCap():
		return refusedHardCap
	case scarce:
		return refusedFD
	case d.only && !known:
		return refusedShedding
	case !d.sources.Hold(c.source, lim.SourceConns):
		return refusedSourceConns
	}
	c.charged = true
	return ""
}

// uncharge ends what objection began.
func (d *door) uncharge(c *conn) {
	if c.charged {
		c.charged = false
		d.sources.Release(c.source)
	}
}

// straight takes what an admission costs if nobody is before c.
func (d *door) straight(now time.Time, s *admission.Source, lim *Limits) bool {
	d.holdLanes()
	if next := d.queue.NextAt(now); d.queue.LenKey(s) > 0 || !next.IsZero() && !next.After(now) || !d.paced(now) || !d.p.slots.free(d.sources.Known(now, s)) {
		return false
	}
	if ok, _ := d.may(now, s, lim); !ok {
		return false
	}
	return d.pacer.Take(now)
}

// paced reports whether the pace of all lets anybody in now.
func (d *door) paced(now time.Time) bool {
	at := d.pacer.ReadyAt(now)
	return !at.IsZero() && !at.After(now)
}

// holdLanes keeps those waiting for whom there is no place for a handshake;
// the end of one wakes us.
func (d *door) holdLanes() {
	d.queue.Hold(admission.First, !d.p.slots.free(true))
	d.queue.Hold(admission.Second, !d.p.slots.free(false))
}

// may takes the source's token if the source may go now; else it gives the
// moment to ask again, the zero time standing for the end of one of the
// source's handshakes.
func (d *door) may(now time.Time, s *admission.Source, lim *Limits) (bool, time.Time) {
	if d.p.cfg.TLS != nil && !d.sources.CanBegin(s, lim.HandshakesPerSource) {
		return false, time.Time{}
	}
	if d.sources.Take(now, s) {
		return true, time.Time{}
	}
	return false, d.sources.ReadyAt(now, s)
}

// enqueue lets c wait, or its ghost when limits are only observed.
func (d *door) enqueue(now time.Time, c *conn, known, enforce bool) (v ruling) {
	lane := admission.Second
	if known {
		lane = admission.First
	}
	lost, what := d.queue.Push(now, lane, c.source, waiter{c: c, ghost: !enforce})
	switch what {
	case admission.Queued:
	case admission.Displaced:
		d.objected(now, lost.c.source, refusedQueueFull, !lost.ghost)
		if !lost.ghost {
			v.lost = lost.c
		}
	case admission.KeyFull, admission.AllFull:
		why := refusedQueueFull
		if what == admission.KeyFull && d.waitsForItself(now, c.source) {
			why = refusedRateSource
		}
		d.objected(now, c.source, why, enforce)
		if enforce {
			v.refused = why
		}
		return v
	}
	v.waits = enforce
	return v
}

// waitsForItself reports whether a source is held up by its own rate.
func (d *door) waitsForItself(now time.Time, s *admission.Source) bool {
	at := d.sources.ReadyAt(now, s)
	return at.IsZero() || at.After(now)
}

// objected counts a refusal, real or not.
func (d *door) objected(now time.Time, s *admission.Source, why string, enforced bool) {
	d.sources.Refuse(s, why)
	if !enforced {
		d.p.met.wouldRefuse.WithLabelValues(why).Inc()
	}
	if d.tellAt.IsZero() {
		d.tellAt = now.Add(summaryEvery)
		d.wakeUp()
	}
}

// begin notes that the handshake of c, if it has one, takes a place of its
// source.
func (d *door) begin(c *conn) {
	if d.p.cfg.TLS != nil {
		c.busy = true
		d.sources.Begin(c.source)
	}
}

// handshakeEnded gives that place back. A failure costs the source more.
func (d *door) handshakeEnded(c *conn, failed bool) {
	d.p.mu.Lock()
	if failed && d.lim.Load().Mode != ModeOff {
		d.sources.Charge(time.Now(), c.source, failedHandshakeCost-1)
	}
	d.idle(c)
	d.p.mu.Unlock()
}

func (d *door) idle(c *conn) {
	if !c.busy {
		return
	}
	c.busy = false
	d.sources.End(c.source)
	if d.queue.LenKey(c.source) > 0 {
		d.queue.Unpark(c.source)
		d.wakeUp()
	}
}

// identified moves c from the budget of its source to that of its identity;
// the caller holds mu.
func (d *door) identified(now time.Time, c *conn, w who) {
	lim := d.lim.Load()
	d.sources.Login(now, c.source)
	if lim.Mode != ModeOff {
		d.sources.Give(now, c.source)
	}
	limit := lim.IdentityConns.User
	if w.class == ClassAgent {
		limit = lim.IdentityConns.Agent
	}
	if d.ids[w] < limit {
		d.ids[w]++
		c.budget = true
		d.uncharge(c)
	}
	if d.queue.LenKey(c.source) > 0 { // it may go sooner now
		d.queue.Unpark(c.source)
		d.wakeUp()
	}
}

// left notes that c is no longer held; the caller holds mu.
func (d *door) left(c *conn) {
	d.idle(c)
	d.uncharge(c)
	if c.budget {
		w := *c.who.Load()
		if d.ids[w]--; d.ids[w] == 0 {
			delete(d.ids, w)
		}
	}
}

// full decides whether c, which is about to be delivered, is to be sent away
// by the program because the port is above its soft cap.
func (d *door) full(c *conn) {
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	lim := d.lim.Load()
	if lim.Mode == ModeOff || len(d.p.conns) <= lim.MaxConns {
		return
	}
	if lim.Mode == ModeObserve {
		d.p.met.wouldRefuse.WithLabelValues(softCap).Inc()
		return
	}
	c.info.Shed = true
	d.retry.raise(time.Now())
	d.p.met.shed.Inc()
}

func (d *door) retryAfter(now time.Time) time.Duration {
	d.p.mu.Lock()
	base := d.retry.base(now)
	d.p.mu.Unlock()
	return time.Duration((0.5 + rand.Float64()) * float64(base))
}

// run serves the queue until the listener ends.
func (d *door) run(life context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next := d.serve()
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-d.wake:
		case <-timer.C:
		case <-life.Done():
			d.tell(time.Now())
			return
		}
	}
}

// serve lets in whom it can, and gives the moment at which there is more to do.
func (d *door) serve() time.Time {
	for {
		now := time.Now()
		d.p.mu.Lock()
		c, refused, next := d.step(now)
		d.p.mu.Unlock()
		switch {
		case c == nil:
			return d.soonest(now, next)
		case refused != "":
			d.p.discard(c, refused)
		case gone(c.Conn):
			d.takeBack(now, c)
		default:
			d.p.met.queueWait.Observe(now.Sub(c.info.AcceptedAt).Seconds())
			d.p.start(c)
		}
	}
}

// soonest adds the next summary of refusals to what is to come.
func (d *door) soonest(now, next time.Time) time.Time {
	d.p.mu.Lock()
	at := d.tellAt
	d.p.mu.Unlock()
	if !at.IsZero() && !at.After(now) {
		d.tell(now)
		return next
	}
	return earliest(next, at)
}

// step finds one connection that leaves the queue: it is let in, or refused for
// the reason given. Without one it gives the moment to look again. The caller
// holds mu.
func (d *door) step(now time.Time) (c *conn, refused string, next time.Time) {
	lim := d.lim.Load()
	for {
		if lim.Mode == ModeOff {
			return d.release()
		}
		w, s, ok := d.queue.Expire(now)
		if ok {
			why := refusedQueueWait
			if d.waitsForItself(now, s) {
				why = refusedRateSource
			}
			if c, why := d.out(now, w, s, why); c != nil {
				return c, why, next
			}
			continue
		}
		d.holdLanes()
		if !d.paced(now) {
			if at := d.pacer.ReadyAt(now); d.queue.Total() > 0 && at.After(now) {
				next = at
			}
			return nil, "", earliest(next, d.queue.ExpiresAt())
		}
		w, s, ok = d.queue.Pop(now, func(s *admission.Source) (bool, time.Time) { return d.may(now, s, lim) })
		switch {
		case !ok:
			return nil, "", earliest(d.queue.NextAt(now), d.queue.ExpiresAt())
		case w.c.closed.Load(): // it ended while it waited, and costs nothing
			d.sources.Give(now, s)
		case d.only && !d.sources.Known(now, s):
			if c, why := d.out(now, w, s, refusedShedding); c != nil {
				return c, why, next
			}
		default:
			d.pacer.Take(now)
			if !w.ghost {
				d.begin(w.c)
				return w.c, "", next
			}
		}
	}
}

// out counts that a waiter is refused. It gives the connection that it means,
// if there is one to be told, and the reason; that is empty when limits are
// only observed by now.
func (d *door) out(now time.Time, w waiter, s *admission.Source, why string) (*conn, string) {
	if w.c.closed.Load() {
		return nil, ""
	}
	enforce := !w.ghost && d.lim.Load().Mode == ModeEnforce
	d.objected(now, s, why, enforce)
	if w.ghost {
		return nil, ""
	}
	if !enforce {
		d.begin(w.c)
		why = ""
	}
	return w.c, why
}

// release lets one waiter in because nothing is limited any more.
func (d *door) release() (c *conn, refused string, next time.Time) {
	for {
		w, _, ok := d.queue.Oldest()
		if !ok {
			return nil, "", next
		}
		if !w.ghost && !w.c.closed.Load() {
			d.begin(w.c)
			return w.c, "", next
		}
	}
}

// takeBack makes the admission of a client free that left while it waited.
func (d *door) takeBack(now time.Time, c *conn) {
	d.p.mu.Lock()
	d.sources.Give(now, c.source)
	d.pacer.Give(now)
	d.p.mu.Unlock()
	_ = c.Close()
}

// tell logs what was refused since the last time, one line for each source,
// and counts the part of the source that had most of it.
func (d *door) tell(now time.Time) {
	d.p.mu.Lock()
	list, rest := d.sources.TakeRefusals()
	mode, since := d.lim.Load().Mode, now
	if !d.tellAt.IsZero() {
		since = d.tellAt.Add(-summaryEvery)
	}
	d.tellAt = time.Time{}
	d.p.mu.Unlock()
	within := now.Sub(since).Round(time.Second)
	line := func(source string, n uint64, why string) {
		d.p.log.Warn("connections over the limits", "port", d.p.name, "source", source, "count", n, "reason", why, "mode", mode, "within", within)
	}
	var most uint64
	for _, v := range list {
		if v.Overflow {
			rest += v.Count
			continue
		}
		most = max(most, v.Count)
		line(v.Key.String(), v.Count, v.Why)
	}
	if rest > 0 {
		line("others", rest, "various")
	}
	if mode == ModeEnforce {
		d.p.met.topRefused.Add(float64(most))
	}
}

// earliest gives the earlier of two moments; the zero time is never.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

// sourceOf gives the source of a connection.
func sourceOf(c net.Conn) admission.Key {
	if t, ok := c.RemoteAddr().(*net.TCPAddr); ok && t != nil {
		return admission.KeyOf(t.AddrPort().Addr())
	}
	return admission.Key{}
}
