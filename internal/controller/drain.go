package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headgate/listener"
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
	d.done("readyz")
	c.drainLead()
	d.done("lead", "lead", c.cfg.DrainLead)

	gentle, cancel := context.WithTimeout(base, c.cfg.DrainTimeout)
	c.listener.Refuse()
	d.done("public refuses")
	open := c.farewell.Open()
	shut := c.sayGoodbye(gentle)
	d.done("connections told to close")
	left := c.farewell.Wait(gentle)
	d.done("streams ended", "streams", open, "left", c.farewell.Open(), "spread", c.cfg.drainSpread())
	left = errors.Join(left, c.listener.Drain(gentle))
	d.done("ports closed")
	if left = errors.Join(left, <-shut); left != nil {
		c.log.Warn("requests were still open at the end and are broken off", "err", left, "close", c.server.Close())
	}
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

// drainLead leaves load balancers the time to see that /readyz fails. Nobody
// was sent here before the public port opened.
func (c *Controller) drainLead() {
	if !c.listener.Ports().PublicOpen {
		return
	}
	<-time.After(c.cfg.DrainLead)
}

// idleSweep is how often idle connections are closed. The first time comes
// that long after they were told, so that a request under way is still served.
const idleSweep = 250 * time.Millisecond

// sayGoodbye tells all connections that they end: answers over HTTP/1.1 say
// Connection: close, HTTP/2 connections get GOAWAY, idle ones are closed, and
// streams and waits begin to leave. The channel gives the end of the server's
// shutdown, which comes after that of the listener.
func (c *Controller) sayGoodbye(ctx context.Context) <-chan error {
	c.farewell.Begin(c.cfg.drainSpread())
	ended, result := make(chan struct{}), make(chan error, 1)
	go func() {
		result <- c.server.Shutdown(ctx)
		close(ended)
	}()
	go func() {
		tick := time.NewTicker(idleSweep)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				c.server.SetKeepAlivesEnabled(false) // closes what is idle now
			case <-ended:
				return
			}
		}
	}()
	return result
}

// keptOpen is the listener as the HTTP server gets it. The server's Shutdown
// begins with closing its listener, but the controller port must answer to the
// last, so that is left to drain.
type keptOpen struct{ *listener.Listener }

// Close leaves the listener as it is.
func (keptOpen) Close() error { return nil }

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
