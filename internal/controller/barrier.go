package controller

import (
	"context"
	"log/slog"
	"time"
	"uuid"
)

// barrierPause is the time between looks at the other controllers, and with
// them between our own words that they wait for.
const barrierPause = 500 * time.Millisecond

// peers is what a barrier knows of the other controllers; internal/store
// implements it.
type peers interface {
	Heartbeat(ctx context.Context, id uuid.UUID, stable bool) (time.Time, error)
	StableControllers(ctx context.Context, since time.Time) (stable, alive int, err error)
}

// barrier keeps controllers that start together from opening one by one, when
// the first would get the clients of all.
type barrier struct {
	peers peers
	id    uuid.UUID
	log   *slog.Logger
}

// wait says that this controller is fit to serve and ends when the majority of
// those alive has said so since. A single one does not wait. An error of the
// database is no reason to give up: the gate sees it too. It ends with ctx also
// while the database is silent.
func (b barrier) wait(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- b.poll(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (b barrier) poll(ctx context.Context) error {
	var since time.Time
	for said := false; ; {
		stable, alive, err := b.look(ctx, &since)
		switch {
		case err != nil:
			if ctx.Err() == nil {
				b.log.Warn("ask after the other controllers", "err", err)
			}
		case 2*stable > alive:
			return nil
		case !said:
			said = true
			b.log.Info("waiting for a majority of the controllers to be fit to serve", "stable", stable, "alive", alive)
		}
		pause(ctx, barrierPause)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// look speaks up and counts those who did so since we first did.
func (b barrier) look(ctx context.Context, since *time.Time) (stable, alive int, err error) {
	at, err := b.peers.Heartbeat(ctx, b.id, true)
	if err != nil {
		return 0, 0, err
	}
	if since.IsZero() {
		*since = at
	}
	return b.peers.StableControllers(ctx, *since)
}
