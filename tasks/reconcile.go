package tasks

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"headgate/internal/kinds"
)

// apply settles what the agent had in hand before it may be given anything.
func (e sessionUp) apply(l *loop) {
	_, shard, known := l.m.loopOfAgent(e.s.Agent)
	if h := l.shards[shard]; !known || h == nil {
		return
	} else if !h.ready {
		l.early[e.s.Agent] = e // its rows are read first
		return
	}
	a := l.agent(e.s.Agent, shard)
	a.session, a.reconciled, a.changed, a.downWhy = true, false, l.now, ""
	a.hold, a.downs = time.Time{}, e.downs
	a.flights = slices.DeleteFunc(a.flights, func(f *flight) bool { return f.ghost })
	for _, f := range a.flights {
		f.cancelSent, f.haunts = false, false
	}
	if e.s.LedgerNew && !e.s.LedgerApproved {
		l.otherLedger(a)
		return
	}
	a.foreign = false
	if e.s.LedgerNew {
		l.interruptAll(a)
	}
	l.reconcile(a, &e.s)
	a.reconciled = true
	a.freeSince = l.now
	l.touch(a)
}

// otherLedger stops an agent whose record is not the one that our tasks were
// written into: it cannot say what became of them.
func (l *loop) otherLedger(a *agent) {
	a.foreign = true
	open := 0
	for _, f := range a.flights {
		if !f.finishing {
			open++
		}
	}
	why := "It came back with another ledger, as after restoring a snapshot."
	if open > 0 {
		why += fmt.Sprintf(" It cannot tell what became of %d started task(s).", open)
	}
	l.log.Warn("agent has another ledger", "agent", a.info.ID, "started_tasks", open)
	num := a.num
	l.out.after(func() { l.m.cfg.Runner.Quarantine(num, why) })
}

// olderLedger stops an agent that was put back to an older copy of its record:
// it does not know a task that it had begun.
func (l *loop) olderLedger(a *agent, f *flight) {
	l.interrupted(a, f, ReasonLedgerChanged, "")
	a.foreign = true
	l.log.Warn("agent has an older ledger", "agent", a.info.ID, "task_id", f.q.ID)
	num, why := a.num, fmt.Sprintf("Its ledger does not know task %s, which it had begun, as after restoring a snapshot.", f.q.ID)
	l.out.after(func() { l.m.cfg.Runner.Quarantine(num, why) })
}

// approve goes on after an operator's decision: what the agent had in hand
// counts as interrupted, and a new session says what it has now.
func (l *loop) approve(a *agent) {
	l.interruptAll(a)
	a.foreign, a.reconciled = false, false
	if a.session {
		num := a.num
		l.out.after(func() { l.m.cfg.Runner.Reconnect(num, "an operator has approved it") })
	}
}

// interruptAll settles what was under way when the ledger was replaced.
func (l *loop) interruptAll(a *agent) {
	for _, f := range slices.Clone(a.flights) {
		if !f.ghost && !f.finishing {
			l.interrupted(a, f, ReasonLedgerChanged, "")
		}
	}
}

// reconcile settles every started row by what the agent says of it.
func (l *loop) reconcile(a *agent, s *Session) {
	spoken := map[Ref]bool{}
	for _, fin := range s.Finished {
		f := a.flight(fin.Ref)
		spoken[fin.Ref] = true
		switch {
		case f == nil:
			l.lateAnswer(a, fin)
		case f.finishing:
		case f.epoch != fin.Epoch:
			l.m.metrics.stale.Inc()
			spoken[fin.Ref] = false // an answer under another epoch is none
		default:
			l.endStarted(a, f, checked(fin.Ending))
		}
	}
	for _, ref := range s.Interrupted {
		if f := a.flight(ref); f == nil {
			a.forget = append(a.forget, ref.ID) // it is completed here, or runs again under a new attempt
			l.out.forgets = append(l.out.forgets, a)
		} else if !f.finishing {
			l.interrupted(a, f, ReasonAgentRestart, s.Found[ref])
		}
	}
	if s.Running != nil {
		spoken[*s.Running] = true
		l.attach(a, *s.Running)
	}
	for _, f := range slices.Clone(a.flights) {
		if !f.ghost && !f.finishing && !spoken[f.ref()] {
			l.neverRan(a, f)
		}
	}
}

// attach goes on waiting for a task that the agent runs.
func (l *loop) attach(a *agent, ref Ref) {
	f := a.flight(ref)
	switch {
	case f == nil:
		l.ghost(a, ref)
	case f.finishing:
		f.haunts = true
	default:
		l.hear(f)
		if !f.cancelAsked.IsZero() {
			l.cancelAt(a, f, "its cancellation was asked for before")
		}
	}
}

// ghost keeps the slot busy with a task that is completed here, or is none of
// ours, and asks the agent to end it.
func (l *loop) ghost(a *agent, ref Ref) {
	f := &flight{q: Queued{Agent: a.num, ID: ref.ID, Attempt: ref.Attempt}, ghost: true, since: l.now, heard: l.now}
	a.flights = append(a.flights, f)
	l.log.Warn("agent runs a task that is not in flight here; it is cancelled", "agent", a.info.ID, "task_id", ref.ID)
	l.cancelAt(a, f, "the task is not in flight any more")
}

// neverRan puts a task back that the agent has never begun. That cannot be when
// it has told us of it: a task of delivery once is on the agent's disk before.
func (l *loop) neverRan(a *agent, f *flight) {
	if f.q.Delivery != kinds.DeliveryRepeatable && !f.accepted.IsZero() {
		l.olderLedger(a, f)
		return
	}
	if !f.cancelAsked.IsZero() {
		l.endStarted(a, f, Ending{
			Outcome: Cancelled, Reason: ReasonCancelled, Detail: "Cancelled on its way; the agent has never begun it.",
		})
		return
	}
	l.giveBack(a, f, time.Time{})
}

// interrupted settles a task that was begun and whose end nobody knows. found
// is what the agent says of what it found of it, a sentence or nothing.
func (l *loop) interrupted(a *agent, f *flight, reason, found string) {
	what := "The agent restarted while it ran"
	if found != "" {
		found = " " + safeText(found, maxDetail/2)
	}
	if reason == ReasonLedgerChanged {
		what = "The agent's ledger was replaced while it was under way"
	}
	switch {
	case f.q.Delivery != kinds.DeliveryRepeatable:
		l.endStarted(a, f, Ending{
			Outcome: Unknown, Reason: reason,
			Detail: what + ", so that nobody can tell whether it took effect. It is not run again by itself." + found,
		})
	case !f.cancelAsked.IsZero():
		l.endStarted(a, f, Ending{
			Outcome: Cancelled, Reason: ReasonCancelled, Detail: what + "; it was to be cancelled and is not run again." + found,
		})
	case f.q.Attempt >= MaxAttempts:
		l.endStarted(a, f, Ending{
			Outcome: Failed, Reason: ReasonAttempts,
			Detail: fmt.Sprintf("%s, for the last of %d attempts.", what, MaxAttempts) + found,
		})
	default:
		l.giveBack(a, f, l.now.Add(backoff(f.q.Attempt)))
	}
}

// maxBackoff bounds the pause between two attempts.
const maxBackoff = 10 * time.Minute

// backoff gives the pause after an interrupted attempt: 1, 5, 25, 125 s, each
// up to 20 % shorter or longer, so that a fleet does not come back in step.
func backoff(attempt int) time.Duration {
	d := time.Second
	for range attempt - 1 {
		d = min(5*d, maxBackoff)
	}
	return min(d-d/5+rand.N(2*d/5), maxBackoff)
}

// recordEachLate keeps what can be kept when an answer among many cannot: an
// agent may say what it likes.
func (l *loop) recordEachLate(ctx context.Context) (kept []ID, err error) {
	for i, f := range l.late {
		one, err := l.m.cfg.Store.RecordLate(ctx, l.late[i:i+1])
		if isPoison(err) {
			l.log.Error("a late answer could not be kept", "task_id", f.ID, "attempt", f.Attempt, "err", err)
		} else if err != nil {
			return nil, err
		}
		kept = append(kept, one...)
	}
	return kept, nil
}

// flushLate keeps late answers, and lets the agents forget them.
func (l *loop) flushLate(ctx context.Context) error {
	if len(l.late) == 0 {
		return nil
	}
	ctx, cancel := l.storeContext(ctx)
	defer cancel()
	kept, err := l.m.cfg.Store.RecordLate(ctx, l.late)
	if isPoison(err) {
		kept, err = l.recordEachLate(ctx)
	}
	if err != nil {
		return err
	}
	l.mu.Lock()
	for _, f := range l.late {
		if a := l.agents[f.Agent]; a != nil && slices.Contains(kept, f.ID) {
			l.out.events = append(l.out.events, Event{Type: EventLate, Task: f.ID, Agent: a.info.ID, State: StateCompleted})
		}
		if a := l.agents[f.Agent]; a != nil && a.session && a.task(f.ID) == nil {
			a.forget = append(a.forget, f.ID)
			l.out.forgets = append(l.out.forgets, a)
		}
	}
	clear(l.late)
	l.late = l.late[:0]
	l.mu.Unlock()
	l.flush()
	return nil
}
