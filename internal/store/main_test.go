package store

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/internal/testkit"
	"headgate/tasks"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// open gives the store on a database of its own.
func open(tb testing.TB) *DB {
	tb.Helper()
	return openDSN(tb, testkit.NewDatabase(tb))
}

func openDSN(tb testing.TB, dsn string, change ...func(*Config)) *DB {
	tb.Helper()
	c := Config{DSN: dsn, LoopConns: 6, GeneralConns: 6, PageConns: 4}
	for _, f := range change {
		f(&c)
	}
	d, err := Open(tb.Context(), c)
	if err != nil {
		tb.Fatalf("open the store: %v", err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Errorf("close the store: %v", err)
		}
	})
	return d
}

// rig is a store with agents and an owner of all shards.
type rig struct {
	*DB
	tb     testing.TB
	me     tasks.Owner
	leases []tasks.Lease
	agents []fleet.Agent
	next   tasks.ID
	left   int
}

func newRig(tb testing.TB, agents int) *rig {
	tb.Helper()
	return rigOn(tb, open(tb), agents)
}

func rigOn(tb testing.TB, d *DB, agents int) *rig {
	tb.Helper()
	r := &rig{DB: d, tb: tb, me: tasks.Owner{ID: uuid.New(), Addr: "127.0.0.1:1"}}
	for i := range agents {
		r.agents = append(r.agents, r.agent(fmt.Sprintf("agent-%04d", i), nil))
	}
	r.leases = r.acquire(r.me)
	return r
}

func allShards() []tasks.Shard {
	var s []tasks.Shard
	for i := range tasks.NumShards {
		s = append(s, tasks.Shard(i))
	}
	return s
}

func (r *rig) acquire(me tasks.Owner, former ...uuid.UUID) []tasks.Lease {
	r.tb.Helper()
	l, err := r.Acquire(r.tb.Context(), me, former, allShards())
	if err != nil {
		r.tb.Fatalf("acquire: %v", err)
	}
	return l
}

func (r *rig) agent(name string, labels map[string]string) fleet.Agent {
	r.tb.Helper()
	id := uuid.New()
	a := fleet.Agent{ID: id, Name: name, Labels: labels, Addresses: []string{"127.0.0.1:7442"}}
	copy(a.SPKI[:], id[:])
	a, err := r.InsertAgent(r.tb.Context(), a)
	if err != nil {
		r.tb.Fatalf("insert agent: %v", err)
	}
	a, err = r.ConfirmAgent(r.tb.Context(), a.ID)
	if err != nil {
		r.tb.Fatalf("confirm agent: %v", err)
	}
	return a
}

func (r *rig) id() tasks.ID {
	r.tb.Helper()
	if r.left == 0 {
		first, err := r.TakeIDs(r.tb.Context())
		if err != nil {
			r.tb.Fatalf("take ids: %v", err)
		}
		r.next, r.left = first, tasks.IDBlock
	}
	r.left--
	r.next++
	return r.next - 1
}

func (r *rig) epoch(a fleet.Agent) int64 { return r.leaseOf(a).Epoch }

func (r *rig) leaseOf(a fleet.Agent) tasks.Lease {
	shard := tasks.ShardOf(a.ID)
	for _, l := range r.leases {
		if l.Shard == shard {
			return l
		}
	}
	return tasks.Lease{}
}

// insert makes an Insert for an agent.
func (r *rig) insert(a fleet.Agent, started bool) tasks.Insert {
	now := time.Now()
	return tasks.Insert{
		ID: r.id(), Agent: a.Num, Epoch: r.epoch(a), Kind: "core.echo", Args: `{"text":"hello"}`,
		Delivery: kinds.DeliveryOnce, Priority: 5, Timeout: time.Minute, CreatedAt: now, ExpiresAt: now.Add(time.Hour),
		Actor: "token:test", Started: started,
	}
}

func (r *rig) finish(i tasks.Insert, attempt int) tasks.Finish {
	f := tasks.Finish{
		Agent: i.Agent, Priority: i.Priority, Ref: tasks.Ref{ID: i.ID, Attempt: attempt}, Epoch: i.Epoch,
		Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"ok":true}`)},
	}
	if attempt == 0 {
		f.Epoch = 0
	}
	return f
}

func (r *rig) turn(t *tasks.Turn) *tasks.TurnResult {
	r.tb.Helper()
	res, err := r.tryTurn(t)
	if err != nil {
		r.tb.Fatalf("turn: %v", err)
	}
	return res
}

func (r *rig) tryTurn(t *tasks.Turn) (*tasks.TurnResult, error) {
	t.Owner, t.Leases = r.me.ID, r.leases
	return r.Turn(r.tb.Context(), t)
}

// count runs a query that gives one number.
func (r *rig) count(query string, args ...any) int {
	r.tb.Helper()
	return countOn(r.tb, r.DB, query, args...)
}

func countOn(tb testing.TB, d *DB, query string, args ...any) int {
	tb.Helper()
	var n int
	if err := d.general.GetContext(context.WithoutCancel(tb.Context()), &n, query, args...); err != nil {
		tb.Fatalf("%s: %v", query, err)
	}
	return n
}
