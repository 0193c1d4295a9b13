package agent_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"uuid"

	"headgate/internal/agent"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/kinds"
	"headgate/internal/pki"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// headTime is the time limit of a head that does not end: time enough for a
// busy machine to submit what waits behind it.
const headTime = 8 * time.Second

// product is the whole queue with the product's own fleet and one real agent;
// only the database is in memory.
type product struct {
	*tasks.Service
	t     *testing.T
	fleet *fleet.Fleet
	store *tasktest.Store
	id    uuid.UUID // of the agent
}

// newProduct serves an agent in a process of its own, so that it can be frozen
// or killed.
func newProduct(t *testing.T, c agent.Config, limits tasks.Limits) (*product, *child) {
	t.Helper()
	dir, err := pki.OpenDir(t.TempDir())
	check(t, err)
	t.Cleanup(func() { dir.Close() })
	p := &product{t: t, store: tasktest.NewStore()}
	p.fleet, err = fleet.New(fleet.Config{
		Store: fleettest.NewStore(), Dir: dir, ControllerID: uuid.NewV4(), FleetName: "test", Version: "test", AllowLoopback: true,
		Limits: fleet.Limits{BackoffBase: 10 * time.Millisecond, BackoffMax: 50 * time.Millisecond, Pulse: 250 * time.Millisecond, SilentAfter: 2 * time.Second},
	})
	check(t, err)
	manager := tasks.NewManager(tasks.Config{Store: p.store, Runner: p.fleet, Owner: tasks.Owner{ID: uuid.NewV4()}, Limits: limits})
	p.Service = tasks.NewService(tasks.ServiceConfig{Manager: manager, Kinds: kinds.Default()})
	p.fleet.Attach(manager)
	_, err = p.fleet.EnsureCA(t.Context())
	check(t, err)
	check(t, p.fleet.Load(t.Context()))
	for _, run := range []func(context.Context) error{p.fleet.Run, manager.Run} {
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- run(ctx) }()
		t.Cleanup(func() {
			stop()
			check(t, <-ended)
		})
	}
	return p, p.enrol(c)
}

func (p *product) enrol(c agent.Config) *child {
	p.t.Helper()
	token, _, err := p.fleet.CreateEnrolmentToken(p.t.Context(), "test", time.Hour, 1)
	check(p.t, err)
	c.EnrolTokenFile = filepath.Join(p.t.TempDir(), "token")
	check(p.t, os.WriteFile(c.EnrolTokenFile, []byte(token), 0o600))
	c.DataDir = filepath.Join(p.t.TempDir(), "data")
	a := (&running{config: c}).startChild(p.t)
	id, err := agentID(c.DataDir)
	check(p.t, err)
	p.id = id
	// The queue's store hears of the agent before the queue does.
	num := p.store.NewAgent(id, "box", nil)
	view, err := p.fleet.Pair(p.t.Context(), "test", a.addr, token)
	check(p.t, err)
	if view.ID != id || view.Num != num {
		p.t.Fatalf("paired as %v with number %d, want %v and %d", view.ID, view.Num, id, num)
	}
	return a
}

// agentID reads what an agent says of itself.
func agentID(dir string) (uuid.UUID, error) {
	data, err := os.ReadFile(filepath.Join(dir, "agent.json"))
	if err != nil {
		return uuid.Nil(), err
	}
	var info struct {
		ID string `json:"id"`
	}
	if err := json.Unmarshal(data, &info); err != nil {
		return uuid.Nil(), err
	}
	return uuid.Parse(info.ID)
}

func (p *product) submit(kind, args string, timeout time.Duration) tasks.ID {
	p.t.Helper()
	s := tasks.Submission{Agent: p.id.String(), Kind: kind, Args: json.RawMessage(args)}
	if timeout > 0 {
		s.Timeout = timeout
	}
	task, err := p.Submit(p.t.Context(), s, "test", tasks.Idempotency{})
	check(p.t, err)
	return task.ID
}

// until asks for a task until it is as it should be.
func (p *product) until(id tasks.ID, what string, is func(*tasks.Task) bool) *tasks.Task {
	p.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		task, err := p.Get(p.t.Context(), id)
		check(p.t, err)
		if is(task) {
			return task
		}
		select {
		case <-tick.C:
		case <-deadline:
			p.t.Fatalf("task %d is not %s: %+v, waiting %+v", id, what, task, task.Waiting)
		}
	}
}

func (p *product) completed(id tasks.ID) *tasks.Task {
	p.t.Helper()
	return p.until(id, "completed", func(t *tasks.Task) bool { return t.State == tasks.StateCompleted })
}

func started(t *tasks.Task) bool {
	return t.State == tasks.StateWaiting && t.Waiting.Cause == tasks.CauseRunning
}

// behind submits three tasks behind a head and checks that they name it.
func (p *product) behind(head tasks.ID) []tasks.ID {
	p.t.Helper()
	var list []tasks.ID
	for i := range 3 {
		id := p.submit(kinds.Echo, fmt.Sprintf(`{"n":%d}`, i), 0)
		list = append(list, id)
		w := p.until(id, "waiting", func(t *tasks.Task) bool { return t.Waiting != nil && t.Waiting.Blocking != 0 }).Waiting
		if w.Blocking != head || w.Cause != tasks.CauseBusy || !strings.Contains(w.Sentence, fmt.Sprintf("busy with %d", head)) {
			p.t.Errorf("task %d waits for %+v, want %d", id, w, head)
		}
	}
	return list
}

// TestAHeadThatIgnoresItsEndIsEndedAndTheQueueMoves: its program hears no
// SIGTERM, and three tasks wait behind it.
// Cases P12.
func TestAHeadThatIgnoresItsEndIsEndedAndTheQueueMoves(t *testing.T) {
	t.Parallel()
	limits := quick()
	limits.TermGrace = 200 * time.Millisecond
	p, _ := newProduct(t, agent.Config{Limits: limits, PolicyFile: policyWith(t, "ignore_term")}, tasks.Limits{})
	head := p.submit(kinds.Run, programArgs("ignore_term"), headTime)
	p.until(head, "running", started)
	list := p.behind(head)
	ended := p.completed(head)
	if e := ended.Ending; e.Outcome != tasks.TimedOut || e.Exit == nil || e.Exit.KilledBy != tasks.KilledByKill || e.Exit.GraceMS != 200 {
		t.Errorf("head: %+v, %+v", e, e.Exit)
	}
	for _, id := range list {
		if task := p.completed(id); task.Ending.Outcome != tasks.Succeeded || task.StartedAt.Before(ended.StartedAt) {
			t.Errorf("behind: %+v", task)
		}
	}
}

// TestAHeadWhoseAgentFreezesIsEndedAtItsDeadlineAndTheQueueMoves: the agent is
// stopped beyond the forced deadline, and comes back with a late answer.
// Cases P12, P16.
func TestAHeadWhoseAgentFreezesIsEndedAtItsDeadlineAndTheQueueMoves(t *testing.T) {
	t.Parallel()
	p, a := newProduct(t, agent.Config{Limits: quick()}, tasks.Limits{ForcedGrace: 2 * time.Second, CancelGrace: time.Second})
	head := p.submit(kinds.Sleep, `{"seconds":3600}`, headTime)
	p.until(head, "running", started)
	list := p.behind(head)
	check(t, a.cmd.Process.Signal(syscall.SIGSTOP))
	if e := p.completed(head).Ending; e.Outcome != tasks.Unknown || e.Reason != tasks.ReasonNoWord {
		t.Errorf("head: %+v", e)
	}
	p.until(list[0], "told that the agent does not answer", func(t *tasks.Task) bool { return t.Waiting != nil && t.Waiting.Cause == tasks.CauseUnreachable })
	check(t, a.cmd.Process.Signal(syscall.SIGCONT))
	for _, id := range list {
		if task := p.completed(id); task.Ending.Outcome != tasks.Succeeded {
			t.Errorf("behind: %+v", task)
		}
	}
	late := p.store.Late()
	if len(late) == 0 || late[0].ID != head || late[0].Ending.Outcome == tasks.Unknown {
		t.Errorf("late answers: %+v", late)
	}
	if e := p.completed(head).Ending; e.Outcome != tasks.Unknown {
		t.Errorf("the head has changed: %+v", e)
	}
}

// TestAFrozenAgentIsSilentAndItsTaskGoesOn: nothing fails while the agent is
// stopped, and the one run of the task gives its result afterwards.
// Cases P16.
func TestAFrozenAgentIsSilentAndItsTaskGoesOn(t *testing.T) {
	t.Parallel()
	p, a := newProduct(t, agent.Config{Limits: quick(), PolicyFile: policyWith(t, "until_file")}, tasks.Limits{})
	dir := t.TempDir()
	id := p.submit(kinds.Run, fmt.Sprintf(`{"program":"until_file","args":{"file":%q}}`, filepath.Join(dir, "end")), time.Hour)
	p.until(id, "running", started)
	check(t, a.cmd.Process.Signal(syscall.SIGSTOP))
	p.until(id, "known to be silent", func(t *tasks.Task) bool { return t.Waiting != nil && t.Waiting.Cause == tasks.CauseUnreachable })
	check(t, os.WriteFile(filepath.Join(dir, "end"), nil, 0o600)) // the program goes on beside its frozen agent
	if task, err := p.Get(t.Context(), id); err != nil || task.State != tasks.StateWaiting {
		t.Errorf("while it is frozen: %+v, %v", task, err)
	}
	check(t, a.cmd.Process.Signal(syscall.SIGCONT))
	task := p.completed(id)
	if task.Ending.Outcome != tasks.Succeeded || task.Attempt != 1 || len(p.store.Late()) != 0 {
		t.Errorf("afterwards: %+v, late %+v", task, p.store.Late())
	}
	if runs := lines(t, filepath.Join(dir, "end.runs")); len(runs) != 1 {
		t.Errorf("it ran %d times", len(runs))
	}
}

// TestTheWayOfAnEndIsTold all the way from the program to the task as people
// read it, also when the agent was killed in the middle.
// Cases P13, R20, R22.
func TestTheWayOfAnEndIsTold(t *testing.T) {
	t.Parallel()
	p, a := newProduct(t, agent.Config{Limits: quick(), PolicyFile: policyWith(t, "grandchild", "family")}, tasks.Limits{})
	e := p.completed(p.submit(kinds.Run, programArgs("grandchild"), 0)).Ending
	if e.Outcome != tasks.Succeeded || e.Exit == nil || len(e.Exit.LeftBehind) != 1 || e.Exit.LeftBehind[0].PID == 0 || e.Exit.LeftBehind[0].Name == "" || e.Exit.Released {
		t.Errorf("with a child left behind: %+v, %+v", e, e.Exit)
	}
	id := p.submit(kinds.Run, programArgs("family"), time.Hour)
	p.until(id, "heard of", func(task *tasks.Task) bool {
		r, err := p.Output(t.Context(), id, "stdout")
		check(t, err)
		text, err := io.ReadAll(r)
		return err == nil && strings.Count(string(text), "\n") == 2
	})
	a.kill(t)
	c := a.config
	c.Listen = a.addr
	(&running{config: c}).startChild(t)
	e = p.completed(id).Ending
	if e.Outcome != tasks.Unknown || e.Reason != tasks.ReasonAgentRestart || !strings.Contains(e.Detail, "was alive and was ended: ") {
		t.Errorf("after a restart: %+v", e)
	}
}
