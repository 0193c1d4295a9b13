package tasks_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// act does one step.
func (w *world) act(s simStep) {
	num, n := w.agents[s.agent].Num, w.nodes[s.node]
	switch s.do {
	case "send":
		for i := range 1 + s.n%6 {
			w.send(s, rand.New(rand.NewPCG(s.seed, uint64(i))))
		}
	case "cancel":
		if id, ok := w.any(s.seed); ok {
			w.wg.Go(func() { _, _ = n.service.Cancel(w.ctx, id, "user:sim") })
		}
	case "retry":
		w.retry(s)
	case "lie":
		w.lie(s, num)
	case "cable":
		w.ground.Disconnect(num, "cable")
	case "connect":
		for _, n := range w.nodes {
			n.runner.Connect(num)
		}
	case "lose":
		w.ground.LoseNext(num, true)
	case "crash":
		w.ground.Restart(num)
	case "ledger":
		w.ground.LoseLedger(num)
	case "approve":
		w.ground.Approve(num)
	case "pause":
		w.ground.Change(num, func(a *tasks.Agent) { a.Paused = !a.Paused })
	case "remove":
		w.remove(s)
	case "pass":
		w.pass(s.d)
	case "long":
		w.pass(s.d * 60)
	default:
		w.hurt(s, n)
	}
}

// hurt does the steps that concern controllers and their store.
func (w *world) hurt(s simStep, n *node) {
	w.rec.fault(s)
	switch s.do {
	case "turns":
		w.breakTurns(s, n)
	case "down":
		n.faults.Down(true)
		w.pass(s.d * 5)
		n.faults.Down(false)
	case "expire":
		w.calm = false
		w.store.ExpireLeases()
	case "freeze":
		w.freeze(s, n)
	case "stop":
		w.calm = false
		w.hits.hit("controller stopped")
		w.thaw(n)
		n.cancel()
		<-n.done
		n.runner.Hangup("the controller has stopped")
		w.replace(s.node, w.boot(n.name, nil))
	case "kill":
		w.kill(s, n)
	}
}

// freeze stops a controller between two instructions for up to 40 s, in which
// its leases may end; it goes on where it was.
func (w *world) freeze(s simStep, n *node) {
	if n.frozen.Swap(true) {
		return
	}
	w.calm = false
	w.hits.hit("controller frozen")
	n.runner.Freeze()
	n.faults.Freeze()
	if s.n < 50 { // in the middle of the steps that follow
		w.wg.Go(func() {
			select {
			case <-time.After(s.d * 13):
			case <-w.ctx.Done():
			}
			if !n.gone.Load() {
				n.faults.Thaw()
				n.runner.Thaw()
				n.frozen.Store(false)
			}
		})
		return
	}
	w.pass(s.d * 13)
	w.thaw(n)
}

func (w *world) thaw(n *node) {
	n.faults.Thaw()
	w.pass(0)
	n.runner.Thaw()
	n.frozen.Store(false)
}

// kill ends a controller at once; the next start of it holds the lock of its
// data directory and so knows that it is dead.
func (w *world) kill(s simStep, n *node) {
	w.calm = false
	w.hits.hit("controller killed")
	n.gone.Store(true)
	n.faults.Freeze()
	n.runner.Freeze()
	n.runner.Hangup("the controller was killed")
	w.dead = append(w.dead, n)
	w.replace(s.node, w.boot(n.name, []uuid.UUID{n.owner.ID}))
}

func (w *world) replace(i int, n *node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes[i] = n
}

// breakTurns lets the next turns of a controller fail in all ways.
func (w *world) breakTurns(s simStep, n *node) {
	rnd := rand.New(rand.NewPCG(s.seed, 2))
	left := 1 + rnd.IntN(6)
	n.faults.FailSettles(rnd.IntN(4))
	n.faults.OnTurn(func(*tasks.Turn) tasktest.Fault {
		w.mu.Lock()
		left--
		f, slow := tasktest.Fault(rnd.IntN(6)), time.Duration(rnd.IntN(8000))*time.Millisecond
		over := left < 0
		w.mu.Unlock()
		if over {
			return tasktest.None
		}
		switch f {
		case tasktest.None:
		case tasktest.Broken:
			w.hits.hit("turn broken")
		case tasktest.UnknownDone:
			w.hits.hit("turn unknown and done")
		case tasktest.UnknownUndone:
			w.hits.hit("turn unknown and not done")
		case tasktest.Fenced:
			w.hits.hit("turn fenced")
		default:
			w.hits.hit("turn slow")
			<-time.After(slow)
			return tasktest.None
		}
		return f
	})
}

// remove removes the last agent for good, as the fleet or another controller
// does.
func (w *world) remove(s simStep) {
	if w.removed || s.n < 50 {
		return
	}
	w.removed = true
	num := w.agents[simAgents-1].Num
	w.store.RemoveAgent(num)
	w.ground.Disconnect(num, "it was removed")
	w.ground.Change(num, func(a *tasks.Agent) { a.Removed = true })
}

// lie lets an agent say what is not so.
func (w *world) lie(s simStep, num tasks.AgentNum) {
	id, ok := w.any(s.seed)
	if !ok {
		return
	}
	ref := tasks.Ref{ID: id, Attempt: 90}
	w.nodes[s.node].runner.Say(func(x tasks.Sessions) {
		x.Final(num, tasks.Final{Ref: ref, Epoch: 1, Ending: tasks.Ending{Outcome: tasks.Succeeded}})
		x.Accepted(num, ref)
		x.Refused(num, tasks.Refusal{Ref: ref, Cause: "busy"})
		x.Output(num, tasks.OutputChunk{Ref: ref, Stream: "stdout"})
		x.Final(num, tasks.Final{Ref: tasks.Ref{ID: id, Attempt: 1}, Epoch: 99, Ending: tasks.Ending{Outcome: tasks.Succeeded}})
	})
}

// any picks a task that was acknowledged.
func (w *world) any(seed uint64) (tasks.ID, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sent) == 0 {
		return 0, false
	}
	recent := w.sent[max(0, len(w.sent)-30):]
	return recent[seed%uint64(len(recent))], true
}

// send submits without waiting for the answer; some under a key, which is asked
// again until it answers, and some with a waiter.
func (w *world) send(s simStep, rnd *rand.Rand) {
	x, priority := echo(s.agent), tasks.DefaultPriority
	call := simCall{agent: w.agents[s.agent].Num, priority: priority}
	if rnd.IntN(100) < 30 {
		x.Delivery, call.once = kinds.DeliveryOnce, true
	}
	if rnd.IntN(100) < 15 {
		priority = rnd.IntN(10)
		x.Priority, call.priority = &priority, priority
	}
	if rnd.IntN(100) < 10 {
		x.NotBefore, call.free = time.Now().Add(time.Duration(rnd.IntN(30))*time.Second+time.Second), true
	}
	if rnd.IntN(100) < 12 {
		x.ExpiresAt = time.Now().Add(time.Minute)
	}
	x.Timeout = time.Duration(5+rnd.IntN(30)) * time.Second
	if rnd.IntN(100) < 20 { // newer ones replace older ones
		x.Kind, x.Args, x.Timeout = kinds.Inventory, nil, 0
	}
	if rnd.IntN(100) < 30 {
		call.key = fmt.Sprintf("k%x", rnd.Uint64())
	}
	n, waits, again := w.nodes[s.node], rnd.IntN(100) < 20, 1+rnd.IntN(3)
	w.wg.Go(func() {
		for range again {
			w.submit(n, x, call, waits)
			if call.key == "" {
				return
			}
			n = w.node(s.seed)
		}
	})
}

func (w *world) node(seed uint64) *node {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[seed%uint64(len(w.nodes))]
}

func (w *world) submit(n *node, x tasks.Submission, call simCall, waits bool) {
	var key tasks.Idempotency
	if call.key != "" {
		key = tasks.Idempotency{Principal: "user:sim", Route: "POST /tasks", Key: call.key}
	}
	op := w.rec.submit(call)
	t, err := n.service.Submit(w.ctx, x, "user:sim", key)
	if err != nil || n.gone.Load() {
		w.rec.unanswered(op, err)
		return
	}
	w.rec.acked(op, t.ID)
	w.mu.Lock()
	w.sent = append(w.sent, t.ID)
	w.mu.Unlock()
	if !waits {
		return
	}
	who, id := fmt.Sprintf("waiter %d", op), t.ID
	w.rec.wait(who, id)
	t, err = n.service.Wait(w.ctx, id, 100*time.Second)
	if err != nil || n.gone.Load() || t.State != tasks.StateCompleted {
		w.rec.left(who, id)
		return
	}
	w.hits.hit("told")
	w.rec.told(who, t.ID, t.Ending.Outcome)
}

// retry repeats some task twice; every retry of it must give the same one.
func (w *world) retry(s simStep) {
	old, ok := w.any(s.seed)
	if !ok {
		return
	}
	was, err := w.store.Task(w.ctx, old)
	if err != nil {
		w.fail("acknowledged task %d: %v", old, err)
		return
	}
	call := simCall{agent: was.Agent.Num, once: was.Delivery == kinds.DeliveryOnce, free: true, key: "retry of " + old.String()}
	n := w.nodes[s.node]
	for range 2 {
		w.wg.Go(func() {
			op := w.rec.submit(call)
			t, replayed, err := n.service.Retry(w.ctx, old, "user:sim")
			if err != nil || n.gone.Load() {
				w.rec.unanswered(op, err)
				return
			}
			w.rec.acked(op, t.ID)
			w.mu.Lock()
			defer w.mu.Unlock()
			if was, ok := w.retried[old]; ok && was != t.ID {
				w.fails = append(w.fails, fmt.Sprintf("task %d was retried as %d and as %d", old, was, t.ID))
			}
			w.retried[old] = t.ID
			w.sent = append(w.sent, t.ID)
			w.hits.hit(map[bool]string{false: "retry stored", true: "retry known"}[replayed])
		})
	}
}

// frozenRow checks that a completed task is what it was.
func (w *world) frozenRow(t *tasks.Task) {
	if t.State != tasks.StateCompleted {
		return
	}
	c := *t
	c.RetriedAs = 0 // the one thing that is said of a completed task later
	w.mu.Lock()
	old, seen := w.ended[t.ID]
	if !seen {
		w.ended[t.ID] = c
	}
	w.mu.Unlock()
	if seen && !reflect.DeepEqual(old, c) {
		w.fail("completed task %d changed:\n%s", t.ID, cmp.Diff(old, c))
	}
}
