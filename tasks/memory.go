package tasks

import (
	"cmp"
	"slices"
	"time"
)

// What a loop keeps in memory of the tasks that wait for an agent; the rest is
// in the table and read when it is needed.
const (
	nextItems = 64       // as many as one refill brings
	nextBytes = 64 << 10 // of arguments; the first task is kept whatever its size
)

// agent is what a loop remembers of an agent of its shards.
type agent struct {
	num   AgentNum
	shard Shard
	info  Agent // zero until the fleet has told

	session    bool
	reconciled bool   // its started rows are settled: it may be given something
	foreign    bool   // it came back with another ledger; nothing it says counts
	downs      uint64 // tells its session from the next one
	changed    time.Time
	downWhy    string

	flights []*flight // started rows and ghosts; at most one while all is well

	next      []Queued // what comes next, by (priority, id)
	nextSize  int
	more      bool // the table holds more behind next
	depth     int  // in state new, without those for later
	requeuing int  // requeues on their way to disk
	hold      time.Time
	removedAt time.Time // when its removal was learned of, set by the sweep
	freeSince time.Time // since when nothing stands in the way of a start

	forget    []ID   // results on disk, not yet told
	reserved  uint64 // number of the turn that fills the slot
	plannedIn uint64 // number of the turn that planned counts for
	planned   int    // inserts in it
	marked    bool   // in loop.dirty
	gone      bool   // dropped from memory
}

// flight is a task in the slot. A ghost is one that is completed here while
// the agent still runs it: it keeps the slot busy until the agent's word.
type flight struct {
	q           Queued
	epoch       int64
	startedAt   time.Time // by the store's clock
	since       time.Time // by ours; deadlines count from here
	loaded      time.Time // read from the table then, zero = started by us
	accepted    time.Time
	heard       time.Time
	cancelAsked time.Time
	markedAt    time.Time // when somebody asked for its end, by the store's clock
	markedBy    string
	cancelSent  bool
	ghost       bool
	finishing   bool // its end or its requeue is on its way to disk
	haunts      bool // the agent still runs it: a ghost once its end is on disk
	leaving     uint64
	touched     uint64
	deferred    uint64 // number of the turn that left output of it to the next
	kept        int    // cost of its output so far
	chunks      int    // of output on their way to disk
	printed     int64  // bytes, when only they are known of its end
}

func (f *flight) ref() Ref { return Ref{ID: f.q.ID, Attempt: f.q.Attempt} }

// agent gives the memory of an agent, making it when needed.
func (l *loop) agent(num AgentNum, s Shard) *agent {
	a := l.agents[num]
	if a == nil {
		a = &agent{num: num, shard: s, changed: l.now}
		a.info, _ = l.m.known(num)
		l.agents[num] = a
		l.m.place(num, s)
	}
	return a
}

// name is for sentences.
func (a *agent) name() string {
	if a.info.Name != "" {
		return a.info.Name
	}
	return "this agent"
}

// flight finds an execution in the slot.
func (a *agent) flight(ref Ref) *flight {
	for _, f := range a.flights {
		if f.ref() == ref {
			return f
		}
	}
	return nil
}

// task finds a started task that is not completed.
func (a *agent) task(id ID) *flight {
	for _, f := range a.flights {
		if f.q.ID == id && !f.ghost {
			return f
		}
	}
	return nil
}

func (a *agent) land(f *flight) {
	a.flights = slices.DeleteFunc(a.flights, func(x *flight) bool { return x == f })
}

// barred says why nothing new is given to the agent whatever its slot does.
func (a *agent) barred(now time.Time) bool {
	return !a.session || !a.reconciled || a.foreign || a.info.Paused || a.info.Quarantined || a.info.Removed ||
		a.requeuing > 0 || now.Before(a.hold)
}

// free says whether the slot is empty, or will be by turn no. A task that ends
// here while the agent still runs it keeps the slot.
func (a *agent) free(no uint64) bool {
	for _, f := range a.flights {
		if f.leaving != no || no == 0 || f.haunts {
			return false
		}
	}
	return a.reserved != no || no == 0
}

func compareQueued(a, b Queued) int {
	return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(a.ID, b.ID))
}

// push puts a task that is in the table now into the order kept in memory, if
// its place is there.
func (a *agent) push(q Queued) {
	n := len(a.next)
	if a.more && (n == 0 || compareQueued(q, a.next[n-1]) > 0) {
		return
	}
	i, found := slices.BinarySearchFunc(a.next, q, compareQueued)
	if found {
		return
	}
	a.next = slices.Insert(a.next, i, q)
	a.nextSize += len(q.Args)
	for len(a.next) > nextItems || a.nextSize > nextBytes && len(a.next) > 1 {
		last := len(a.next) - 1
		a.nextSize -= len(a.next[last].Args)
		a.next[last] = Queued{}
		a.next, a.more = a.next[:last], true
	}
}

// drop takes a task out of the order kept in memory.
func (a *agent) drop(id ID) {
	for i := range a.next {
		if a.next[i].ID == id {
			a.nextSize -= len(a.next[i].Args)
			a.next = slices.Delete(a.next, i, i+1)
			return
		}
	}
}

// reread forgets the order kept in memory; a refill brings it back.
func (a *agent) reread() {
	a.next, a.nextSize, a.more = nil, 0, true
}

// touch notes that the agent may be able to start something.
func (l *loop) touch(a *agent) {
	if !a.marked {
		a.marked = true
		l.dirty = append(l.dirty, a)
	}
}

// queued counts a task that has entered the table.
func (l *loop) queued(a *agent, n int) {
	a.depth += n
	l.depth += n
}

// postponed counts a task that has entered or left agent_later.
func (l *loop) postponed(s Shard, n int) {
	l.later += n
	if h := l.shards[s]; h != nil {
		h.later += n
	}
}

// counted passes the counts on to the metrics and to the other loops.
func (l *loop) counted() {
	l.waiting.Store(int64(l.depth + l.later))
	l.m.stats.setDepth(l)
}

// epoch gives the number under which the agent's shard is held; false when it is
// not ours or not loaded.
func (l *loop) epoch(s Shard) (int64, bool) {
	h := l.shards[s]
	if h == nil || !h.ready {
		return 0, false
	}
	return h.lease.Epoch, true
}
