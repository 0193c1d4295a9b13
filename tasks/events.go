package tasks

import (
	"errors"
	"time"
)

// maxChunks is how many chunks of output of one task may be on their way to
// disk; agents send at most 4 that are not acknowledged, so more is a defect.
const maxChunks = 16

// maxLate bounds the answers without a task that wait for being kept.
const maxLate = 1000

// Pauses before an agent that refused is given something again.
const (
	holdBusy = time.Second     // it runs something that we do not know
	holdDisk = 5 * time.Second // its ledger cannot take the task
)

// errMoved says that a task was somewhere else than expected; look again.
var errMoved = errors.New("tasks: the task has moved")

type (
	agentChanged struct{ info Agent }
	sessionUp    struct {
		s     Session
		downs uint64 // sessions of the agent that had ended before
	}
	sessionDown struct {
		agent AgentNum
		why   string
	}
	accepted struct {
		agent AgentNum
		ref   Ref
	}
	output struct {
		agent AgentNum
		c     OutputChunk
	}
	final struct {
		agent AgentNum
		f     Final
	}
	refused struct {
		agent AgentNum
		r     Refusal
	}
)

func (e agentChanged) apply(l *loop) {
	s := e.info.Shard()
	if _, ok := l.epoch(s); !ok {
		return // Load makes the agent from the directory
	}
	a := l.agent(e.info.Num, s)
	if a.info.Removed {
		e.info.Removed = true // nobody comes back under the same number
	}
	approved := a.info.Quarantined && !e.info.Quarantined && !e.info.Removed
	if a.info.Paused && !e.info.Paused || a.info.Quarantined && !e.info.Quarantined {
		a.freeSince = l.now
	}
	a.info = e.info
	if approved {
		l.approve(a)
	}
	if e.info.Removed {
		a.reread()
		l.removing[a.num] = a
	}
	l.touch(a)
}

// sessionOf gives the agent if what it says now counts.
func (l *loop) sessionOf(num AgentNum) *agent {
	a := l.agents[num]
	if a == nil || !a.session || a.foreign {
		return nil
	}
	return a
}

func (e sessionDown) apply(l *loop) {
	delete(l.early, e.agent)
	a := l.agents[e.agent]
	if a == nil || !a.session {
		return
	}
	a.session, a.reconciled, a.changed, a.downWhy = false, false, l.now, e.why
}

func (e accepted) apply(l *loop) {
	a := l.sessionOf(e.agent)
	if a == nil {
		return
	}
	f := a.flight(e.ref)
	if f == nil || f.ghost {
		l.m.metrics.stale.Inc()
		return
	}
	l.hear(f)
}

// hear notes a word of the agent about its task.
func (l *loop) hear(f *flight) {
	f.heard = l.now
	if f.accepted.IsZero() {
		f.accepted = l.now
		if f.loaded.IsZero() {
			l.m.metrics.started(l.now.Sub(f.q.CreatedAt))
		}
	}
}

// leastChunk is what a chunk counts for at least, so that rows are bounded too.
const leastChunk = 128

func (e output) apply(l *loop) {
	a := l.sessionOf(e.agent)
	if a == nil {
		return
	}
	f := a.flight(e.c.Ref)
	switch {
	case f == nil || f.finishing && !f.haunts || e.c.Seq < 0 || e.c.Stream != "stdout" && e.c.Stream != "stderr":
		l.m.metrics.stale.Inc()
		return
	case f.ghost || f.finishing:
		// Completed here: nobody keeps it, but the agent must come to its end.
		l.out.acks = append(l.out.acks, ack{a.num, e.c.Ref, e.c.Seq})
		return
	}
	l.hear(f)
	if f.kept += max(len(e.c.Data), leastChunk); f.kept > l.m.cfg.Limits.TaskOutput {
		// The agent bounds it far below. It is acknowledged, so that the task comes
		// to its end; what is missing shows.
		l.m.metrics.excess.Add(float64(len(e.c.Data)))
		l.out.acks = append(l.out.acks, ack{a.num, e.c.Ref, e.c.Seq})
		return
	}
	if f.chunks++; f.chunks > maxChunks {
		f.chunks--
		num := a.num
		l.out.after(func() {
			l.m.cfg.Runner.Reconnect(num, "it sent more output than was acknowledged")
		})
		return
	}
	l.ops = append(l.ops, &op{kind: opOutput, a: a, f: f, out: &OutputRow{Agent: a.num, OutputChunk: e.c}})
}

func (e final) apply(l *loop) {
	a := l.sessionOf(e.agent)
	if a == nil {
		return
	}
	f := a.flight(e.f.Ref)
	switch {
	case f == nil:
		l.lateAnswer(a, e.f)
	case f.ghost:
		a.land(f)
		a.freeSince = l.now
		l.lateAnswer(a, e.f)
		l.touch(a)
	case f.epoch != e.f.Epoch:
		l.m.metrics.stale.Inc()
	case f.haunts:
		f.haunts = false // its word has come before our own end of it was on disk
		l.lateAnswer(a, e.f)
	case f.finishing:
		l.m.metrics.stale.Inc()
	default:
		l.hear(f)
		if e.f.Interrupted {
			f.printed = max(0, e.f.Ending.OutputBytes)
			l.interrupted(a, f, ReasonAgentRestart, e.f.Ending.Detail)
			return
		}
		l.endStarted(a, f, checked(e.f.Ending))
	}
}

// lateAnswer keeps what cannot be a result any more; then it may be forgotten.
func (l *loop) lateAnswer(a *agent, f Final) {
	l.m.metrics.late.Inc()
	if len(l.late) >= maxLate {
		return // the agent keeps it, and says it again when it reconnects
	}
	l.late = append(l.late, Finish{
		Agent: a.num, Ref: f.Ref, Epoch: f.Epoch, StartedAt: f.StartedAt, Ending: checked(f.Ending),
	})
}

func (e refused) apply(l *loop) {
	a := l.sessionOf(e.agent)
	if a == nil {
		return
	}
	f := a.flight(e.r.Ref)
	if f == nil || f.ghost || f.finishing {
		l.m.metrics.stale.Inc()
		return
	}
	l.m.metrics.refused.Inc()
	l.log.Warn("agent refused a task", "agent", a.info.ID, "task_id", e.r.ID, "cause", e.r.Cause, "detail", e.r.Detail)
	l.neverRan(a, f)
	switch e.r.Cause {
	case "busy":
		a.hold = l.now.Add(holdBusy)
		if r := e.r.Running; r != nil && a.flight(*r) == nil {
			l.ghost(a, *r)
		}
	case "stale_epoch":
		a.reconciled = false
		num := a.num
		l.out.after(func() {
			l.m.cfg.Runner.Reconnect(num, "it knows a newer owner of its shard")
		})
	default:
		a.hold = l.now.Add(holdDisk)
	}
}

// cancelRequest is a person's or program's wish to end a task.
type cancelRequest struct {
	id    ID
	actor string
	row   QueueRow
	shard Shard
	done  chan error // with room for the one answer
}

func (c *cancelRequest) answer(err error) {
	select {
	case c.done <- err:
	default:
	}
}

func (c *cancelRequest) apply(l *loop) {
	answer := func(err error) { l.out.after(func() { c.answer(err) }) }
	if _, ok := l.epoch(c.shard); !ok {
		answer(errNotOwner())
		return
	}
	a := l.agent(c.row.Agent, c.shard)
	f := a.task(c.id)
	_, pinned := l.pinned[c.id]
	switch {
	case pinned || f != nil && f.finishing || f == nil && !c.row.StartedAt.IsZero():
		answer(errMoved)
	case f != nil && !f.cancelAsked.IsZero():
		if a.session && a.reconciled {
			l.cancelAt(a, f, "cancelled by "+c.actor)
		}
		answer(nil)
	case f != nil:
		l.ops = append(l.ops, &op{
			kind: opCancel, a: a, f: f, cancel: c,
			mark: &CancelMark{Agent: a.num, Priority: f.q.Priority, Ref: f.ref(), Actor: c.actor},
		})
	default:
		l.endUnstarted(a, c.row.Priority, c.row.Ref, c.row.Later, Ending{
			Outcome: Cancelled, Reason: ReasonCancelled, Detail: "Cancelled by " + c.actor + " before it had started.",
		}, c)
	}
}
