package controller

import (
	"context"
	"time"

	"headgate/internal/fleet"
	"headgate/tasks"
)

// What wake-ups of other controllers are about.
const (
	wakeAgents = "agents" // rows of agents have changed
	wakeShards = "shards" // shards were given back
)

// Times of wake-ups.
const (
	wakePause = 200 * time.Millisecond // from one to the next: the server has one lock for all of them
	wakeWait  = 5 * time.Second        // for one to be sent
)

// wakeOthers gives a function that wakes up the other controllers soon. It does
// not wait; several wake-ups of one sort become one.
func (c *Controller) wakeOthers(what string) func() {
	to := c.wakes[what]
	return func() {
		select {
		case to <- struct{}{}:
		default: // on its way already
		}
	}
}

// newWakes gives the signals of all sorts of wake-ups.
func newWakes() map[string]chan struct{} {
	return map[string]chan struct{}{wakeAgents: make(chan struct{}, 1), wakeShards: make(chan struct{}, 1)}
}

// wake sends wake-ups. They are hints: what is lost is found by looking.
func (c *Controller) wake(ctx context.Context) error {
	for {
		what := wakeAgents
		select {
		case <-ctx.Done():
			c.lastWake()
			return nil
		case <-c.wakes[wakeAgents]:
		case <-c.wakes[wakeShards]:
			what = wakeShards
		}
		one, cancel := context.WithTimeout(ctx, wakeWait)
		if err := c.parts.db.Notify(one, wakeTopic, what); err != nil && ctx.Err() == nil {
			c.log.Debug("wake up the other controllers", "about", what, "err", err)
		}
		cancel()
		pause(ctx, wakePause)
	}
}

// lastWake tells of the shards that were given back at the end.
func (c *Controller) lastWake() {
	select {
	case <-c.wakes[wakeShards]:
	default:
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // a clean stop must not hang
	defer cancel()
	if err := c.parts.db.Notify(ctx, wakeTopic, wakeShards); err != nil {
		c.log.Debug("wake up the other controllers", "about", wakeShards, "err", err)
	}
}

// pingElsewhere pings an agent through the controller that is connected to it.
func (c *Controller) pingElsewhere(ctx context.Context, agent tasks.Agent) (fleet.Pong, error) {
	to, err := c.parts.manager.Owner(ctx, agent.Shard())
	if err != nil {
		return fleet.Pong{}, err
	}
	if c.parts.peers == nil {
		return fleet.Pong{}, errNoControllerPort()
	}
	pong, err := c.parts.peers.ping(ctx, to, agent.ID)
	return pong, asUnreachable(to, err)
}
