package tasks

import (
	"context"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

// hookBacklog is how many completions may wait for their hooks: some seconds
// of a busy fleet. Hooks are for conveniences, never for promises.
const hookBacklog = 1024

// hooks calls functions for completed tasks of certain kinds.
type hooks struct {
	log     *slog.Logger
	byKind  map[string][]func(context.Context, Completed) // fixed once Run has begun
	backlog chan Completed
	dropped atomic.Int64
}

func newHooks(log *slog.Logger) *hooks {
	return &hooks{
		log: log, byKind: map[string][]func(context.Context, Completed){}, backlog: make(chan Completed, hookBacklog),
	}
}

func (h *hooks) add(kind string, f func(context.Context, Completed)) {
	h.byKind[kind] = append(h.byKind[kind], f)
}

func (h *hooks) wants(kind string) bool { return len(h.byKind) > 0 && len(h.byKind[kind]) > 0 }

// tell never waits: a slow hook must not hold a write loop up.
func (h *hooks) tell(c Completed) {
	select {
	case h.backlog <- c:
	default:
		if h.dropped.Add(1) == 1 {
			h.log.Warn("completion hooks are too slow; calls are dropped", "kind", c.Kind)
		}
	}
}

// call keeps a hook that panics from taking the controller with it.
func (h *hooks) call(ctx context.Context, f func(context.Context, Completed), c Completed) {
	defer func() {
		if p := recover(); p != nil {
			h.log.Error("a completion hook panicked", "kind", c.Kind, "task_id", c.ID, "panic", p, "stack", string(debug.Stack()))
		}
	}()
	f(ctx, c)
}

func (h *hooks) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-h.backlog:
			for _, f := range h.byKind[c.Kind] {
				h.call(ctx, f, c)
			}
		}
	}
}
