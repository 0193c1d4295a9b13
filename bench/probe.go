package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// A prober is one process that asks one address again and again, by a new
// connection each time, as a monitoring system or a short script does.

// probeOrder begins the probing of a target, or reports and forgets.
type probeOrder struct {
	Target  target        `json:"target"`
	Path    string        `json:"path"`
	From    string        `json:"from"` // the address it comes from
	Every   time.Duration `json:"every"`
	Clients int           `json:"clients"` // that many, each at an address of its own from there on
	Keep    bool          `json:"keep"`    // over one connection each, not a new one each time
	Patient bool          `json:"patient"` // failures before the first answer do not count: it is not there yet
	Stop    bool          `json:"stop"`
}

// probeState is what was seen since the last report.
type probeState struct {
	Times  []time.Duration `json:"times"` // of each answer 200
	Failed int             `json:"failed"`
	Errors []string        `json:"errors"` // the first few
}

// keptErrors bounds what is told of failures.
const keptErrors = 5

type prober struct {
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	patient bool // nothing has answered yet, and need not
	seen    probeState
}

// runProber is the process.
func runProber(ctx context.Context) error {
	p := &prober{ctx: ctx, stop: func() {}}
	defer p.wg.Wait()
	defer func() { p.stop() }()
	return obey(ctx, probeState{}, p.obey)
}

func (p *prober) obey(o probeOrder) (probeState, error) {
	if o.Stop {
		p.stop()
		p.wg.Wait()
	}
	if o.Every > 0 {
		conf, err := o.Target.tls()
		if err != nil {
			return probeState{}, err
		}
		from, err := netip.ParseAddr(o.From)
		if err != nil {
			return probeState{}, err
		}
		p.patient = o.Patient
		var ctx context.Context
		ctx, p.stop = context.WithCancel(p.ctx)
		for range max(o.Clients, 1) {
			c := &probeClient{order: o, from: from, conf: conf, tell: p.note}
			p.wg.Go(func() { c.run(ctx) })
			from = from.Next()
		}
	}
	return p.take(), nil
}

func (p *prober) take() probeState {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.seen
	p.seen = probeState{}
	return s
}

func (p *prober) note(took time.Duration, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && p.patient {
		return
	}
	p.patient = false
	if err == nil {
		p.seen.Times = append(p.seen.Times, took)
		return
	}
	p.seen.Failed++
	if len(p.seen.Errors) < keptErrors {
		p.seen.Errors = append(p.seen.Errors, err.Error())
	}
}

// probeClient is one client of a prober.
type probeClient struct {
	order probeOrder
	from  netip.Addr
	conf  *tls.Config
	tell  func(time.Duration, error)
	ask   func() (int, error) // over the kept connection; nil = none is open
	close func()
}

func (c *probeClient) run(ctx context.Context) {
	tick := time.NewTicker(c.order.Every)
	defer tick.Stop()
	defer c.leave()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		began := time.Now()
		err := c.once(ctx)
		if ctx.Err() != nil {
			return
		}
		c.tell(time.Since(began), err)
	}
}

// once asks once; the connection, where a new one is made, counts.
func (c *probeClient) once(ctx context.Context) error {
	if c.ask == nil {
		conn, err := c.order.Target.dial(ctx, c.from, c.conf)
		if err != nil {
			return err
		}
		in := bufio.NewReader(conn)
		c.ask = func() (int, error) { return c.order.Target.ask(conn, in, c.order.Path) }
		c.close = func() { release(conn) }
	}
	status, err := c.ask()
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("answer %d", status)
	}
	if err != nil || !c.order.Keep {
		c.leave()
	}
	return err
}

func (c *probeClient) leave() {
	if c.ask != nil {
		c.close()
		c.ask = nil
	}
}
