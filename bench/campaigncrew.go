package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"headgate/internal/agent"
	"headgate/internal/fault"
	"headgate/internal/kinds"
)

// A crew is one process with many agents, all of them the real one with its
// ledger on disk. Around their executors it keeps a record of its own of what
// has run: one line before and one after each task, in a file that is appended
// to, so that a kill of the process loses none of them.

// crewPlace says where the agents of a crew listen.
type crewPlace struct {
	crew int
	port int
}

// address gives where agent i of the crew listens, or, from outside, the relay
// in front of it.
func (p crewPlace) address(i int) string {
	return fmt.Sprintf("127.66.%d.%d:%d", p.crew+1, i+1, p.port)
}

func (p crewPlace) relayed(i int) string {
	return fmt.Sprintf("127.67.%d.%d:%d", p.crew+1, i+1, p.port)
}

// effectsFile is the record of a crew, or of an agent of its own.
const effectsFile = "effects"

// work is what a task of a campaign is: its token, and how long it takes.
type work struct {
	Token  int `json:"t"`
	Millis int `json:"ms,omitempty"`
}

// crewAt is runCrew for the words of a command line.
func crewAt(ctx context.Context, dir string, agents int, place string) error {
	var p crewPlace
	if _, err := fmt.Sscanf(place, "%d:%d", &p.crew, &p.port); err != nil {
		return fmt.Errorf("the place %q is not number:port: %w", place, err)
	}
	return runCrew(ctx, dir, agents, p)
}

// runCrew is the process.
func runCrew(ctx context.Context, dir string, agents int, place crewPlace) error {
	out, err := os.OpenFile(filepath.Join(dir, effectsFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) //nolint:gosec // a record to read
	if err != nil {
		return err
	}
	defer out.Close()
	if _, err := fmt.Fprintln(out, "B", monotonic()); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, agents)
	var wg sync.WaitGroup
	for i := range agents {
		wg.Go(func() {
			defer cancel() // none goes on without the others
			errs[i] = agent.Run(ctx, agent.Config{
				DataDir: filepath.Join(dir, fmt.Sprint(i)), Listen: place.address(i), Name: fmt.Sprintf("crew-%d-%d", place.crew, i),
				EnrolTokenFile: filepath.Join(dir, "token"), Logger: log.With("agent", i),
				Around: func(e agent.Executor) agent.Executor { return &witness{out: out, agent: i, inner: e} },
			})
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// witness notes what runs.
type witness struct {
	out   *os.File
	agent int
	inner agent.Executor
}

func (w *witness) Execute(ctx context.Context, t agent.Task) agent.Ending {
	var todo work
	if t.Kind != kinds.Echo || json.Unmarshal(t.Args, &todo) != nil {
		return w.inner.Execute(ctx, t)
	}
	if err := w.note('S', todo.Token, t); err != nil {
		return agent.Ending{Outcome: "failed", Reason: "no_record", Detail: err.Error()}
	}
	fault.Point("mid_run")
	_ = wait(ctx, time.Duration(todo.Millis)*time.Millisecond) // a cancelled one ends early
	end := w.inner.Execute(ctx, t)
	if err := w.note('E', todo.Token, t); err != nil {
		return agent.Ending{Outcome: "failed", Reason: "no_record", Detail: err.Error()}
	}
	return end
}

func (w *witness) note(what byte, token int, t agent.Task) error {
	_, err := fmt.Fprintf(w.out, "%c %d %d %d %d %d\n", what, w.agent, token, t.ID, t.Attempt, monotonic())
	return err
}
