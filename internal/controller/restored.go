package controller

import (
	"context"
	"time"

	"headgate/internal/store"
	"headgate/tasks"
)

// epochsEvery is how often the agents' refusals are looked at; it needs no
// database.
const epochsEvery = 5 * time.Second

// watchEpochs says once when the agents have obeyed newer owners than the
// database knows of, and once when that is over. It does not make the
// controller unready: who would look then could not get in.
func (c *Controller) watchEpochs(ctx context.Context) error {
	said := false
	for ctx.Err() == nil {
		sentence := c.parts.fleet.Outdated(time.Now()).Sentence()
		switch {
		case sentence != "" && !said:
			c.log.Error("agents refuse this controller", "why", sentence)
		case sentence == "" && said:
			c.log.Info("the agents obey this controller again")
		}
		if said != (sentence != "") {
			said = !said
			c.parts.manager.Hub().Publish(tasks.Event{Type: tasks.EventController})
		}
		pause(ctx, epochsEvery)
	}
	return nil
}

// RaiseEpochs makes a database that was restored from a backup usable again and
// gives the new epoch; controllers may run meanwhile, or not.
func RaiseEpochs(ctx context.Context, c Config) (epoch int64, err error) {
	db, err := store.Open(ctx, store.Config{DSN: c.DatabaseURL, DirectDSN: c.DatabaseDirectURL})
	if err != nil {
		return 0, err
	}
	defer func() { _ = db.Close() }()
	if epoch, err = db.RaiseEpochs(ctx); err == nil {
		_ = db.Notify(ctx, wakeTopic, wakeShards) // a hint: the next renewal finds it too
	}
	return epoch, err
}
