package tasks_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "replay one seed of the model test")
	seedsFlag = flag.Int("seeds", 20, "how many seeds the model test tries")
)

// TestModel lets everything happen at random: submissions, cancels, retries, lost
// sessions, restarts, lying agents, lost and unknown commits, take-overs. Then
// all heals, and the promises are checked.
func TestModel(t *testing.T) {
	t.Parallel()
	if *seedFlag != 0 {
		synctest.Test(t, func(t *testing.T) { runModel(t, *seedFlag) })
		return
	}
	base := rand.Uint64()
	for i := range *seedsFlag {
		seed := base + uint64(i)
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { runModel(t, seed) })
		})
	}
}

const (
	modelAgents = 4
	modelSteps  = 150
)

// sent is one acknowledged submission.
type sent struct {
	id          tasks.ID
	agent       int
	priority    int
	once, later bool
	begin, end  int // steps: sent, acknowledged
}

type model struct {
	*rig
	rnd      *rand.Rand
	step     atomic.Int64
	mu       sync.Mutex
	sent     []sent
	frozen   map[tasks.ID]tasks.Task // as first seen completed
	retried  map[tasks.ID]tasks.ID
	terminal map[tasks.ID]int
	wg       sync.WaitGroup
	ctx      context.Context
	restarts int

	strangers map[tasks.AgentNum]bool // agents that have come back with another ledger
	late      map[tasks.ID]bool       // tasks that one of them began at their second attempt
}

func runModel(t *testing.T, seed uint64) {
	t.Logf("seed %d", seed)
	m := &model{
		rnd: rand.New(rand.NewPCG(seed, 1)), frozen: map[tasks.ID]tasks.Task{}, terminal: map[tasks.ID]int{}, retried: map[tasks.ID]tasks.ID{},
		strangers: map[tasks.AgentNum]bool{},
	}
	m.rig = buildRig(t, modelAgents)
	m.runner.Trace = func(format string, args ...any) {
		t.Logf("%s step %d "+format, append([]any{time.Now().Format("04:05.000"), m.now()}, args...)...)
	}
	ctx, cancel := context.WithCancel(t.Context())
	m.ctx = ctx
	m.start()
	m.follow()
	for i := range m.agents {
		m.script(i, m.behave)
	}
	for i := range modelSteps {
		m.step.Store(int64(i))
		m.act()
		synctest.Wait()
		m.observe()
	}
	m.heal()
	cancel()
	m.wg.Wait()
	m.judge()
}

// follow counts the terminal events of one Hub, like a browser that comes back
// with the last id it has seen whenever it was too slow.
func (m *model) follow() {
	hub := m.manager.Hub()
	last := hub.LastEventID()
	sub, err := hub.Subscribe([]string{tasks.TopicTasks}, last)
	if err != nil {
		m.Fatal(err)
	}
	m.wg.Go(func() {
		for {
			select {
			case <-m.ctx.Done():
				sub.Close()
				return
			case e, ok := <-sub.Events():
				switch {
				case !ok:
					if sub, err = hub.Subscribe([]string{tasks.TopicTasks}, last); err != nil {
						m.Error(err)
						return
					}
				case e.Type != tasks.EventReset:
					last = e.ID
				}
				if e.Type == tasks.EventCompleted {
					m.mu.Lock()
					m.terminal[e.Task]++
					m.mu.Unlock()
				}
			}
		}
	})
}

func (m *model) now() int { return int(m.step.Load()) }

func (m *model) chance(percent int) bool { return m.rnd.IntN(100) < percent }

// behave is the script of all agents.
func (m *model) behave(x tasks.Assignment) tasktest.Answer {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch n := m.rnd.IntN(100); {
	case n < 45:
		return tasktest.Answer{}
	case n < 70:
		return tasktest.Answer{After: time.Duration(m.rnd.IntN(20_000)) * time.Millisecond}
	case n < 78:
		return tasktest.Answer{Silent: true}
	case n < 82:
		return tasktest.Answer{Silent: true, Deaf: true}
	case n < 86:
		return tasktest.Answer{Refuse: &tasks.Refusal{Cause: "disk"}}
	case n < 88:
		return tasktest.Answer{Refuse: &tasks.Refusal{Cause: "stale_epoch"}}
	case n < 93:
		return tasktest.Answer{After: time.Second, Output: []tasks.OutputChunk{
			{Seq: 0, Stream: "stdout", Data: []byte("a")}, {Seq: 1, Stream: "stderr", Data: []byte("b")},
		}}
	case n < 96:
		return tasktest.Answer{Ending: tasks.Ending{Outcome: tasks.Failed, Detail: "\x00", Result: json.RawMessage("\xff")}}
	default:
		lie := tasks.Final{Ref: tasks.Ref{ID: x.ID, Attempt: x.Attempt + 1}, Epoch: x.Epoch, Ending: tasks.Ending{Outcome: tasks.Failed}}
		return tasktest.Answer{After: time.Second, Instead: &lie}
	}
}

func (m *model) act() {
	m.mu.Lock()
	n, agent := m.rnd.IntN(100), m.rnd.IntN(modelAgents)
	pause := time.Duration(m.rnd.IntN(3000)) * time.Millisecond
	m.mu.Unlock()
	num := m.agents[agent].Num
	switch {
	case n < 40:
		for range 1 + n%6 {
			m.send(agent)
		}
	case n < 47:
		m.cancelOne()
	case n < 52:
		m.runner.Disconnect(num, "cable")
	case n < 62:
		m.runner.Connect(num)
	case n < 66:
		m.runner.Restart(num)
	case n < 68:
		m.runner.LoseLedger(num)
		m.strangers[num] = true
	case n < 72:
		m.runner.Approve(num)
	case n < 74:
		m.runner.Change(num, func(a *tasks.Agent) { a.Paused = !a.Paused })
	case n < 78:
		m.lie(agent)
	case n < 83:
		m.breakTurns()
	case n < 84:
		m.faults.Down(true)
		m.pass(pause * 5)
		m.faults.Down(false)
	case n < 86:
		m.takeOver(pause)
	case n < 88:
		m.restart()
	case n < 90:
		m.retryOne()
	default:
		m.pass(pause)
	}
}

// send submits without waiting for the answer.
func (m *model) send(agent int) {
	m.mu.Lock()
	s := echo(agent)
	rec := sent{agent: agent, begin: m.now(), priority: tasks.DefaultPriority}
	if m.chance(30) {
		s.Delivery, rec.once = kinds.DeliveryOnce, true
	}
	if m.chance(15) {
		rec.priority = m.rnd.IntN(10)
		s.Priority = &rec.priority
	}
	if m.chance(10) {
		s.NotBefore, rec.later = time.Now().Add(time.Duration(m.rnd.IntN(30))*time.Second+time.Second), true
	}
	if m.chance(10) {
		s.ExpiresAt = time.Now().Add(time.Minute)
	}
	s.Timeout = time.Duration(5+m.rnd.IntN(30)) * time.Second
	if m.chance(20) { // newer ones replace older ones
		s.Kind, s.Args, s.Timeout = kinds.Inventory, nil, 0
	}
	m.mu.Unlock()
	service := m.service
	m.wg.Go(func() {
		t, err := service.Submit(m.ctx, s, "user:model", tasks.Idempotency{})
		if err != nil {
			return
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		rec.id, rec.end = t.ID, m.now()
		m.sent = append(m.sent, rec)
	})
}

func (m *model) any() (tasks.ID, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.sent) == 0 {
		return 0, false
	}
	return m.sent[m.rnd.IntN(len(m.sent))].id, true
}

func (m *model) cancelOne() {
	if id, ok := m.any(); ok {
		service := m.service
		m.wg.Go(func() { _, _ = service.Cancel(m.ctx, id, "user:model") })
	}
}

// retryOne retries some task; every retry of it must give the same one.
func (m *model) retryOne() {
	m.mu.Lock()
	if len(m.sent) == 0 {
		m.mu.Unlock()
		return
	}
	old := m.sent[m.rnd.IntN(len(m.sent))]
	m.mu.Unlock()
	service := m.service
	for range 2 {
		m.wg.Go(func() {
			t, replayed, err := service.Retry(m.ctx, old.id, "user:model")
			if err != nil {
				return
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			if was, ok := m.retried[old.id]; ok && was != t.ID {
				m.Errorf("task %d was retried as %d and as %d", old.id, was, t.ID)
			}
			m.retried[old.id] = t.ID
			if !replayed { // its place in the order is not known here
				m.sent = append(m.sent, sent{agent: old.agent, id: t.ID, once: old.once, priority: old.priority, later: true})
			}
		})
	}
}

// lie lets an agent say what is not so.
func (m *model) lie(agent int) {
	id, ok := m.any()
	if !ok {
		return
	}
	num := m.agents[agent].Num
	ref := tasks.Ref{ID: id, Attempt: 90}
	m.runner.Say(func(s tasks.Sessions) {
		s.Final(num, tasks.Final{Ref: ref, Epoch: 1, Ending: tasks.Ending{Outcome: tasks.Succeeded}})
		s.Accepted(num, ref)
		s.Refused(num, tasks.Refusal{Ref: ref, Cause: "busy"})
		s.Output(num, tasks.OutputChunk{Ref: ref, Stream: "stdout"})
		s.Final(num, tasks.Final{Ref: tasks.Ref{ID: id, Attempt: 1}, Epoch: 99, Ending: tasks.Ending{Outcome: tasks.Succeeded}})
	})
}

// breakTurns lets the next turns fail in all ways.
func (m *model) breakTurns() {
	left := 1 + m.rnd.IntN(6)
	m.faults.FailSettles(m.rnd.IntN(4))
	m.faults.OnTurn(func(*tasks.Turn) tasktest.Fault {
		m.mu.Lock()
		defer m.mu.Unlock()
		if left--; left < 0 {
			return tasktest.None
		}
		return tasktest.Fault(m.rnd.IntN(5))
	})
}

// takeOver lets another controller hold all shards for a while.
func (m *model) takeOver(d time.Duration) {
	var all []tasks.Shard
	for s := range tasks.Shard(tasks.NumShards) {
		all = append(all, s)
	}
	other := tasks.Owner{ID: uuid.NewV4(), Name: "other"}
	m.store.ExpireLeases()
	got, err := m.store.Acquire(m.Context(), other, nil, all)
	if err != nil {
		m.Fatal(err)
	}
	m.pass(d * 3)
	if err := m.store.Release(m.Context(), other, got); err != nil {
		m.Fatal(err)
	}
}

// restart ends the controller and starts the next one.
func (m *model) restart() {
	m.restarts++
	m.stop()
	for i := range m.agents {
		m.runner.Disconnect(m.agents[i].Num, "the controller stops")
	}
	m.make()
	m.start()
	m.follow()
}

// observe checks what must hold at every moment.
func (m *model) observe() {
	for num, n := range m.store.StartedPerAgent() {
		if n > 1 {
			m.Fatalf("step %d: agent %d has %d started rows", m.now(), num, n)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sent {
		t, err := m.store.Task(m.Context(), s.id)
		if err != nil {
			m.Fatalf("step %d: acknowledged task %d: %v", m.now(), s.id, err)
		}
		t.RetriedAs = 0 // the one thing that is said of a completed task later
		old, seen := m.frozen[s.id]
		if seen {
			if !reflect.DeepEqual(old, *t) {
				m.Fatalf("step %d: completed task %d changed:\n%s", m.now(), s.id, cmp.Diff(old, *t))
			}
		} else if t.State == tasks.StateCompleted {
			m.frozen[s.id] = *t
		}
	}
}

// heal ends all faults and gives time.
func (m *model) heal() {
	m.faults.OnTurn(nil)
	m.faults.FailSettles(0)
	for i := range m.agents {
		m.script(i, nil2())
	}
	for range 40 {
		for i, a := range m.agents {
			m.runner.Approve(a.Num)
			m.runner.Change(a.Num, func(a *tasks.Agent) { a.Paused = false })
			m.runner.Connect(a.Num)
			if m.step.Add(1); i == 0 {
				m.runner.Finish(a.Num, tasks.Ending{Outcome: tasks.Succeeded})
			}
			m.runner.Finish(a.Num, tasks.Ending{Outcome: tasks.Succeeded})
		}
		m.pass(10 * time.Second)
	}
	m.observe()
}

func (m *model) judge() {
	m.check()
	if n := m.store.Open(); n != 0 {
		m.Errorf("%d tasks are still open after all has healed", n)
	}
	starts := map[int]map[tasks.ID]int{} // first start of each task, by agent
	m.late = map[tasks.ID]bool{}
	for i, a := range m.agents {
		starts[i] = map[tasks.ID]int{}
		runs := map[tasks.ID]int{}
		for at, ref := range m.runner.Starts(a.Num) {
			runs[ref.ID]++
			if _, ok := starts[i][ref.ID]; !ok {
				starts[i][ref.ID] = at
				m.late[ref.ID] = ref.Attempt > 1 && m.strangers[a.Num]
			}
		}
		for _, s := range m.sent {
			if s.agent == i && s.once && runs[s.id] > 1 {
				m.Errorf("task %d is delivered once and ran %d times", s.id, runs[s.id])
			}
		}
	}
	for _, s := range m.sent {
		if _, ok := m.frozen[s.id]; !ok {
			m.Errorf("acknowledged task %d never completed", s.id)
		}
	}
	for id, n := range m.terminal {
		if n > 1 {
			m.Errorf("%d terminal events of task %d", n, id)
		}
	}
	if m.restarts == 0 {
		for _, s := range m.sent {
			if m.terminal[s.id] != 1 {
				m.Errorf("%d terminal events of task %d", m.terminal[s.id], s.id)
			}
		}
	}
	m.judgeOrder(starts)
}

// judgeOrder checks first in, first out: acknowledged before the other was
// sent means started before it. A task that was on its way when the agent's
// ledger was replaced counts as interrupted: whether it had begun nobody knows,
// and it comes again only after a pause.
func (m *model) judgeOrder(starts map[int]map[tasks.ID]int) {
	for _, a := range m.sent {
		for _, b := range m.sent {
			if a.agent != b.agent || a.priority != b.priority || a.later || b.later || a.end >= b.begin {
				continue
			}
			x, okX := starts[a.agent][a.id]
			y, okY := starts[b.agent][b.id]
			if okX && okY && x > y && !m.late[a.id] {
				m.Errorf("task %d was acknowledged in step %d, before %d was sent in step %d, and started after it", a.id, a.end, b.id, b.begin)
			}
		}
	}
}
