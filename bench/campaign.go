package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"headgate/internal/testkit/history"
)

// The campaign runs two controllers on one database, crews of agents, agents of
// their own, clients that submit and wait, and kills, freezes and cuts all of
// them, by a schedule that a seed decides. Then it heals everything and looks
// whether each promise was kept.

// campaignPlan says how large a campaign is.
type campaignPlan struct {
	name  string // of its figures
	seed  uint64
	kills int // kills and freezes, at least
	tasks int // acknowledged, at least

	controllers int
	crews       int
	agents      int // in each crew
	reals       int // headgate-agent processes of their own

	gapMin, gapMax time.Duration // between two faults
	rate           float64       // tasks a second at most; 0 = as the faults go on
	open           int           // tasks that are open before the clients pause
	least, most    time.Duration // it goes on for so long at least, and ends then, however far it is
	spare          bool          // the first controller and the first crew are not killed
	settle         time.Duration // after healing, until the queue is empty
	faults         func(context.Context, *campaign) error
	shadow         bool // each change of a row is written down, too
}

// settleLimit is how long the queue may take to be empty once all is healed;
// beside other work, as in all tests, it is twice as long.
const settleLimit = 30 * time.Second

// pauseLimit is how much longer tasks may take whose runs were interrupted
// again and again: the fifth attempt comes two minutes after the fourth.
const pauseLimit = 4 * time.Minute

// stopLimit is how long a controller may take to stop with all connected.
const stopLimit = 15 * time.Second

// campaignSizes are what KILLS=, TASKS= and SEED= shorten or repeat.
type campaignSizes struct {
	kills, tasks int
	seed         uint64
	minutes      int // of a soak
}

func (s campaignSizes) full() campaignPlan {
	p := campaignPlan{
		name: "campaign", seed: s.seed, kills: s.kills, tasks: s.tasks, controllers: 2, crews: 4, agents: 20, reals: 5,
		gapMin: 300 * time.Millisecond, gapMax: 2 * time.Second, open: mostOpen, most: time.Hour, settle: settleLimit, faults: scheduled,
	}
	if p.seed == 0 {
		p.seed = rand.Uint64()
	}
	return p
}

// quick is what is run with all tests.
func (s campaignSizes) quick() campaignPlan {
	p := s.full()
	p.name, p.kills, p.tasks, p.crews, p.agents, p.reals = "quick_campaign", quickKills, quickTasks, 2, 8, 2
	p.settle, p.shadow = 2*settleLimit, true
	return p
}

// quickKills and quickTasks are less than a minute of kills.
const (
	quickKills = 20
	quickTasks = 5000
)

// quickCampaign is the campaign in small. Cases P1, P8, P18, R2, R5.
func quickCampaign(ctx context.Context, b *bench) error { return b.runCampaign(ctx, b.sizes.quick()) }

// chaosCampaign runs the whole campaign. Cases P1, P8, P18, R2, R5.
func chaosCampaign(ctx context.Context, b *bench) error {
	return b.runCampaign(ctx, b.sizes.full())
}

// runCampaign makes the rig, runs the faults, heals, checks, and keeps the
// files when a promise was broken.
func (b *bench) runCampaign(ctx context.Context, plan campaignPlan) (err error) {
	dir, err := b.newDir()
	if err != nil {
		return err
	}
	b.note("%s: seed %d; at least %d kills and freezes, %d acknowledged tasks; %d agents in %d crews, %d of their own; files in %s",
		plan.name, plan.seed, plan.kills, plan.tasks, plan.crews*plan.agents, plan.crews, plan.reals, dir)
	c := &campaign{b: b, plan: plan, dir: dir, chance: rand.New(rand.NewPCG(plan.seed, 0))}
	err = c.whole(ctx)
	if err != nil {
		b.note("%s: seed %d; the logs, histories and the database are left in %s", plan.name, plan.seed, dir)
	}
	err = errors.Join(err, c.close())
	if err == nil {
		return b.removeDir(dir)
	}
	return err
}

// campaign is one run.
type campaign struct {
	b      *bench
	plan   campaignPlan
	dir    string
	chance *rand.Rand // of the schedule, which one goroutine makes

	database    *database
	controllers []*controllerNode
	crews       []*crewNode
	reals       []*realNode
	token       string
	agents      []campaignAgent
	book        book
	faults      faultLog
	samples     []sample // of a soak
}

// campaignAgent is an agent that tasks are sent to.
type campaignAgent struct {
	id    string
	real  bool
	group int // crew, or number among the agents of their own
	index int // in the crew
}

// nodes gives everything that must not end by itself.
func (c *campaign) nodes() []*node {
	var all []*node
	for _, n := range c.controllers {
		all = append(all, n.node)
	}
	for _, n := range c.crews {
		all = append(all, n.node)
	}
	for _, n := range c.reals {
		all = append(all, n.node)
	}
	return all
}

func (c *campaign) whole(ctx context.Context) error {
	if err := c.openBooks(); err != nil {
		return err
	}
	if err := c.setUp(ctx); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	c.faults.began, c.faults.busy = time.Now(), map[string]bool{}
	load, err := c.startLoad(ctx)
	if err != nil {
		return err
	}
	err = c.runFaults(ctx)
	c.b.note("%s: %d kills and freezes, %d cuts, %d tasks acknowledged after %s; healing",
		c.plan.name, c.faults.kills.Load(), c.faults.cuts.Load(), c.book.acknowledged(), time.Since(c.faults.began).Round(time.Second))
	healed := time.Now()
	c.faults.out.Healed("all")
	load.finish()
	var end finish
	end.settled, end.open = c.settle(ctx, healed)
	load.answered()
	end.stopped = c.stopControllers()
	load.leave()
	if err := errors.Join(c.book.Close(), c.faults.out.Close()); err != nil {
		return err
	}
	return errors.Join(context.Cause(ctx), err, c.judge(ctx, end))
}

// openBooks makes the files of what is done here.
func (c *campaign) openBooks() (err error) {
	if c.book.Writer, err = history.Open(c.path("clients.jsonl")); err != nil {
		return err
	}
	c.faults.out, err = history.Open(c.path("faults.jsonl"))
	return err
}

// finish is how a campaign ended.
type finish struct {
	settled time.Duration // from the healing until the queue was empty
	open    int           // tasks, if it did not get empty
	stopped time.Duration // the slower controller, from TERM to its end
}

// stopControllers stops all controllers as an operator does, with agents and
// event streams connected.
func (c *campaign) stopControllers() time.Duration {
	began := time.Now()
	for _, n := range c.controllers {
		n.terminate()
	}
	for _, n := range c.controllers {
		select {
		case <-n.ended():
		case <-time.After(2 * stopLimit):
		}
	}
	return time.Since(began)
}

// settle waits until the queue is empty, for as long as it may take, and then for
// the tasks that pause between two attempts.
func (c *campaign) settle(ctx context.Context, healed time.Time) (took time.Duration, open int) {
	err := waitEvery(ctx, 200*time.Millisecond, 2*c.plan.settle, "the queue to be empty", func() (bool, error) {
		n, _, err := c.openTasks(ctx)
		if err == nil {
			open = n
		}
		return err == nil && n == 0, nil
	})
	took = time.Since(healed)
	if err == nil {
		err = waitEvery(ctx, time.Second, pauseLimit, "tasks that pause", func() (bool, error) {
			n, later, err := c.openTasks(ctx)
			if err == nil {
				open = n + later
			}
			return err == nil && open == 0, nil
		})
	}
	c.tellLast(ctx, healed)
	if err != nil {
		c.b.note("%s: %d tasks are still open after %s", c.plan.name, open, took.Round(time.Second))
	}
	return took, open
}

// tellLast says which tasks ended last: what a slow end waited for.
func (c *campaign) tellLast(ctx context.Context, healed time.Time) {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return
	}
	defer release(db)
	var text string
	err = db.QueryRowContext(ctx, `SELECT string_agg(format('task %s %s, attempt %s, created %s s, started %s s and ended %s s after the healing',
		id, args, attempt, round(extract(epoch FROM created_at - $1), 1), round(extract(epoch FROM started_at - $1), 1), round(extract(epoch FROM completed_at - $1), 1)), E'\n')
		FROM (SELECT * FROM agent_task_view WHERE completed_at IS NOT NULL ORDER BY completed_at DESC LIMIT 3) AS last`, healed).Scan(&text)
	if err == nil {
		c.b.note("%s: the last tasks to end:\n%s", c.plan.name, text)
	}
}

// openTasks counts what is not completed, and of it apart what pauses.
func (c *campaign) openTasks(ctx context.Context) (queued, later int, err error) {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return 0, 0, err
	}
	defer release(db)
	err = db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM agent_queue), (SELECT count(*) FROM agent_later)`).Scan(&queued, &later)
	return queued, later, err
}

// close ends all processes, in the order that leaves none behind.
func (c *campaign) close() error {
	var errs []error
	for _, n := range c.nodes() {
		n.kill()
	}
	for _, n := range c.controllers {
		errs = append(errs, n.relay.close())
	}
	for _, n := range c.crews {
		errs = append(errs, n.relay.close())
	}
	if c.database != nil && c.database.now() != nil {
		ctx, cancel := context.WithTimeout(context.Background(), stopWait)
		defer cancel()
		errs = append(errs, c.database.now().Stop(ctx))
	}
	return errors.Join(errs...)
}

func (c *campaign) path(parts ...string) string {
	return filepath.Join(append([]string{c.dir}, parts...)...)
}
