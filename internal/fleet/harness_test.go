package fleet_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/pki"
	"headgate/tasks"
)

// harness is a fleet that runs in a test.
type harness struct {
	*fleet.Fleet
	t         testing.TB
	store     *fleettest.Store
	queue     *fleettest.Queue
	authority *pki.Authority
	dir       *pki.Dir
	limits    fleet.Limits
	stop      func()

	mu     sync.Mutex
	events []fleet.Event
	more   chan struct{}
}

// quick are limits that do not make tests wait.
func quick() fleet.Limits {
	return fleet.Limits{
		BackoffBase: 20 * time.Millisecond, BackoffMax: 200 * time.Millisecond,
		// No test waits these out: a busy machine may take seconds for a handshake.
		ConnectTimeout: 30 * time.Second, WelcomeTimeout: 30 * time.Second, AnswerStep: time.Millisecond,
	}
}

func newHarness(t testing.TB, limits fleet.Limits, edit func(*fleet.Config)) *harness {
	t.Helper()
	dir, err := pki.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	h := &harness{t: t, store: fleettest.NewStore(), queue: fleettest.NewQueue(), dir: dir, limits: limits, more: make(chan struct{})}
	// The CA is older than the certificates that some tests need expired.
	authority, err := pki.NewAuthority("test", time.Now().Add(-60*24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if err := authority.SaveKey(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := h.store.InsertCA(context.Background(), fleet.CA{ID: uuid.NewV4(), Fleet: "test", CertPEM: string(authority.PEM()), State: "active"}); err != nil {
		t.Fatal(err)
	}
	h.make(edit)
	return h
}

// another is a controller beside h, or after it, with its database.
func (h *harness) another() *harness {
	h.t.Helper()
	o := &harness{t: h.t, store: h.store, queue: fleettest.NewQueue(), dir: h.dir, limits: h.limits, more: make(chan struct{})}
	o.make(nil)
	return o
}

func (h *harness) make(edit func(*fleet.Config)) {
	h.t.Helper()
	cfg := fleet.Config{
		Store: h.store, Dir: h.dir, ControllerID: uuid.NewV4(), FleetName: "test", Version: "test",
		Limits: h.limits, AllowLoopback: true, Publish: h.publish,
	}
	if edit != nil {
		edit(&cfg)
	}
	var err error
	if h.Fleet, err = fleet.New(cfg); err != nil {
		h.t.Fatal(err)
	}
	h.Attach(h.queue)
	if h.authority, err = h.EnsureCA(context.Background()); err != nil {
		h.t.Fatal(err)
	}
}

// run loads what is in the store and starts; every shard is owned at epoch 1.
func (h *harness) run() {
	h.t.Helper()
	h.start()
	h.own(1)
}

// start is run without any shard.
func (h *harness) start() {
	h.t.Helper()
	if err := h.Load(context.Background()); err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				h.t.Error(err)
			}
		case <-time.After(20 * time.Second):
			h.t.Error("Run did not end")
		}
	})
	h.t.Cleanup(h.stop)
}

func (h *harness) own(epoch int64) {
	var leases []tasks.Lease
	for s := range tasks.Shard(tasks.NumShards) {
		leases = append(leases, tasks.Lease{Shard: s, Epoch: epoch})
	}
	h.Own(leases)
}

func (h *harness) publish(e fleet.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, e)
	close(h.more)
	h.more = make(chan struct{})
}

// event waits for one that matches.
func (h *harness) event(what string, match func(fleet.Event) bool) fleet.Event {
	h.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		h.mu.Lock()
		more := h.more
		i := slices.IndexFunc(h.events, match)
		if i >= 0 {
			e := h.events[i]
			h.mu.Unlock()
			return e
		}
		h.mu.Unlock()
		select {
		case <-more:
		case <-deadline:
			h.t.Fatalf("no event: %s", what)
		}
	}
}

func (h *harness) countEvents(match func(fleet.Event) bool) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, e := range h.events {
		if match(e) {
			n++
		}
	}
	return n
}

// trouble waits until the agent is unreachable for a cause. It looks at the
// agent itself: another cause is no change of health, and so no event.
func (h *harness) trouble(id uuid.UUID, cause string) fleet.View {
	h.t.Helper()
	deadline := time.After(30 * time.Second)
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for {
		v, err := h.Get(id)
		if err == nil && v.Live.Health == fleet.HealthUnreachable && v.Live.Cause == cause {
			return v
		}
		h.mu.Lock()
		i := slices.IndexFunc(h.events, func(e fleet.Event) bool {
			return e.View.ID == id && e.View.Live.Health == fleet.HealthUnreachable && e.View.Live.Cause == cause
		})
		if i >= 0 {
			e := h.events[i]
			h.mu.Unlock()
			return e.View
		}
		h.mu.Unlock()
		select {
		case <-look.C:
		case <-deadline:
			h.t.Fatalf("agent %s is never unreachable because of %s; now %+v, %v", id, cause, v.Live, err)
		}
	}
}

// agent makes an agent of the fleet, starts it and stores its row.
func (h *harness) agent(name string, edit func(*fleettest.Agent)) (*fleettest.Agent, fleet.Agent) {
	h.t.Helper()
	a := fleettest.NewAgent(h.t, h.authority, name)
	if edit != nil {
		edit(a)
	}
	return a, h.store.Add(a.Row(a.Start(h.t)))
}

// give sends a task and gives its ref.
func (h *harness) give(num tasks.AgentNum, id tasks.ID, args string) tasks.Ref {
	a := tasks.Assignment{Queued: tasks.Queued{Agent: num, ID: id, Attempt: 1, Kind: "core.echo", Args: args}, Epoch: 1}
	h.Execute(a)
	return a.Ref()
}

func (h *harness) up(num tasks.AgentNum, n int) fleettest.Call {
	h.t.Helper()
	return h.queue.Wait(h.t, n, "a session", fleettest.Is("up", num))
}

func (h *harness) down(num tasks.AgentNum, n int) fleettest.Call {
	h.t.Helper()
	return h.queue.Wait(h.t, n, "the end of a session", fleettest.Is("down", num))
}

func (h *harness) final(num tasks.AgentNum, n int) fleettest.Call {
	h.t.Helper()
	return h.queue.Wait(h.t, n, "a final", fleettest.Is("final", num))
}
