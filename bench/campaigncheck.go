package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"headgate/internal/testkit/history"
)

// historyFile is what each process of a campaign writes into its folder.
const historyFile = "history.jsonl"

// judge compares what the clients know, what ran and what is on disk, and
// prints whether the promises were kept.
func (c *campaign) judge(ctx context.Context, end finish) error {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return err
	}
	defer release(db)
	if err := c.dump(ctx); err != nil {
		return err
	}
	files := []string{c.path("clients.jsonl"), c.path("faults.jsonl"), c.path("final.jsonl")}
	for _, n := range c.crews {
		files = append(files, n.history())
	}
	for _, n := range c.reals {
		files = append(files, n.history())
	}
	report, err := history.Check(files, history.Options{Settle: c.plan.settle, Pause: pauseLimit})
	if err != nil {
		return err
	}
	ends, err := c.ends(ctx)
	if err != nil {
		return err
	}
	c.describe(report, ends)
	return c.print(report, ends, end)
}

// dump writes down what is on disk.
func (c *campaign) dump(ctx context.Context) error {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return err
	}
	defer release(db)
	w, err := history.Open(c.path("final.jsonl"))
	if err != nil {
		return err
	}
	return errors.Join(history.Dump(ctx, db, w), w.Close())
}

// endings is how the tasks ended.
type endings struct {
	counts  []string
	odd     int // outcomes that no fault explains
	foreign int // results that are not the task's own
}

func (c *campaign) ends(ctx context.Context) (e endings, err error) {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return e, err
	}
	defer release(db)
	rows, err := db.QueryContext(ctx, `SELECT r.outcome, coalesce(r.reason, ''), count(*),
		count(*) FILTER (WHERE r.outcome = 'succeeded' AND t.kind = 'core.echo' AND r.result::text IS DISTINCT FROM t.args::text)
		FROM agent_result r JOIN agent_task t ON t.id = r.task_id GROUP BY 1, 2 ORDER BY 3 DESC`)
	if err != nil {
		return e, err
	}
	defer rows.Close()
	for rows.Next() {
		var outcome, reason string
		var n, foreign int
		if err := rows.Scan(&outcome, &reason, &n, &foreign); err != nil {
			return e, err
		}
		e.counts = append(e.counts, strings.TrimSpace(fmt.Sprintf("%d %s %s", n, outcome, reason)))
		e.foreign += foreign
		switch {
		case outcome == "succeeded", outcome == "unknown", outcome == "timed-out":
		case reason == "attempts_exhausted": // its agent was killed under it each time
		default:
			e.odd += n
		}
	}
	return e, rows.Err()
}

// describe tells what happened and each violation with the lines that prove it.
func (c *campaign) describe(r history.Report, ends endings) {
	b, f := c.b, &c.faults
	b.note("%s: %s", c.plan.name, r)
	for _, text := range append(c.book.odd, c.crashes()...) {
		b.note("%s: %s", c.plan.name, text)
	}
	b.note("%s: ends: %s", c.plan.name, strings.Join(ends.counts, ", "))
	b.note("%s: %d freezes among the kills, %d of a controller across its leases; a controller that was started again served after %s at most",
		c.plan.name, f.freezes.Load(), f.overLease.Load(), f.slowest)
}

func (c *campaign) crashes() (all []string) {
	for _, n := range c.nodes() {
		all = append(all, n.crashed()...)
	}
	return all
}

// campaignRules are the rules of the history, in the order of the promises,
// each with the name of its figure.
func campaignRules() [][2]string {
	return [][2]string{
		{"lost", "lost"},
		{"doubled", "doubled"},
		{"once", "twice_run"},
		{"slot", "two_at_once"},
		{"order", "order_inversions"},
		{"repeat", "unexplained_runs"},
		{"final", "changed"},
		{"waiter", "waiters_misled"},
		{"epoch", "epoch_falls"},
		{"liveness", "left_waiting"},
	}
}

// print tells what was found, each promise in a line of its own.
func (c *campaign) print(r history.Report, ends endings, end finish) error {
	b := c.b
	named := func(name string) string { return c.plan.name + "_" + name }
	broken := map[string]int{}
	for _, v := range r.Violations {
		broken[v.Rule]++
	}
	errs := []error{
		b.reach(named("kills"), float64(c.faults.kills.Load()), float64(c.plan.kills), "kills and freezes"),
		b.reach(named("acknowledged_tasks"), float64(r.Acked), float64(c.plan.tasks), "tasks"),
	}
	for _, rule := range campaignRules() {
		errs = append(errs, b.hold(named(rule[1]), float64(broken[rule[0]]), 0, "violations"))
	}
	errs = append(errs,
		b.hold(named("odd_outcomes"), float64(ends.odd), 0, "tasks"),
		b.hold(named("foreign_results"), float64(ends.foreign), 0, "tasks"),
		b.hold(named("odd_answers"), float64(len(c.book.odd)), 0, "answers"),
		b.hold(named("settled_s"), end.settled.Seconds(), c.plan.settle.Seconds(), "s"),
		b.hold(named("stop_s"), end.stopped.Seconds(), stopLimit.Seconds(), "s"),
		b.hold(named("crashes"), float64(len(c.crashes())), 0, "processes"),
	)
	errs = append(errs, c.judgeSamples()...)
	if r.More > 0 {
		errs = append(errs, fmt.Errorf("%s: %d more violations", c.plan.name, r.More))
	}
	return errors.Join(errs...)
}

// reach prints a figure beside what is demanded of the run itself.
func (b *bench) reach(name string, value, least float64, unit string) error {
	word := "kept"
	var err error
	if value < least {
		word, err = "BROKEN", fmt.Errorf("%s is %s %s, less than %s", name, decimal(value), unit, decimal(least))
	}
	b.line(strings.Join([]string{"CHAOS", name, decimal(value), unit, "(at least " + decimal(least) + ")", word}, " "))
	return err
}
