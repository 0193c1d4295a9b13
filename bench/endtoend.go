package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// batchSize is how many tasks one call submits.
	batchSize = 2000
	// loaders submit batches, one at a time each.
	loaders = 4
	// openPerAgent and openLeast bound the tasks that are not completed: enough
	// that no agent's queue runs empty, few enough that the queue stays small.
	openPerAgent = 20
	openLeast    = 10_000
	// warmUp is load before the counting begins.
	warmUp = 3 * time.Second
	// pollEvery is how often the progress is looked at.
	pollEvery = 100 * time.Millisecond
)

// benchFewAgents measures tasks from a batch submit over REST, through
// sessions over mutual TLS to 100 simulated agents, to the stored result.
func benchFewAgents(ctx context.Context, b *bench) error {
	rates, err := b.endToEndRates(ctx, 100, nil)
	if err != nil {
		return err
	}
	b.note("end to end with 100 agents: %s tasks/s", list(rates))
	b.figure("end_to_end_tasks_per_s_100_agents", median(rates), "tasks/s")
	return nil
}

// benchManyAgents does the same with 1,000 agents, in turn with plain unary
// calls over as many connections.
func benchManyAgents(ctx context.Context, b *bench) error {
	const agents = 1000
	echo, err := b.newEcho(ctx, agents, nil)
	if err != nil {
		return err
	}
	if err := echo.connect(agents); err != nil {
		return errors.Join(err, echo.close())
	}
	var raw []float64
	large, err := b.endToEndRates(ctx, agents, func() error {
		res, err := echo.load(b.window)
		if err == nil {
			raw = append(raw, float64(res.Calls)/res.Seconds)
		}
		return err
	})
	if err = errors.Join(err, echo.close()); err != nil {
		return err
	}
	b.note("compared with: unary gRPC echo of %d bytes, one call in flight on each of %d mTLS connections, both ends on this machine", echoBytes, agents)
	b.note("end to end with %d agents: %s tasks/s; unary echo: %s/s", agents, list(large), list(raw))
	b.figure("end_to_end_tasks_per_s_1000_agents", median(large), "tasks/s")
	b.figure("raw_grpc_echo_per_s_1000_connections", median(raw), "calls/s")
	b.ratio("end_to_end_vs_raw_grpc", median(large)/median(raw))
	return nil
}

// endToEndRates gives the rate of each round; between is run after each.
func (b *bench) endToEndRates(ctx context.Context, agents int, between func() error) (rates []float64, err error) {
	r, err := b.newRig(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	began := time.Now()
	if err := r.simulate(ctx, agents); err != nil {
		return nil, err
	}
	b.note("%d agents paired and connected in %.1f s", agents, time.Since(began).Seconds())
	db, err := openDB(r.run.DatabaseURL)
	if err != nil {
		return nil, err
	}
	defer release(db)
	if err := r.bench.noteDurability(ctx, db); err != nil {
		return nil, err
	}
	for range b.rounds {
		rate, err := r.endToEndRound(ctx)
		if err != nil {
			return nil, err
		}
		rates = append(rates, rate)
		if between != nil {
			if err := between(); err != nil {
				return nil, err
			}
		}
	}
	return rates, nil
}

// endToEndRound loads the agents for a window and gives tasks/s.
func (r *rig) endToEndRound(ctx context.Context) (float64, error) {
	before, err := r.stats(ctx)
	if err != nil {
		return 0, err
	}
	g := &generator{rig: r, most: int64(max(openLeast, openPerAgent*len(r.ids)))}
	if err := g.start(ctx); err != nil {
		return 0, err
	}
	rate, err := g.measure(ctx, before.completed())
	if err = errors.Join(err, g.stop()); err != nil {
		return 0, err
	}
	if err := r.drained(ctx); err != nil {
		return 0, err
	}
	after, err := r.stats(ctx)
	if err != nil {
		return 0, err
	}
	done, good := after.completed()-before.completed(), after.Tasks.Completed["succeeded"]-before.Tasks.Completed["succeeded"]
	if done != g.submitted.Load() || good != done {
		return 0, fmt.Errorf("%d tasks were submitted, %d completed, %d of them succeeded", g.submitted.Load(), done, good)
	}
	return rate, nil
}

// generator submits batches as long as few enough tasks are open.
type generator struct {
	rig       *rig
	most      int64
	submitted atomic.Int64
	completed atomic.Int64 // since the start, as last seen
	ctx       context.Context
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	mu        sync.Mutex
	room      *sync.Cond
	err       error
}

func (g *generator) start(ctx context.Context) error {
	host, err := g.rig.api.host()
	if err != nil {
		return err
	}
	g.ctx, g.cancel = context.WithCancel(ctx)
	g.room = sync.NewCond(&g.mu)
	for i := range loaders {
		w, err := dialWire(host)
		if err != nil {
			return errors.Join(err, g.stop())
		}
		g.wg.Go(func() {
			defer w.close()
			if err := g.load(w, host, i); err != nil {
				g.fail(err)
			}
		})
	}
	return nil
}

func (g *generator) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = err
	}
	g.cancel()
}

// stop ends the load and gives what went wrong.
func (g *generator) stop() error {
	g.cancel()
	g.room.Broadcast()
	g.wg.Wait()
	return g.err
}

// load submits the batches of one loader. All batches together go round the
// agents, so that each gets as many.
func (g *generator) load(w *wire, host string, i int) error {
	batches := g.batches(host)
	for n := i; ; n += loaders {
		g.mu.Lock()
		for g.ctx.Err() == nil && g.submitted.Load()-g.completed.Load() > g.most-batchSize {
			g.room.Wait()
		}
		g.mu.Unlock()
		if g.ctx.Err() != nil {
			return nil
		}
		g.submitted.Add(batchSize)
		status, body, err := w.do(batches[n%len(batches)])
		if err != nil {
			return err
		}
		if status != 202 {
			return fmt.Errorf("POST /tasks/batch answered %d: %.300s", status, body)
		}
	}
}

// batches gives the requests that together reach all agents equally often.
func (g *generator) batches(host string) [][]byte {
	ids := g.rig.ids
	n := max(1, len(ids)/batchSize)
	requests := make([][]byte, n)
	for k := range requests {
		var b bytes.Buffer
		b.WriteString(`{"tasks":[`)
		for i := range batchSize {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, `{"agent":%q,"kind":"core.echo","args":%s}`, ids[(k*batchSize+i)%len(ids)], echoArgs)
		}
		b.WriteString(`]}`)
		requests[k] = request(host, "/api/v1/tasks/batch", g.rig.api.token, b.Bytes())
	}
	return requests
}

// look updates what is completed and lets the loaders go on. It gives also
// how many tasks are in no agent's hands.
func (g *generator) look(ctx context.Context, base int64) (queued int, err error) {
	s, err := g.rig.stats(ctx)
	if err != nil {
		return 0, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.completed.Store(s.completed() - base)
	g.room.Broadcast()
	return s.Tasks.New, g.err
}

// measure gives the rate of completions in the window.
func (g *generator) measure(ctx context.Context, base int64) (float64, error) {
	var m *meter
	var begin time.Time
	var first int64
	fewest := 1 << 30
	start := time.Now()
	for {
		if err := wait(ctx, pollEvery); err != nil {
			return 0, err
		}
		queued, err := g.look(ctx, base)
		if err != nil {
			return 0, err
		}
		now := time.Now()
		switch {
		case m == nil && now.Sub(start) >= warmUp:
			if m, err = g.rig.meter(ctx, "end to end, "+strconv.Itoa(len(g.rig.ids))+" agents"); err != nil {
				return 0, err
			}
			if _, err := g.look(ctx, base); err != nil {
				return 0, err
			}
			begin, first = time.Now(), g.completed.Load()
		case m != nil:
			fewest = min(fewest, queued)
		}
		if m != nil && now.Sub(begin) >= g.rig.bench.window {
			done := g.completed.Load() - first
			m.note(ctx, done)
			g.rig.bench.note("open tasks never fell below %d queued in the window", fewest)
			return float64(done) / now.Sub(begin).Seconds(), nil
		}
	}
}

// echo is the comparison: the simulator's process serves plain calls, another
// process of this program takes the controller's part.
type echo struct {
	dir    string
	bench  *bench
	server *worker
	client *worker
}

// newEcho connects n connections; the environment is that of both processes.
func (b *bench) newEcho(ctx context.Context, n int, env []string) (*echo, error) {
	dir, err := b.newDir()
	if err != nil {
		return nil, err
	}
	e := &echo{dir: filepath.Join(dir, "echo"), bench: b}
	if err := echoFleet(e.dir, n); err != nil {
		return nil, errors.Join(err, e.close())
	}
	if e.server, err = startWorker(&simState{}, env, "-simulator", e.dir, "-agents", strconv.Itoa(n)); err != nil {
		return nil, errors.Join(err, e.close())
	}
	if e.client, err = startWorker(&echoResult{}, env, "-echo-client", e.dir); err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, ctx.Err()
}

func (e *echo) connect(n int) error {
	return e.client.order(echoOrder{Connect: n}, &echoResult{})
}

// load keeps one call in flight on each connection.
func (e *echo) load(d time.Duration) (r echoResult, err error) {
	client, _ := cpuOf(e.client.pid()) // only for the note
	server, _ := cpuOf(e.server.pid())
	if err = e.client.order(echoOrder{Seconds: d.Seconds()}, &r); err != nil {
		return r, err
	}
	clientEnd, _ := cpuOf(e.client.pid())
	serverEnd, _ := cpuOf(e.server.pid())
	n := float64(max(r.Calls, 1))
	e.bench.note("unary echo, %d connections: %.0f/s, p50 %.1f ms, p99 %.1f ms; processor time of each: client %.1f us, server %.1f us",
		r.Connected, float64(r.Calls)/r.Seconds, r.P50, r.P99, float64((clientEnd-client).Microseconds())/n, float64((serverEnd-server).Microseconds())/n)
	return r, nil
}

func (e *echo) close() error {
	var errs []error
	for _, w := range []*worker{e.client, e.server} {
		if w != nil {
			errs = append(errs, w.stop())
		}
	}
	return errors.Join(append(errs, e.bench.removeDir(filepath.Dir(e.dir)))...)
}
