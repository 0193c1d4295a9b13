package listener

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"
)

// refusedNotStable is the reason for clients of a passed socket that come while
// the port is closed.
const refusedNotStable = "not_stable"

// driver does to the public socket what the phases ask for, until they are
// closed. Its one goroutine is the only one that touches the socket.
type driver struct {
	*Listener
	loop  chan error    // result of the accept loop; nil while there is none
	pause time.Duration // before the next try to open
	only  bool          // the admission was last told to take known clients alone

	turns   chan struct{} // closed when the loop that turns clients away has ended; nil while there is none
	turnsAt time.Time     // not to be tried before

	ask      *asking       // the barrier, while it is asked or waits to be
	askPause time.Duration // before it is asked once more
	warnAt   time.Time     // when the operator hears that the port does not open; zero: never (again)
}

// asking is one question to the barrier.
type asking struct {
	epoch  uint64 // of the phases that want to know
	ctx    context.Context
	cancel context.CancelFunc
	result chan error // nil: not asked before again
	again  time.Time
}

// runPublic drives the public port; loop is that of a port which is open
// already.
func (l *Listener) runPublic(loop chan error) {
	d := &driver{Listener: l, loop: loop, pause: l.cfg.Retry.Min, askPause: l.cfg.Retry.Min}
	d.warnAt = l.began.Add(l.cfg.OpenWarnAfter)
	defer l.pubSock.close()
	defer d.stopAsking()
	for {
		p, changed := l.state.follow()
		d.settle(&p)
		if p.state == StateClosed {
			return
		}
		now := time.Now()
		d.warn(&p, now)
		d.turnAway(&p, now)
		d.askBarrier(&p, now)
		if at, ok := p.wantsOpen(); ok && !now.Before(at) {
			d.open(&p)
			continue
		}
		if at, to := p.plan(); to != "" && !now.Before(at) {
			l.apply(event{kind: evTick})
			continue
		}
		d.wait(&p, changed)
	}
}

// settle brings socket and admission to where the state wants them.
func (d *driver) settle(p *phases) {
	if !p.accepting() && d.loop != nil {
		d.refuse()
	}
	if shedding := p.state == StateShedding; shedding != d.only {
		d.only = shedding
		if d.onShed != nil {
			d.onShed(shedding)
		}
	}
	if p.ending() {
		d.refusedOnce.Do(func() { close(d.refused) })
	}
}

// turnAwayAt gives from when on clients of a closed port are reset; false where
// they are refused by the kernel, or shall wait there. In settling the waiting
// begins anew, because the port is about to open.
func (d *driver) turnAwayAt(p *phases) (time.Time, bool) {
	if !d.pubSock.passed || p.accepting() || p.state == StateClosed {
		return time.Time{}, false
	}
	return latest(p.since.Add(d.cfg.ActivatedHold), d.turnsAt), true
}

// turnAway starts or ends the resetting of those who wait at a passed socket.
func (d *driver) turnAway(p *phases, now time.Time) {
	at, ok := d.turnAwayAt(p)
	want := ok && !now.Before(at)
	if want == (d.turns != nil) {
		return
	}
	if !want {
		d.stopTurning()
		return
	}
	if err := d.pubSock.open(d.life); err != nil {
		d.turnsAt = now.Add(d.cfg.Retry.Max)
		d.cfg.Logger.Warn("clients of the closed public port cannot be turned away; they wait", "err", err)
		return
	}
	ln, ended := d.pubSock.ln, make(chan struct{})
	d.turns = ended
	d.wg.Go(func() {
		defer close(ended)
		d.public.turnAway(ln)
	})
}

func (d *driver) stopTurning() {
	if d.turns == nil {
		return
	}
	d.pubSock.stop()
	<-d.turns
	d.turns = nil
}

// turnAway accepts from ln and resets, until ln is closed or broken.
func (p *port) turnAway(ln net.Listener) {
	pause := time.Duration(0)
	for {
		nc, err := ln.Accept()
		if err == nil {
			pause = 0
			p.refuse(refusedNotStable, 1)
			reset(nc)
			nc.Close()
			continue
		}
		if errors.Is(err, net.ErrClosed) || p.life.Err() != nil {
			return
		}
		pause = min(max(2*pause, acceptPauseMin), acceptPauseMax)
		if !sleep(p.life, pause) {
			return
		}
	}
}

// refuse stops accepting and waits for the accept loop.
func (d *driver) refuse() {
	d.pubSock.stop()
	if err := <-d.loop; err != nil {
		d.cfg.Logger.Debug("public accept loop ended", "err", err)
	}
	d.loop = nil
	d.pubSock.refuse()
}

// open tries to open the public port.
func (d *driver) open(p *phases) {
	d.stopTurning()
	if err := d.pubSock.open(d.life); err != nil {
		perr := newPortError(PortPublic, d.pubSock.want, "open", err)
		d.apply(event{kind: evFailed, epoch: p.epoch, reason: perr.Error(), err: perr, next: time.Now().Add(d.pause)})
		d.pause = min(2*d.pause, d.cfg.Retry.Max)
		return
	}
	d.pause = d.cfg.Retry.Min
	d.loop = d.acceptPublic()
	if !d.apply(event{kind: evOpened, epoch: p.epoch}) { // it was called off meanwhile
		d.refuse()
	}
}

// acceptPublic starts to accept on the public socket, which is open.
func (l *Listener) acceptPublic() chan error {
	if l.onOpening != nil {
		l.onOpening()
	}
	loop := make(chan error, 1)
	ln := l.pubSock.ln
	l.wg.Go(func() { loop <- l.public.acceptLoop(ln) })
	return loop
}

// lost handles the end of the accept loop while the port was open.
func (d *driver) lost(err error) {
	d.loop = nil
	d.pubSock.refuse()
	if err == nil {
		err = net.ErrClosed // somebody closed a listener made by Config.Listen
	}
	perr := newPortError(PortPublic, d.pubSock.want, "accept", err)
	d.apply(event{kind: evLost, reason: perr.Error(), err: perr, next: time.Now().Add(d.cfg.Retry.Min)})
}

// wait waits for whatever comes first.
func (d *driver) wait(p *phases, changed <-chan struct{}) {
	var alarm <-chan time.Time
	if at := d.next(p); !at.IsZero() {
		timer := time.NewTimer(time.Until(at))
		defer timer.Stop()
		alarm = timer.C
	}
	var answered chan error
	var late <-chan struct{}
	if d.ask != nil && d.ask.result != nil {
		answered, late = d.ask.result, d.ask.ctx.Done()
	}
	select {
	case <-changed:
	case <-alarm:
	case err := <-d.loop:
		d.lost(err)
	case err := <-answered:
		d.answered(p, err)
	case <-late:
		d.answered(p, d.ask.ctx.Err())
	}
}

// next gives the nearest moment at which something is to be done; zero when
// there is none.
func (d *driver) next(p *phases) time.Time {
	at := d.warnAt
	if t, ok := p.wantsOpen(); ok {
		at = earliest(at, t)
	}
	if t, to := p.plan(); to != "" {
		at = earliest(at, t)
	}
	if t, ok := d.turnAwayAt(p); ok && d.turns == nil {
		at = earliest(at, t)
	}
	if d.ask != nil && d.ask.result == nil {
		at = earliest(at, d.ask.again)
	}
	return at
}

// askBarrier asks the barrier once for each settling, and again after an error.
func (d *driver) askBarrier(p *phases, now time.Time) {
	if d.ask != nil && d.ask.epoch != p.epoch {
		d.stopAsking()
		d.askPause = d.cfg.Retry.Min
	}
	if p.state != StateSettling || !p.barrier {
		return
	}
	if d.ask != nil && (d.ask.result != nil || now.Before(d.ask.again)) {
		return
	}
	ask := &asking{epoch: p.epoch, result: make(chan error, 1)}
	ask.ctx, ask.cancel = context.WithTimeout(d.life, d.cfg.OpenBarrierTimeout)
	d.ask = ask
	go func() { ask.result <- d.cfg.OpenBarrier(ask.ctx) }() // ends with its context; Close does not wait for one that will not
}

func (d *driver) stopAsking() {
	if d.ask != nil && d.ask.cancel != nil {
		d.ask.cancel()
	}
	d.ask = nil
}

// answered takes in the barrier's answer, or that none came in time: then the
// port opens all the same, because a barrier that nobody can pass would keep
// every member of a cluster closed.
func (d *driver) answered(p *phases, err error) {
	late := d.ask.ctx.Err()
	d.stopAsking()
	switch {
	case err == nil || errors.Is(late, context.DeadlineExceeded):
		if err != nil {
			d.cfg.Logger.Warn("opening barrier not passed in time; opening the public port without it", "after", d.cfg.OpenBarrierTimeout, "err", err)
		}
		d.apply(event{kind: evBarrierPassed, epoch: p.epoch})
	case late != nil: // closed
	default:
		d.ask = &asking{epoch: p.epoch, again: time.Now().Add(d.askPause)}
		d.askPause = min(2*d.askPause, d.cfg.Retry.Max)
		if p.err == nil { // the first of a row
			d.cfg.Logger.Warn("opening barrier failed; the public port stays closed", "err", err)
		}
		d.apply(event{kind: evBarrierFailed, epoch: p.epoch, err: fmt.Errorf("opening barrier: %w", err)})
	}
}

// warn tells the operator, once, of a public port that does not come to open.
func (d *driver) warn(p *phases, now time.Time) {
	switch {
	case d.warnAt.IsZero():
	case p.wasOpen || p.ending():
		d.warnAt = time.Time{}
	case !now.Before(d.warnAt):
		d.warnAt = time.Time{}
		d.met.publicLate.Set(1)
		r := d.state.report()
		d.cfg.Logger.Log(d.life, slog.LevelError, "public port is still not open", "after", d.cfg.OpenWarnAfter, "state", r.State,
			"reason", r.Reason, "stable", r.Stable, "mark_reason", r.MarkReason, "err", r.Err)
	}
}
