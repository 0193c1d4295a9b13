package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	// latencyTasks are submitted in one round, one after the other.
	latencyTasks = 400
	// latencyGap lies between them, so that nothing is under way any more.
	latencyGap = 5 * time.Millisecond
)

// benchLatency measures a single task on an idle system, against the least
// that it can take: one durable commit and one round trip over mutual TLS.
func benchLatency(ctx context.Context, b *bench) error {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	e, err := b.newEcho(ctx, 1, nil)
	if err != nil {
		return errors.Join(err, r.close())
	}
	return errors.Join(r.latency(ctx, e), e.close(), r.close())
}

// latencies are the medians of one round, in milliseconds.
type latencies struct {
	start50, start99, result50, result99, commit50, trip50 float64
}

func (r *rig) latency(ctx context.Context, e *echo) error {
	b := r.bench
	if err := r.simulate(ctx, 1); err != nil {
		return err
	}
	if err := e.connect(1); err != nil {
		return err
	}
	c, err := r.newComparison(ctx)
	if err != nil {
		return err
	}
	b.note("compared with: one INSERT of a like row by lib/pq over the same socket, and one unary echo over mTLS; %d of each a round, %s apart", latencyTasks, latencyGap)
	var rounds []latencies
	for range b.rounds {
		l, err := r.latencyRound(ctx, e, c)
		if err != nil {
			return err
		}
		b.note("submit to start p50 %.3f p99 %.3f ms, to result p50 %.3f p99 %.3f ms; commit p50 %.3f ms, round trip p50 %.3f ms",
			l.start50, l.start99, l.result50, l.result99, l.commit50, l.trip50)
		rounds = append(rounds, l)
	}
	of := func(pick func(latencies) float64) float64 {
		var v []float64
		for _, l := range rounds {
			v = append(v, pick(l))
		}
		return median(v)
	}
	b.figure("idle_submit_to_start_p50_ms", of(func(l latencies) float64 { return l.start50 }), "ms")
	b.figure("idle_submit_to_start_p99_ms", of(func(l latencies) float64 { return l.start99 }), "ms")
	b.figure("idle_submit_to_result_p50_ms", of(func(l latencies) float64 { return l.result50 }), "ms")
	b.figure("idle_submit_to_result_p99_ms", of(func(l latencies) float64 { return l.result99 }), "ms")
	b.figure("idle_floor_ms", of(func(l latencies) float64 { return l.commit50 + l.trip50 }), "ms")
	b.ratio("idle_latency_vs_floor", of(func(l latencies) float64 { return l.start50 / (l.commit50 + l.trip50) }))
	return nil
}

func (r *rig) latencyRound(ctx context.Context, e *echo, c *comparison) (l latencies, err error) {
	commits, err := c.commits(ctx, latencyTasks, latencyGap)
	if err != nil {
		return l, err
	}
	var trips echoResult
	gap := float64(latencyGap) / float64(time.Millisecond)
	if err := e.client.order(echoOrder{Calls: latencyTasks, Gap: gap}, &trips); err != nil {
		return l, err
	}
	starts, results, err := r.singleTasks(ctx, latencyTasks)
	if err != nil {
		return l, err
	}
	return latencies{
		start50: quantile(starts, 0.5), start99: quantile(starts, 0.99),
		result50: quantile(results, 0.5), result99: quantile(results, 0.99),
		commit50: quantile(commits, 0.5), trip50: trips.P50,
	}, nil
}

// singleTasks submits tasks one at a time and gives how long each took to
// start, by the agent's clock, and to be answered with its result.
func (r *rig) singleTasks(ctx context.Context, n int) (starts, results []time.Duration, err error) {
	host, err := r.api.host()
	if err != nil {
		return nil, nil, err
	}
	w, err := dialWire(host)
	if err != nil {
		return nil, nil, err
	}
	defer w.close()
	on, off := true, false
	if err := r.sim.order(simCommand{Record: &on}, &simState{}); err != nil {
		return nil, nil, err
	}
	body := fmt.Sprintf(`{"agent":%q,"kind":"core.echo","args":%s}`, r.ids[0], echoArgs)
	req := request(host, "/api/v1/tasks?wait=30s", r.api.token, []byte(body))
	sent := map[int64]int64{} // by task id
	for range n {
		if err := wait(ctx, latencyGap); err != nil {
			return nil, nil, err
		}
		began := monotonic()
		status, answer, err := w.do(req)
		took := monotonic() - began
		if err != nil {
			return nil, nil, err
		}
		var t struct {
			ID      string `json:"id"`
			Outcome string `json:"outcome"`
		}
		if err := json.Unmarshal(answer, &t); err != nil || status != 200 || t.Outcome != "succeeded" {
			return nil, nil, fmt.Errorf("POST /tasks?wait=30s answered %d: %s", status, answer)
		}
		id, err := strconv.ParseInt(t.ID, 10, 64)
		if err != nil {
			return nil, nil, err
		}
		sent[id] = began
		results = append(results, time.Duration(took))
	}
	var st simState
	if err := r.sim.order(simCommand{Record: &off, Take: true}, &st); err != nil {
		return nil, nil, err
	}
	for id, at := range sent {
		started, ok := st.Started[id]
		if !ok {
			return nil, nil, fmt.Errorf("the agent does not know when it started task %d", id)
		}
		starts = append(starts, time.Duration(started-at))
	}
	return starts, results, nil
}
