package controller

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// drain stops the controller so that its clients notice as little as can be.
// In this order: /readyz answers 503, and after DrainLead, in which load
// balancers look elsewhere, the public port refuses; connections are told to
// close, streams and waits end one by one over the spread, each with a pause
// of its own; what is left at DrainTimeout is closed; the controller port
// closes last. Then the parts stop: queue, agents, database. Running tasks are
// not touched: agents keep them and their results for the next start.
func (c *Controller) drain(ctx context.Context, sup *supervisor) error {
	base := context.WithoutCancel(ctx)
	d := &drainLog{c: c, began: time.Now()}
	c.ready.explain("draining", "the controller is stopping")
	c.ready.enter(phaseDrain)
	close(c.leaves)
	if c.hasJoined() {
		c.handOver(base)
	}
	d.done("readyz")
	c.drainLead()
	d.done("lead", "lead", c.cfg.DrainLead)

	gentle, cancel := context.WithTimeout(base, c.cfg.DrainTimeout)
	c.listener.Refuse()
	d.done("public refuses")
	open := c.farewell.Open()
	told := c.sayGoodbye()
	d.done("connections told to close")
	left := c.farewell.Wait(gentle)
	d.done("streams ended", "streams", open, "left", c.farewell.Open(), "spread", c.cfg.drainSpread())
	left = errors.Join(left, c.listener.Drain(gentle))
	d.done("ports closed")
	if left = errors.Join(left, c.server.Shutdown(gentle)); left != nil {
		c.log.Warn("requests were still open at the end and are broken off", "err", left, "close", c.server.Close())
	}
	told()
	cancel()
	d.done("requests ended")

	stop, cancel := context.WithTimeout(base, stopTimeout)
	defer cancel()
	err := sup.stop(stop)
	d.done("parts stopped")
	if err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	return nil
}

// handOver leaves the agents to other controllers, if there are any. It signs
// off first: whoever counts the controllers then takes all that is given back.
func (c *Controller) handOver(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.unregister(ctx); err == nil {
			c.parts.manager.HandOver()
		}
	}()
	select {
	case <-done:
	case <-time.After(handOverWait):
	}
}

// handOverWait bounds the word to the others: a database that is silent must not
// hold up a stop.
const handOverWait = 2 * time.Second

// drainLead leaves load balancers the time to see that /readyz fails. Nobody
// was sent here before the public port opened.
func (c *Controller) drainLead() {
	select {
	case <-c.opened: // the one port alone has accepted before, but was not ready
	default:
		return
	}
	if !c.listener.Ports().PublicOpen {
		return
	}
	<-time.After(c.cfg.DrainLead)
}

// idleSweep is how often idle connections are closed.
const idleSweep = 250 * time.Millisecond

// sayGoodbye tells all connections that they end: answers over HTTP/1.1 say
// Connection: close, those over HTTP/2 are followed by GOAWAY, idle connections
// are closed, and streams and waits begin to leave. It goes on until the
// function returned is called. The server's own Shutdown must wait until both
// ports are closed: from its beginning, requests over HTTP/1.1 are dropped
// without an answer, and the controller port must answer to the last.
func (c *Controller) sayGoodbye() (end func()) {
	c.parting.Store(true)
	c.farewell.Begin(c.cfg.drainSpread())
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for ; ctx.Err() == nil; pause(ctx, idleSweep) {
			c.server.SetKeepAlivesEnabled(false) // closes what is idle now
		}
	}()
	return cancel
}

// answer is the handler of both ports: that of the present phase, which in the
// end adds that the connection ends.
func (c *Controller) answer(w http.ResponseWriter, r *http.Request) {
	if c.parting.Load() {
		w.Header().Set("Connection", "close") // over HTTP/2 the server makes a GOAWAY of it
	}
	(*c.handler.Load()).ServeHTTP(w, r)
}

// drainLog writes a line for each step of a drain.
type drainLog struct {
	c     *Controller
	began time.Time // of the present step
}

func (d *drainLog) done(step string, more ...any) {
	now := time.Now()
	d.c.log.Info("drain", append([]any{"step", step, "took", now.Sub(d.began)}, more...)...)
	d.began = now
}
