package tasks

import (
	"context"
	"slices"
	"time"

	"headgate/internal/fault"
)

// opKind orders the parts of a turn: what frees comes before what fills.
type opKind uint8

const (
	opOutput opKind = iota
	opFinish
	opRequeue
	opCancel
	opDue
	opClaim
	opInsert
)

type opState uint8

const (
	opPending opState = iota
	opDone            // written
	opMissing         // the row was not as expected: nothing written
	opRefused         // cannot be stored whatever we do
)

// op is one thing to write.
type op struct {
	kind   opKind
	state  opState
	clean  bool // already reduced to what can certainly be stored
	a      *agent
	f      *flight // of started tasks
	fin    *Finish
	out    *OutputRow
	rq     *Requeue
	mark   *CancelMark
	due    *DueTask
	q      Queued // of a claim; of a requeue what goes back
	sub    *submission
	older  []Finish       // of an insert: what it replaces, in the same turn or not at all
	first  bool           // of an insert that replaces: no task like it stands before it
	ended  []ID           // those of older that were written
	newer  *op            // an insert of the same turn that replaces this one
	cancel *cancelRequest // waits for the answer
	at     time.Time      // when it was written, by the store's clock
	err    error
}

func (o *op) id() ID {
	switch o.kind {
	case opFinish:
		return o.fin.ID
	case opOutput:
		return o.out.ID
	case opRequeue:
		return o.rq.ID
	case opCancel:
		return o.mark.ID
	case opDue:
		return o.due.ID
	case opClaim:
		return o.q.ID
	}
	return o.sub.ins.ID
}

// answer tells whoever waits for this op, after the lock is released.
func (o *op) answer(out *effects, err error) {
	if o.cancel != nil {
		c := o.cancel
		out.after(func() { c.answer(err) })
	}
}

// plan is one turn with what is known about each of its parts.
type plan struct {
	no   uint64
	ops  []*op
	took int // ops taken from loop.ops
	subs int // submissions looked at
	keys map[planKey]struct{}

	replaced map[ID]struct{}  // tasks that inserts of this turn replace
	newest   map[likeness]*op // the last insert of each likeness that replaces others
}

// fill takes ids and reads the order of agents that need it, so that build
// needs no store. It runs between turns: nothing changes under it.
func (l *loop) fill(ctx context.Context) error {
	if err := l.fillIDs(ctx); err != nil {
		return err
	}
	if err := l.fillRemoved(ctx); err != nil {
		return err
	}
	if err := l.fillOlder(ctx); err != nil {
		return err
	}
	var want []*agent
	for _, a := range l.dirty {
		if !a.gone && a.more && len(a.next) == 0 && !a.barred(l.now) {
			want = append(want, a)
		}
	}
	return l.refill(ctx, want)
}

// fillIDs makes sure that there are ids for submissions, or that the loop is
// woken up when there are.
func (l *loop) fillIDs(ctx context.Context) error {
	l.idless = false
	if len(l.subs) == 0 {
		return nil
	}
	c, cancel := l.storeContext(ctx)
	defer cancel()
	took, err := l.m.ids.fill(c, l.m.cfg.Store.TakeIDs)
	if err != nil {
		return err
	}
	if took {
		for _, other := range l.m.loops {
			other.wake()
		}
	}
	l.idless = !l.m.ids.good()
	return nil
}

// refill reads the next tasks of agents behind what is in memory.
func (l *loop) refill(ctx context.Context, agents []*agent) error {
	if len(agents) == 0 {
		return nil
	}
	reqs := make([]RefillRequest, 0, len(agents))
	for _, a := range agents {
		r := RefillRequest{Agent: a.num, AfterPriority: -1, Limit: nextItems}
		if n := len(a.next); n > 0 {
			r.AfterPriority, r.AfterID, r.Limit = a.next[n-1].Priority, a.next[n-1].ID, nextItems-n
		}
		reqs = append(reqs, r)
	}
	ctx, cancel := l.storeContext(ctx)
	defer cancel()
	got, err := l.m.cfg.Store.Refill(ctx, reqs)
	if err != nil {
		return err
	}
	l.m.metrics.refills.Inc()
	l.mu.Lock()
	defer l.mu.Unlock()
	count := map[AgentNum]int{}
	for _, q := range got {
		count[q.Agent]++
	}
	for i, a := range agents {
		a.more = false // push sets it again when memory is full
		full := count[a.num] >= reqs[i].Limit
		for _, q := range got {
			if q.Agent != a.num {
				continue
			}
			if _, pinned := l.pinned[q.ID]; !pinned {
				a.push(q)
			}
		}
		a.more = a.more || full
		if len(a.next) == 0 && !a.more && len(l.pinned) == 0 {
			l.queued(a, -a.depth) // the table knows better
		}
	}
	return nil
}

// endUnstarted lets a task that has not started end in a coming turn.
func (l *loop) endUnstarted(a *agent, priority int, ref Ref, later bool, e Ending, c *cancelRequest) {
	l.pinned[ref.ID] = struct{}{}
	a.drop(ref.ID)
	fin := &Finish{Agent: a.num, Priority: priority, Ref: ref, Later: later, Ending: e}
	if c != nil {
		fin.CancelActor = c.actor
	}
	l.ops = append(l.ops, &op{kind: opFinish, a: a, cancel: c, fin: fin})
}

// endStarted lets a started task end in a coming turn.
func (l *loop) endStarted(a *agent, f *flight, e Ending) {
	f.finishing = true
	e.OutputBytes = max(e.OutputBytes, f.printed)
	l.ops = append(l.ops, &op{
		kind: opFinish, a: a, f: f,
		fin: &Finish{
			Agent: a.num, Priority: f.q.Priority, Ref: f.ref(), Epoch: f.epoch, StartedAt: f.startedAt, Ending: e,
		},
	})
}

// giveBack lets a started task go back to its old place, or to a later time.
func (l *loop) giveBack(a *agent, f *flight, notBefore time.Time) {
	f.finishing = true
	a.requeuing++
	l.ops = append(l.ops, &op{
		kind: opRequeue, a: a, f: f, q: f.q,
		rq: &Requeue{Agent: a.num, Priority: f.q.Priority, Ref: f.ref(), Epoch: f.epoch, NotBefore: notBefore},
	})
}

// build makes the next turn. It changes nothing that would have to be undone
// when the turn fails: marks carry the number of the turn.
func (l *loop) build() *plan {
	l.turnNo++
	p := &l.plan
	clear(p.ops)
	*p = plan{no: l.turnNo, ops: p.ops[:0]}
	l.buildOps(p)
	l.buildClaims(p)
	l.buildInserts(p)
	return p
}

// buildOps takes what has arrived, in order, until one limit is reached.
func (l *loop) buildOps(p *plan) {
	var count [opInsert + 1]int
	size, printed := 0, 0
	for i, o := range l.ops {
		if o.f != nil && o.f.deferred == p.no && o.kind != opCancel {
			continue // behind output of its own that waits for the next turn
		}
		if o.kind == opOutput && printed > 0 && printed+len(o.out.Data) > l.m.cfg.Limits.TurnOutput {
			o.f.deferred = p.no
			continue
		}
		if count[o.kind]++; count[o.kind] > l.m.cfg.Limits.TurnItems {
			break
		}
		switch o.kind {
		case opOutput:
			size += len(o.out.Data)
			printed += len(o.out.Data)
		case opFinish:
			size += len(o.fin.Ending.Result) + len(o.fin.Ending.ResultBytes) + len(o.fin.Ending.Detail)
		}
		if size > l.m.cfg.Limits.TurnBytes && p.took > 0 {
			break
		}
		// A row is touched once a turn: a mark and an end never ride together.
		if o.f != nil && o.kind != opOutput {
			if o.f.touched == p.no {
				break
			}
			o.f.touched = p.no
		}
		if o.kind == opFinish && o.f != nil {
			o.f.leaving = p.no
			l.touch(o.a)
		}
		p.ops = append(p.ops, o)
		p.took = i + 1
	}
	// Parts go to disk in the order of their kinds; within one kind the order
	// of arrival stays.
	slices.SortStableFunc(p.ops, func(a, b *op) int { return int(a.kind) - int(b.kind) })
}

// buildClaims starts the next task of every agent whose slot is empty.
func (l *loop) buildClaims(p *plan) {
	claims := 0
	rest := l.dirty[:0]
	for _, a := range l.dirty {
		if claims == l.m.cfg.Limits.TurnItems {
			rest = append(rest, a)
			continue
		}
		a.marked = false
		if a.gone || a.barred(l.now) || !a.free(p.no) || l.m.draining.Load() {
			continue
		}
		l.expireHead(a)
		if len(a.next) == 0 {
			if a.more { // the refill found only what ends anyway
				a.marked = true
				rest = append(rest, a)
			}
			continue
		}
		q := a.next[0]
		q.Attempt++
		a.reserved = p.no
		claims++
		p.ops = append(p.ops, &op{kind: opClaim, a: a, q: q})
	}
	clear(l.dirty[len(rest):])
	l.dirty = rest
}

// expireHead ends tasks that would be too late now instead of running them.
func (l *loop) expireHead(a *agent) {
	for len(a.next) > 0 && !a.next[0].ExpiresAt.After(l.now) {
		q := a.next[0]
		l.endUnstarted(a, q.Priority, Ref{ID: q.ID, Attempt: q.Attempt}, false, expiredEnding(), nil)
	}
}

func expiredEnding() Ending {
	return Ending{Outcome: Expired, Reason: ReasonExpired, Detail: "It had not started when its expires_at passed."}
}

// buildInserts takes submissions; what cannot be accepted is answered at once.
func (l *loop) buildInserts(p *plan) {
	n, size := 0, 0
	for _, s := range l.subs {
		if n == l.m.cfg.Limits.TurnItems {
			break
		}
		if size += len(s.ins.Args); size > l.m.cfg.Limits.TurnBytes && n > 0 {
			break
		}
		if s.ins.Key != nil && !p.take(s) {
			break // the same key twice: the second one is a replay of the next turn
		}
		if s.replaces && !s.looked {
			break // what it replaces is looked for before the next turn
		}
		if !l.numbered(s) {
			break
		}
		p.subs++
		epoch, ok := l.epoch(s.shard)
		if !ok {
			s.answer(errNotOwner())
			continue
		}
		a := l.agent(s.ins.Agent, s.shard)
		if a.info.Removed {
			s.answer(errAgentRemoved(a.name()))
			continue
		}
		if err := l.room(a, n); err != nil {
			s.answer(err)
			continue
		}
		if !s.begin() {
			continue // its submitter has left
		}
		s.ins.Epoch = epoch
		s.ins.Started = !s.ins.NotBefore.After(s.ins.CreatedAt) && !a.barred(l.now) && a.free(p.no) &&
			len(a.next) == 0 && !a.more && !l.m.draining.Load()
		if s.ins.Started {
			a.reserved = p.no
		}
		if a.plannedIn != p.no {
			a.plannedIn, a.planned = p.no, 0
		}
		a.planned++
		n++
		o := &op{kind: opInsert, a: a, sub: s}
		if s.replaces {
			l.replace(p, o)
		}
		p.ops = append(p.ops, o)
	}
}

// numbered gives a submission its id, which it keeps through all attempts to
// store it; false when none is left for this turn.
func (l *loop) numbered(s *submission) (ok bool) {
	if s.ins.ID != 0 {
		return true
	}
	s.ins.ID, ok = l.m.ids.give()
	return ok
}

// planKey is an idempotency key with the place in its batch.
type planKey struct {
	principal, route, key string
	index                 int
}

// take notes the key of a submission; false when the turn has it already.
func (p *plan) take(s *submission) bool {
	k := planKey{s.ins.Key.Principal, s.ins.Key.Route, s.ins.Key.Key, s.ins.KeyIndex}
	if _, ok := p.keys[k]; ok {
		return false
	}
	if p.keys == nil {
		p.keys = map[planKey]struct{}{}
	}
	p.keys[k] = struct{}{}
	return true
}

// room says whether the queue has a place for one more task of the agent,
// beside those that the turn holds already.
func (l *loop) room(a *agent, inTurn int) error {
	lim := l.m.cfg.Limits
	planned := 0
	if a.plannedIn == l.turnNo {
		planned = a.planned
	}
	if a.depth+planned >= lim.AgentDepth {
		return fault.Newf(fault.Exhausted, "queue_full", "%d tasks wait for %s already, which is the most for one agent.",
			a.depth, a.name()).WithHint("Wait until it has worked some off, or cancel tasks that are no longer needed.")
	}
	if total := l.total(); total+inTurn >= lim.TotalDepth {
		return fault.Newf(fault.Exhausted, "queue_full", "%d tasks wait in all, which is the most that this controller keeps.",
			total).WithHint("Wait until the agents have worked some off, or cancel tasks that are no longer needed.")
	}
	return nil
}

// total counts the tasks that wait in all loops, those of the others as of
// their last turn.
func (l *loop) total() int {
	n := l.depth + l.later
	for _, other := range l.m.loops {
		if other != l {
			n += int(other.waiting.Load())
		}
	}
	return n
}
