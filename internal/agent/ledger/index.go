package ledger

import (
	"fmt"
	"maps"
	"slices"
)

// State of an entry, as a dump shows it.
type State string

// The states of an entry.
const (
	Accepted    State = "accepted"    // started and not ended: running, or interrupted by a restart
	Done        State = "done"        // ended, its result is kept
	Forgotten   State = "forgotten"   // ended, its result is with the controller
	Interrupted State = "interrupted" // never ended; forgotten or followed by another attempt
)

// Entry is what the ledger knows of one attempt of a task. Callers of the
// ledger must not change an entry they are given.
type Entry struct {
	TaskID  int64
	Attempt int32
	Epoch   int64
	Kind    string
	Once    bool    // delivery once
	Digest  [8]byte // of kind and arguments: tells two tasks with one id apart

	AcceptedOrder uint64 // counts accepts and finishes over the ledger's life
	DoneOrder     uint64
	AcceptedAt    int64 // Unix nanoseconds, like the two below
	StartedAt     int64
	EndedAt       int64

	Done    bool
	Outcome string
	Reason  string

	final []byte // the result; nil once forgotten
	past  bool   // no longer live
}

// Final gives the result of a live entry that is done. The bytes must not be
// changed.
func (e *Entry) Final() []byte { return e.final }

// Live says whether the controller has not yet forgotten the entry.
func (e *Entry) Live() bool { return !e.past }

// State says how the entry stands.
func (e *Entry) State() State {
	switch {
	case e.past && e.Done:
		return Forgotten
	case e.past:
		return Interrupted
	case e.Done:
		return Done
	default:
		return Accepted
	}
}

// index is the content of the ledger in memory.
type index struct {
	order   uint64
	live    map[int64]*Entry
	held    int64 // bytes of results kept
	past    []*Entry
	head    int              // the oldest of past; entries before it are gone
	pastIDs map[int64]*Entry // the newest past entry of each id
	keep    int              // how many past entries are kept
	kinds   map[string]string
}

func newIndex(keep int) *index {
	return &index{live: map[int64]*Entry{}, pastIDs: map[int64]*Entry{}, keep: keep, kinds: map[string]string{}}
}

// intern keeps one copy of each of the few strings that all entries share.
func (x *index) intern(s string) string {
	if have, ok := x.kinds[s]; ok {
		return have
	}
	if len(x.kinds) < 1000 { // a bound in case that somebody invents names
		x.kinds[s] = s
	}
	return s
}

// lookup finds the latest attempt of a task.
func (x *index) lookup(id int64) *Entry {
	if e := x.live[id]; e != nil {
		return e
	}
	return x.pastIDs[id]
}

func (x *index) accept(e *Entry) {
	e.Kind = x.intern(e.Kind)
	if old := x.live[e.TaskID]; old != nil {
		x.retire(old) // an interrupted attempt that is tried again
	}
	x.live[e.TaskID] = e
	x.order = max(x.order, e.AcceptedOrder)
}

func (x *index) done(e *Entry) {
	e.Done = true
	e.Outcome, e.Reason = x.intern(e.Outcome), x.intern(e.Reason)
	x.held += int64(len(e.final))
	x.order = max(x.order, e.DoneOrder)
}

// retire makes a live entry a past one and drops its result.
func (x *index) retire(e *Entry) {
	if x.live[e.TaskID] == e {
		delete(x.live, e.TaskID)
	}
	x.held -= int64(len(e.final))
	x.addPast(e)
}

func (x *index) addPast(e *Entry) {
	e.final, e.past = nil, true
	x.past = append(x.past, e)
	x.pastIDs[e.TaskID] = e
	x.order = max(x.order, e.AcceptedOrder, e.DoneOrder)
	for len(x.past)-x.head > x.keep {
		old := x.past[x.head]
		if x.pastIDs[old.TaskID] == old {
			delete(x.pastIDs, old.TaskID)
		}
		x.past[x.head] = nil
		x.head++
	}
	if x.head > x.keep { // move down, so that the slice does not grow for ever
		x.past = append([]*Entry(nil), x.past[x.head:]...)
		x.head = 0
	}
}

// liveEntries gives the live entries in the order of their acceptance.
func (x *index) liveEntries() []*Entry {
	return slices.SortedFunc(maps.Values(x.live), byAcceptance)
}

// entries gives all entries in the order of their acceptance.
func (x *index) entries() []*Entry {
	all := slices.Concat(x.past[x.head:], x.liveEntries())
	slices.SortStableFunc(all, byAcceptance)
	return all
}

func byAcceptance(a, b *Entry) int {
	if a.AcceptedOrder < b.AcceptedOrder {
		return -1
	}
	return 1
}

// apply replays one record of the file.
func (x *index) apply(payload []byte) error {
	r := &reader{b: payload}
	switch sort := r.bytes(1); {
	case len(sort) == 0:
		return errRecord
	case sort[0] == recAccept:
		if e := r.accept(); r.ok() {
			x.accept(e)
		}
	case sort[0] == recDone:
		return x.applyDone(r)
	case sort[0] == recForget:
		x.applyForget(r)
	case sort[0] == recPast:
		e := r.accept()
		e.Done = r.flag()
		r.done(e)
		if r.ok() {
			e.Kind, e.Outcome, e.Reason = x.intern(e.Kind), x.intern(e.Outcome), x.intern(e.Reason)
			x.addPast(e)
		}
	case sort[0] == recCounter:
		if n := r.uvarint(); r.ok() {
			x.order = max(x.order, n)
		}
	default:
		return fmt.Errorf("a record is of the unknown sort %d", sort[0])
	}
	if !r.ok() {
		return errRecord
	}
	return nil
}

func (r *reader) ok() bool { return !r.bad && len(r.b) == 0 }

func (x *index) applyDone(r *reader) error {
	id := r.varint()
	e := x.live[id]
	if e == nil || e.Done {
		return fmt.Errorf("a result is recorded for task %d, which was not accepted before it", id)
	}
	r.done(e)
	if r.bad {
		return errRecord
	}
	e.final = slices.Clone(r.b)
	x.done(e)
	return nil
}

func (x *index) applyForget(r *reader) {
	for n := r.uvarint(); n > 0 && !r.bad; n-- {
		if e := x.live[r.varint()]; e != nil {
			x.retire(e)
		}
	}
}
