package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// readyLook is how often the agents are counted while they are dialled: often
// enough for a figure of seconds, seldom enough to cost the controller nothing.
const readyLook = 100 * time.Millisecond

// benchLargeFleet measures a large fleet: from the start of `headgate up` on
// existing data until every agent that it knows has a session, one call that
// reaches them all, and lists at a large history.
func benchLargeFleet(ctx context.Context, b *bench) (err error) {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.timeReady(ctx, "all_agents_ready_s", maxSimulated); err != nil {
		return err
	}
	for _, f := range []struct {
		figure string
		agents int
	}{{"fanout_1000_s", 1000}, {"fanout_10000_s", maxSimulated}} {
		times, err := r.fanouts(ctx, f.agents)
		if err != nil {
			return err
		}
		b.figure(f.figure, median(times), "s")
	}
	return r.lists(ctx)
}

// benchReadyThousand measures the start with a fleet of ordinary size.
func benchReadyThousand(ctx context.Context, b *bench) error {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	return errors.Join(r.timeReady(ctx, "all_agents_ready_s_1000_agents", 1000), r.close())
}

// timeReady enrols the agents and measures starts with them.
func (r *rig) timeReady(ctx context.Context, figure string, agents int) error {
	b := r.bench
	began := time.Now()
	if err := r.simulate(ctx, agents); err != nil {
		return err
	}
	b.note("%d agents enrolled and connected in %.0f s", agents, time.Since(began).Seconds())
	var times []float64
	for range b.rounds {
		took, err := r.timeAllReady(ctx, agents)
		if err != nil {
			return err
		}
		times = append(times, took.Seconds())
	}
	b.note("headgate up --agents 0 on existing data (its own PostgreSQL starts with it), until all of %d agents have a session: %s s", agents, list(times))
	b.figure(figure, median(times), "s")
	return nil
}

// timeAllReady starts Headgate anew. The agents are processes that stayed: all
// of them can be reached at once, so what is measured is the controller's own
// pace.
func (r *rig) timeAllReady(ctx context.Context, agents int) (time.Duration, error) {
	if err := r.stopUp(); err != nil {
		return 0, err
	}
	var simBefore time.Duration
	simBefore, _ = cpuOf(r.sim.pid()) // only for a note
	began := time.Now()
	if err := r.startUp(ctx); err != nil {
		return 0, err
	}
	open := time.Since(began)
	var slowest time.Duration
	err := waitEvery(ctx, readyLook, connectWait, fmt.Sprintf("%d agents to be connected", agents), func() (bool, error) {
		asked := time.Now()
		s, err := r.stats(ctx)
		slowest = max(slowest, time.Since(asked))
		return s.Agents["connected"] == agents, err
	})
	if err != nil {
		return 0, err
	}
	took := time.Since(began)
	cpu, _ := cpuOf(r.run.PID)
	sim, _ := cpuOf(r.sim.pid())
	r.bench.note("public port open after %.1f s, all agents ready after %.1f s; processor time of the controller %.1f s, of the simulator %.1f s; slowest answer to GET /stats meanwhile %.0f ms",
		open.Seconds(), took.Seconds(), cpu.Seconds(), (sim - simBefore).Seconds(), float64(slowest.Milliseconds()))
	return took, nil
}
