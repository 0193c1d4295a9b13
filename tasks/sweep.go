package tasks

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// lazyRefills is how many agents one sweep reads the order of, so that pages
// can tell positions behind agents that are away.
const lazyRefills = 200

func isPoison(err error) bool {
	_, ok := errors.AsType[*PoisonError](err)
	return ok
}

// sweep is the pass that alone guarantees progress: what is due, what has
// expired, deadlines, and idle agents with work.
func (l *loop) sweep(ctx context.Context) error {
	l.nextTick = l.now.Add(l.m.cfg.Limits.SweepEvery)
	l.again = false
	shards := l.readyShards()
	if len(shards) > 0 {
		if err := l.sweepRemoved(ctx, shards); err != nil {
			return err
		}
		if err := l.sweepTimes(ctx, shards); err != nil {
			return err
		}
	}
	l.mu.Lock()
	lazy := l.sweepAgents()
	l.mu.Unlock()
	l.flush()
	if err := l.refill(ctx, lazy); err != nil {
		return err
	}
	if l.m.keeper.hasAcquired() && len(shards) == len(l.shards) {
		l.swept.Store(true)
	}
	return nil
}

func (l *loop) readyShards() []Shard {
	var all []Shard
	for s, h := range l.shards {
		if h.ready {
			all = append(all, s)
		}
	}
	return all
}

// sweepTimes reads what is due and what has expired.
func (l *loop) sweepTimes(ctx context.Context, shards []Shard) error {
	limit := l.m.cfg.Limits.TurnItems
	ctx, cancel := l.storeContext(ctx)
	defer cancel()
	due, err := l.m.cfg.Store.Due(ctx, shards, limit)
	if err != nil {
		return err
	}
	over, err := l.m.cfg.Store.Overdue(ctx, shards, limit)
	if err != nil {
		return err
	}
	if err := l.locate(ctx, due, over); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	fresh := 0
	for i := range over {
		if a := l.unstarted(over[i].Agent, over[i].ID); a != nil {
			fresh++
			l.endUnstarted(a, over[i].Priority, over[i].Ref, over[i].Later, expiredEnding(), nil)
		}
	}
	for i := range due {
		if a := l.unstarted(due[i].Agent, due[i].ID); a != nil {
			fresh++
			l.pinned[due[i].ID] = struct{}{}
			l.ops = append(l.ops, &op{kind: opDue, a: a, due: &due[i]})
		}
	}
	l.again = fresh > 0 && (len(due) == limit || len(over) == limit)
	return nil
}

// unstarted gives the agent of a task that the table calls not started, unless
// something else is about to happen to it.
func (l *loop) unstarted(num AgentNum, id ID) *agent {
	_, shard, ok := l.m.loopOfAgent(num)
	if _, pinned := l.pinned[id]; !ok || pinned {
		return nil
	}
	if _, ours := l.epoch(shard); !ours {
		return nil
	}
	a := l.agent(num, shard)
	if a.task(id) != nil {
		return nil
	}
	return a
}

// locate finds the shard of agents that nobody has told of: those that were
// removed while tasks of theirs still waited for a time.
func (l *loop) locate(ctx context.Context, due []DueTask, over []Finish) error {
	unknown := false
	see := func(num AgentNum) {
		_, _, ok := l.m.loopOfAgent(num)
		unknown = unknown || !ok
	}
	for i := range due {
		see(due[i].Agent)
	}
	for i := range over {
		see(over[i].Agent)
	}
	if !unknown {
		return nil
	}
	for _, s := range l.readyShards() {
		one := []Shard{s}
		due, err := l.m.cfg.Store.Due(ctx, one, l.m.cfg.Limits.TurnItems)
		if err != nil {
			return err
		}
		over, err := l.m.cfg.Store.Overdue(ctx, one, l.m.cfg.Limits.TurnItems)
		if err != nil {
			return err
		}
		for i := range due {
			l.m.place(due[i].Agent, s)
		}
		for i := range over {
			l.m.place(over[i].Agent, s)
		}
	}
	return nil
}

// sweepAgents looks at every agent once. It gives those whose order shall be
// read for the pages.
func (l *loop) sweepAgents() []*agent {
	var lazy []*agent
	var c loopCounts
	for _, a := range l.agents {
		if a.session {
			c.sessions++
		}
		for _, f := range a.flights {
			if !f.ghost {
				c.flights++
				if c.flight.IsZero() || f.since.Before(c.flight) {
					c.flight = f.since
				}
			}
			l.deadline(a, f)
		}
		if a.depth == 0 {
			continue
		}
		if a.info.Removed {
			l.removing[a.num] = a
		}
		if len(a.next) == 0 && a.more && len(lazy) < lazyRefills {
			lazy = append(lazy, a)
		}
		if len(a.next) > 0 && (c.oldest.IsZero() || a.next[0].CreatedAt.Before(c.oldest)) {
			c.oldest = a.next[0].CreatedAt
		}
		if !a.barred(l.now) && len(a.flights) == 0 {
			since := later(a.freeSince, a.hold)
			if len(a.next) > 0 {
				since = later(since, a.next[0].CreatedAt)
			}
			c.idle = max(c.idle, l.now.Sub(since))
			l.touch(a)
		}
	}
	l.m.stats.swept(l, c)
	return lazy
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// deadline acts on a task that is over its time: first Cancel, then waiting
// for the agent's word, and at last the outcome unknown. The agent counts the
// timeout itself and ends the task by it, so that its verdict comes first.
func (l *loop) deadline(a *agent, f *flight) {
	if f.ghost || f.finishing {
		return
	}
	lim := &l.m.cfg.Limits
	decided := a.foreign || a.info.Quarantined // nothing it says counts until an operator decides
	over := l.now.Sub(f.since) - f.q.Timeout
	switch {
	case a.info.Removed:
		if a.removedAt.IsZero() {
			a.removedAt = l.now
		}
		if l.now.Sub(a.removedAt) >= RemovedGrace {
			l.endStarted(a, f, removedInFlight())
		}
	case !f.cancelAsked.IsZero() && !l.now.Before(lim.cancelEnd(f, a.session && !decided, a.changed)):
		l.forceEnd(a, f, Ending{
			Outcome: Unknown, Reason: ReasonCancelNoWord,
			Detail: fmt.Sprintf("%s asked for its end, and the agent has given no word since, so that nobody can tell whether it took effect.",
				first(f.markedBy, "Somebody")),
		})
	case decided:
	case l.now.After(lim.forcedEnd(f, f.since.Add(f.q.Timeout))):
		l.forceEnd(a, f, Ending{
			Outcome: Unknown, Reason: ReasonNoWord,
			Detail: fmt.Sprintf("The agent gave no word for %s after the timeout of %s, also when it was asked to end the task.",
				lim.ForcedGrace, f.q.Timeout),
		})
	case over > lim.CancelGrace && !f.cancelSent && a.session && a.reconciled:
		f.cancelSent = true
		l.cancelAt(a, f, "its timeout has passed")
	}
}

// forceEnd completes a task without its agent's word. The slot is known again
// after the next Welcome: if the agent still runs it, it is asked to end it
// before anything else starts, and what it says later is kept beside.
func (l *loop) forceEnd(a *agent, f *flight, e Ending) {
	l.log.Warn("no word from the agent in time", "agent", a.info.ID, "task_id", f.q.ID, "reason", e.Reason)
	l.endStarted(a, f, e)
	a.reconciled = false
	num := a.num
	l.out.after(func() {
		l.m.cfg.Runner.Reconnect(num, "it gave no word about a task that is over its time")
	})
}

// forcedEnd gives the moment at which a task ends without a word of its agent:
// after its timeout, but a controller that has just taken it over asks first.
func (lim *Limits) forcedEnd(f *flight, timeout time.Time) time.Time {
	return later(timeout, f.loaded).Add(lim.ForcedGrace)
}

// cancelEnd gives the moment at which a cancelled task ends without a word of
// its agent: sooner when the agent is away, since changed.
func (lim *Limits) cancelEnd(f *flight, up bool, changed time.Time) time.Time {
	asked := later(f.cancelAsked, f.loaded)
	end := asked.Add(lim.ForcedGrace)
	if !up {
		end = earlier(end, later(asked, changed).Add(lim.AwayGrace))
	}
	return end
}
