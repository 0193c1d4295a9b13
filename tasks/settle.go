package tasks

import (
	"time"

	"headgate/internal/fault"
)

// effects is what happens after a commit, outside of the lock.
type effects struct {
	execs    []assigned
	acks     []ack
	forgets  []*agent
	events   []Event
	answered []*submission
	done     []Completed
	calls    []func() // the rare ones
}

type ack struct {
	agent AgentNum
	ref   Ref
	seq   int
}

func (e *effects) after(f func()) { e.calls = append(e.calls, f) }

// answers runs only what tells callers, for a loop that ends.
func (e *effects) answers() {
	for _, f := range e.calls {
		f()
	}
	e.calls = nil
}

// flush makes the effects happen. It runs without the lock.
func (l *loop) flush() {
	r, e := l.m.cfg.Runner, &l.out
	if len(e.execs) > 0 {
		l.m.hand(e.execs)
	}
	for _, s := range e.answered {
		s.release()
	}
	for _, a := range e.acks {
		r.AckOutput(a.agent, a.ref, a.seq)
	}
	for _, a := range e.forgets {
		if len(a.forget) > 0 {
			fault.Point("before_forget")
			r.Forget(a.num, a.forget...)
			a.forget = nil
		}
	}
	if len(e.events) > 0 {
		fault.Point("before_notify")
	}
	l.m.cfg.Hub.Publish(e.events...)
	for i := range e.done {
		l.m.hooks.tell(e.done[i])
	}
	for _, f := range e.calls {
		f()
	}
	clear(e.execs)
	clear(e.answered)
	clear(e.forgets)
	clear(e.events)
	clear(e.done)
	clear(e.calls)
	*e = effects{
		execs: e.execs[:0], acks: e.acks[:0], forgets: e.forgets[:0], events: e.events[:0],
		answered: e.answered[:0], done: e.done[:0], calls: e.calls[:0],
	}
}

// settle brings memory up to what the turn has written.
func (l *loop) settle(p *plan) {
	var parted []Shard
	for _, o := range p.ops {
		if !l.settleOp(o) {
			l.m.metrics.mismatches.Inc()
			l.log.Error("the queue on disk differs from memory; the shard is read again",
				"shard", int(o.a.shard), "task_id", o.id(), "agent", o.a.info.ID, "part", int(o.kind))
			parted = append(parted, o.a.shard)
		}
	}
	l.keepPending(p)
	for _, s := range parted {
		l.reload(s)
	}
	l.counted()
}

// settleOp applies one op; false when disk and memory have parted.
func (l *loop) settleOp(o *op) bool {
	if o.state == opPending {
		return true
	}
	switch o.kind {
	case opOutput:
		l.settleOutput(o)
	case opFinish:
		if o.f == nil {
			return l.settleUnstarted(o)
		}
		return l.settleStarted(o)
	case opRequeue:
		return l.settleRequeue(o)
	case opCancel:
		l.settleCancel(o)
	case opDue:
		l.settleDue(o)
	case opClaim:
		return l.settleClaim(o)
	case opInsert:
		return l.settleInsert(o)
	}
	return true
}

// keepPending takes what was written out of the lists of the loop; the rest
// stays in the order of its arrival.
func (l *loop) keepPending(p *plan) {
	var subs []*submission
	for _, o := range p.ops {
		switch {
		case o.state != opPending:
		case o.kind == opInsert:
			if !l.inDoubt {
				o.sub.rollback()
			}
			subs = append(subs, o.sub)
		case o.kind == opClaim:
			l.touch(o.a)
		}
	}
	k := 0
	for i, o := range l.ops {
		if i >= p.took || o.state == opPending {
			l.ops[k] = o
			k++
		}
	}
	clear(l.ops[k:])
	l.ops = l.ops[:k]
	if len(subs) > 0 {
		l.subs = append(subs, l.subs[p.subs:]...)
		return
	}
	k = copy(l.subs, l.subs[p.subs:])
	clear(l.subs[k:])
	l.subs = l.subs[:k]
}

func (l *loop) settleOutput(o *op) {
	o.f.chunks--
	l.out.acks = append(l.out.acks, ack{o.a.num, o.out.Ref, o.out.Seq})
	l.out.events = append(l.out.events, Event{Type: EventOutput, Task: o.out.ID, Agent: o.a.info.ID})
}

func (l *loop) settleStarted(o *op) bool {
	if o.state != opDone {
		return false
	}
	f, a := o.f, o.a
	f.finishing = false
	if f.haunts {
		f.ghost, f.haunts = true, false
		l.cancelAt(a, f, "the task is completed here without the agent's word")
	} else {
		a.land(f)
		a.freeSince = l.now
	}
	a.forget = append(a.forget, o.fin.ID)
	l.out.forgets = append(l.out.forgets, a)
	l.m.stats.landed(l)
	l.completed(o, f)
	l.touch(a)
	return true
}

// completed tells everybody of one completion that is on disk; f is nil when
// the task has not started.
func (l *loop) completed(o *op, f *flight) {
	fin, q := o.fin, &Queued{}
	e := Event{
		Type: EventCompleted, Task: fin.ID, Agent: o.a.info.ID, State: StateCompleted, Outcome: fin.Ending.Outcome,
	}
	if l.m.cfg.Hub.awaited() {
		e.end = &completion{attempt: fin.Attempt, completedAt: o.at, ending: fin.Ending}
		if f != nil {
			e.end.startedAt, e.end.cancelledAt, e.end.cancelActor = f.startedAt, f.markedAt, f.markedBy
		} else if fin.CancelActor != "" {
			e.end.cancelledAt, e.end.cancelActor = o.at, fin.CancelActor
		}
	}
	l.out.events = append(l.out.events, e)
	ran, total := time.Duration(-1), time.Duration(-1)
	if f != nil {
		q = &f.q
		ran, total = l.now.Sub(f.since), l.now.Sub(q.CreatedAt)
	}
	l.m.stats.completed(fin.Ending.Outcome, ran)
	l.m.metrics.finished(fin.Ending.Outcome, total)
	if l.m.hooks.wants(q.Kind) {
		l.out.done = append(l.out.done, Completed{
			ID: fin.ID, Agent: o.a.num, Kind: q.Kind, Ending: fin.Ending, CompletedAt: o.at,
		})
	}
}

func (l *loop) settleUnstarted(o *op) bool {
	delete(l.pinned, o.fin.ID)
	switch o.state {
	case opMissing:
		// It moved between the look and the turn. Whoever asked looks again.
		if o.a.depth > 0 {
			o.a.reread()
			l.touch(o.a)
		}
		o.answer(&l.out, errMoved)
		return true
	case opRefused:
		o.answer(&l.out, o.err)
		return true
	}
	if o.fin.Later {
		l.postponed(o.a.shard, -1)
	} else {
		l.queued(o.a, -1)
	}
	l.completed(o, nil)
	o.answer(&l.out, nil)
	return true
}

func (l *loop) settleRequeue(o *op) bool {
	if o.state != opDone {
		return false
	}
	a := o.a
	a.requeuing--
	a.land(o.f)
	l.m.stats.landed(l)
	a.freeSince = l.now
	if o.rq.NotBefore.After(o.at) {
		l.postponed(a.shard, 1)
	} else {
		l.returned(a)
	}
	l.m.metrics.requeued.Inc()
	l.out.events = append(l.out.events, Event{Type: EventRequeued, Task: o.q.ID, Agent: a.info.ID, State: StateNew})
	l.touch(a)
	return true
}

func (l *loop) settleCancel(o *op) {
	if o.state != opDone {
		o.answer(&l.out, cmpErr(o.err, errMoved))
		return
	}
	o.f.cancelAsked = l.now
	if o.f.markedAt.IsZero() { // the row keeps the first, too
		o.f.markedAt, o.f.markedBy = o.at, o.mark.Actor
	}
	if o.a.session && o.a.reconciled {
		l.cancelAt(o.a, o.f, "cancelled by "+o.mark.Actor)
	}
	l.out.events = append(l.out.events, Event{Type: EventCancelling, Task: o.mark.ID, Agent: o.a.info.ID, State: StateWaiting})
	o.answer(&l.out, nil)
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

// cancelAt asks the agent to end a task.
func (l *loop) cancelAt(a *agent, f *flight, why string) {
	num, ref := a.num, f.ref()
	l.out.after(func() { l.m.cfg.Runner.Cancel(num, ref, why) })
}

func (l *loop) settleDue(o *op) {
	delete(l.pinned, o.due.ID)
	if o.state != opDone {
		return // it was cancelled or has expired meanwhile
	}
	l.postponed(o.a.shard, -1)
	l.returned(o.a)
	l.touch(o.a)
}

// returned counts a task that has come back into the table. Its place may be
// before what is in memory, and its arguments are only there.
func (l *loop) returned(a *agent) {
	l.queued(a, 1)
	a.reread()
	if a.info.Removed {
		l.removing[a.num] = a
	}
}

func (l *loop) settleClaim(o *op) bool {
	if o.state != opDone {
		return false
	}
	o.a.drop(o.q.ID)
	l.queued(o.a, -1)
	l.begin(o, o.q)
	return true
}

// begin puts a task that is started on disk into the slot and hands it over.
func (l *loop) begin(o *op, q Queued) {
	a := o.a
	epoch := l.shards[a.shard].lease.Epoch
	a.flights = append(a.flights, &flight{q: q, epoch: epoch, startedAt: o.at, since: l.now})
	l.out.execs = append(l.out.execs, assigned{Assignment: Assignment{Queued: q, Epoch: epoch, Forget: a.forget}, downs: a.downs})
	a.forget = nil
	l.out.events = append(l.out.events, Event{Type: EventStarted, Task: q.ID, Agent: a.info.ID, State: StateWaiting})
	l.m.stats.started(l, l.now, q.CreatedAt)
	// The arguments have been handed over; a requeue reads them again.
	a.flights[len(a.flights)-1].q.Args = ""
}

func (l *loop) settleInsert(o *op) bool {
	s, a := o.sub, o.a
	l.settleOlder(o)
	switch {
	case o.state == opRefused:
		l.answerSub(s, o.err)
		return true
	case o.state == opMissing && s.ins.Key != nil:
		s.replay = true
		l.answerSub(s, nil)
		return true
	case o.state == opMissing:
		l.answerSub(s, fault.New(fault.Internal, "queue_mismatch", "The queue did not take the task; nothing was stored."))
		return false
	}
	if a.info.ID != s.agent.ID {
		a.info = s.agent // the first that is heard of this agent
	}
	q := Queued{
		Agent: a.num, Priority: s.ins.Priority, ID: s.ins.ID, Kind: s.ins.Kind, Args: s.ins.Args,
		Delivery: s.ins.Delivery, Timeout: s.ins.Timeout, CreatedAt: s.ins.CreatedAt, ExpiresAt: s.ins.ExpiresAt,
	}
	if s.waiter != nil { // before anything can end the task
		l.m.cfg.Hub.join(s.waiter, q.ID)
	}
	l.m.stats.submitted()
	l.out.events = append(l.out.events, Event{Type: EventCreated, Task: q.ID, Agent: a.info.ID, State: StateNew})
	switch {
	case s.ins.Started:
		q.Attempt = 1
		s.startedAt = o.at
		l.begin(o, q)
	case s.ins.NotBefore.After(s.ins.CreatedAt):
		l.postponed(a.shard, 1)
	default:
		l.queued(a, 1)
		a.push(q)
		l.settleNewer(o)
	}
	l.answerSub(s, nil)
	return true
}

func (l *loop) answerSub(s *submission, err error) {
	s.err = err
	l.out.answered = append(l.out.answered, s)
}
