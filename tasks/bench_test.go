package tasks_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// countingRunner answers every task at once and counts, with as little cost
// of its own as possible.
type countingRunner struct {
	agents   map[string]tasks.Agent
	sessions tasks.Sessions
	executed atomic.Int64
}

func (r *countingRunner) Own(leases []tasks.Lease) {
	for _, a := range r.agents {
		r.sessions.SessionUp(tasks.Session{Agent: a.Num})
	}
}

func (r *countingRunner) Lookup(ref string) (tasks.Agent, error) { return r.agents[ref], nil }

func (r *countingRunner) Execute(x tasks.Assignment) {
	r.executed.Add(1)
	r.sessions.Final(x.Agent, tasks.Final{
		Ref: x.Ref(), Epoch: x.Epoch, Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"x":1}`)},
	})
}
func (*countingRunner) Cancel(tasks.AgentNum, tasks.Ref, string) {}
func (*countingRunner) Forget(tasks.AgentNum, ...tasks.ID)       {}
func (*countingRunner) AckOutput(tasks.AgentNum, tasks.Ref, int) {}
func (*countingRunner) Reconnect(tasks.AgentNum, string)         {}
func (*countingRunner) Quarantine(tasks.AgentNum, string)        {}

// nullStore writes nothing and says that all was written: what is left is the
// cost of the Manager alone.
type nullStore struct{ *tasktest.Store }

func (nullStore) Turn(_ context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	r := &tasks.TurnResult{At: time.Now()}
	for i := range t.Inserts {
		r.Inserted = append(r.Inserted, t.Inserts[i].ID)
	}
	for i := range t.Finishes {
		r.Finished = append(r.Finished, t.Finishes[i].ID)
	}
	for i := range t.Claims {
		r.Claimed = append(r.Claimed, t.Claims[i].ID)
	}
	return r, nil
}

func benchmarkCycle(b *testing.B, agents, clients, batch int, wrap func(*tasktest.Store) tasks.Store) {
	store := tasktest.NewStore()
	runner := &countingRunner{agents: map[string]tasks.Agent{}}
	var names []string
	for i := range agents {
		id := uuid.NewV4()
		name := fmt.Sprintf("a%d", i)
		runner.agents[name] = tasks.Agent{Num: store.NewAgent(id, name, nil), ID: id, Name: name}
		names = append(names, name)
	}
	m := tasks.NewManager(tasks.Config{Store: wrap(store), Runner: runner, Owner: tasks.Owner{ID: uuid.NewV4()}})
	runner.sessions = m
	for _, a := range runner.agents {
		m.AgentChanged(a)
	}
	s := tasks.NewService(tasks.ServiceConfig{Manager: m, Kinds: kinds.Default()})
	ctx, cancel := context.WithCancel(b.Context())
	var run sync.WaitGroup
	run.Go(func() { _ = m.Run(ctx) })
	until(func() bool { return len(m.Ready()) == 0 })
	args := json.RawMessage(`{"x":1}`)
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for {
				at := next.Add(int64(batch))
				if at > int64(b.N) && at-int64(batch) >= int64(b.N) {
					return
				}
				var err error
				if batch == 1 {
					_, err = s.Submit(ctx, tasks.Submission{Agent: names[int(at)%agents], Kind: kinds.Echo, Args: args}, "token:bench", tasks.Idempotency{})
				} else {
					subs := make([]tasks.Submission, batch)
					for i := range subs {
						subs[i] = tasks.Submission{Agent: names[(int(at)+i)%agents], Kind: kinds.Echo, Args: args}
					}
					_, err = s.SubmitBatch(ctx, subs, "token:bench", tasks.Idempotency{})
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	want := next.Load() - int64(clients*batch)
	until(func() bool { return m.Stats().Completed[tasks.Succeeded] >= want })
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N)/1000, "cpu-us/op")
	b.ReportMetric(float64(m.Stats().Completed[tasks.Succeeded])/b.Elapsed().Seconds(), "cycles/s")
	cancel()
	run.Wait()
}

func until(done func() bool) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !done() {
		<-tick.C
	}
}

// cpuTime is what the process has used: the elapsed time of a benchmark says
// little on a machine that others use too.
func cpuTime() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func memory(s *tasktest.Store) tasks.Store  { return s }
func nothing(s *tasktest.Store) tasks.Store { return nullStore{s} }

// BenchmarkCycle is the full cycle (submit, start, finish) of a task.
func BenchmarkCycle(b *testing.B) {
	b.Run("single/memory", func(b *testing.B) { benchmarkCycle(b, 1000, 256, 1, memory) })
	b.Run("single/nostore", func(b *testing.B) { benchmarkCycle(b, 1000, 256, 1, nothing) })
	b.Run("batch/memory", func(b *testing.B) { benchmarkCycle(b, 1000, 4, 1000, memory) })
	b.Run("batch/nostore", func(b *testing.B) { benchmarkCycle(b, 1000, 4, 1000, nothing) })
}
