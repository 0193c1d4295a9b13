package tasks

import (
	"context"
	"fmt"
	"slices"
	"time"

	"headgate/internal/kinds"
)

// maxLooks bounds the agents whose tables are searched for one turn: each
// costs up to 20 ms when 10,000 tasks wait for it, and others wait meanwhile.
const maxLooks = 8

// expirySlack is how much earlier a newer task may expire and still replace
// an older one: two that come together may be stored in either order.
const expirySlack = time.Minute

// likeness is what two tasks have in common when one may replace the other.
type likeness struct {
	agent    AgentNum
	kind     string
	args     string
	delivery kinds.Delivery
	priority int
	timeout  time.Duration
}

func (x *Insert) likeness() likeness {
	return likeness{x.Agent, x.Kind, x.Args, x.Delivery, x.Priority, x.Timeout}
}

// replacedBy says whether a waiting task has to make room for x.
func (q *Queued) replacedBy(x *Insert) bool {
	return likeness{q.Agent, q.Kind, q.Args, q.Delivery, q.Priority, q.Timeout} == x.likeness() &&
		!q.ExpiresAt.After(x.ExpiresAt.Add(expirySlack))
}

// alike gives the waiting tasks that make room for x, from memory that holds
// all of the agent's.
func (a *agent) alike(x *Insert) []Like {
	var list []Like
	behind := 0
	for i := range slices.Backward(a.next) {
		q := &a.next[i]
		if q.Priority != x.Priority {
			continue
		}
		if q.replacedBy(x) {
			list = append(list, Like{Ref: Ref{ID: q.ID, Attempt: q.Attempt}, Behind: behind})
		}
		behind++
	}
	slices.Reverse(list)
	return list
}

// fillOlder looks for what the submissions of the next turn replace. Nobody
// else changes the queue of these agents, so that it still holds in the turn.
func (l *loop) fillOlder(ctx context.Context) error {
	var far []*submission // their agents have more in the table than in memory
	for _, s := range l.subs[:min(len(l.subs), l.m.cfg.Limits.TurnItems)] {
		if !s.replaces {
			continue
		}
		s.older, s.looked = nil, true
		a := l.agents[s.ins.Agent]
		switch {
		case a == nil || a.depth == 0 && !a.more:
		case !a.more:
			s.older = a.alike(&s.ins)
		case len(far) < maxLooks:
			far = append(far, s)
		default:
			s.looked = false
		}
	}
	if err := l.searchOlder(ctx, far); err != nil {
		return err
	}
	return l.spareKnown(ctx)
}

// searchOlder looks into the table.
func (l *loop) searchOlder(ctx context.Context, subs []*submission) error {
	if len(subs) == 0 {
		return nil
	}
	inserts := make([]Insert, len(subs))
	for i, s := range subs {
		inserts[i] = s.ins
		inserts[i].ExpiresAt = s.ins.ExpiresAt.Add(expirySlack)
	}
	ctx, cancel := l.storeContext(ctx)
	defer cancel()
	found, err := l.m.cfg.Store.Alike(ctx, inserts)
	if err != nil {
		return err
	}
	for i, s := range subs {
		s.older = found[i]
	}
	return nil
}

// spareKnown lets a submission replace nothing when its key is known: it will
// not be stored, and what it would replace may be the very task of the key. Each
// key is asked for once: all tasks of a batch share one.
func (l *loop) spareKnown(ctx context.Context) error {
	stored := map[planKey]map[int]bool{}
	for _, s := range l.subs[:min(len(l.subs), l.m.cfg.Limits.TurnItems)] {
		if s.ins.Key == nil || len(s.older) == 0 {
			continue
		}
		k := planKey{principal: s.ins.Key.Principal, route: s.ins.Key.Route, key: s.ins.Key.Key}
		if stored[k] == nil {
			places, err := l.storedUnder(ctx, *s.ins.Key)
			if err != nil {
				return err
			}
			stored[k] = places
		}
		if stored[k][s.ins.KeyIndex] {
			s.older = nil
		}
	}
	return nil
}

// storedUnder gives the places in its request of the tasks that are stored under
// a key.
func (l *loop) storedUnder(ctx context.Context, key Idempotency) (map[int]bool, error) {
	ctx, cancel := l.storeContext(ctx)
	defer cancel()
	known, err := l.m.cfg.Store.Replay(ctx, key)
	if err != nil {
		return nil, err
	}
	places := make(map[int]bool, len(known))
	for _, r := range known {
		places[r.Index] = true
	}
	return places, nil
}

// replace lets the older tasks end in the turn that stores the newer one. What
// starts or ends in this turn anyway is left alone.
//
// The oldest keeps its place when another task stands between it and the
// newer one. Otherwise a kind that is asked for again and again would go to the
// end each time, and never be run. So at most two tasks that are alike wait: one in
// the place of the first that was asked for, and the newest.
func (l *loop) replace(p *plan, o *op) {
	like := o.sub.ins.likeness()
	last := p.newest[like]
	rest := slices.DeleteFunc(slices.Clone(o.sub.older), func(r Like) bool {
		_, pinned := l.pinned[r.ID]
		_, taken := p.replaced[r.ID]
		return pinned || taken || p.claims(r.ID)
	})
	if len(rest) > 0 && (rest[0].Behind != alikeBehind(o.sub.older, rest[0].ID) || p.between(nil, o)) {
		rest = rest[1:]
	} else if last == nil {
		o.first = true // it takes over the place of the oldest
	}
	for _, r := range rest {
		if p.replaced == nil {
			p.replaced = map[ID]struct{}{}
		}
		p.replaced[r.ID] = struct{}{}
		o.older = append(o.older, Finish{Agent: like.agent, Priority: like.priority, Ref: r.Ref, Ending: superseded(o.sub.ins.ID)})
	}
	if last != nil && !last.sub.ins.ExpiresAt.After(o.sub.ins.ExpiresAt.Add(expirySlack)) {
		if keeps := last.first && p.between(last, o); !keeps {
			last.newer, o.first = o, last.first
		}
	}
	if p.newest == nil {
		p.newest = map[likeness]*op{}
	}
	p.newest[like] = o
}

// alikeBehind counts the tasks of the list that stand behind one of them.
func alikeBehind(list []Like, id ID) int {
	return len(list) - 1 - slices.IndexFunc(list, func(r Like) bool { return r.ID == id })
}

// between says whether the plan puts another task, one that is not like o,
// behind an insert (nil = behind all that waits) and before o.
func (p *plan) between(from, o *op) bool {
	like := o.sub.ins.likeness()
	for _, x := range slices.Backward(p.ops) {
		if x == from || x.kind != opInsert {
			return false // inserts are the last part of a plan
		}
		if x.sub.ins.Agent == like.agent && x.sub.ins.Priority == like.priority && x.sub.ins.likeness() != like {
			return true
		}
	}
	return false
}

// claims says whether the plan starts a task.
func (p *plan) claims(id ID) bool {
	return slices.ContainsFunc(p.ops, func(o *op) bool { return o.kind == opClaim && o.q.ID == id })
}

func superseded(by ID) Ending {
	return Ending{
		Outcome: Cancelled, Reason: ReasonSuperseded,
		Detail: fmt.Sprintf("Task %d, which is newer and asks for the same, has taken its place.", by),
	}
}

// settleOlder tells of the tasks that ended because o was stored.
func (l *loop) settleOlder(o *op) {
	if o.state == opRefused {
		return // nothing was written
	}
	for i := range o.older {
		f := &o.older[i]
		o.a.drop(f.ID)
		if !slices.Contains(o.ended, f.ID) {
			o.a.reread() // it was not where it was seen
			l.touch(o.a)
			continue
		}
		l.queued(o.a, -1)
		l.completed(&op{kind: opFinish, a: o.a, fin: f, at: o.at}, nil)
	}
}

// settleNewer ends a task that one of the same turn replaces: it is in the
// table only now.
func (l *loop) settleNewer(o *op) {
	if o.newer == nil || o.newer.state != opDone {
		return
	}
	l.endUnstarted(o.a, o.sub.ins.Priority, Ref{ID: o.sub.ins.ID}, false, superseded(o.newer.sub.ins.ID), nil)
}
