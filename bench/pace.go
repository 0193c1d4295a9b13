package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// paceRate is the offered load of result_p99_at_10k_ms, tasks a second.
	paceRate = 10_000
	// paceAgents share it.
	paceAgents = 1000
	// paceLoaders send batches in turn, one every paceTick.
	paceLoaders = 4
	paceTick    = 5 * time.Millisecond
	// paceSamplers each submit single tasks and wait for their results, one
	// every sampleGap: what a client sees, beside the load.
	paceSamplers = 8
	sampleGap    = 50 * time.Millisecond
	// paceWarmUp is load whose samples do not count.
	paceWarmUp = 2 * time.Second
)

// benchPace measures how long a submission takes until its result is stored
// while 10,000 tasks a second are offered, whether they are served or not.
func benchPace(ctx context.Context, b *bench) error {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	return errors.Join(r.paceRounds(ctx), r.close())
}

func (r *rig) paceRounds(ctx context.Context) error {
	b := r.bench
	if err := r.simulate(ctx, paceAgents); err != nil {
		return err
	}
	b.note("offered: %d tasks/s to %d agents, in batches every %s over %d connections; %d clients submit one task every %s with ?wait and are measured",
		paceRate, paceAgents, paceTick, paceLoaders, paceSamplers, sampleGap)
	var p50, p99 []float64
	for range b.rounds {
		m, err := r.meter(ctx, "paced load")
		if err != nil {
			return err
		}
		p, err := r.pace(ctx, paceRate, b.window, r.ids)
		if err != nil {
			return err
		}
		m.note(ctx, p.tasks)
		b.note("%d samples: p50 %.2f ms, p99 %.2f ms; the generator was late by %.1f ms at most; all results stored %.2f s after the last submission",
			len(p.results), quantile(p.results, 0.5), quantile(p.results, 0.99), float64(p.late.Microseconds())/1000, p.drained.Seconds())
		p50, p99 = append(p50, quantile(p.results, 0.5)), append(p99, quantile(p.results, 0.99))
	}
	b.figure("result_p50_at_10k_ms", median(p50), "ms")
	b.figure("result_p99_at_10k_ms", median(p99), "ms")
	return nil
}

// paced is what one window of offered load gave.
type paced struct {
	results []time.Duration // of the samples, from the first byte sent to the stored result
	tasks   int64
	late    time.Duration // by which the generator fell behind, at most
	drained time.Duration // from the last submission until nothing was open any more
}

// pacer offers tasks at a fixed rate.
type pacer struct {
	rig    *rig
	host   string
	ids    []string
	began  time.Time
	end    time.Time
	per    int // tasks in a batch
	sent   atomic.Int64
	mu     sync.Mutex
	out    paced
	ctx    context.Context
	cancel context.CancelFunc
}

// pace offers rate tasks a second to the agents for a warm-up and a window. The
// load does not wait for answers: what is late is sent at once.
func (r *rig) pace(ctx context.Context, rate int, window time.Duration, ids []string) (paced, error) {
	host, err := r.api.host()
	if err != nil {
		return paced{}, err
	}
	singles := paceSamplers * int(time.Second/sampleGap)
	p := &pacer{rig: r, host: host, ids: ids, per: (rate - singles) * int(paceTick/time.Millisecond) / 1000, began: time.Now()}
	p.end = p.began.Add(paceWarmUp + window)
	p.ctx, p.cancel = context.WithCancel(ctx)
	defer p.cancel()
	err = inParallel(paceLoaders+paceSamplers, paceLoaders+paceSamplers, func(i int) error {
		w, err := dialWire(host)
		if err == nil {
			defer w.close()
			if i < paceLoaders {
				err = p.load(w, i)
			} else {
				err = p.sample(w, i-paceLoaders)
			}
		}
		if err != nil {
			p.cancel()
		}
		return err
	})
	if err != nil {
		return paced{}, err
	}
	last := time.Now()
	if err := r.drained(ctx); err != nil {
		return paced{}, err
	}
	p.out.drained, p.out.tasks = time.Since(last), p.sent.Load()
	return p.out, nil
}

// at waits for a moment and notes by how much it was missed.
func (p *pacer) at(t time.Time) error {
	if d := time.Until(t); d > 0 {
		return wait(p.ctx, d)
	}
	late := time.Since(t)
	p.mu.Lock()
	p.out.late = max(p.out.late, late)
	p.mu.Unlock()
	return p.ctx.Err()
}

// load sends every paceLoaders-th batch.
func (p *pacer) load(w *wire, i int) error {
	for n := i; ; n += paceLoaders {
		due := p.began.Add(time.Duration(n) * paceTick)
		if due.After(p.end) {
			return nil
		}
		req := p.batch(n)
		if err := p.at(due); err != nil {
			return err
		}
		status, body, err := w.do(req)
		if err != nil {
			return err
		}
		if status != 202 {
			return fmt.Errorf("POST /tasks/batch answered %d: %.300s", status, body)
		}
		p.sent.Add(int64(p.per))
	}
}

// batch gives the request of one tick; ticks go round the agents.
func (p *pacer) batch(n int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"tasks":[`)
	for i := range p.per {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"agent":%q,"kind":"core.echo","args":%s}`, p.ids[(n*p.per+i)%len(p.ids)], echoArgs)
	}
	b.WriteString(`]}`)
	return request(p.host, "/api/v1/tasks/batch", p.rig.api.token, b.Bytes())
}

// sample submits single tasks and waits for each result. A sample that is due
// while the last one is still waited for is measured from when it was due.
func (p *pacer) sample(w *wire, i int) error {
	for n := 0; ; n++ {
		due := p.began.Add(time.Duration(n)*sampleGap + time.Duration(i)*sampleGap/paceSamplers)
		if due.After(p.end) {
			return nil
		}
		agent := p.ids[(n*paceSamplers+i*len(p.ids)/paceSamplers)%len(p.ids)]
		body := `{"agent":` + strconv.Quote(agent) + `,"kind":"core.echo","args":` + echoArgs + `}`
		req := request(p.host, "/api/v1/tasks?wait=30s", p.rig.api.token, []byte(body))
		if d := time.Until(due); d > 0 {
			if err := wait(p.ctx, d); err != nil {
				return err
			}
			due = time.Now() // a timer that fires late is the generator's
		}
		status, answer, err := w.do(req)
		took := time.Since(due)
		if err != nil {
			return err
		}
		var t struct {
			Outcome string `json:"outcome"`
		}
		if err := json.Unmarshal(answer, &t); err != nil || status != 200 || t.Outcome != "succeeded" {
			return fmt.Errorf("POST /tasks?wait=30s answered %d: %.300s", status, answer)
		}
		p.sent.Add(1)
		if due.Sub(p.began) > paceWarmUp {
			p.mu.Lock()
			p.out.results = append(p.out.results, took)
			p.mu.Unlock()
		}
	}
}
