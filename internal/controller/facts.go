package controller

import (
	"context"
	"math/rand/v2"
	"time"

	"headgate/tasks"
)

// factsEvery is between looks for facts that were missed: a controller that is
// killed between the end of an inventory and its hook, or whose hooks were too
// slow, loses the call.
const factsEvery = 10 * time.Minute

// keepFacts stores what an agent said of its host: the completion hook of
// core.inventory.
func (c *Controller) keepFacts(ctx context.Context, done tasks.Completed) {
	if done.Ending.Outcome != tasks.Succeeded || len(done.Ending.Result) == 0 {
		return
	}
	if err := c.parts.fleet.SetFacts(ctx, done.Agent, done.Ending.Result, done.CompletedAt); err != nil {
		c.log.Warn("store the facts of an agent; it is tried again within ten minutes", "task_id", done.ID, "err", err)
	}
}

// catchUpFacts does at the start, and now and then, what hooks have missed,
// here or at a controller that is gone.
func (c *Controller) catchUpFacts(ctx context.Context) error {
	for {
		missed, err := c.parts.db.MissedFacts(ctx)
		if err != nil && ctx.Err() == nil {
			c.log.Warn("look for facts of agents that were missed", "err", err)
		}
		for _, f := range missed {
			if err := c.parts.fleet.SetFacts(ctx, f.Agent, f.Facts, f.At); err != nil && ctx.Err() == nil {
				c.log.Warn("store the facts of an agent", "err", err)
			}
		}
		timer := time.NewTimer(factsEvery + rand.N(factsEvery/5))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}
