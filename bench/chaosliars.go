package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"time"
)

const (
	// liarsGood agents work, beside liarsBad that lie, trickle, fall silent or are dead.
	liarsGood = 50
	liarsBad  = 48
	// liarsRate is what the good ones are offered together.
	liarsRate   = 1000
	liarsWindow = 10 * time.Second
	// liarsLimit is for the p99 of the good ones beside liars, in parts of that
	// without, liarsGrowth for the controller's memory.
	liarsLimit  = 1.05
	liarsGrowth = 64 // MiB
)

// chaosLiars measures the results of good agents with liars beside them, and
// with as many idle good ones instead, in turn.
func chaosLiars(ctx context.Context, b *bench) (err error) {
	dir, err := b.newDir()
	if err != nil {
		return err
	}
	r := &rig{bench: b, dir: dir}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.startUp(ctx); err != nil {
		return err
	}
	if err := r.simulate(ctx, liarsGood+liarsBad); err != nil {
		return err
	}
	var p99 [2][]float64
	var memory [2]float64 // KiB, after the first and the last round
	for i := range b.rounds {
		for side, liars := range []int{0, liarsBad} {
			if err := r.simulateLiars(ctx, liars); err != nil {
				return err
			}
			p, err := r.pace(ctx, liarsRate, liarsWindow, r.ids[:liarsGood])
			if err != nil {
				return err
			}
			p99[side] = append(p99[side], quantile(p.results, 0.99))
		}
		kib, err := residentKiB(r.run.PID)
		if err != nil {
			return err
		}
		if i == 0 {
			memory[0] = kib
		}
		memory[1] = kib
	}
	b.note("%d tasks/s to %d agents, p99 of submit to result in ms: beside idle agents %s, beside liars %s", liarsRate, liarsGood, list(p99[0]), list(p99[1]))
	return errors.Join(
		b.hold("liars_p99_ratio", median(p99[1])/median(p99[0]), liarsLimit, "x"),
		b.hold("liars_memory_growth_mib", (memory[1]-memory[0])/1024, liarsGrowth, "MiB"),
	)
}

// simulateLiars starts the simulated agents anew, of which the last so many
// misbehave, and waits until the others are connected.
func (r *rig) simulateLiars(ctx context.Context, liars int) error {
	err := r.sim.stop()
	r.sim = nil
	if err != nil {
		return err
	}
	var st simState
	all := liarsGood + liarsBad
	r.sim, err = startWorker(&st, nil, "-simulator", filepath.Join(r.dir, "agents"), "-agents", strconv.Itoa(all), "-liars", strconv.Itoa(liars))
	if err != nil {
		return err
	}
	return waitUntil(ctx, connectWait, "the good agents to be connected", func() (bool, error) {
		for _, id := range r.ids[:all-liars] {
			var a struct {
				Connection struct {
					Health string `json:"health"`
				} `json:"connection"`
			}
			if err := r.api.call(ctx, "GET", "/api/v1/agents/"+id, nil, &a); err != nil {
				return false, fmt.Errorf("look at an agent: %w", err)
			}
			if a.Connection.Health != "connected" {
				return false, nil
			}
		}
		return true, nil
	})
}
