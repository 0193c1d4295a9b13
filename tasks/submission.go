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
	size  int64
	state atomic.Int32
	group *group
	// waiter joins the Hub when the task is stored, and not when it was a
	// replay; nil = nobody waits for the end.
	waiter *waiter
	// replaces says that older tasks like it are to end when it is stored; older
	// are those, and looked that they were looked for. Only the loop uses these.
	replaces bool
	looked   bool
	older    []QueueRow

	// Set before release.
	err       error
	replay    bool
	startedAt time.Time
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

// store sends submissions to their loops and waits until all are answered.
// After SubmitWait it takes back what has not been begun and says what it
// knows.
func (m *Manager) store(ctx context.Context, subs []submission) error {
	g := &group{done: make(chan struct{})}
	g.left.Store(int32(len(subs)))
	if err := m.admit(subs); err != nil {
		return err
	}
	defer m.discharge(subs)
	m.send(subs, g)
	timer := time.NewTimer(m.cfg.Limits.SubmitWait)
	defer timer.Stop()
	select {
	case <-g.done:
		return firstError(subs)
	case <-ctx.Done():
	case <-timer.C:
	}
	return giveUp(subs)
}

// admit keeps the memory of submissions under way bounded.
func (m *Manager) admit(subs []submission) error {
	var size int64
	for i := range subs {
		subs[i].size = int64(len(subs[i].ins.Args)) + 512 // and the rest of it
		size += subs[i].size
	}
	items := m.inboxItems.Add(int64(len(subs)))
	bytes := m.inboxBytes.Add(size)
	if items > int64(m.cfg.Limits.InboxItems) || bytes > int64(m.cfg.Limits.InboxBytes) {
		m.discharge(subs)
		m.metrics.submitRefused.Inc()
		return fault.Newf(fault.Exhausted, "too_many_submissions",
			"%d submissions are on their way to disk already, which is the most at a time.", items-int64(len(subs))).
			WithHint("Send the request again in a second, and fewer at once.")
	}
	return nil
}

func (m *Manager) discharge(subs []submission) {
	var size int64
	for i := range subs {
		size += subs[i].size
	}
	m.inboxItems.Add(-int64(len(subs)))
	m.inboxBytes.Add(-size)
}

func (m *Manager) send(subs []submission, g *group) {
	if len(subs) == 1 {
		subs[0].group = g
		m.loopOf(subs[0].shard).submit(&subs[0])
		return
	}
	per := make([][]*submission, len(m.loops))
	for i := range subs {
		subs[i].group = g
		n := int(subs[i].shard) % len(m.loops)
		per[n] = append(per[n], &subs[i])
	}
	for n, list := range per {
		if len(list) > 0 {
			m.loops[n].submit(list...)
		}
	}
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
