package tasks_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// rig is a Manager with a store in memory and scripted agents, in simulated
// time.
type rig struct {
	*testing.T
	store   *tasktest.Store
	faults  *tasktest.Faults
	runner  *tasktest.ScriptedRunner
	manager *tasks.Manager
	service *tasks.Service
	agents  []tasks.Agent
	cancel  context.CancelFunc
	done    chan struct{}
}

type option func(*tasks.Config)

// newRig makes agents named a0, a1, ... and starts the Manager.
func newRig(t *testing.T, agents int, opts ...option) *rig {
	t.Helper()
	r := buildRig(t, agents, opts...)
	r.start()
	return r
}

func buildRig(t *testing.T, agents int, opts ...option) *rig {
	t.Helper()
	r := &rig{T: t, store: tasktest.NewStore(), runner: tasktest.NewScriptedRunner()}
	r.faults = tasktest.NewFaults(r.store)
	for i := range agents {
		id := uuid.NewV4()
		id[15] = byte(i)
		a := tasks.Agent{ID: id, Name: fmt.Sprintf("a%d", i)}
		a.Num = r.store.NewAgent(id, a.Name, nil)
		r.runner.Add(a, nil)
		r.agents = append(r.agents, a)
	}
	r.make(opts...)
	return r
}

// make makes a Manager over what there is, as a new start of a controller.
func (r *rig) make(opts ...option) {
	cfg := tasks.Config{
		Store: r.faults, Runner: r.runner, Owner: tasks.Owner{ID: uuid.NewV4(), Name: "test"},
		Logger: slog.New(slog.NewTextHandler(r.Output(), &slog.HandlerOptions{Level: slog.LevelInfo})),
	}
	for _, o := range opts {
		o(&cfg)
	}
	r.manager = tasks.NewManager(cfg)
	r.service = tasks.NewService(tasks.ServiceConfig{Manager: r.manager, Kinds: kinds.Default()})
	r.runner.Attach(r.manager)
}

func (r *rig) start() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	r.cancel, r.done = cancel, done
	r.Cleanup(func() { // also after a failure: nothing may stay in the bubble
		cancel()
		<-done
	})
	go func() {
		defer close(done)
		if err := r.manager.Run(ctx); err != nil {
			r.Errorf("run: %v", err)
		}
	}()
	synctest.Wait()
}

// stop ends the Manager cleanly.
func (r *rig) stop() {
	r.cancel()
	<-r.done
	synctest.Wait()
}

func (r *rig) script(agent int, f func(tasks.Assignment) tasktest.Answer) {
	r.runner.Script(r.agents[agent].Num, f)
}

func silent(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true} }

func echo(agent int) tasks.Submission {
	return tasks.Submission{Agent: fmt.Sprintf("a%d", agent), Kind: kinds.Echo, Args: json.RawMessage(`{"x":1}`)}
}

func (r *rig) submit(agent int, change ...func(*tasks.Submission)) *tasks.Task {
	r.Helper()
	s := echo(agent)
	for _, f := range change {
		f(&s)
	}
	t, err := r.service.Submit(r.Context(), s, "user:test", tasks.Idempotency{})
	if err != nil {
		r.Fatalf("submit: %v", err)
	}
	synctest.Wait()
	return t
}

func (r *rig) get(id tasks.ID) *tasks.Task {
	r.Helper()
	t, err := r.service.Get(r.Context(), id)
	if err != nil {
		r.Fatalf("get %d: %v", id, err)
	}
	return t
}

// is checks a task's state, attempt and outcome.
func (r *rig) is(id tasks.ID, state tasks.State, attempt int, outcome tasks.Outcome, reason string) *tasks.Task {
	r.Helper()
	t := r.get(id)
	if t.State != state || t.Attempt != attempt || t.Ending.Outcome != outcome || t.Ending.Reason != reason {
		r.Fatalf("task %d is %s at attempt %d, outcome %q, reason %q (%s); want %s, %d, %q, %q",
			id, t.State, t.Attempt, t.Ending.Outcome, t.Ending.Reason, t.Ending.Detail, state, attempt, outcome, reason)
	}
	return t
}

func (r *rig) isNew(id tasks.ID) { r.Helper(); r.is(id, tasks.StateNew, 0, "", "") }

func (r *rig) isDone(id tasks.ID) *tasks.Task {
	r.Helper()
	t := r.get(id)
	if t.State != tasks.StateCompleted || t.Ending.Outcome != tasks.Succeeded {
		r.Fatalf("task %d is %s, outcome %q (%s); want it succeeded", id, t.State, t.Ending.Outcome, t.Ending.Detail)
	}
	return t
}

// pass lets simulated time go by.
func (r *rig) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// check ends the Manager and looks for broken rules.
func (r *rig) check() {
	r.Helper()
	r.stop()
	for _, v := range r.runner.Violations() {
		r.Error(v)
	}
	if n := r.manager.Mismatches(); n != 0 {
		r.Errorf("disk and memory parted %v times", n)
	}
}

// wantFault checks the code of an error.
func wantFault(t testing.TB, err error, code string) {
	t.Helper()
	if fault.CodeOf(err) != code {
		t.Fatalf("got %v, want a fault with code %s", err, code)
	}
}

// bubble runs a test in simulated time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, f)
}

func (r *rig) output(id tasks.ID, stream string) string {
	r.Helper()
	reader, err := r.service.Output(r.Context(), id, stream)
	if err != nil {
		r.Fatal(err)
	}
	b, err := io.ReadAll(reader)
	if err != nil {
		r.Fatal(err)
	}
	return string(b)
}
