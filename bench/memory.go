package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"
)

const (
	// memoryAgents are connected and idle.
	memoryAgents = 1000
	// steadyWithin: memory counts as settled when it moves less than this
	// between looks.
	steadyWithin = 0.005
	settleLook   = 2 * time.Second
	settleWait   = 90 * time.Second
)

// gcHard makes the collector keep little garbage in both programs that are
// compared, so that resident memory says what is in use.
func gcHard() []string { return []string{"GOGC=10"} }

// benchMemory measures what an idle connected agent costs the controller, and
// what a plain gRPC client connection costs.
func benchMemory(ctx context.Context, b *bench) error {
	ours, err := b.controllerMemory(ctx)
	if err != nil {
		return err
	}
	raw, err := b.echoMemory(ctx)
	if err != nil {
		return err
	}
	b.note("resident memory of the process at %d idle connections less that at none, with GOGC=10 in both programs: controller %.1f KiB, plain gRPC client %.1f KiB each", memoryAgents, ours, raw)
	b.figure("memory_per_agent_kib", ours, "KiB")
	b.figure("raw_grpc_memory_per_connection_kib", raw, "KiB")
	b.ratio("memory_per_agent_vs_raw_grpc", ours/raw)
	return nil
}

// controllerMemory starts the controller twice: without agents, and again
// when it knows a thousand, so that pairing them leaves no trace.
func (b *bench) controllerMemory(ctx context.Context) (perAgent float64, err error) {
	r, err := b.newRig(ctx, gcHard()...)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	none, err := settledMemory(ctx, r.run.PID)
	if err != nil {
		return 0, err
	}
	if err := r.simulate(ctx, memoryAgents); err != nil {
		return 0, err
	}
	if err := r.stopUp(); err != nil {
		return 0, err
	}
	began := time.Now()
	if err := r.startUp(ctx); err != nil {
		return 0, err
	}
	if err := r.connected(ctx, memoryAgents); err != nil {
		return 0, err
	}
	b.note("%d known agents were connected %.1f s after the start of headgate up", memoryAgents, time.Since(began).Seconds())
	full, err := settledMemory(ctx, r.run.PID)
	if err != nil {
		return 0, err
	}
	b.note("controller: %.0f KiB without agents, %.0f KiB with %d", none, full, memoryAgents)
	return (full - none) / memoryAgents, nil
}

func (b *bench) echoMemory(ctx context.Context) (perConnection float64, err error) {
	e, err := b.newEcho(ctx, memoryAgents, gcHard())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	none, err := settledMemory(ctx, e.client.pid())
	if err != nil {
		return 0, err
	}
	if err := e.connect(memoryAgents); err != nil {
		return 0, err
	}
	full, err := settledMemory(ctx, e.client.pid())
	return (full - none) / memoryAgents, err
}

// settledMemory waits until the resident memory does not move any more.
func settledMemory(ctx context.Context, pid int) (float64, error) {
	last, same := math.Inf(1), 0
	for deadline := time.Now().Add(settleWait); time.Now().Before(deadline); {
		if err := wait(ctx, settleLook); err != nil {
			return 0, err
		}
		now, err := residentKiB(pid)
		if err != nil {
			return 0, err
		}
		if math.Abs(now-last) <= steadyWithin*now {
			if same++; same >= 3 {
				return now, nil
			}
		} else {
			same = 0
		}
		last = now
	}
	return 0, fmt.Errorf("the memory of process %d did not settle within %s", pid, settleWait)
}
