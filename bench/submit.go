package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

const (
	// submitters keep one request each in flight.
	submitters = 64
	// compareClients is how many clients pgbench has.
	compareClients = 16
	// submitAgents take the tasks; they are paused, so that only submission is
	// measured. More of them than submitters, that no queue gets full.
	submitAgents = 100
	// submitWindow is one side of a round.
	submitWindow = 6 * time.Second
)

// echoArgs are the args of every task here, 100 bytes, and echoText their text.
const (
	echoText = "01234567890123456789012345678901234567890123456789012345678901234567890123456789012345678"
	echoArgs = `{"text":"` + echoText + `"}`
)

// benchSubmit measures single submissions, each acknowledged durable, against
// single-row inserts by pgbench on the same cluster.
func benchSubmit(ctx context.Context, b *bench) error {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	return errors.Join(r.submit(ctx), r.close())
}

func (r *rig) submit(ctx context.Context) error {
	b := r.bench
	if err := r.simulate(ctx, submitAgents); err != nil {
		return err
	}
	for _, id := range r.ids {
		if err := r.api.call(ctx, "PATCH", "/api/v1/agents/"+id, map[string]any{"paused": true}, nil); err != nil {
			return err
		}
	}
	c, err := r.newComparison(ctx)
	if err != nil {
		return err
	}
	b.note("compared with: %s", c.command(compareClients, submitWindow))
	var ours, theirs []float64
	for range b.rounds {
		rate, err := c.inserts(ctx, compareClients, submitWindow)
		if err != nil {
			return err
		}
		theirs = append(theirs, rate)
		if rate, err = r.submitRound(ctx); err != nil {
			return err
		}
		ours = append(ours, rate)
	}
	b.note("single submits/s, %d in parallel: %s; pgbench -c %d: %s commits/s", submitters, list(ours), compareClients, list(theirs))
	b.figure("single_submits_per_s", median(ours), "tasks/s")
	b.figure("pgbench_single_insert_per_s", median(theirs), "commits/s")
	b.ratio("single_submit_vs_pgbench", median(ours)/median(theirs))
	return nil
}

// submitRound gives acknowledged submissions per second.
func (r *rig) submitRound(ctx context.Context) (float64, error) {
	host, err := r.api.host()
	if err != nil {
		return 0, err
	}
	m, err := r.meter(ctx, "single submits")
	if err != nil {
		return 0, err
	}
	var done atomic.Int64
	before, err := r.stats(ctx)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	err = inParallel(submitters, submitters, func(i int) error {
		w, err := dialWire(host)
		if err != nil {
			return err
		}
		defer w.close()
		body := fmt.Sprintf(`{"agent":%q,"kind":"core.echo","args":%s}`, r.ids[i%len(r.ids)], echoArgs)
		req := request(host, "/api/v1/tasks", r.api.token, []byte(body))
		for time.Since(began) < submitWindow && ctx.Err() == nil {
			status, answer, err := w.do(req)
			if err != nil {
				return err
			}
			if status != 202 {
				return fmt.Errorf("POST /tasks answered %d: %s", status, answer)
			}
			done.Add(1)
		}
		return nil
	})
	took := time.Since(began)
	if err != nil {
		return 0, err
	}
	m.note(ctx, done.Load())
	after, err := r.stats(ctx)
	if err != nil {
		return 0, err
	}
	if stored := after.Tasks.Submitted - before.Tasks.Submitted; stored != done.Load() {
		return 0, fmt.Errorf("%d submissions were acknowledged, but %d are counted as stored", done.Load(), stored)
	}
	return float64(done.Load()) / took.Seconds(), nil
}
