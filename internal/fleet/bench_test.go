package fleet_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"headgate/internal/agentpb"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/pki"
	"headgate/tasks"
)

// ring is a queue that gives each agent its next task, from one goroutine, as
// the Manager does: everything that has come meanwhile is handled in one go.
type ring struct {
	f    *fleet.Fleet
	left atomic.Int64
	done chan struct{}
	ups  chan struct{}

	mu     sync.Mutex
	finals []tasks.AgentNum
	signal chan struct{}
	next   tasks.ID
}

func (r *ring) SessionUp(tasks.Session)                  { r.ups <- struct{}{} }
func (r *ring) SessionDown(tasks.AgentNum, string)       {}
func (r *ring) Accepted(tasks.AgentNum, tasks.Ref)       {}
func (r *ring) Output(tasks.AgentNum, tasks.OutputChunk) {}
func (r *ring) Refused(tasks.AgentNum, tasks.Refusal)    {}
func (r *ring) AgentChanged(tasks.Agent)                 {}
func (r *ring) Final(agent tasks.AgentNum, f tasks.Final) {
	if r.left.Add(-1) == 0 {
		close(r.done)
	}
	r.mu.Lock()
	r.finals = append(r.finals, agent)
	r.mu.Unlock()
	select {
	case r.signal <- struct{}{}:
	default:
	}
}

func (r *ring) run(ctx context.Context) {
	var batch []tasks.AgentNum
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.signal:
		}
		r.mu.Lock()
		batch, r.finals = r.finals, batch[:0]
		r.mu.Unlock()
		for _, num := range batch {
			r.give(num)
		}
	}
}

const benchArgs = `{"text":"0123456789012345678901234567890123456789012345678901234567890123456789012345"}`

func (r *ring) give(num tasks.AgentNum) {
	r.next++
	r.f.Execute(tasks.Assignment{Queued: tasks.Queued{
		Agent: num, ID: r.next, Attempt: 1, Kind: "core.echo", Args: benchArgs, Timeout: time.Minute,
	}, Epoch: 1, Forget: []tasks.ID{r.next - 1}})
}

// connected starts n agents and a fleet that is connected to all of them.
func connected(b *testing.B, n int) (*harness, *ring, time.Duration) {
	b.Helper()
	r := &ring{done: make(chan struct{}), ups: make(chan struct{}, n), signal: make(chan struct{}, 1)}
	h := newHarness(b, fleet.Limits{}, nil)
	r.f = h.Fleet
	h.Attach(r)
	for i := range n {
		a := fleettest.NewAgent(b, h.authority, fmt.Sprint("agent", i))
		h.store.Add(a.Row(a.Start(b)))
	}
	began := time.Now()
	h.run()
	for range n {
		<-r.ups
	}
	return h, r, time.Since(began)
}

// BenchmarkTasks counts tasks through the sessions of 1,000 agents, both ends
// and mutual TLS in this process.
func BenchmarkTasks(b *testing.B) {
	for _, n := range []int{1, 100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			_, r, ready := connected(b, n)
			ctx, cancel := context.WithCancel(b.Context())
			var loop sync.WaitGroup
			r.left.Store(int64(b.N))
			b.ReportAllocs()
			b.ResetTimer()
			used := processor()
			for i := range n {
				r.give(tasks.AgentNum(i + 1))
			}
			loop.Go(func() { r.run(ctx) })
			<-r.done
			b.StopTimer()
			cancel()
			loop.Wait()
			b.ReportMetric(float64((processor()-used).Nanoseconds())/1000/float64(b.N), "cpu-us/task")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tasks/s")
			b.ReportMetric(float64(n)/ready.Seconds(), "dials/s")
		})
	}
}

// BenchmarkRawPing is the yardstick: unary calls over the same connections,
// one in flight each.
func BenchmarkRawPing(b *testing.B) {
	for _, n := range []int{1, 100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			h, _, _ := connected(b, n)
			views, err := h.List(fleet.Filter{Limit: fleet.MaxPage})
			if err != nil {
				b.Fatal(err)
			}
			for len(views) < n {
				more, err := h.List(fleet.Filter{Limit: fleet.MaxPage, After: fleet.Cursor(views[len(views)-1])})
				if err != nil || len(more) == 0 {
					b.Fatal(err)
				}
				views = append(views, more...)
			}
			var left atomic.Int64
			left.Store(int64(b.N))
			var callers sync.WaitGroup
			b.ReportAllocs()
			b.ResetTimer()
			used := processor()
			for _, v := range views {
				callers.Go(func() {
					for left.Add(-1) >= 0 {
						if _, err := h.Ping(b.Context(), v.ID); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			callers.Wait()
			b.ReportMetric(float64((processor()-used).Nanoseconds())/1000/float64(b.N), "cpu-us/ping")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pings/s")
		})
	}
}

// BenchmarkIdleAgents tells the memory of connected agents, both ends in this
// process; the number of goroutines counts both ends too.
func BenchmarkIdleAgents(b *testing.B) {
	const n = 1000
	for b.Loop() {
		b.StopTimer()
		before, goroutines := memory(), runtime.NumGoroutine()
		h, _, _ := connected(b, n)
		b.ReportMetric(float64(memory()-before)/n/1024, "KiB/agent-both-ends")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/agent-both-ends")
		h.stop()
		b.StartTimer()
	}
}

// BenchmarkIdleRaw is the yardstick for BenchmarkIdleAgents: plain gRPC
// clients with a small read buffer to the same agents, one call made.
func BenchmarkIdleRaw(b *testing.B) {
	const n = 1000
	for b.Loop() {
		b.StopTimer()
		before, goroutines := memory(), runtime.NumGoroutine()
		h := newHarness(b, fleet.Limits{}, nil)
		conns := make([]*grpc.ClientConn, 0, n)
		for i := range n {
			a := fleettest.NewAgent(b, h.authority, fmt.Sprint("agent", i))
			conf := pki.DialAgent(pki.AgentDial{Identity: h.Identity(), Roots: h.Roots(), ID: a.ID, Pins: []pki.Fingerprint{a.Identity.SPKI()}})
			cc, err := grpc.NewClient("passthrough:///"+a.Start(b), grpc.WithTransportCredentials(credentials.NewTLS(conf)), grpc.WithReadBufferSize(4<<10), grpc.WithIdleTimeout(0))
			if err != nil {
				b.Fatal(err)
			}
			if _, err := agentpb.NewAgentClient(cc).Ping(b.Context(), &agentpb.PingRequest{}); err != nil {
				b.Fatal(err)
			}
			conns = append(conns, cc)
		}
		b.ReportMetric(float64(memory()-before)/n/1024, "KiB/agent-both-ends")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/agent-both-ends")
		for _, cc := range conns {
			_ = cc.Close()
		}
		b.StartTimer()
	}
}

// processor gives the processor time that this process has used.
func processor() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func memory() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}
