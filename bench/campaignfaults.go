package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"headgate/internal/testkit/history"
)

// faultLog counts the faults and writes down when each began and ended. A fault
// that has healed is no event of its own to the checker: others go on.
type faultLog struct {
	began       time.Time
	kills, cuts atomic.Int64
	freezes     atomic.Int64 // of the kills
	overLease   atomic.Int64 // controllers frozen for longer than their leases

	out *history.Writer

	mu      sync.Mutex
	errs    []error
	slowest time.Duration // from the start of a controller until it was ready
	busy    map[string]bool
}

// take reserves a target: a second fault waits until the first is healed.
func (f *faultLog) take(target string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.busy[target] {
		return false
	}
	f.busy[target] = true
	return true
}

func (f *faultLog) free(target string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.busy, target)
	if err != nil {
		f.errs = append(f.errs, fmt.Errorf("%s: %w", target, err))
	}
}

// fault is one entry of the table from which the schedule draws.
type faultKind struct {
	weight int
	plan   func(*campaign) *plannedFault
}

// plannedFault is one fault; everything random about it is decided.
type plannedFault struct {
	target string
	what   string
	kill   bool // counts as kill or freeze; else it is a cut
	last   time.Duration
	begin  func(context.Context) error
	end    func(context.Context) error
}

func faultTable() []faultKind {
	return []faultKind{
		{14, (*campaign).killController},
		{3, (*campaign).freezeController},
		{5, (*campaign).pauseController},
		{24, (*campaign).killCrew},
		{10, (*campaign).freezeCrew},
		{14, (*campaign).killReal},
		{6, (*campaign).freezeReal},
		{6, (*campaign).killDatabase},
		{5, (*campaign).endSessions},
		{7, (*campaign).cutDatabase},
		{12, (*campaign).cutCrew},
	}
}

// runFaults has the plan's faults made and gives what could not be healed.
func (c *campaign) runFaults(ctx context.Context) error {
	f := &c.faults
	err := c.plan.faults(ctx, c)
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(append(f.errs, err)...)
}

// scheduled makes faults until there were enough of them and enough tasks, then
// heals all.
func scheduled(ctx context.Context, c *campaign) (err error) {
	f := &c.faults
	var healing sync.WaitGroup
	faulty, heal := context.WithCancel(ctx)
	defer heal()
	for ctx.Err() == nil && time.Since(f.began) < c.plan.most && !c.enough() {
		if err = wait(ctx, c.between(c.plan.gapMin, c.plan.gapMax)); err != nil {
			break
		}
		if c.tasksLag() {
			continue
		}
		if p := c.draw(); p != nil && f.take(p.target) {
			c.inflict(ctx, faulty, p, &healing)
		}
	}
	heal()
	healing.Wait()
	return err
}

func (c *campaign) enough() bool {
	return time.Since(c.faults.began) >= c.plan.least && int(c.faults.kills.Load()) >= c.plan.kills && c.book.acknowledged() >= c.plan.tasks
}

// tasksLag holds the faults back while the tasks are far behind them, so that
// the last of the tasks meet faults too.
func (c *campaign) tasksLag() bool {
	if c.plan.rate > 0 {
		return false
	}
	return c.book.acknowledged() < c.plan.tasks*(int(c.faults.kills.Load())-20)/max(c.plan.kills, 1)
}

func (c *campaign) draw() *plannedFault {
	sum := 0
	table := faultTable()
	for _, k := range table {
		sum += k.weight
	}
	n := c.chance.IntN(sum)
	for _, k := range table {
		if n -= k.weight; n < 0 {
			return k.plan(c)
		}
	}
	return nil
}

// inflict begins a fault and has it ended when its time, or faulty, is over.
func (c *campaign) inflict(ctx, faulty context.Context, p *plannedFault, healing *sync.WaitGroup) {
	f := &c.faults
	f.out.Fault(fmt.Sprintf("%s %s for %s", p.target, p.what, p.last))
	err := p.begin(ctx)
	switch {
	case err != nil: // the database is still busy with the last one
		f.out.Fault(fmt.Sprintf("%s %s failed: %v", p.target, p.what, err))
	case p.kill:
		f.kills.Add(1)
	default:
		f.cuts.Add(1)
	}
	healing.Go(func() {
		_ = wait(faulty, p.last) // a campaign that ends heals early
		var err error
		if p.end != nil {
			err = p.end(ctx)
		}
		f.out.Fault(p.target + " healed")
		f.free(p.target, err)
	})
}

func (c *campaign) between(least, most time.Duration) time.Duration {
	return least + time.Duration(c.chance.Int64N(int64(most-least)+1))
}

// killController: it is usually started again at once, now and then only after
// the other has taken over.
func (c *campaign) killController() *plannedFault {
	n := c.controllers[c.killable(len(c.controllers))]
	last := c.between(0, 500*time.Millisecond)
	switch c.chance.IntN(10) {
	case 0:
		last = c.between(17*time.Second, 22*time.Second)
	case 1, 2:
		last = c.between(time.Second, 4*time.Second)
	}
	return &plannedFault{
		target: n.name, what: "killed", kill: true, last: last,
		begin: func(context.Context) error { n.kill(); return nil },
		end: func(ctx context.Context) error {
			if ctx.Err() != nil {
				return nil
			}
			return c.restart(ctx, n)
		},
	}
}

func (c *campaign) restart(ctx context.Context, n *controllerNode) error {
	began := time.Now()
	for {
		if err := n.start(); err != nil {
			return err
		}
		err := c.ready(ctx, n)
		if err == nil {
			break
		}
		select {
		case <-n.ended(): // a crash, which is noted, costs the campaign nothing more
		default:
			return err
		}
	}
	c.faults.mu.Lock()
	defer c.faults.mu.Unlock()
	c.faults.slowest = max(c.faults.slowest, time.Since(began))
	return nil
}

// freezeController stops it until after its leases have ended: what it then
// still believes is wrong.
func (c *campaign) freezeController() *plannedFault {
	p := c.freeze(c.controllers[c.chance.IntN(len(c.controllers))].node, c.between(16*time.Second, 25*time.Second))
	begin := p.begin
	p.begin = func(ctx context.Context) error {
		c.faults.overLease.Add(1)
		return begin(ctx)
	}
	return p
}

func (c *campaign) pauseController() *plannedFault {
	return c.freeze(c.controllers[c.chance.IntN(len(c.controllers))].node, c.between(200*time.Millisecond, 4*time.Second))
}

func (c *campaign) freeze(n *node, last time.Duration) *plannedFault {
	return &plannedFault{
		target: n.name, what: "frozen", kill: true, last: last,
		begin: func(context.Context) error {
			c.faults.freezes.Add(1)
			return n.signal(syscall.SIGSTOP)
		},
		end: func(context.Context) error { return n.signal(syscall.SIGCONT) },
	}
}

func (c *campaign) killCrew() *plannedFault {
	n := c.crews[c.killable(len(c.crews))]
	return c.killNode(n.node, n.start)
}

// killable chooses one of n that may be killed.
func (c *campaign) killable(n int) int {
	if c.plan.spare && n > 1 {
		return 1 + c.chance.IntN(n-1)
	}
	return c.chance.IntN(n)
}

func (c *campaign) killReal() *plannedFault {
	if len(c.reals) == 0 {
		return nil
	}
	n := c.reals[c.chance.IntN(len(c.reals))]
	return c.killNode(n.node, n.restart)
}

func (c *campaign) killNode(n *node, start func() error) *plannedFault {
	return &plannedFault{
		target: n.name, what: "killed", kill: true, last: c.between(0, 2*time.Second),
		begin: func(context.Context) error { n.kill(); return nil },
		end:   func(context.Context) error { return start() },
	}
}

func (c *campaign) freezeCrew() *plannedFault {
	return c.freeze(c.crews[c.chance.IntN(len(c.crews))].node, c.freezeTime())
}

func (c *campaign) freezeReal() *plannedFault {
	if len(c.reals) == 0 {
		return nil
	}
	return c.freeze(c.reals[c.chance.IntN(len(c.reals))].node, c.freezeTime())
}

// freezeTime is short, or longer than a controller waits for a silent agent.
func (c *campaign) freezeTime() time.Duration {
	if c.chance.IntN(6) == 0 {
		return c.between(20*time.Second, 32*time.Second)
	}
	return c.between(200*time.Millisecond, 4*time.Second)
}

// killDatabase ends the server in one of its ways and starts it again.
func (c *campaign) killDatabase() *plannedFault {
	p := &plannedFault{target: "database", kill: true, last: c.between(0, 3*time.Second), end: c.database.start}
	stop := func(s syscall.Signal) func(context.Context) error {
		return func(context.Context) error { return c.database.end(s) }
	}
	switch c.chance.IntN(4) {
	case 0:
		p.what, p.begin = "postmaster killed", stop(syscall.SIGKILL)
	case 1:
		p.what, p.begin = "stopped at once", stop(syscall.SIGQUIT)
	case 2:
		p.what, p.begin = "stopped fast", stop(syscall.SIGINT)
	default:
		at := c.chance.IntN(1000)
		p.what, p.end = "backend killed", nil // the server recovers by itself
		p.begin = func(ctx context.Context) error {
			return c.database.endBackend(ctx, func(n int) int { return at % n })
		}
	}
	return p
}

func (c *campaign) endSessions() *plannedFault {
	return &plannedFault{target: "database", what: "sessions ended", begin: c.database.endSessions}
}

func (c *campaign) cutDatabase() *plannedFault {
	n := c.controllers[c.chance.IntN(len(c.controllers))]
	return c.cut(n.name+"'s way to the database", n.relay)
}

func (c *campaign) cutCrew() *plannedFault {
	n := c.crews[c.chance.IntN(len(c.crews))]
	return c.cut("the way to "+n.name, n.relay)
}

func (c *campaign) cut(target string, r *relay) *plannedFault {
	p := &plannedFault{target: target}
	end := func(context.Context) error { r.heal(); return nil }
	begin := func(do func()) func(context.Context) error {
		return func(context.Context) error { do(); return nil }
	}
	last := c.between(200*time.Millisecond, 5*time.Second)
	if c.chance.IntN(6) == 0 {
		last = c.between(15*time.Second, 25*time.Second)
	}
	switch c.chance.IntN(3) {
	case 0:
		p.what, p.begin = "cut", begin(r.cut)
	case 1:
		p.what, p.begin, p.end, p.last = "blocked", begin(r.block), end, last
	default:
		p.what, p.begin, p.end, p.last = "silent", begin(r.stall), end, last
	}
	return p
}
