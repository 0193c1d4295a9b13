package history

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// violate notes a broken promise with the lines that prove it.
func (c *Checker) violate(rule string, proof []place, format string, args ...any) {
	if len(c.found) >= c.opts.MaxViolations {
		c.report.More++
		return
	}
	c.found = append(c.found, finding{rule, fmt.Sprintf(format, args...), proof})
}

// Report judges everything that was added. Nothing may be added after it.
func (c *Checker) Report() (Report, error) {
	c.settle()
	ids := slices.Sorted(maps.Keys(c.tasks))
	for _, id := range ids {
		t := c.tasks[id]
		c.judgeStored(t)
		c.judgeEffects(t)
		c.judgeSight(t)
		c.judgeLiveness(t)
	}
	c.judgeUnknown(ids)
	for _, name := range slices.Sorted(maps.Keys(c.agents)) {
		a := c.agents[name]
		c.judgeSlot(a)
		c.judgeEpochs(a)
	}
	c.judgeOrder(ids)
	c.judgeWaiters(ids)
	c.judgeShadow()
	return c.report, c.prove()
}

// settle joins what was told apart: ends with their begins, calls without an
// answer with the task of their key.
func (c *Checker) settle() {
	for _, e := range c.ends {
		if r := c.agent(e.agent).going[e.key]; r != nil && e.t >= r.begin.t {
			r.finish(e.t, e.since, e.at)
			delete(c.agent(e.agent).going, e.key)
		}
	}
	for _, o := range c.vague {
		if k := c.keys[o.e.Key]; o.e.Key != "" && k != nil && !o.refused {
			t := c.task(k.id)
			t.once = t.once || o.e.Once
			t.free = t.free || o.e.Free
			t.call.first(o.e.T, o.at)
		}
	}
}

// judgeStored: what was acknowledged is on disk and completed.
func (c *Checker) judgeStored(t *task) {
	switch {
	case !t.acked:
	case t.dumps == 0:
		c.violate("lost", []place{t.call.at, t.ack.at}, "task %d was acknowledged and is not in the final dump", t.id)
	case !t.closed && !c.opts.Open:
		c.violate("lost", []place{t.ack.at, t.dump.at}, "task %d was acknowledged and never completed", t.id)
	}
}

// judgeEffects: how often a task ran.
func (c *Checker) judgeEffects(t *task) {
	if t.once && t.starts > 1 {
		c.violate("once", []place{t.begin.at, t.lastStart.at}, "task %d is delivered once and began %d times", t.id, t.starts)
	}
	if t.starts > 0 && t.dumps == 0 && !t.acked {
		c.violate("repeat", []place{t.begin.at}, "task %d ran and is on no disk", t.id)
	}
	if t.outcome == "succeeded" && t.starts == 0 && !c.opts.Unlogged {
		c.violate("repeat", []place{t.outcomeAt}, "task %d succeeded without having run", t.id)
	}
}

// judgeSight: completed is for ever, and true when it is said.
func (c *Checker) judgeSight(t *task) {
	if t.sight.is() && t.openSight.is() && t.openSight.t > t.sight.t {
		c.violate("final", []place{t.sight.at, t.openSight.at}, "task %d was seen completed, and not completed by a read that began later", t.id)
	}
	if t.toldAt.is() && t.dumps > 0 && !t.closed {
		c.violate("waiter", []place{t.toldAt.at, t.dump.at}, "the end of task %d was told, and it is not on disk", t.id)
	}
	if t.toldAt.is() && t.outcome == "succeeded" && t.starts > 0 && (!t.firstEnd.is() || t.firstEnd.t > t.toldAt.t) {
		c.violate("waiter", []place{t.begin.at, t.toldAt.at}, "the success of task %d was told before its agent had ended it", t.id)
	}
}

// judgeLiveness: when all is healed, work goes on.
func (c *Checker) judgeLiveness(t *task) {
	limit := c.healed + int64(c.opts.Settle)
	if t.attempts&^firstAttempt != 0 {
		limit += int64(c.opts.Pause)
	}
	if c.opts.Settle == 0 || c.healed == 0 || !t.ack.is() || t.ack.t > c.healed {
		return
	}
	if !t.closed && t.dumps > 0 && c.dumpTime > limit {
		c.violate("liveness", []place{c.healedAt, t.ack.at, t.dump.at}, "task %d still waits %s after all had healed",
			t.id, time.Duration(c.dumpTime-c.healed))
	}
	if t.lastStart.is() && t.lastStart.t > limit {
		c.violate("liveness", []place{c.healedAt, t.ack.at, t.lastStart.at}, "task %d began %s after all had healed",
			t.id, time.Duration(t.lastStart.t-c.healed))
	}
}

// judgeUnknown: a submission without an answer is stored once or not at all,
// and nothing is stored that nobody has asked for.
func (c *Checker) judgeUnknown(ids []int64) {
	may := map[int32]int{}
	for _, o := range c.vague {
		switch k := c.keys[o.e.Key]; {
		case o.refused && k != nil && o.e.Key != "" && c.onlyRefused(o.e.Key, k.id):
			c.violate("doubled", []place{o.at, k.at}, "the submission with the key %q was refused, and task %d is stored", o.e.Key, k.id)
		case !o.refused && (o.e.Key == "" || k == nil):
			may[c.agent(o.e.Agent).num]++
		}
	}
	if c.opts.Foreign {
		return
	}
	named := map[int64]bool{}
	for _, o := range c.vague {
		if k := c.keys[o.e.Key]; k != nil && o.e.Key != "" {
			named[k.id] = true
		}
	}
	for _, id := range ids {
		t := c.tasks[id]
		if t.acked || t.dumps == 0 || named[id] {
			continue
		}
		if may[t.agent]--; may[t.agent] < 0 {
			c.violate("doubled", []place{t.dump.at}, "task %d is stored for %s, beyond what was submitted for it", id, c.names[t.agent])
		}
	}
}

// onlyRefused says whether every submission with the key was refused.
func (c *Checker) onlyRefused(key string, id int64) bool {
	if c.task(id).acked {
		return false
	}
	return !slices.ContainsFunc(c.vague, func(o *open) bool { return o.e.Key == key && !o.refused })
}

// judgeEpochs: an agent never obeys a lower epoch after a higher one.
func (c *Checker) judgeEpochs(a *agent) {
	var before *run
	for _, r := range a.runs { // in order of time, judgeSlot has seen to that
		if before != nil && r.epoch < before.epoch {
			c.violate("epoch", []place{before.begin.at, r.begin.at}, "%s began task %d under epoch %d after task %d under epoch %d",
				a.name, r.id, r.epoch, before.id, before.epoch)
		}
		if before == nil || r.epoch > before.epoch {
			before = r
		}
	}
}

// judgeOrder: acknowledged before the other was sent means started before it,
// for tasks of one agent and priority that both started, and were not set back.
// It walks them in the order of their first starts and remembers the one that
// was sent last.
func (c *Checker) judgeOrder(ids []int64) {
	var list []*task
	for _, id := range ids {
		if t := c.tasks[id]; t.ack.is() && t.call.is() && t.begin.is() && !t.free && !c.setBack(t) {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(a, b *task) int {
		return cmp.Or(cmp.Compare(a.agent, b.agent), cmp.Compare(a.priority, b.priority), cmp.Compare(a.begin.t, b.begin.t))
	})
	var late *task
	for _, t := range list {
		if late == nil || late.agent != t.agent || late.priority != t.priority {
			late = t
			continue
		}
		if t.ack.t < late.call.t && late.begin.t < t.begin.t {
			c.violate("order", []place{t.ack.at, late.call.at, late.begin.at, t.begin.at},
				"task %d was acknowledged before task %d was sent to %s, and started after it", t.id, late.id, c.names[t.agent])
		}
		if t.call.t > late.call.t {
			late = t
		}
	}
}

// firstAttempt is the bit of the first one among those that began.
const firstAttempt = uint64(1) << 1

// setBack says whether a task lost its place by right: it had been given before
// its first start, and its agent began anew in between. Such a task is tried
// again after a pause, in which others run.
func (c *Checker) setBack(t *task) bool {
	if t.attempts&firstAttempt != 0 || t.agent < 0 {
		return false
	}
	return slices.ContainsFunc(c.agents[c.names[t.agent]].boots, func(m moment) bool { return m.t > t.call.t && m.t < t.begin.t })
}

// judgeWaiters: whoever asked was told, once.
func (c *Checker) judgeWaiters(ids []int64) {
	for _, k := range slices.SortedFunc(maps.Keys(c.waits), func(a, b waitKey) int {
		return cmp.Or(cmp.Compare(a.waiter, b.waiter), cmp.Compare(a.id, b.id))
	}) {
		w := c.waits[k]
		if w.asked.is() && !w.told.is() && !w.left.is() {
			c.violate("waiter", []place{w.asked.at}, "%s was never told of the end of task %d", k.waiter, k.id)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.follow)) {
		f := c.follow[name]
		if f.reset.is() || !f.begin.is() {
			continue
		}
		for _, id := range ids {
			t := c.tasks[id]
			if !t.closed || !t.call.is() || t.call.t < f.begin.t || f.end.is() && t.dump.t > f.end.t {
				continue
			}
			if w := c.waits[waitKey{name, id}]; w == nil || !w.told.is() {
				c.violate("waiter", []place{f.begin.at, t.call.at, t.dump.at}, "%s has followed all events and was never told of the end of task %d", name, id)
			}
		}
	}
}

// prove reads the lines of what was found.
func (c *Checker) prove() error {
	want := map[int][]int{}
	for _, f := range c.found {
		for _, p := range f.proof {
			want[p.file()] = append(want[p.file()], p.line())
		}
	}
	texts := map[int]map[int]string{}
	for n, numbers := range want {
		if events, ok := c.mem[n]; ok {
			texts[n] = memoryLines(events, numbers)
			continue
		}
		got, err := lines(c.files[n], numbers)
		if err != nil {
			return err
		}
		texts[n] = got
	}
	for _, f := range c.found {
		v := Violation{Rule: f.rule, Text: f.text}
		for _, p := range f.proof {
			if p != 0 {
				v.Proof = append(v.Proof, Line{c.files[p.file()], p.line(), texts[p.file()][p.line()]})
			}
		}
		c.report.Violations = append(c.report.Violations, v)
	}
	return nil
}
