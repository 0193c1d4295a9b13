package tasks

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"headgate/internal/fault"
)

// removedMargin is how far a look for removed agents reaches behind the one
// before: a removal carries the time at which its transaction began, and is
// seen only after its commit.
const removedMargin = time.Minute

// sweepRemoved learns which agents were removed. The fleet tells it of its own
// removals at once; those of another controller, and those of before this
// start, are found here.
func (l *loop) sweepRemoved(ctx context.Context, shards []Shard) error {
	var within time.Duration
	if !l.asked.IsZero() {
		within = l.now.Sub(l.asked) + removedMargin
	}
	c, cancel := l.storeContext(ctx)
	gone, err := l.m.cfg.Store.Removed(c, shards, within)
	cancel()
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = l.now
	for _, info := range gone {
		if _, ours := l.epoch(info.Shard()); !ours {
			continue
		}
		a := l.agent(info.Num, info.Shard())
		if !a.info.Removed {
			a.info = info
			a.info.Removed = true
			a.reread()
		}
		l.removing[a.num] = a
	}
	return nil
}

// fillRemoved ends the tasks of removed agents that have not started, a page
// at a time.
func (l *loop) fillRemoved(ctx context.Context) error {
	if len(l.removing) == 0 || len(l.pinned) > 0 {
		return nil // the page before is still on its way
	}
	limit := l.m.cfg.Limits.TurnItems
	c, cancel := l.storeContext(ctx)
	open, err := l.m.cfg.Store.Abandoned(c, slices.Collect(maps.Keys(l.removing)), limit)
	cancel()
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range open {
		x := &open[i]
		l.endUnstarted(l.removing[x.Agent], x.Priority, x.Ref, x.Later, Ending{
			Outcome: Cancelled, Reason: ReasonAgentRemoved,
			Detail: "The agent was removed before this task had started.",
		}, nil)
	}
	if len(open) == limit {
		return nil
	}
	for num, a := range l.removing {
		if !slices.ContainsFunc(open, func(f Finish) bool { return f.Agent == num }) {
			delete(l.removing, num)
			l.queued(a, -a.depth) // the table knows better
		}
	}
	l.counted()
	return nil
}

// removedInFlight is the end of a task that a removed agent had in hand.
func removedInFlight() Ending {
	return Ending{
		Outcome: Unknown, Reason: ReasonAgentRemoved,
		Detail: "The agent was removed while it had this task and has given no word, so that nobody can tell whether it took effect.",
	}
}

// removedWaiting explains a task of a removed agent.
func removedWaiting(t *Task, s *situation, now time.Time) *Waiting {
	if t.State == StateNew {
		return &Waiting{
			Cause: CauseRemoved, Since: t.CreatedAt,
			Sentence: "Waits for its end: the agent was removed, so that it does not start any more.",
			NextStep: "Headgate completes it as cancelled within seconds.",
		}
	}
	since := s.removedAt
	if since.IsZero() {
		since = now
	}
	return &Waiting{
		Cause: CauseRemoved, Since: since,
		Sentence: "The agent was removed while it had this task; no word of it is expected any more.",
		NextStep: fmt.Sprintf("It is completed at %s, with the outcome unknown.", clock(since.Add(RemovedGrace), now)),
	}
}

func errAgentRemoved(name string) *fault.Error {
	return fault.Newf(fault.Conflict, "agent_removed", "The agent %s was removed; nothing was stored.", name).
		WithHint("Submit a new task for another agent, or pair this one again and use it then.")
}
