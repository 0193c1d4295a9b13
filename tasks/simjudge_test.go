package tasks_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"headgate/internal/testkit/history"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// recorder writes the history of a simulation. Its clock is the simulated one,
// and never shows the same time twice.
type recorder struct {
	w      *world
	healed atomic.Bool

	mu       sync.Mutex
	last     int64
	op, tx   int64
	events   []history.Event
	attempts map[tasks.ID]int // of every task, as its rows have told
}

func newRecorder(w *world) *recorder { return &recorder{w: w, attempts: map[tasks.ID]int{}} }

// simCall is a submission as its caller knows it.
type simCall struct {
	agent      tasks.AgentNum
	key        string
	priority   int
	once, free bool
}

func (r *recorder) add(e history.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.put(e)
}

// put is add for who holds the lock.
func (r *recorder) put(e history.Event) {
	r.last = max(r.last+1, time.Now().UnixNano())
	e.T = r.last
	r.events = append(r.events, e)
}

func agentName(n tasks.AgentNum) string { return fmt.Sprint("agent ", n) }

func (r *recorder) submit(c simCall) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.op++
	r.put(history.Event{
		Kind: history.KindSubmit, Op: r.op, Agent: agentName(c.agent), Key: c.key, Priority: c.priority, Once: c.once, Free: c.free,
	})
	return r.op
}

func (r *recorder) acked(op int64, id tasks.ID) {
	r.add(history.Event{Kind: history.KindAcked, Op: op, ID: int64(id), Status: 202})
}

func (r *recorder) unanswered(op int64, err error) {
	r.add(history.Event{Kind: history.KindAcked, Op: op, Text: fmt.Sprint(err)})
}

func (r *recorder) wait(who string, id tasks.ID) {
	r.add(history.Event{Kind: history.KindWait, Waiter: who, ID: int64(id)})
}

func (r *recorder) left(who string, id tasks.ID) {
	r.add(history.Event{Kind: history.KindLeft, Waiter: who, ID: int64(id)})
}

func (r *recorder) told(who string, id tasks.ID, o tasks.Outcome) {
	r.add(history.Event{Kind: history.KindTold, Waiter: who, ID: int64(id), Outcome: string(o)})
}

func (r *recorder) follow(who string) { r.add(history.Event{Kind: history.KindFollow, Waiter: who}) }

func (r *recorder) reset(who string) { r.add(history.Event{Kind: history.KindReset, Waiter: who}) }

func (r *recorder) fault(s simStep) { r.add(history.Event{Kind: history.KindFault, Text: s.String()}) }

func (r *recorder) heal() {
	r.healed.Store(true)
	r.add(history.Event{Kind: history.KindHealed})
}

// step takes what an agent does.
func (r *recorder) step(s tasktest.Step) {
	e := history.Event{
		Agent: agentName(s.Agent), ID: int64(s.Ref.ID), Attempt: s.Ref.Attempt, Epoch: s.Epoch, Once: s.Once, Outcome: string(s.Outcome),
	}
	switch s.What {
	case "start":
		e.Kind = history.KindStart
		r.add(e)
		switch s.Ref.Attempt {
		case 1:
		case 2:
			r.w.hits.hit("second attempt")
		default:
			r.w.hits.hit("third attempt")
		}
	case "end":
		e.Kind = history.KindEnd
		r.add(e)
	default:
		if s.What == "boot" {
			e.Kind = history.KindBoot
			r.add(e)
		}
		r.w.hits.hit("agent " + s.What)
	}
}

// commit takes what a turn has written, as a shadow table would.
func (r *recorder) commit(t *tasks.Turn, done *tasks.TurnResult, err error) {
	if err == tasks.ErrFenced { //nolint:errorlint // the store returns the bare value
		r.w.hits.hit("turn refused for its lease")
	}
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tx++
	for _, l := range t.Leases {
		if l.Epoch > 1 {
			r.w.hits.hit("shards changed hands")
		}
	}
	r.commitEnds(t, has(done.Finished))
	r.commitMoves(t, done)
	r.commitInserts(t, has(done.Inserted))
}

func has(ids []tasks.ID) map[tasks.ID]bool {
	m := map[tasks.ID]bool{}
	for _, id := range ids {
		m[id] = true
	}
	return m
}

func (r *recorder) row(id tasks.ID, action, table string, attempt int) {
	if table != "agent_task" {
		r.attempts[id] = attempt
	}
	r.put(history.Event{Kind: history.KindRow, Op: r.tx, ID: int64(id), Action: action, Table: table, Attempt: attempt})
}

func (r *recorder) commitEnds(t *tasks.Turn, done map[tasks.ID]bool) {
	for _, f := range t.Finishes {
		if !done[f.ID] {
			continue
		}
		from, table := "started", "agent_queue"
		switch {
		case f.Later:
			from, table = "later", "agent_later"
		case f.Epoch == 0:
			from = "new"
		}
		r.w.hits.hit(strings.TrimSpace(fmt.Sprintf("%s: %s %s", from, f.Ending.Outcome, f.Ending.Reason)))
		r.row(f.ID, "DELETE", table, f.Attempt)
		r.row(f.ID, "INSERT", "agent_result", f.Attempt)
	}
}

func (r *recorder) commitMoves(t *tasks.Turn, done *tasks.TurnResult) {
	back, moved, claimed, marked := has(done.Requeued), has(done.Moved), has(done.Claimed), has(done.Marked)
	for _, q := range t.Requeues {
		switch {
		case !back[q.ID]:
		case q.NotBefore.After(done.At):
			r.w.hits.hit("back for later")
			r.row(q.ID, "DELETE", "agent_queue", q.Attempt)
			r.row(q.ID, "INSERT", "agent_later", q.Attempt)
		default:
			r.w.hits.hit("back to its place")
			r.row(q.ID, "UPDATE", "agent_queue", q.Attempt)
		}
	}
	for _, d := range t.Due {
		if moved[d.ID] {
			r.w.hits.hit("due")
			r.row(d.ID, "DELETE", "agent_later", r.attempts[d.ID])
			r.row(d.ID, "INSERT", "agent_queue", r.attempts[d.ID])
		}
	}
	for _, c := range t.Claims {
		if claimed[c.ID] {
			r.w.hits.hit("claim")
			r.row(c.ID, "UPDATE", "agent_queue", c.Attempt)
		}
	}
	for _, c := range t.Cancels {
		if marked[c.ID] {
			r.w.hits.hit("cancel marked")
			r.row(c.ID, "UPDATE", "agent_queue", c.Attempt)
		}
	}
}

func (r *recorder) commitInserts(t *tasks.Turn, done map[tasks.ID]bool) {
	for i := range t.Inserts {
		x := &t.Inserts[i]
		if !done[x.ID] {
			r.w.hits.hit("key known")
			continue
		}
		r.row(x.ID, "INSERT", "agent_task", 0)
		switch {
		case x.Started:
			r.w.hits.hit("insert started")
			r.row(x.ID, "INSERT", "agent_queue", 1)
		case x.NotBefore.After(x.CreatedAt):
			r.w.hits.hit("insert later")
			r.row(x.ID, "INSERT", "agent_later", 0)
		default:
			r.w.hits.hit("insert new")
			r.row(x.ID, "INSERT", "agent_queue", 0)
		}
	}
}

// judge lets the checker look at the history, and looks at what only the
// simulation can see.
func (w *world) judge() {
	for _, v := range w.ground.Violations() {
		w.fail("%s", v)
	}
	for _, n := range w.all {
		if x := n.manager.Mismatches(); x != 0 {
			w.fail("at %s disk and memory parted %v times", n.name, x)
		}
		if !w.calm { // another Hub has told of what ended elsewhere
			w.rec.reset("stream " + n.owner.ID.String())
		}
	}
	if len(w.store.Late()) > 0 {
		w.hits.hit("late answer")
	}
	for _, k := range w.store.Dump() {
		w.rec.add(history.Event{
			Kind: history.KindFinal, ID: int64(k.ID), Agent: agentName(k.Agent), State: string(k.State), Outcome: string(k.Outcome),
			Attempt: k.Attempt, Key: k.Key, Places: 1, // Verify has seen to that
		})
	}
	c := history.NewChecker(history.Options{Settle: 10 * time.Minute, Open: len(w.fails) > 0})
	c.AddEvents("history", w.rec.events)
	report, err := c.Report()
	if err != nil {
		w.fail("%v", err)
	}
	for _, v := range report.Violations {
		w.fails = append(w.fails, v.String())
	}
	if report.Acked == 0 && len(w.steps) == simSteps {
		w.fail("nothing was acknowledged in %d steps", simSteps)
	}
}
