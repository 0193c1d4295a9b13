package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// The trial of points kills a controller or a process of agents not at any
// moment but at each of those that matter, in programs built with the tag
// faultpoints.

// controllerPoints are passed by a controller, crewPoints by a crew.
func controllerPoints() []string {
	return []string{
		"before_insert_commit", "after_insert_commit", "before_claim_commit", "after_claim_commit", "after_send",
		"after_result_received", "before_complete_commit", "after_complete_commit", "before_forget", "before_notify",
	}
}

func crewPoints() []string {
	return []string{"before_accepted_sync", "after_accepted_sync", "mid_run", "before_done_sync", "after_done_sync"}
}

const (
	// roundsOfPoints is how often each point is met in the long trial.
	roundsOfPoints = 40
	// latestPass is the latest pass of a point at which a process is killed.
	latestPass = 15
	// pointWait is how long a process may take to come to a point, its start
	// included.
	pointWait = time.Minute
	// pointRate is how many tasks a second pass meanwhile, pointOpen how many
	// may be open: agents that always have a next task are told with it what to
	// forget, and before_forget is never met.
	pointRate = 400
	pointOpen = 100
)

// chaosPoints meets each point often. Cases P1, R11, R29.
func chaosPoints(ctx context.Context, b *bench) error { return b.runPoints(ctx, roundsOfPoints) }

// quickPoints meets each point once. Cases P1, R11, R29.
func quickPoints(ctx context.Context, b *bench) error { return b.runPoints(ctx, 1) }

func (b *bench) runPoints(ctx context.Context, rounds int) error {
	dir, err := b.newDir()
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }() // programs that are built anew
	faulty := &bench{report: report{out: b.out}, keep: b.keep, sizes: b.sizes}
	if err := faulty.buildFaulty(ctx, dir); err != nil {
		return err
	}
	plan := b.sizes.full()
	plan.name, plan.controllers, plan.crews, plan.agents, plan.reals, plan.rate = "points", 1, 1, 12, 0, pointRate
	plan.open = pointOpen
	plan.kills = rounds * (len(controllerPoints()) + len(crewPoints()))
	plan.tasks, plan.settle, plan.shadow = plan.kills, 2*settleLimit, true
	plan.faults = func(ctx context.Context, c *campaign) error { return c.meetPoints(ctx, rounds) }
	return faulty.runCampaign(ctx, plan)
}

// buildFaulty builds all programs with fault points in them.
func (b *bench) buildFaulty(ctx context.Context, dir string) error {
	for folder, what := range map[string][]string{"..": {"./cmd/headgate", "./cmd/headgate-agent"}, ".": {"."}} {
		args := append([]string{"build", "-tags", "faultpoints", "-o", dir + string(filepath.Separator)}, what...)
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = folder
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build with fault points: %w: %s", err, out)
		}
	}
	b.headgate, b.agent = filepath.Join(dir, "headgate"), filepath.Join(dir, "headgate-agent")
	b.self = filepath.Join(dir, "bench")
	return nil
}

// meetPoints lets each point be met, in rounds, and at last starts both
// processes without any.
func (c *campaign) meetPoints(ctx context.Context, rounds int) error {
	controller, crew := c.controllers[0].node, c.crews[0].node
	for range rounds {
		if err := c.meetEach(ctx, controller, controllerPoints()); err != nil {
			return err
		}
		if err := c.meetEach(ctx, crew, crewPoints()); err != nil {
			return err
		}
	}
	return c.ready(ctx, c.controllers[0])
}

// meetEach lets a process die at each of its points, and live after the last.
func (c *campaign) meetEach(ctx context.Context, n *node, points []string) error {
	n.kill()
	for _, p := range points {
		if err := c.meet(ctx, n, p); err != nil {
			return err
		}
	}
	return n.start()
}

// meet starts a process that is to die at a point, and waits until it has.
func (c *campaign) meet(ctx context.Context, n *node, point string) error {
	order := fmt.Sprintf("%s:kill@%d", point, 1+c.chance.IntN(latestPass))
	c.faults.out.Fault(n.name + " meets " + order)
	if err := n.startWith("HG_FAULT=" + order); err != nil {
		return err
	}
	timer := time.NewTimer(pointWait)
	defer timer.Stop()
	select {
	case <-n.ended():
	case <-timer.C:
		return fmt.Errorf("%s did not come to its point %s within %s", n.name, order, pointWait)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	c.faults.kills.Add(1)
	return nil
}
