package history

// moment is when something happened and the line that says so; the zero value
// means that it did not.
type moment struct {
	t  int64
	at place
}

func (m moment) is() bool { return m.at != 0 }

// first and last keep the earlier and the later of two moments.
func (m *moment) first(t int64, at place) {
	if !m.is() || t < m.t {
		*m = moment{t, at}
	}
}

func (m *moment) last(t int64, at place) {
	if !m.is() || t > m.t {
		*m = moment{t, at}
	}
}

// task is what is known of one task over all files.
type task struct {
	id       int64
	agent    int32 // number of the agent it was submitted for or dumped of; -1 = not known
	priority int16
	starts   int16
	dumps    int16
	once     bool
	free     bool
	acked    bool
	closed   bool   // completed in the final dump
	attempts uint64 // a bit for each attempt that began
	outcome  string // as first seen

	call, ack moment
	begin     moment // its first start
	lastStart moment
	firstEnd  moment
	dump      moment
	sight     moment // the first time that anybody saw it completed
	openSight moment // the read that began last of those that saw it not completed
	outcomeAt place
	toldAt    moment // the first terminal event
}

// run is one execution.
type run struct {
	id         int64
	begin, end moment
	since      int64 // the end happened between since and end.t
	epoch      int64
	attempt    int
}

type agent struct {
	num   int32
	name  string
	runs  []*run
	boots []moment
	going map[runKey]*run // of those whose end was not seen yet
}

type runKey struct {
	id      int64
	attempt int
}

type end struct {
	agent string
	key   runKey
	since int64
	moment
}

// open is a submission without an answer.
type open struct {
	e       Event
	at      place
	refused bool
}

// keyed is what became of an idempotency key.
type keyed struct {
	id int64
	at place
}

type waitKey struct {
	waiter string
	id     int64
}

// wait is one question for the end of one task, or a follower's share of it.
type wait struct {
	asked, left, told moment
	times             int
}

type follower struct {
	begin, end, reset moment
}

// finding is a violation before its lines are read.
type finding struct {
	rule, text string
	proof      []place
}

func (c *Checker) task(id int64) *task {
	t := c.tasks[id]
	if t == nil {
		t = &task{id: id, agent: -1}
		c.tasks[id] = t
	}
	return t
}

func (c *Checker) agent(name string) *agent {
	a := c.agents[name]
	if a == nil {
		a = &agent{num: int32(len(c.names)), name: name, going: map[runKey]*run{}} //nolint:gosec // a fleet fits
		c.agents[name] = a
		c.names = append(c.names, name)
	}
	return a
}

// add takes one event.
func (c *Checker) add(e *Event, at place) {
	c.report.Events++
	switch e.Kind {
	case KindSubmit:
		c.report.Submitted++
		c.ops[e.Op] = &open{e: *e, at: at}
	case KindAcked:
		c.acked(e, at)
	case KindStart, KindEnd, KindBoot:
		c.ran(e, at)
	case KindWait, KindLeft, KindTold, KindFollow, KindUnfollow, KindReset:
		c.waited(e, at)
	case KindSeen:
		c.seen(c.task(e.ID), e.State == StateCompleted, e.Outcome, e.Since, e.T, at)
	case KindFault:
		c.report.Faults++
	case KindHealed:
		if e.T > c.healed {
			c.healed, c.healedAt = e.T, at
		}
	case KindFinal:
		c.final(e, at)
	case KindRow:
		c.row(e, at)
	}
}

// acked pairs an answer with its submission.
func (c *Checker) acked(e *Event, at place) {
	o := c.ops[e.Op]
	if o == nil {
		return
	}
	delete(c.ops, e.Op)
	if e.ID == 0 || e.Status < 200 || e.Status > 299 {
		o.refused = e.Status >= 400 && e.Status < 500
		c.vague = append(c.vague, o)
		if !o.refused {
			c.report.Unknown++
		}
		return
	}
	t := c.task(e.ID)
	if t.acked && (o.e.Key == "" || c.keys[o.e.Key] == nil || c.keys[o.e.Key].id != e.ID) {
		c.violate("doubled", []place{t.call.at, t.ack.at, o.at, at}, "task %d is the answer to two submissions", e.ID)
	}
	c.keyed(o.e.Key, e.ID, at)
	if !t.acked {
		c.report.Acked++
		t.acked, t.agent = true, c.agent(o.e.Agent).num
		t.priority, t.free = int16(o.e.Priority), o.e.Free //nolint:gosec // 0 to 9
	}
	t.once = t.once || o.e.Once
	t.call.first(o.e.T, o.at)
	t.ack.first(e.T, at)
}

// keyed notes which task a key stands for.
func (c *Checker) keyed(key string, id int64, at place) {
	if key == "" {
		return
	}
	k := c.keys[key]
	if k == nil {
		c.keys[key] = &keyed{id: id, at: at}
		return
	}
	if k.id != id {
		c.violate("doubled", []place{k.at, at}, "the key %q stands for task %d and for task %d", key, k.id, id)
	}
}

// closeOps ends a file: what has no answer never gets one.
func (c *Checker) closeOps() {
	for _, o := range c.ops {
		c.vague = append(c.vague, o)
		c.report.Unknown++
	}
	c.ops = nil
}

// ran takes what agents say of their executions.
func (c *Checker) ran(e *Event, at place) {
	a := c.agent(e.Agent)
	key := runKey{e.ID, e.Attempt}
	switch e.Kind {
	case KindBoot:
		a.boots = append(a.boots, moment{e.T, at})
	case KindEnd:
		if r := a.going[key]; r != nil {
			r.finish(e.T, e.Since, at)
			delete(a.going, key)
		} else {
			c.ends = append(c.ends, end{e.Agent, key, e.Since, moment{e.T, at}})
		}
		c.task(e.ID).firstEnd.first(e.T, at)
	case KindStart:
		c.started(a, e, at)
	}
}

func (c *Checker) started(a *agent, e *Event, at place) {
	c.report.Runs++
	r := &run{id: e.ID, begin: moment{e.T, at}, epoch: e.Epoch, attempt: e.Attempt}
	a.runs = append(a.runs, r)
	a.going[runKey{e.ID, e.Attempt}] = r
	t := c.task(e.ID)
	t.once = t.once || e.Once
	t.starts++
	t.begin.first(e.T, at)
	t.lastStart.last(e.T, at)
	bit := uint64(1) << (uint(e.Attempt) % 64) //nolint:gosec // attempts are few
	if t.attempts&bit != 0 {
		c.violate("repeat", []place{t.begin.at, at}, "attempt %d of task %d began twice", e.Attempt, e.ID)
	}
	t.attempts |= bit
}

func (r *run) finish(t, since int64, at place) {
	r.end, r.since = moment{t, at}, t
	if since != 0 {
		r.since = max(since, r.begin.t)
	}
}

// waited takes what waiters and followers say.
func (c *Checker) waited(e *Event, at place) {
	switch e.Kind {
	case KindFollow, KindUnfollow, KindReset:
		f := c.follow[e.Waiter]
		if f == nil {
			f = &follower{}
			c.follow[e.Waiter] = f
		}
		switch e.Kind {
		case KindFollow:
			f.begin.first(e.T, at)
		case KindReset:
			f.reset.first(e.T, at)
		default:
			f.end.last(e.T, at)
		}
		return
	}
	k := waitKey{e.Waiter, e.ID}
	w := c.waits[k]
	if w == nil {
		w = &wait{}
		c.waits[k] = w
	}
	switch e.Kind {
	case KindWait:
		w.asked.first(e.T, at)
	case KindLeft:
		w.left.first(e.T, at)
	default:
		c.report.Told++
		if w.times++; w.times > 1 {
			c.violate("waiter", []place{w.told.at, at}, "%s was told of the end of task %d more than once", e.Waiter, e.ID)
		}
		w.told.first(e.T, at)
		t := c.task(e.ID)
		t.toldAt.first(e.T, at)
		c.seen(t, true, e.Outcome, 0, e.T, at)
	}
}

// seen compares what was seen of a completed task with what was seen before.
func (c *Checker) seen(t *task, completed bool, outcome string, since, now int64, at place) {
	if !completed {
		t.openSight.last(since, at)
		return
	}
	t.sight.first(now, at)
	switch {
	case t.outcomeAt == 0:
		if _, ok := c.words[outcome]; !ok {
			c.words[outcome] = outcome
		}
		t.outcome, t.outcomeAt = c.words[outcome], at
	case t.outcome != outcome:
		c.violate("final", []place{t.outcomeAt, at}, "task %d ended as %s and as %s", t.id, t.outcome, outcome)
	}
}

// final takes one task of the dump.
func (c *Checker) final(e *Event, at place) {
	c.report.Dumped++
	t := c.task(e.ID)
	if t.dumps++; t.dumps > 1 {
		c.violate("doubled", []place{t.dump.at, at}, "task %d is in the dump twice", e.ID)
	}
	if e.Places != 1 {
		c.violate("doubled", []place{at}, "task %d has %d places among queue, later and result, instead of one", e.ID, e.Places)
	}
	if n := c.agent(e.Agent).num; t.agent >= 0 && t.agent != n {
		c.violate("doubled", []place{t.call.at, at}, "task %d was submitted for %s and is stored for %s", e.ID, c.names[t.agent], e.Agent)
	} else {
		t.agent = n
	}
	c.keyed(e.Key, e.ID, at)
	t.dump, t.closed = moment{e.T, at}, e.State == StateCompleted
	c.dumpTime = max(c.dumpTime, e.T)
	c.seen(t, t.closed, e.Outcome, e.T, e.T, at)
}
