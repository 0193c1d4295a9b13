package history

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"

	"github.com/anishathalye/porcupine"
)

// slotOp is one step at the one execution place of an agent: a run takes it or
// leaves it.
type slotOp struct {
	run   int // its number, from 1
	leave bool
}

// slotModel is a lock: free (0) or held by one run.
var slotModel = porcupine.Model{
	Init: func() any { return 0 },
	Step: func(state, input, _ any) (bool, any) {
		holder, op := state.(int), input.(slotOp)
		if op.leave {
			return holder == op.run, 0
		}
		return holder == 0, op.run
	},
	Equal: func(a, b any) bool { return a == b },
}

// judgeSlot: never two executions at once. Runs that overlap no other are
// right at once; only groups that do go to the model, which knows that an end
// may have come earlier than it was noticed.
func (c *Checker) judgeSlot(a *agent) {
	slices.SortStableFunc(a.runs, func(x, y *run) int { return cmp.Compare(x.begin.t, y.begin.t) })
	slices.SortFunc(a.boots, func(x, y moment) int { return cmp.Compare(x.t, y.t) })
	for _, r := range a.runs {
		if r.end.is() {
			continue
		}
		// Without a word it has ended when its agent began anew, at the latest
		// and at the earliest: nobody else could end it.
		i, _ := slices.BinarySearchFunc(a.boots, r.begin.t, func(m moment, t int64) int { return cmp.Compare(m.t, t) })
		if i < len(a.boots) {
			r.finish(a.boots[i].t, 0, a.boots[i].at)
		} else {
			r.end.t, r.since = math.MaxInt64, math.MaxInt64
		}
	}
	var group []*run
	until := int64(math.MinInt64)
	for _, r := range a.runs {
		if r.begin.t >= until {
			c.judgeGroup(a, group)
			group = nil
		}
		group = append(group, r)
		until = max(until, r.end.t)
	}
	c.judgeGroup(a, group)
}

func (c *Checker) judgeGroup(a *agent, group []*run) {
	if len(group) < 2 {
		return
	}
	var ops []porcupine.Operation
	for i, r := range group {
		ops = append(ops,
			porcupine.Operation{Input: slotOp{run: i + 1}, Call: r.begin.t, Return: r.begin.t},
			porcupine.Operation{Input: slotOp{run: i + 1, leave: true}, Call: r.since, Return: r.end.t})
	}
	if porcupine.CheckOperations(slotModel, ops) {
		return
	}
	for i, r := range group[1:] {
		before := group[i]
		for _, x := range group[:i+1] { // the one that certainly ran longest
			if x.since > before.since {
				before = x
			}
		}
		if before.since > r.begin.t {
			c.violate("slot", []place{before.begin.at, before.end.at, r.begin.at, r.end.at},
				"%s ran task %d (attempt %d) and task %d (attempt %d) at once", a.name, before.id, before.attempt, r.id, r.attempt)
			return
		}
	}
	c.violate("slot", []place{group[0].begin.at, group[1].begin.at}, "the %d runs of %s from task %d on have no order in which only one was there at a time",
		len(group), a.name, group[0].id)
}

// memoryLines writes events of memory as lines.
func memoryLines(events []Event, numbers []int) map[int]string {
	texts := map[int]string{}
	for _, n := range numbers {
		b, err := json.Marshal(&events[n-1])
		if err != nil {
			panic(err) // an Event has no field that could fail
		}
		texts[n] = string(b)
	}
	return texts
}
