package tasks_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// world is what a simulation happens in.
type world struct {
	*testing.T
	program
	hits   *simHits
	rec    *recorder
	store  *tasktest.Store
	ground *tasktest.ScriptedRunner // of no controller; what concerns all agents
	nodes  []*node
	all    []*node // every start that there was
	dead   []*node // killed; they come back to life only to end
	agents []tasks.Agent
	wg     sync.WaitGroup
	ctx    context.Context
	cancel context.CancelFunc

	mu      sync.Mutex
	sent    []tasks.ID
	retried map[tasks.ID]tasks.ID
	ended   map[tasks.ID]tasks.Task // as first seen completed
	removed bool
	calm    bool // one controller, never stopped: its Hub has told of everything
	fails   []string
	trace   []string
}

// node is one start of one controller.
type node struct {
	w       *world
	name    string
	owner   tasks.Owner
	faults  *tasktest.Faults
	runner  *tasktest.ScriptedRunner
	manager *tasks.Manager
	service *tasks.Service
	cancel  context.CancelFunc
	done    chan struct{}
	gone    atomic.Bool // killed: nobody hears what it still says
	frozen  atomic.Bool
}

func newWorld(t *testing.T, p program, hits *simHits) *world {
	w := &world{
		T: t, program: p, hits: hits, store: tasktest.NewStore(), ground: tasktest.NewScriptedRunner(),
		retried: map[tasks.ID]tasks.ID{}, ended: map[tasks.ID]tasks.Task{}, calm: p.nodes == 1,
	}
	w.rec = newRecorder(w)
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.ground.Watch = w.rec.step
	w.ground.Trace = w.note
	for i := range simAgents {
		id := uuid.NewV4()
		id[15] = byte(i)
		a := tasks.Agent{ID: id, Name: fmt.Sprintf("a%d", i)}
		a.Num = w.store.NewAgent(id, a.Name, nil)
		w.ground.Add(a, w.behave)
		w.agents = append(w.agents, a)
	}
	for i := range p.nodes {
		w.nodes = append(w.nodes, w.boot(fmt.Sprintf("c%d", i), nil))
	}
	return w
}

// boot starts a controller; former is the start that its lock proves dead.
func (w *world) boot(name string, former []uuid.UUID) *node {
	n := &node{
		w: w, name: name, owner: tasks.Owner{ID: uuid.NewV4(), Name: name}, faults: tasktest.NewFaults(w.store),
		runner: w.ground.Twin(), done: make(chan struct{}),
	}
	n.faults.OnCommit(w.rec.commit)
	n.manager = tasks.NewManager(tasks.Config{
		Store: n.faults, Runner: n.runner, Owner: n.owner, Former: former, Loops: w.loops, Logger: slog.New(slog.DiscardHandler),
		Limits: tasks.Limits{TurnItems: w.items},
	})
	n.service = tasks.NewService(tasks.ServiceConfig{Manager: n.manager, Kinds: kinds.Default()})
	n.runner.Attach(n.manager)
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	go func() {
		defer close(n.done)
		if err := n.manager.Run(ctx); err != nil {
			w.fail("%s: run: %v", name, err)
		}
	}()
	w.all = append(w.all, n)
	w.follow(n)
	synctest.Wait()
	return n
}

// follow listens to the events of one controller, like a browser that comes
// back with the last id it has seen whenever it was too slow.
func (w *world) follow(n *node) {
	hub, who := n.manager.Hub(), "stream "+n.owner.ID.String()
	last := hub.LastEventID()
	sub, err := hub.Subscribe([]string{tasks.TopicTasks}, last)
	if err != nil {
		w.fail("subscribe: %v", err)
		return
	}
	w.rec.follow(who)
	w.wg.Go(func() {
		for {
			select {
			case <-w.ctx.Done():
				sub.Close()
				return
			case e, ok := <-sub.Events():
				switch {
				case !ok:
					if sub, err = hub.Subscribe([]string{tasks.TopicTasks}, last); err != nil {
						w.fail("subscribe again: %v", err)
						return
					}
				case e.Type == tasks.EventReset:
					w.rec.reset(who)
				default:
					last = e.ID
				}
				if e.Type == tasks.EventCompleted {
					w.rec.told(who, e.Task, e.Outcome)
				}
			}
		}
	})
}

func (w *world) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fails = append(w.fails, fmt.Sprintf(format, args...))
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trace = append(w.trace, time.Now().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

// pass lets simulated time go by.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// run does the program, heals everything, and judges.
func (w *world) run() {
	for _, s := range w.steps {
		w.note("step %v", s)
		w.act(s)
		synctest.Wait()
		if w.observe(); len(w.fails) > 0 {
			break
		}
	}
	w.heal()
	w.quick()
	w.end()
	w.judge()
}

// behave is what agents do with a task; the same whenever it is asked.
func (w *world) behave(x tasks.Assignment) tasktest.Answer {
	rnd := rand.New(rand.NewPCG(w.seed, uint64(x.ID)<<8|uint64(x.Attempt)))
	if w.healing() {
		return tasktest.Answer{}
	}
	switch n := rnd.IntN(100); {
	case n < 42:
		return tasktest.Answer{}
	case n < 67:
		return tasktest.Answer{After: time.Duration(rnd.IntN(20_000)) * time.Millisecond}
	case n < 76:
		return tasktest.Answer{Silent: true}
	case n < 80:
		return tasktest.Answer{Silent: true, Deaf: true}
	case n < 84:
		return tasktest.Answer{Refuse: &tasks.Refusal{Cause: "disk"}}
	case n < 86:
		return tasktest.Answer{Refuse: &tasks.Refusal{Cause: "stale_epoch"}}
	case n < 90:
		return tasktest.Answer{After: time.Second, Output: []tasks.OutputChunk{
			{Seq: 0, Stream: "stdout", Data: []byte("a")}, {Seq: 1, Stream: "stderr", Data: []byte("b")},
		}}
	case n < 93:
		return tasktest.Answer{Ending: tasks.Ending{Outcome: tasks.Failed, Detail: "\x00", Result: json.RawMessage("\xff")}}
	case n < 95:
		return tasktest.Answer{Ending: tasks.Ending{Outcome: "splendid"}}
	case n < 97:
		return tasktest.Answer{After: time.Second, Ending: tasks.Ending{Outcome: tasks.TimedOut, Reason: "timeout"}}
	default:
		lie := tasks.Final{Ref: tasks.Ref{ID: x.ID, Attempt: x.Attempt + 1}, Epoch: x.Epoch, Ending: tasks.Ending{Outcome: tasks.Failed}}
		return tasktest.Answer{After: time.Second, Instead: &lie}
	}
}

func (w *world) healing() bool { return w.rec.healed.Load() }

// heal ends all faults and gives time: the longest timeout, the forced
// deadline after it, and the longest back-off.
func (w *world) heal() {
	w.rec.heal()
	for _, n := range w.nodes {
		w.thaw(n)
		n.faults.OnTurn(nil)
		n.faults.Poison(nil)
		n.faults.FailSettles(0)
		n.faults.Down(false)
	}
	for round := range 40 {
		for _, a := range w.agents {
			w.ground.LoseNext(a.Num, false)
			w.ground.Approve(a.Num)
			w.ground.Change(a.Num, func(a *tasks.Agent) { a.Paused = false })
			for _, n := range w.nodes {
				n.runner.Connect(a.Num)
			}
			w.ground.Finish(a.Num, tasks.Ending{Outcome: tasks.Succeeded})
		}
		w.pass(10 * time.Second)
		if round >= 3 && w.store.Open() == 0 { // a quarantine is approved in the second round
			break
		}
	}
	w.observe()
}

// quick sends each agent one more task when every wake-up is lost: the sweep
// alone must let it run within two seconds.
func (w *world) quick() {
	if len(w.fails) > 0 {
		return
	}
	for _, n := range w.nodes {
		n.manager.Deafen()
	}
	w.pass(time.Second)
	for i, a := range w.agents {
		if w.removed && i == simAgents-1 {
			continue
		}
		before := len(w.sent)
		for _, n := range w.nodes { // the owner takes it, the others refuse
			w.submit(n, echo(i), simCall{agent: a.Num, priority: tasks.DefaultPriority}, false)
		}
		if len(w.sent) == before {
			w.fail("without wake-ups nobody has stored a task for the idle agent %s", a.Name)
		}
		w.pass(2 * time.Second)
		w.none(a, tasks.StateNew)
		w.pass(2 * time.Second)
		w.none(a, tasks.StateWaiting)
	}
}

// none fails when a task of the idle agent is still in a state.
func (w *world) none(a tasks.Agent, s tasks.State) {
	for _, k := range w.store.Dump() {
		if k.Agent == a.Num && k.State == s {
			w.fail("without wake-ups task %d of the idle agent %s is still %s", k.ID, a.Name, s)
		}
	}
}

// end stops everything, also what was killed.
func (w *world) end() {
	for _, n := range w.dead {
		n.faults.Down(true)
		n.cancel()
		n.faults.Thaw()
		n.runner.Thaw()
		<-n.done
	}
	for _, n := range w.nodes {
		n.cancel()
		<-n.done
	}
	w.cancel()
	w.wg.Wait()
}

// observe checks what must hold at every moment.
func (w *world) observe() {
	if err := w.store.Verify(); err != nil {
		w.fail("%v", err)
	}
	w.mu.Lock()
	ids := append([]tasks.ID(nil), w.sent...)
	w.mu.Unlock()
	for _, id := range ids {
		t, err := w.store.Task(w.ctx, id)
		if err != nil {
			w.fail("acknowledged task %d: %v", id, err)
			return
		}
		w.frozenRow(t)
	}
}
