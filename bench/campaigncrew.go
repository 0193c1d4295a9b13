package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"headgate/internal/agent"
	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/internal/testkit/history"
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

// address gives where agent i of the crew listens, relayed where the relay in
// front of it does.
func (p crewPlace) address(i int) string {
	return fmt.Sprintf("127.66.%d.%d:%d", p.crew+1, i+1, p.port)
}

func (p crewPlace) relayed(i int) string {
	return fmt.Sprintf("127.67.%d.%d:%d", p.crew+1, i+1, p.port)
}

// idsFile holds the ids of a crew's agents once they are paired.
const idsFile = "ids.json"

// work is what a task of a campaign is: how long it takes.
type work struct {
	Millis int `json:"ms"`
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
func runCrew(ctx context.Context, dir string, agents int, place crewPlace) (err error) {
	out, err := history.Open(filepath.Join(dir, historyFile))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	ids := sync.OnceValues(func() (ids []string, err error) {
		data, err := os.ReadFile(filepath.Join(dir, idsFile))
		if err == nil {
			err = json.Unmarshal(data, &ids)
		}
		return ids, err
	})
	if _, err := os.Stat(filepath.Join(dir, idsFile)); err == nil { // else nothing has run
		all, err := ids()
		if err != nil {
			return err
		}
		for _, id := range all {
			out.Boot(id)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
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
				Around: func(e agent.Executor) agent.Executor { return &witness{out: out, ids: ids, index: i, inner: e} },
			})
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// witness writes down what runs.
type witness struct {
	out   *history.Writer
	ids   func() ([]string, error)
	index int
	inner agent.Executor
}

func (w *witness) Execute(ctx context.Context, t agent.Task) agent.Ending {
	var todo work
	ids, err := w.ids()
	if err == nil {
		err = json.Unmarshal(t.Args, &todo)
	}
	if err != nil || t.Kind != kinds.Echo {
		return agent.Ending{Outcome: "failed", Reason: "no_campaign", Detail: fmt.Sprintf("A task of kind %s: %v", t.Kind, err)}
	}
	r := history.Run{Agent: ids[w.index], ID: t.ID, Attempt: int(t.Attempt)}
	w.out.Start(r)
	fault.Point("mid_run")
	_ = wait(ctx, time.Duration(todo.Millis)*time.Millisecond) // a cancelled one ends early
	end := w.inner.Execute(ctx, t)
	w.out.End(r, end.Outcome)
	return end
}
