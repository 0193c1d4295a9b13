package fleet

import (
	"context"
	"fmt"
	"strings"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/tasks"
)

// Own implements tasks.Runner.
func (f *Fleet) Own(leases []tasks.Lease) {
	f.mu.Lock()
	before := f.held
	f.held = [tasks.NumShards]holding{}
	gained := false
	for _, l := range leases {
		if l.Shard < 0 || l.Shard >= tasks.NumShards {
			continue
		}
		h := holding{lease: l, owned: true}
		if was := before[l.Shard]; was.owned && was.lease.Epoch == l.Epoch {
			h.read = was.read
		}
		gained = gained || !h.read
		f.held[l.Shard] = h
	}
	f.mu.Unlock()
	if gained {
		wake(f.reload)
	}
	for _, p := range f.reg.all() {
		f.arrange(p.m)
	}
}

// Lookup implements tasks.Runner.
func (f *Fleet) Lookup(ref string) (tasks.Agent, error) {
	if id, err := uuid.Parse(ref); err == nil {
		if m := f.reg.id(id); m != nil {
			return m.agent(), nil
		}
		return tasks.Agent{}, unknownAgent(ref, "")
	}
	switch found := f.reg.named(ref); len(found) {
	case 1:
		return found[0].agent(), nil
	case 0:
		return tasks.Agent{}, unknownAgent(ref, f.nearest(ref))
	default:
		return tasks.Agent{}, ambiguousAgent(ref, found)
	}
}

func unknownAgent(ref, near string) error {
	err := fault.Newf(fault.Invalid, CodeUnknownAgent, "There is no agent %q.", clean(ref, maxName))
	if near != "" {
		return err.WithHint(fmt.Sprintf("Did you mean %q?", near))
	}
	return err.WithHint("Give the id or the exact name of an enrolled agent.")
}

func ambiguousAgent(name string, found []*member) error {
	const shown = 5 // ids; more do not help
	ids := make([]string, 0, shown)
	for _, m := range found[:min(len(found), shown)] {
		ids = append(ids, m.id.String())
	}
	more := ""
	if len(found) > shown {
		more = fmt.Sprintf(" and %d more", len(found)-shown)
	}
	return fault.Newf(fault.Conflict, CodeAmbiguousAgent, "%d agents have the name %q: %s%s.",
		len(found), clean(name, maxName), strings.Join(ids, ", "), more).WithHint("Give the agent's id instead.")
}

// nearest gives the name that a mistyped one probably meant.
func (f *Fleet) nearest(name string) string {
	const maxTyped = 64 // longer words are no typing errors
	if len(name) == 0 || len(name) > maxTyped {
		return ""
	}
	best, bestDistance := "", 1+len(name)/4
	for _, p := range f.reg.all() {
		if len(p.name) > maxTyped {
			continue
		}
		if strings.EqualFold(p.name, name) {
			return p.name
		}
		if d := distance(name, p.name, bestDistance); d <= bestDistance && (best == "" || d < bestDistance) {
			best, bestDistance = p.name, d
		}
	}
	return best
}

// distance is the number of edits between two names, or more than limit.
func distance(a, b string, limit int) int {
	if len(a)-len(b) > limit || len(b)-len(a) > limit {
		return limit + 1
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// Execute implements tasks.Runner.
func (f *Fleet) Execute(a tasks.Assignment) {
	m := f.reg.num(a.Agent)
	if m == nil {
		return
	}
	s := m.session.Load()
	if s == nil || s.lease.Epoch != a.Epoch {
		return // the next SessionUp settles it
	}
	s.settle()
	s.post(func(b *box) { b.put(item{assignment: a}) })
}

// Cancel implements tasks.Runner.
func (f *Fleet) Cancel(agent tasks.AgentNum, ref tasks.Ref, reason string) {
	f.post(agent, func(b *box) {
		b.put(item{cancel: true, assignment: tasks.Assignment{Queued: tasks.Queued{ID: ref.ID, Attempt: ref.Attempt}}, reason: clean(reason, maxSentence)})
	})
}

// Forget implements tasks.Runner.
func (f *Fleet) Forget(agent tasks.AgentNum, ids ...tasks.ID) {
	f.post(agent, func(b *box) {
		for _, id := range ids {
			b.forget = append(b.forget, int64(id))
		}
		b.unheeded = 0
	})
}

// AckOutput implements tasks.Runner.
func (f *Fleet) AckOutput(agent tasks.AgentNum, ref tasks.Ref, seq int) {
	f.post(agent, func(b *box) { b.acknowledge(ref, seq) })
}

func (f *Fleet) post(agent tasks.AgentNum, put func(*box)) {
	if m := f.reg.num(agent); m != nil {
		if s := m.session.Load(); s != nil {
			s.post(put)
		}
	}
}

// Reconnect implements tasks.Runner.
func (f *Fleet) Reconnect(agent tasks.AgentNum, why string) {
	if m := f.reg.num(agent); m != nil {
		m.end(&trouble{cause: CauseReconnect, sentence: clean(why, maxSentence)})
		m.nudge()
	}
}

// Quarantine implements tasks.Runner. Memory knows at once; the row follows.
func (f *Fleet) Quarantine(agent tasks.AgentNum, why string) {
	m := f.reg.num(agent)
	if m == nil {
		return
	}
	m.mu.Lock()
	if m.row.Status != Active {
		m.mu.Unlock()
		return
	}
	m.pending = clean(why, maxSentence)
	if m.row.LedgerID != uuid.Nil() && m.ledger != uuid.Nil() && m.ledger != m.row.LedgerID {
		m.pending = withLedger(why, m.ledger)
	}
	m.row.Status, m.row.StatusWhy = Quarantined, m.pending
	m.mu.Unlock()
	f.arrange(m)
	f.soon(m)
}

// soon asks for the member's pending changes to be stored.
func (f *Fleet) soon(m *member) {
	f.mu.Lock()
	f.dirty[m] = struct{}{}
	f.mu.Unlock()
	wake(f.upkeep)
}

// holding is what is known of a shard's lease.
type holding struct {
	lease tasks.Lease
	owned bool
	// read says that the rows were read since the shard was gained. Nobody is
	// dialled before: the owner before us may have recorded a ledger, and one
	// that we do not know of would be trusted.
	read bool
}

// holdingOf gives what is known of the lease of the member's shard; nothing is
// owned while the fleet does not run.
func (f *Fleet) holdingOf(m *member) holding {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.held[tasks.ShardOf(m.id)]
	h.owned = h.owned && f.ctx != nil && f.ctx.Err() == nil
	return h
}

// setHealth changes what is said of a member's connection. Only a change of
// health itself is published, not each failed dial.
//
// A member's loop gives its context: when arrange has ended the loop, what the
// loop still has to say does not count any more.
func (f *Fleet) setHealth(ctx context.Context, m *member, h Health, edit func(*Live)) {
	m.mu.Lock()
	if ctx.Err() != nil {
		m.mu.Unlock()
		return
	}
	changed := m.live.Health != h
	if changed {
		f.metrics.agents.WithLabelValues(string(m.live.Health)).Dec()
		f.metrics.agents.WithLabelValues(string(h)).Inc()
		m.live.Health, m.live.Since = h, time.Now()
	}
	edit(&m.live)
	m.mu.Unlock()
	if changed {
		f.cfg.Publish(Event{What: EventHealth, View: m.view(time.Now())})
	}
}
