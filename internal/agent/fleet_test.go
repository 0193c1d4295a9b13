package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
	"uuid"

	"headgate/internal/agent"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/kinds"
	"headgate/internal/pki"
	"headgate/tasks"
)

// realFleet is the product's own controller side, with its store and its queue
// in memory.
type realFleet struct {
	*fleet.Fleet
	queue *fleettest.Queue
}

func newRealFleet(t *testing.T) *realFleet {
	t.Helper()
	dir, err := pki.OpenDir(t.TempDir())
	check(t, err)
	t.Cleanup(func() { dir.Close() })
	f := &realFleet{queue: fleettest.NewQueue()}
	f.Fleet, err = fleet.New(fleet.Config{
		Store: fleettest.NewStore(), Dir: dir, ControllerID: uuid.NewV4(), FleetName: "test", Version: "test", AllowLoopback: true,
		Limits: fleet.Limits{BackoffBase: 10 * time.Millisecond, BackoffMax: 50 * time.Millisecond, AnswerStep: time.Millisecond},
	})
	check(t, err)
	f.Attach(f.queue)
	_, err = f.EnsureCA(t.Context())
	check(t, err)
	check(t, f.Load(t.Context()))
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		check(t, <-ended)
	})
	var leases []tasks.Lease
	for s := range tasks.Shard(tasks.NumShards) {
		leases = append(leases, tasks.Lease{Shard: s, Epoch: 7})
	}
	f.Own(leases)
	return f
}

func (f *realFleet) run(t *testing.T, num tasks.AgentNum, id tasks.ID, kind, args string) tasks.Final {
	t.Helper()
	q := tasks.Queued{}
	q.ID, q.Agent, q.Attempt, q.Kind, q.Args = id, num, 1, kind, args
	q.Delivery, q.Timeout = kinds.DeliveryOnce, time.Minute
	f.Execute(tasks.Assignment{Queued: q, Epoch: 7})
	return f.queue.Wait(t, 1, "a final", func(c fleettest.Call) bool { return c.Method == "final" && c.Final.ID == id }).Final
}

// TestTheRealFleetPairsAndRunsTheRealAgent holds both sides of the protocol to
// each other.
func TestTheRealFleetPairsAndRunsTheRealAgent(t *testing.T) {
	t.Parallel()
	f := newRealFleet(t)
	token, _, err := f.CreateEnrolmentToken(t.Context(), "test", time.Hour, 1)
	check(t, err)
	file := filepath.Join(t.TempDir(), "token")
	check(t, os.WriteFile(file, []byte(token), 0o600))
	a := &running{config: agent.Config{
		DataDir: filepath.Join(t.TempDir(), "data"), Name: "box", EnrolTokenFile: file, PolicyFile: policyWith(t, "show"), Version: "9",
	}}
	a.restart(t)
	view, err := f.Pair(t.Context(), "test", a.addr, token)
	check(t, err)
	if view.Name != "box" || view.Status != fleet.Active || view.Version != "9" {
		t.Errorf("paired as %+v", view)
	}
	up := f.queue.Wait(t, 1, "a session", fleettest.Is("up", view.Num)).Session
	if up.LedgerID == uuid.Nil() || up.Running != nil || len(up.Finished) != 0 {
		t.Errorf("session %+v", up)
	}
	if e := f.run(t, view.Num, 1, kinds.Echo, `{"a":1}`); e.Ending.Outcome != tasks.Succeeded || string(e.Ending.Result) != `{"a":1}` {
		t.Errorf("echo: %+v", e)
	}
	end := f.run(t, view.Num, 2, kinds.Run, `{"program":"show"}`)
	if end.Ending.Outcome != tasks.Succeeded || end.Ending.Exit == nil || end.Epoch != 7 {
		t.Errorf("show: %+v", end)
	}
	var printed int64
	for _, c := range f.queue.Calls(func(c fleettest.Call) bool { return c.Method == "output" }) {
		printed += int64(len(c.Output.Data))
	}
	if printed == 0 || printed != end.Ending.OutputBytes {
		t.Errorf("%d bytes arrived, %d were printed", printed, end.Ending.OutputBytes)
	}
	f.Forget(view.Num, 1, 2)
}
