package controller

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/internal/store"
	"headgate/tasks"
)

// Intervals of the upkeep.
const (
	upkeepEvery    = time.Minute // what has expired is deleted this often
	upkeepPasses   = 60          // at most, of one round
	retentionEvery = 10 * time.Minute
	retentionRetry = time.Minute // somebody was in the way
	watchEvery     = time.Minute
	tendEvery      = 10 * time.Second
)

// upkeep deletes what has expired: sessions, links, idempotency keys, series.
func (c *Controller) upkeep(ctx context.Context) error {
	tick := time.NewTicker(upkeepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for range upkeepPasses {
			rows, err := c.parts.db.Upkeep(ctx)
			if err != nil && ctx.Err() == nil {
				c.log.Warn("delete what has expired", "err", err)
			}
			if err != nil || rows < store.UpkeepRows {
				break
			}
		}
	}
}

// leads says whether this controller is the one that does what one alone
// shall do: the owner of the first shard. For a moment two may believe it,
// which harms nothing that asks here.
func (c *Controller) leads() bool {
	return slices.ContainsFunc(c.parts.manager.Held(), func(l tasks.Lease) bool { return l.Shard == 0 })
}

// retention removes old tasks.
func (c *Controller) retention(ctx context.Context) error {
	wait := retentionRetry // a start has better things to do
	failing := false
	for {
		pause(ctx, wait+rand.N(wait/8))
		if ctx.Err() != nil {
			return nil
		}
		wait = retentionEvery
		if !c.leads() {
			failing = false
			c.parts.db.LeaveRetention()
			continue
		}
		_, err := c.parts.db.ApplyRetention(ctx, c.cfg.Retention)
		if err == nil {
			failing = false
			continue
		}
		wait = retentionRetry
		if ctx.Err() == nil && !failing {
			failing = true
			c.log.Warn("old tasks could not be removed yet; trying again each minute", "err", err)
		}
	}
}

// tendQueue keeps the queue small where the server does not.
func (c *Controller) tendQueue(ctx context.Context) error {
	failing := false
	for {
		pause(ctx, tendEvery+rand.N(tendEvery/8))
		if ctx.Err() != nil {
			return nil
		}
		if !c.leads() {
			continue
		}
		err := c.parts.db.TendQueue(ctx)
		if err != nil && ctx.Err() == nil && !failing {
			c.log.Warn("the queue could not be vacuumed", "err", err)
		}
		failing = err != nil
	}
}

// watchDatabase looks once a minute at what nobody else would notice.
func (c *Controller) watchDatabase(ctx context.Context) error {
	failing := false
	for ctx.Err() == nil {
		h, err := c.parts.db.Health(ctx)
		switch {
		case err == nil:
			failing = false
			notes := h.Notes()
			if why := c.parts.db.Pooled(); why != "" {
				notes = append(notes, why)
			}
			notes = append(notes, c.compareTables(ctx)...)
			c.notes.Store(&notes)
		case ctx.Err() == nil && !failing:
			failing = true
			c.log.Warn("look at the state of the database", "err", err)
		}
		pause(ctx, watchEvery)
	}
	return nil
}

// compareTables gives a sentence for each kind of contradiction in the queue's
// tables; one controller looks.
func (c *Controller) compareTables(ctx context.Context) []string {
	if !c.leads() {
		c.parts.db.LeaveConsistency()
		return nil
	}
	found, err := c.parts.db.CheckConsistency(ctx)
	if err != nil {
		if ctx.Err() == nil {
			c.log.Warn("the queue's tables could not be compared", "err", err)
		}
		return nil
	}
	if !found.OK() {
		c.log.Error("the queue's tables contradict each other", "agents_with_two_started_tasks", found.Crowded,
			"tasks_not_in_one_place", found.Torn, "started_tasks_that_do_not_exist", found.Lost)
	}
	return found.Notes()
}

// PlanRetention says which old tasks would be removed now, and changes nothing.
func PlanRetention(ctx context.Context, c Config) ([]store.Partition, error) {
	db, err := store.Open(ctx, store.Config{DSN: c.DatabaseURL, DirectDSN: c.DatabaseDirectURL})
	if err != nil {
		return nil, err
	}
	defer func() { _ = db.Close() }()
	return db.PlanRetention(ctx, c.Retention)
}

// ApplyRetention removes them. It may run beside controllers.
func ApplyRetention(ctx context.Context, c Config) (store.RetentionReport, error) {
	db, err := store.Open(ctx, store.Config{DSN: c.DatabaseURL, DirectDSN: c.DatabaseDirectURL})
	if err != nil {
		return store.RetentionReport{}, err
	}
	defer func() { _ = db.Close() }()
	return db.ApplyRetention(ctx, c.Retention)
}
