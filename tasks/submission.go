package tasks

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"headgate/internal/fault"
)

// States of a submission on its way to disk.
const (
	subQueued    int32 = iota // nobody has begun to store it
	subTaken                  // it is in a turn
	subDone                   // its answer is known
	subWithdrawn              // its submitter has left before it was taken
)

// submission is one Insert with somebody who waits for it.
type submission struct {
	ins   Insert
	agent Agent
	shard Shard
	state atomic.Int32
	group *group
	// waiter joins the Hub when the task is stored, and not when it was a
	// replay; nil = nobody waits for the end.
	waiter *waiter
	// replaces says that older tasks like it are to end when it is stored; older
	// are those, and looked that they were looked for. Only the loop uses these.
	replaces bool
	looked   bool
	older    []Like

	// Set before release.
	err       error
	replay    bool
	startedAt time.Time
	waiting   *Waiting // as the owner says, when that is another controller

	// Of what is passed on to other controllers; the submitter's goroutine alone
	// uses them.
	lost  bool // an answer was lost: it may be stored
	again bool // err may pass: ask again who owns the agent
}

// group waits for the last of its submissions.
type group struct {
	left atomic.Int32
	done chan struct{}
}

// begin takes the submission into a turn; false when its submitter has left.
func (s *submission) begin() bool {
	return s.state.CompareAndSwap(subQueued, subTaken) || s.state.Load() == subTaken
}

// rollback says that the turn wrote nothing.
func (s *submission) rollback() { s.state.CompareAndSwap(subTaken, subQueued) }

// withdraw takes it back; false when it is, or may be, stored.
func (s *submission) withdraw() bool { return s.state.CompareAndSwap(subQueued, subWithdrawn) }

// answer is an answer that needs no turn.
func (s *submission) answer(err error) {
	if s.state.Load() == subTaken && err != nil {
		err = errUnknown(s.ins.ID)
	}
	s.err = err
	s.release()
}

// release lets the submitter go on.
func (s *submission) release() {
	if s.state.Swap(subDone) == subWithdrawn {
		return
	}
	if s.group.left.Add(-1) == 0 {
		close(s.group.done)
	}
}

func errUnknown(id ID) error {
	return fault.Newf(fault.Unavailable, "commit_unknown",
		"The database fell silent while task %d was being stored; nobody knows yet whether it is.", id).
		WithHint("Ask for the task by this id, or send the request again with the same Idempotency-Key.")
}

func errNotStored() error {
	return fault.New(fault.Unavailable, "database_unavailable",
		"The database does not answer; nothing was stored.").
		WithHint("Send the request again in a few seconds.")
}

func errStopping() error {
	return fault.New(fault.Unavailable, "shutting_down", "This controller is stopping; nothing was stored.").
		WithHint("Send the request again; another controller or the next start takes it.")
}

// store has submissions stored, wherever their agents are owned, and waits until
// all are answered. After SubmitWait, or TakeOverWait when other controllers
// are needed, it takes back what has not been begun and says what it knows.
func (m *Manager) store(ctx context.Context, subs []submission) error {
	var size int64
	for i := range subs {
		size += subs[i].size()
	}
	if err := m.admit(len(subs), size); err != nil {
		return err
	}
	defer m.discharge(len(subs), size)
	if m.cfg.Peers != nil && !m.holdsAll(subs) {
		return m.route(ctx, subs)
	}
	g := newGroup(len(subs))
	m.send(subs, g)
	timer := time.NewTimer(m.cfg.Limits.SubmitWait)
	defer timer.Stop()
	select {
	case <-g.done:
		return m.routeRest(ctx, subs)
	case <-ctx.Done():
	case <-timer.C:
	}
	return giveUp(subs)
}

// routeRest gives the answer of submissions that the loops have answered. Those
// whose shards were lost meanwhile are passed on.
func (m *Manager) routeRest(ctx context.Context, subs []submission) error {
	err := firstError(subs)
	if err == nil || m.cfg.Peers == nil || fault.CodeOf(err) != codeNotOwner {
		return err
	}
	for i := range subs {
		subs[i].again = fault.CodeOf(subs[i].err) == codeNotOwner
	}
	return m.routeSome(ctx, subs)
}

func newGroup(n int) *group {
	g := &group{done: make(chan struct{})}
	g.left.Store(int32(n))
	return g
}

// size is about what the submission takes in memory.
func (s *submission) size() int64 { return int64(len(s.ins.Args)) + 512 }

// admit keeps the memory of submissions under way bounded.
func (m *Manager) admit(n int, size int64) error {
	items := m.inboxItems.Add(int64(n))
	bytes := m.inboxBytes.Add(size)
	if items > int64(m.cfg.Limits.InboxItems) || bytes > int64(m.cfg.Limits.InboxBytes) {
		m.discharge(n, size)
		m.metrics.submitRefused.Inc()
		return fault.Newf(fault.Exhausted, "too_many_submissions",
			"%d submissions are on their way to disk already, which is the most at a time.", items-int64(n)).
			WithHint("Send the request again in a second, and fewer at once.")
	}
	return nil
}

func (m *Manager) discharge(n int, size int64) {
	m.inboxItems.Add(-int64(n))
	m.inboxBytes.Add(-size)
}

func (m *Manager) send(subs []submission, g *group) {
	if len(subs) == 1 {
		subs[0].group = g
		m.loopOf(subs[0].shard).submit(&subs[0])
		return
	}
	list := make([]*submission, len(subs))
	for i := range subs {
		list[i] = &subs[i]
	}
	m.sendAll(list, g)
}

func (m *Manager) sendAll(list []*submission, g *group) {
	per := make([][]*submission, len(m.loops))
	for _, s := range list {
		s.group = g
		n := int(s.shard) % len(m.loops)
		per[n] = append(per[n], s)
	}
	for n, list := range per {
		if len(list) > 0 {
			m.loops[n].submit(list...)
		}
	}
}

// result is what became of one submission.
type result struct {
	id        ID
	replay    bool
	startedAt time.Time
	err       error
}

// storeHere has submissions stored by this controller alone, and says what
// became of each. It hands over copies: what is given up may still be looked at
// by the loop.
func (m *Manager) storeHere(ctx context.Context, subs []*submission) []result {
	list := make([]*submission, len(subs))
	for i, s := range subs {
		list[i] = &submission{ins: s.ins, agent: s.agent, shard: s.shard, waiter: s.waiter, replaces: s.replaces}
	}
	g := newGroup(len(list))
	m.sendAll(list, g)
	timer := time.NewTimer(m.cfg.Limits.SubmitWait)
	defer timer.Stop()
	select {
	case <-g.done:
	case <-ctx.Done():
	case <-timer.C:
	}
	out := make([]result, len(list))
	for i, s := range list {
		switch {
		case s.withdraw():
			out[i].err = errNotStored()
		case s.state.Load() == subDone:
			out[i] = result{id: s.ins.ID, replay: s.replay, startedAt: s.startedAt, err: s.err}
		default:
			out[i].err = errUnknown(s.ins.ID)
		}
	}
	return out
}

// firstError gives the answer of a finished group: the first error, and how
// many of the others are stored all the same.
func firstError(subs []submission) error {
	stored := 0
	var first error
	for i := range subs {
		if subs[i].err == nil {
			stored++
		} else if first == nil {
			first = subs[i].err
		}
	}
	return partly(first, stored, len(subs))
}

func partly(err error, stored, all int) error {
	f, ok := err.(*fault.Error) //nolint:errorlint // made by this package, never wrapped
	if !ok || stored == 0 {
		return err
	}
	c := *f
	c.Message += fmt.Sprintf(" %d of the %d tasks of this request are stored and stay.", stored, all)
	return &c
}

// giveUp answers a submitter who has waited long enough.
func giveUp(subs []submission) error {
	var unknown *submission
	stored := 0
	for i := range subs {
		s := &subs[i]
		if s.withdraw() {
			continue
		}
		if s.state.Load() == subDone {
			if s.err == nil {
				stored++
			}
		} else if unknown == nil {
			unknown = s
		}
	}
	if unknown != nil {
		return partly(errUnknown(unknown.ins.ID), stored, len(subs))
	}
	return partly(errNotStored(), stored, len(subs))
}
