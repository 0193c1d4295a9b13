package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// supervisor starts the long-running parts and stops them in the reverse
// order, each step named, timed and bounded. A part that ends by itself before
// it was told to stops everything.
//
// The parts get contexts derived from one that is not cancelled by the signal:
// a signal ends Run, which then stops the parts one after the other, so that
// the database outlives those who write to it.
type supervisor struct {
	log    *slog.Logger
	base   context.Context
	failed chan error // the first unexpected end; capacity 1

	mu    sync.Mutex
	steps []stopStep // in starting order
}

type stopStep struct {
	name string
	fn   func(context.Context) error
}

func newSupervisor(ctx context.Context, log *slog.Logger) *supervisor {
	return &supervisor{log: log, base: context.WithoutCancel(ctx), failed: make(chan error, 1)}
}

// onStop adds a step to the stopping order; the last one added runs first.
func (s *supervisor) onStop(name string, fn func(context.Context) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps = append(s.steps, stopStep{name, fn})
}

// run starts a part. Its stop step cancels its context and waits for its end.
func (s *supervisor) run(name string, loop func(context.Context) error) {
	ctx, cancel := context.WithCancelCause(s.base)
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := loop(ctx)
		if ctx.Err() != nil {
			return // told to stop
		}
		if err == nil {
			err = errors.New("ended by itself")
		}
		select {
		case s.failed <- fmt.Errorf("%s: %w", name, err):
		default:
		}
	}()
	s.onStop(name, func(stop context.Context) error {
		cancel(errStopping)
		select {
		case <-done:
			return nil
		case <-stop.Done():
			return fmt.Errorf("still running after %s", stopTimeout)
		}
	})
}

var errStopping = errors.New("stopping")

// stopTimeout bounds one step of the stop; all steps together are bounded by
// the context given to stop.
const stopTimeout = 5 * time.Second

// stop runs the steps, last added first, and joins what went wrong.
func (s *supervisor) stop(ctx context.Context) error {
	s.mu.Lock()
	steps := s.steps
	s.steps = nil
	s.mu.Unlock()
	var errs []error
	for _, step := range slices.Backward(steps) {
		began := time.Now()
		stepCtx, cancel := context.WithTimeout(ctx, stopTimeout)
		err := step.fn(stepCtx)
		cancel()
		s.log.Debug("stopped", "part", step.name, "took", time.Since(began), "err", err)
		if err != nil {
			errs = append(errs, fmt.Errorf("stop %s: %w", step.name, err))
		}
	}
	return errors.Join(errs...)
}
