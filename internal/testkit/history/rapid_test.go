package history_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headgate/internal/testkit/history"
)

// gen makes a history in which all promises are kept: a queue that is simple
// enough to be right.
type gen struct {
	*rapid.T
	now     int64
	id, op  int64
	tx      int64
	events  []history.Event
	agents  []*genAgent
	pending []int // events whose submission is stored and not answered yet
	tasks   map[int64]*genTask
}

type genAgent struct {
	name    string
	epoch   int64
	queue   []*genTask // by (priority, id)
	running *genTask
}

type genTask struct {
	id       int64
	agent    *genAgent
	priority int
	once     bool
	attempt  int
	outcome  string
}

func (g *gen) add(e history.Event) {
	g.now += 10
	e.T = g.now
	g.events = append(g.events, e)
}

// row writes a transaction of the shadow table.
func (g *gen) rows(t *genTask, rows ...[2]string) {
	g.tx++
	for _, r := range rows {
		attempt := t.attempt
		if r[1] == "agent_task" {
			attempt = 0
		}
		g.add(history.Event{Kind: history.KindRow, Op: g.tx, ID: t.id, Action: r[0], Table: r[1], Attempt: attempt})
	}
}

func (g *gen) submit() {
	g.id++
	g.op++
	a := g.agents[rapid.IntRange(0, len(g.agents)-1).Draw(g.T, "agent")]
	t := &genTask{id: g.id, agent: a, priority: rapid.IntRange(4, 5).Draw(g.T, "priority"), once: rapid.Bool().Draw(g.T, "once")}
	g.tasks[t.id] = t
	g.add(history.Event{Kind: history.KindSubmit, Op: g.op, Agent: a.name, Priority: t.priority, Once: t.once, Key: fmt.Sprint("k", g.id)})
	i, _ := slices.BinarySearchFunc(a.queue, t, func(x, y *genTask) int { return (x.priority-y.priority)*1_000_000 + int(x.id-y.id) })
	a.queue = slices.Insert(a.queue, i, t)
	g.rows(t, [2]string{"INSERT", "agent_task"}, [2]string{"INSERT", "agent_queue"})
	g.pending = append(g.pending, int(g.op))
}

func (g *gen) answer() {
	if len(g.pending) == 0 {
		return
	}
	i := rapid.IntRange(0, len(g.pending)-1).Draw(g.T, "which")
	op := int64(g.pending[i])
	g.pending = slices.Delete(g.pending, i, i+1)
	if rapid.IntRange(0, 9).Draw(g.T, "lost") == 0 {
		g.add(history.Event{Kind: history.KindAcked, Op: op, Text: "connection reset"})
		return
	}
	g.add(history.Event{Kind: history.KindAcked, Op: op, ID: op, Status: 202})
}

func (g *gen) start(a *genAgent) {
	if a.running != nil || len(a.queue) == 0 {
		return
	}
	t := a.queue[0]
	a.queue, a.running = a.queue[1:], t
	t.attempt++
	g.rows(t, [2]string{"UPDATE", "agent_queue"})
	g.add(history.Event{Kind: history.KindStart, Agent: a.name, ID: t.id, Attempt: t.attempt, Epoch: a.epoch, Once: t.once})
}

func (g *gen) end(a *genAgent) {
	t := a.running
	if t == nil {
		return
	}
	a.running = nil
	g.add(history.Event{Kind: history.KindEnd, Agent: a.name, ID: t.id, Attempt: t.attempt})
	g.complete(t, "succeeded")
}

func (g *gen) complete(t *genTask, outcome string) {
	t.outcome = outcome
	g.rows(t, [2]string{"DELETE", "agent_queue"}, [2]string{"INSERT", "agent_result"})
	g.add(history.Event{Kind: history.KindTold, Waiter: "stream", ID: t.id, Outcome: outcome})
	g.add(history.Event{Kind: history.KindSeen, Since: g.now, ID: t.id, State: history.StateCompleted, Outcome: outcome})
}

// crash restarts an agent in the middle of what it does.
func (g *gen) crash(a *genAgent) {
	g.add(history.Event{Kind: history.KindBoot, Agent: a.name})
	t := a.running
	if t == nil {
		return
	}
	a.running = nil
	if t.once {
		g.complete(t, "unknown")
		return
	}
	a.queue = slices.Insert(a.queue, 0, t)
	g.rows(t, [2]string{"UPDATE", "agent_queue"})
}

// correct draws a history that keeps every promise.
func correct(t *rapid.T) []history.Event {
	g := &gen{T: t, tasks: map[int64]*genTask{}}
	for i := range rapid.IntRange(1, 3).Draw(t, "agents") {
		g.agents = append(g.agents, &genAgent{name: fmt.Sprint("a", i), epoch: 1})
	}
	g.add(history.Event{Kind: history.KindFollow, Waiter: "stream"})
	for range rapid.IntRange(10, 80).Draw(t, "steps") {
		a := g.agents[rapid.IntRange(0, len(g.agents)-1).Draw(t, "agent")]
		switch rapid.IntRange(0, 9).Draw(t, "step") {
		case 0, 1, 2:
			g.submit()
		case 3, 4:
			g.answer()
		case 5, 6:
			g.start(a)
		case 7, 8:
			g.end(a)
		case 9:
			if a.epoch++; rapid.Bool().Draw(t, "crash") {
				g.add(history.Event{Kind: history.KindFault, Text: "kill"})
				g.crash(a)
			}
		}
	}
	for len(g.pending) > 0 {
		g.answer()
	}
	g.add(history.Event{Kind: history.KindHealed})
	for _, a := range g.agents {
		for a.running != nil || len(a.queue) > 0 {
			g.end(a)
			g.start(a)
		}
	}
	for id := int64(1); id <= g.id; id++ {
		x := g.tasks[id]
		g.add(history.Event{
			Kind: history.KindFinal, ID: id, Agent: x.agent.name, State: history.StateCompleted, Outcome: x.outcome, Key: fmt.Sprint("k", id), Places: 1,
		})
	}
	return g.events
}

// Every correct history passes.
func TestCorrectHistories(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := history.NewChecker(history.Options{Settle: time.Minute})
		c.AddEvents("memory", correct(t))
		if r, err := c.Report(); err != nil || r.Err() != nil {
			t.Fatalf("%s, %v", r, err)
		}
	})
}

// mutation spoils a history; nil = this one offers no place for it.
type mutation struct {
	name, rule string
	spoil      func(e []history.Event) []history.Event
}

func find(e []history.Event, f func(history.Event) bool) int { return slices.IndexFunc(e, f) }

func isKind(k history.Kind) func(history.Event) bool {
	return func(e history.Event) bool { return e.Kind == k }
}

// change spoils the first event that f accepts.
func change(f func(history.Event) bool, how func(e *history.Event)) func([]history.Event) []history.Event {
	return func(e []history.Event) []history.Event {
		i := find(e, f)
		if i < 0 {
			return nil
		}
		how(&e[i])
		return e
	}
}

// after adds what it makes of the first event that f accepts to the end.
func after(f func(history.Event) bool, how func(e history.Event) history.Event) func([]history.Event) []history.Event {
	return func(e []history.Event) []history.Event {
		i := find(e, f)
		if i < 0 {
			return nil
		}
		x := how(e[i])
		x.T = max(x.T, e[len(e)-1].T+10)
		return append(e, x)
	}
}

// without leaves out the first event that f accepts.
func without(f func(history.Event) bool) func([]history.Event) []history.Event {
	return func(e []history.Event) []history.Event {
		i := find(e, f)
		if i < 0 {
			return nil
		}
		return slices.Delete(e, i, i+1)
	}
}

func ackedTasks(e []history.Event) map[int64]history.Event {
	m := map[int64]history.Event{}
	for _, x := range e {
		if x.Kind == history.KindAcked && x.ID != 0 {
			m[x.ID] = x
		}
	}
	return m
}

// ofAcked accepts the events of one kind that are about acknowledged tasks.
func ofAcked(e []history.Event, k history.Kind) func(history.Event) bool {
	known := ackedTasks(e)
	return func(x history.Event) bool { _, ok := known[x.ID]; return ok && x.Kind == k }
}

// swapOrder exchanges two executions that stood in the right order.
func swapOrder(e []history.Event) []history.Event {
	known := ackedTasks(e)
	call := map[int64]history.Event{}
	for _, x := range e {
		if x.Kind == history.KindSubmit {
			call[x.Op] = x // in these histories the number of the call is the id
		}
	}
	for i, x := range e {
		for j := i + 1; j < len(e); j++ {
			y := e[j]
			if x.Kind != history.KindStart || y.Kind != history.KindStart || x.Agent != y.Agent || x.Attempt != 1 || y.Attempt != 1 {
				continue
			}
			a, b := known[x.ID], known[y.ID]
			if a.ID == 0 || b.ID == 0 || call[x.ID].Priority != call[y.ID].Priority || a.T >= call[y.ID].T {
				continue
			}
			for n := range e {
				switch k := &e[n]; {
				case k.Kind != history.KindStart && k.Kind != history.KindEnd || k.Agent != x.Agent:
				case k.ID == x.ID:
					k.ID = y.ID
				case k.ID == y.ID:
					k.ID = x.ID
				}
			}
			return e
		}
	}
	return nil
}

// overlap lets an execution last until the next one of its agent has begun.
func overlap(e []history.Event) []history.Event {
	for i, x := range e {
		if x.Kind != history.KindEnd {
			continue
		}
		for _, y := range e[i:] {
			if y.Kind == history.KindStart && y.Agent == x.Agent {
				e[i].T = y.T + 5
				return e
			}
		}
	}
	return nil
}

func mutations(e []history.Event) []mutation {
	keep := func(x history.Event) history.Event { return x }
	onceStart := func(x history.Event) bool { return x.Kind == history.KindStart && x.Once }
	result := func(x history.Event) bool { return x.Kind == history.KindRow && x.Table == "agent_result" }
	return []mutation{
		{"a task vanishes", "lost", without(ofAcked(e, history.KindFinal))},
		{"a task stays open", "lost", change(ofAcked(e, history.KindFinal), func(x *history.Event) { x.State, x.Outcome = "new", "" })},
		{"a task is stored twice", "doubled", after(isKind(history.KindFinal), keep)},
		{"a task comes from nowhere", "doubled", after(isKind(history.KindFinal), func(x history.Event) history.Event { x.ID, x.Key = 99_999, ""; return x })},
		{"a key has two tasks", "doubled", after(isKind(history.KindFinal), func(x history.Event) history.Event { x.ID = 99_999; return x })},
		{"a task has two places", "doubled", change(isKind(history.KindFinal), func(x *history.Event) { x.Places = 2 })},
		{"a second run of delivery once", "once", after(onceStart, func(x history.Event) history.Event { x.Attempt++; return x })},
		{"an attempt begins again", "repeat", after(isKind(history.KindStart), keep)},
		{"two at once", "slot", overlap},
		{"out of order", "order", swapOrder},
		{"an old epoch is obeyed", "epoch", after(isKind(history.KindStart), func(x history.Event) history.Event { x.Epoch, x.Attempt = 0, 40; return x })},
		{"told again", "waiter", after(isKind(history.KindTold), keep)},
		{"never told", "waiter", without(isKind(history.KindTold))},
		{"told otherwise", "final", change(isKind(history.KindTold), func(x *history.Event) { x.Outcome = "cancelled" })},
		{"a result changes", "final", after(result, func(x history.Event) history.Event { x.Op, x.Action = 99_999, "UPDATE"; return x })},
		{"back into the queue", "final", after(result, func(x history.Event) history.Event { x.Op, x.Table = 99_999, "agent_queue"; return x })},
		{"a read sees it open again", "final", after(isKind(history.KindSeen), func(x history.Event) history.Event { x.Since, x.State = 1<<40, "new"; return x })},
		{
			"begins long after the healing", "liveness",
			after(ofAcked(e, history.KindStart), func(x history.Event) history.Event {
				x.T, x.Attempt = int64(time.Hour), 40
				return x
			}),
		},
	}
}

// Every way to spoil a correct history is caught by the rule that is meant for
// it.
func TestSpoiledHistories(t *testing.T) {
	t.Parallel()
	applied := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		good := correct(t)
		for _, m := range mutations(good) {
			bad := m.spoil(slices.Clone(good))
			if bad == nil {
				continue
			}
			applied[m.name]++
			c := history.NewChecker(history.Options{Settle: time.Minute})
			c.AddEvents("memory", bad)
			r, err := c.Report()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(r.Broken(), m.rule) {
				t.Fatalf("%s: not caught by %s: %s", m.name, m.rule, r)
			}
		}
	})
	for _, m := range mutations(nil) {
		if applied[m.name] == 0 {
			t.Errorf("no history offered a place for: %s", m.name)
		}
	}
}
