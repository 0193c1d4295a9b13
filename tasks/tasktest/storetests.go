package tasktest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Env is a Store under test with what the suite needs besides.
type Env struct {
	tasks.Store
	// NewAgent stores an agent and gives its number.
	NewAgent func(id uuid.UUID, name string, labels map[string]string) tasks.AgentNum
	// ExpireLeases ends every lease now; nil skips the tests of expiry.
	ExpireLeases func()
	// RemoveAgent marks an agent as removed.
	RemoveAgent func(num tasks.AgentNum)
	// ExpireKeys lets the 24 hours of every idempotency key be over.
	ExpireKeys func()
	// Late counts the late answers kept for a task; nil skips the check.
	Late func(id tasks.ID) int
}

// RunStoreTests is the contract of tasks.Store. open gives an empty store for
// each test and cleans up with t.Cleanup.
func RunStoreTests(t *testing.T, open func(t *testing.T) Env) {
	t.Helper()
	for name, test := range storeTests() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(newBench(t, open(t)))
		})
	}
}

func storeTests() map[string]func(b *bench) {
	return map[string]func(b *bench){
		"ids come in blocks that never overlap":             testIDs,
		"an insert is new, a started one is waiting":        testInsert,
		"refill gives the order of priority and id":         testRefill,
		"a claim starts a task once":                        testClaim,
		"a finish completes what it saw and nothing else":   testFinish,
		"a finish ends a task that has not started":         testFinishUnstarted,
		"every part of an ending is kept":                   testEnding,
		"a requeue keeps the place":                         testRequeue,
		"a requeue with back-off waits and comes back":      testRequeueLater,
		"a task for later moves when it is due":             testDue,
		"overdue gives what has expired before its start":   testOverdue,
		"output is stored once and read in order":           testOutput,
		"late answers change nothing":                       testLate,
		"a cancel mark is for started tasks":                testCancelMark,
		"a key makes a task once":                           testReplay,
		"a lasting key outlives the others":                 testLastingKey,
		"a cancel mark stays with the result":               testCancelStays,
		"removed agents are found with their open tasks":    testRemoved,
		"alike gives what a newer task replaces":            testAlike,
		"the place in the order":                            testPosition,
		"a task is replaced in the turn of the newer one":   testReplaced,
		"a turn is whole or nothing when data is refused":   testPoison,
		"leases go to one owner and epochs rise":            testLeases,
		"a former owner is replaced at once and fenced":     testFencing,
		"an expired lease is free and writes nothing":       testExpiry,
		"a released lease is free at once":                  testRelease,
		"load gives what a shard holds":                     testLoad,
		"find gives the row of a task not completed":        testFind,
		"lists filter and page in both directions":          testLists,
		"settle reads back what a turn did":                 testSettle,
		"series are kept and replaced":                      testPoints,
		"one turn does everything at once":                  testWholeTurn,
		"a large turn is stored completely":                 testLargeTurn,
		"what does not exist is said by ErrNoTask":          testNoTask,
		"strings of every kind survive":                     testHardStrings,
		"reads and writes end when their context has ended": testContext,
	}
}

// bench holds a store, an owner with all shards, and three agents.
type bench struct {
	*testing.T
	e      Env
	ctx    context.Context
	me     tasks.Owner
	leases map[tasks.Shard]tasks.Lease
	agents [3]tasks.AgentNum
	ids    [3]uuid.UUID
	next   tasks.ID
	last   tasks.ID
}

// agentID makes an id whose last byte decides the shard.
func agentID(n, last byte) uuid.UUID {
	id := uuid.NewV4()
	id[14], id[15] = n, last
	return id
}

func newBench(t *testing.T, e Env) *bench {
	t.Helper()
	b := &bench{T: t, e: e, ctx: t.Context(), me: tasks.Owner{ID: uuid.NewV4(), Addr: "127.0.0.1:1", Name: "one"}}
	for i, name := range []string{"alpha", "beta", "gamma"} {
		b.ids[i] = agentID(byte(i), byte(i))
		b.agents[i] = e.NewAgent(b.ids[i], name, map[string]string{"site": name[:1], "tier": "edge"})
	}
	b.leases = b.acquire(b.me, nil)
	if len(b.leases) != tasks.NumShards {
		t.Fatalf("acquired %d shards of an empty store, want %d", len(b.leases), tasks.NumShards)
	}
	return b
}

func (b *bench) acquire(o tasks.Owner, former []uuid.UUID) map[tasks.Shard]tasks.Lease {
	b.Helper()
	var all []tasks.Shard
	for s := range tasks.Shard(tasks.NumShards) {
		all = append(all, s)
	}
	got, err := b.e.Acquire(b.ctx, o, former, all)
	if err != nil {
		b.Fatalf("acquire: %v", err)
	}
	m := map[tasks.Shard]tasks.Lease{}
	for _, l := range got {
		m[l.Shard] = l
	}
	return m
}

func (b *bench) id() tasks.ID {
	b.Helper()
	if b.next == b.last {
		first, err := b.e.TakeIDs(b.ctx)
		if err != nil {
			b.Fatalf("take ids: %v", err)
		}
		b.next, b.last = first, first+tasks.IDBlock
	}
	b.next++
	return b.next - 1
}

func (b *bench) epoch(agent int) int64 { return b.leases[tasks.ShardOf(b.ids[agent])].Epoch }

// insert makes an Insert for an agent with sensible values.
func (b *bench) insert(agent int, change ...func(*tasks.Insert)) tasks.Insert {
	b.Helper()
	now := time.Now().UTC().Truncate(time.Microsecond)
	x := tasks.Insert{
		ID: b.id(), Agent: b.agents[agent], Epoch: b.epoch(agent), Kind: "core.echo", Args: `{"n": 1}`,
		Delivery: kinds.DeliveryRepeatable, Priority: tasks.DefaultPriority, Timeout: 30 * time.Second,
		CreatedAt: now, ExpiresAt: now.Add(time.Hour), Actor: "token:test",
	}
	for _, f := range change {
		f(&x)
	}
	return x
}

func started(x *tasks.Insert) { x.Started = true }

// ago makes a task old, so that times in the past can be given to it.
func ago(x *tasks.Insert) { x.CreatedAt = x.CreatedAt.Add(-time.Hour) }

func (b *bench) turn(t tasks.Turn) *tasks.TurnResult {
	b.Helper()
	r, err := b.tryTurn(t)
	if err != nil {
		b.Fatalf("turn: %v", err)
	}
	return r
}

func (b *bench) tryTurn(t tasks.Turn) (*tasks.TurnResult, error) {
	t.Owner, t.Leases = b.me.ID, slices.Collect(maps.Values(b.leases))
	return b.e.Turn(b.ctx, &t)
}

// put inserts and gives the ids.
func (b *bench) put(ins ...tasks.Insert) []tasks.ID {
	b.Helper()
	var ids []tasks.ID
	for _, x := range ins {
		ids = append(ids, x.ID)
	}
	sameIDs(b, "inserted", b.turn(tasks.Turn{Inserts: ins}).Inserted, ids...)
	return ids
}

func (b *bench) task(id tasks.ID) *tasks.Task {
	b.Helper()
	t, err := b.e.Task(b.ctx, id)
	if err != nil {
		b.Fatalf("task %d: %v", id, err)
	}
	return t
}

func (b *bench) state(id tasks.ID, want tasks.State, attempt int) *tasks.Task {
	b.Helper()
	t := b.task(id)
	if t.State != want || t.Attempt != attempt {
		b.Fatalf("task %d is %s at attempt %d, want %s at attempt %d", id, t.State, t.Attempt, want, attempt)
	}
	return t
}

func (b *bench) refill(agent int, limit int) []tasks.ID {
	b.Helper()
	got, err := b.e.Refill(b.ctx, []tasks.RefillRequest{{Agent: b.agents[agent], AfterPriority: -1, Limit: limit}})
	if err != nil {
		b.Fatalf("refill: %v", err)
	}
	var ids []tasks.ID
	for _, q := range got {
		ids = append(ids, q.ID)
	}
	return ids
}

func sameIDs(t testing.TB, what string, got []tasks.ID, want ...tasks.ID) {
	t.Helper()
	g, w := slices.Clone(got), slices.Clone(want)
	slices.Sort(g)
	slices.Sort(w)
	if !slices.Equal(g, w) {
		t.Fatalf("%s: got %v, want %v", what, g, w)
	}
}

func inOrder(t testing.TB, what string, got []tasks.ID, want ...tasks.ID) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
}

func testIDs(b *bench) {
	seen := map[tasks.ID]bool{}
	for range 5 {
		first, err := b.e.TakeIDs(b.ctx)
		if err != nil {
			b.Fatal(err)
		}
		for i := range tasks.ID(tasks.IDBlock) {
			if first <= 0 || seen[first+i] {
				b.Fatalf("id %d was given twice or is not positive", first+i)
			}
			seen[first+i] = true
		}
	}
}

func testInsert(b *bench) {
	run := uuid.NewV4()
	x := b.insert(0, func(x *tasks.Insert) {
		x.Priority, x.RunID, x.RetryOf, x.Delivery = 3, run, 7, kinds.DeliveryOnce
	})
	y := b.insert(1, started)
	b.put(x, y)
	got := b.state(x.ID, tasks.StateNew, 0)
	want := &tasks.Task{
		ID: x.ID, Agent: tasks.AgentRef{Num: b.agents[0], ID: b.ids[0], Name: "alpha"}, Kind: x.Kind,
		Args: json.RawMessage(x.Args), Delivery: kinds.DeliveryOnce, Priority: 3, Timeout: x.Timeout,
		State: tasks.StateNew, CreatedAt: x.CreatedAt, ExpiresAt: x.ExpiresAt, Actor: x.Actor, RetryOf: 7, RunID: run,
	}
	if d := cmp.Diff(want, got, cmpopts.EquateApproxTime(time.Millisecond), cmpopts.EquateEmpty()); d != "" {
		b.Errorf("task read back (-want +got):\n%s", d)
	}
	if w := b.state(y.ID, tasks.StateWaiting, 1); w.StartedAt.IsZero() {
		b.Error("a started task has no started_at")
	}
	if r := b.turn(tasks.Turn{}); r.At.IsZero() {
		b.Error("a turn says nothing of its time")
	}
}

func testRefill(b *bench) {
	prio := func(p int) func(*tasks.Insert) { return func(x *tasks.Insert) { x.Priority = p } }
	low, first, second := b.insert(0, prio(9)), b.insert(0), b.insert(0)
	urgent, busy, other := b.insert(0, prio(0)), b.insert(0, started), b.insert(1)
	b.put(low, first, second, urgent, busy, other)
	inOrder(b, "order", b.refill(0, 10), urgent.ID, first.ID, second.ID, low.ID)
	inOrder(b, "limited", b.refill(0, 2), urgent.ID, first.ID)
	got, err := b.e.Refill(b.ctx, []tasks.RefillRequest{
		{Agent: b.agents[0], AfterPriority: tasks.DefaultPriority, AfterID: first.ID, Limit: 10},
		{Agent: b.agents[1], AfterPriority: -1, Limit: 1},
		{Agent: b.agents[2], AfterPriority: -1, Limit: 1},
	})
	if err != nil {
		b.Fatal(err)
	}
	per := map[tasks.AgentNum][]tasks.ID{}
	for _, q := range got {
		per[q.Agent] = append(per[q.Agent], q.ID)
	}
	inOrder(b, "after a place", per[b.agents[0]], second.ID, low.ID)
	inOrder(b, "another agent", per[b.agents[1]], other.ID)
	if q := got[slices.IndexFunc(got, func(q tasks.Queued) bool { return q.ID == second.ID })]; q.Kind != second.Kind ||
		q.Args != second.Args || q.Delivery != second.Delivery || q.Timeout != second.Timeout || q.Priority != second.Priority ||
		q.Attempt != 0 || !q.ExpiresAt.Equal(second.ExpiresAt) || !q.CreatedAt.Equal(second.CreatedAt) {
		b.Errorf("refill gave %+v for %+v", q, second)
	}
}

func (b *bench) claim(agent int, id tasks.ID, attempt int) tasks.Claim {
	return tasks.Claim{Agent: b.agents[agent], Priority: tasks.DefaultPriority, ID: id, Epoch: b.epoch(agent), Attempt: attempt}
}

func testClaim(b *bench) {
	id := b.put(b.insert(0))[0]
	sameIDs(b, "claimed", b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, id, 1)}}).Claimed, id)
	b.state(id, tasks.StateWaiting, 1)
	inOrder(b, "a started task is not offered", b.refill(0, 10))
	sameIDs(b, "claimed again", b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, id, 2)}}).Claimed)
	sameIDs(b, "claimed without row", b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, b.id(), 1)}}).Claimed)
	b.state(id, tasks.StateWaiting, 1)
}

func (b *bench) requeue(agent int, id tasks.ID, attempt int, notBefore time.Time) tasks.Requeue {
	return tasks.Requeue{
		Agent: b.agents[agent], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: id, Attempt: attempt},
		Epoch: b.epoch(agent), NotBefore: notBefore,
	}
}

func testRequeue(b *bench) {
	ids := b.put(b.insert(0, started), b.insert(0), b.insert(0))
	wrong := b.requeue(0, ids[0], 2, time.Time{})
	sameIDs(b, "wrong attempt", b.turn(tasks.Turn{Requeues: []tasks.Requeue{wrong}}).Requeued)
	stale := b.requeue(0, ids[0], 1, time.Time{})
	stale.Epoch++
	sameIDs(b, "wrong epoch", b.turn(tasks.Turn{Requeues: []tasks.Requeue{stale}}).Requeued)
	r := b.turn(tasks.Turn{Requeues: []tasks.Requeue{b.requeue(0, ids[0], 1, time.Time{})}})
	sameIDs(b, "requeued", r.Requeued, ids[0])
	inOrder(b, "in its old place", b.refill(0, 10), ids...)
	b.state(ids[0], tasks.StateNew, 1)
	sameIDs(b, "claimed with the old attempt", b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, ids[0], 1)}}).Claimed)
	sameIDs(b, "claimed", b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, ids[0], 2)}}).Claimed, ids[0])
	sameIDs(b, "finish of the old attempt", b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, ids[0], 1)}}).Finished)
	sameIDs(b, "finish", b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, ids[0], 2)}}).Finished, ids[0])
}

func testRequeueLater(b *bench) {
	ids := b.put(b.insert(0, started), b.insert(0))
	at := time.Now().Add(10 * time.Minute)
	sameIDs(b, "requeued", b.turn(tasks.Turn{Requeues: []tasks.Requeue{b.requeue(0, ids[0], 1, at)}}).Requeued, ids[0])
	got := b.state(ids[0], tasks.StateNew, 1)
	if d := got.NotBefore.Sub(at).Abs(); d > time.Millisecond {
		b.Errorf("waits until %s, want %s", got.NotBefore, at)
	}
	inOrder(b, "does not hold others up", b.refill(0, 10), ids[1])
	row, err := b.e.Find(b.ctx, ids[0])
	if err != nil || !row.Later || row.Attempt != 1 {
		b.Fatalf("find: %+v, %v", row, err)
	}
	back := tasks.DueTask{Agent: b.agents[0], Priority: tasks.DefaultPriority, ID: ids[0], RunAt: got.NotBefore}
	sameIDs(b, "moved back", b.turn(tasks.Turn{Due: []tasks.DueTask{back}}).Moved, ids[0])
	inOrder(b, "before its followers", b.refill(0, 10), ids...)
	sameIDs(b, "next attempt", b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, ids[0], 2)}}).Claimed, ids[0])
}

func allShards() []tasks.Shard {
	var all []tasks.Shard
	for s := range tasks.Shard(tasks.NumShards) {
		all = append(all, s)
	}
	return all
}

func testDue(b *bench) {
	at := func(d time.Duration) func(*tasks.Insert) {
		return func(x *tasks.Insert) { ago(x); x.NotBefore = x.CreatedAt.Add(time.Hour + d) }
	}
	soon, past, other := b.insert(0, at(time.Hour)), b.insert(0, at(-time.Minute)), b.insert(1, at(-2*time.Minute))
	b.put(soon, past, other)
	for _, x := range []tasks.Insert{soon, past, other} {
		if got := b.state(x.ID, tasks.StateNew, 0); !got.NotBefore.Equal(x.NotBefore) {
			b.Errorf("not before %s, want %s", got.NotBefore, x.NotBefore)
		}
	}
	inOrder(b, "not in the queue yet", b.refill(0, 10))
	due, err := b.e.Due(b.ctx, allShards(), 10)
	if err != nil {
		b.Fatal(err)
	}
	if len(due) != 2 || due[0].ID != other.ID || due[1].ID != past.ID {
		b.Fatalf("due: %+v", due)
	}
	if one, err := b.e.Due(b.ctx, allShards(), 1); err != nil || len(one) != 1 {
		b.Errorf("due with limit 1: %v, %v", one, err)
	}
	if mine, err := b.e.Due(b.ctx, []tasks.Shard{tasks.ShardOf(b.ids[0])}, 10); err != nil || len(mine) != 1 || mine[0].ID != past.ID {
		b.Errorf("due of one shard: %v, %v", mine, err)
	}
	sameIDs(b, "moved", b.turn(tasks.Turn{Due: due}).Moved, past.ID, other.ID)
	inOrder(b, "in the queue", b.refill(0, 10), past.ID)
	sameIDs(b, "moved again", b.turn(tasks.Turn{Due: due}).Moved)
}

func testOverdue(b *bench) {
	expired := func(x *tasks.Insert) { ago(x); x.ExpiresAt = x.CreatedAt.Add(time.Minute) }
	later := func(x *tasks.Insert) { expired(x); x.NotBefore = x.CreatedAt.Add(2 * time.Hour) }
	gone, wait, run := b.insert(0, expired), b.insert(0), b.insert(0, expired, started)
	late := b.insert(1, later)
	b.put(gone, wait, run, late)
	over, err := b.e.Overdue(b.ctx, allShards(), 10)
	if err != nil {
		b.Fatal(err)
	}
	var ids []tasks.ID
	for i := range over {
		ids = append(ids, over[i].ID)
		over[i].Ending = tasks.Ending{Outcome: tasks.Expired, Reason: tasks.ReasonExpired, Detail: "Too late."}
	}
	sameIDs(b, "overdue", ids, gone.ID, late.ID)
	if some, err := b.e.Overdue(b.ctx, []tasks.Shard{tasks.ShardOf(b.ids[1])}, 10); err != nil || len(some) != 1 || some[0].ID != late.ID {
		b.Errorf("overdue of one shard: %v, %v", some, err)
	}
	sameIDs(b, "ended", b.turn(tasks.Turn{Finishes: over}).Finished, gone.ID, late.ID)
	if got := b.state(gone.ID, tasks.StateCompleted, 0); got.Ending.Outcome != tasks.Expired {
		b.Errorf("outcome %s", got.Ending.Outcome)
	}
	b.state(run.ID, tasks.StateWaiting, 1)
}

func testReplay(b *bench) {
	key := &tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k", Hash: sha256.Sum256([]byte("x"))}
	keyed := func(k *tasks.Idempotency, i int) func(*tasks.Insert) {
		return func(x *tasks.Insert) { x.Key, x.KeyIndex = k, i }
	}
	if got, err := b.e.Replay(b.ctx, *key); err != nil || len(got) != 0 {
		b.Fatalf("a new key: %v, %v", got, err)
	}
	first := b.put(b.insert(0, keyed(key, 0)), b.insert(1, keyed(key, 1), started))
	again := []tasks.Insert{b.insert(0, keyed(key, 0), started), b.insert(2, keyed(key, 2))}
	sameIDs(b, "second try", b.turn(tasks.Turn{Inserts: again}).Inserted, again[1].ID)
	if _, err := b.e.Task(b.ctx, again[0].ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("the replay left a task: %v", err)
	}
	got, err := b.e.Replay(b.ctx, *key)
	want := []tasks.DedupRow{{Index: 0, ID: first[0], Hash: key.Hash}, {Index: 1, ID: first[1], Hash: key.Hash}, {Index: 2, ID: again[1].ID, Hash: key.Hash}}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		b.Errorf("replay: %v (-want +got):\n%s", err, d)
	}
	other := *key
	other.Principal = "token:b"
	b.put(b.insert(0, keyed(&other, 0)))
}

func testSettle(b *bench) {
	ids := b.put(b.insert(0), b.insert(1, started), b.insert(2, started))
	turns := map[string]tasks.Turn{
		"insert":  {Inserts: []tasks.Insert{b.insert(0)}},
		"claim":   {Claims: []tasks.Claim{b.claim(0, ids[0], 1)}},
		"finish":  {Finishes: []tasks.Finish{b.finish(1, ids[1], 1)}},
		"requeue": {Requeues: []tasks.Requeue{b.requeue(2, ids[2], 1, time.Time{})}},
	}
	for name, t := range turns {
		t.Owner, t.Leases = b.me.ID, slices.Collect(maps.Values(b.leases))
		// What the turn would have answered before its commit was lost.
		would := &tasks.TurnResult{At: time.Now()}
		for _, x := range t.Inserts {
			would.Inserted = append(would.Inserted, x.ID)
		}
		for _, x := range t.Claims {
			would.Claimed = append(would.Claimed, x.ID)
		}
		for _, x := range t.Finishes {
			would.Finished = append(would.Finished, x.ID)
		}
		for _, x := range t.Requeues {
			would.Requeued = append(would.Requeued, x.ID)
		}
		if ok, err := b.e.Settle(b.ctx, &t, would); err != nil || ok {
			b.Errorf("%s that did not take place: settled as %v, %v", name, ok, err)
		}
		r, err := b.e.Turn(b.ctx, &t)
		if err != nil {
			b.Fatalf("%s: %v", name, err)
		}
		if ok, err := b.e.Settle(b.ctx, &t, r); err != nil || !ok {
			b.Errorf("%s that took place: settled as %v, %v", name, ok, err)
		}
	}
}

func testWholeTurn(b *bench) {
	later := func(x *tasks.Insert) { ago(x); x.NotBefore = x.CreatedAt.Add(time.Minute) }
	ids := b.put(b.insert(0, started), b.insert(0), b.insert(1, started), b.insert(2, started), b.insert(2, later), b.insert(1))
	due, err := b.e.Due(b.ctx, allShards(), 10)
	if err != nil || len(due) != 1 {
		b.Fatalf("due: %v, %v", due, err)
	}
	fresh := b.insert(0)
	r := b.turn(tasks.Turn{
		Inserts: []tasks.Insert{fresh}, Due: due,
		Output: []tasks.OutputRow{{Agent: b.agents[0], OutputChunk: tasks.OutputChunk{
			Ref: tasks.Ref{ID: ids[0], Attempt: 1}, Stream: "stdout", At: time.Now(), Data: []byte("x"),
		}}},
		Finishes: []tasks.Finish{b.finish(0, ids[0], 1), b.finish(1, ids[5], 0, func(f *tasks.Finish) { f.Ending.Outcome = tasks.Cancelled })},
		Requeues: []tasks.Requeue{b.requeue(1, ids[2], 1, time.Time{})},
		Claims:   []tasks.Claim{b.claim(0, ids[1], 1)},
		Cancels:  []tasks.CancelMark{{Agent: b.agents[2], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: ids[3], Attempt: 1}, Actor: "user:a"}},
	})
	sameIDs(b, "inserted", r.Inserted, fresh.ID)
	sameIDs(b, "finished", r.Finished, ids[0], ids[5])
	sameIDs(b, "requeued", r.Requeued, ids[2])
	sameIDs(b, "claimed", r.Claimed, ids[1])
	sameIDs(b, "moved", r.Moved, ids[4])
	sameIDs(b, "marked", r.Marked, ids[3])
	b.state(ids[0], tasks.StateCompleted, 1)
	b.state(ids[1], tasks.StateWaiting, 1)
	b.state(ids[2], tasks.StateNew, 1)
	b.state(fresh.ID, tasks.StateNew, 0)
}

func testLargeTurn(b *bench) {
	const n = 1000
	var ins []tasks.Insert
	for i := range n {
		ins = append(ins, b.insert(i%3, func(x *tasks.Insert) { x.Args = fmt.Sprintf(`{"i":%d}`, i) }))
	}
	ids := b.put(ins...)
	total := 0
	for a := range 3 {
		got := b.refill(a, n)
		total += len(got)
		if !slices.IsSorted(got) {
			b.Errorf("agent %d is out of order", a)
		}
	}
	if total != n {
		b.Fatalf("%d tasks in the queue, want %d", total, n)
	}
	// Service asks for one more than the longest page, to see whether it is the last.
	known, err := b.e.TasksByID(b.ctx, append([]tasks.ID{1 << 40}, ids...))
	if err != nil || len(known) != n {
		b.Errorf("%d of %d tasks by their ids, %v", len(known), n, err)
	}
	page, err := b.e.Tasks(b.ctx, tasks.Filter{Limit: tasks.MaxPage + 1})
	if err != nil || len(page) != tasks.MaxPage+1 {
		b.Errorf("a page of %d has %d tasks, %v", tasks.MaxPage+1, len(page), err)
	}
	var fs []tasks.Finish
	for i, id := range ids {
		fs = append(fs, b.finish(i%3, id, 0, func(f *tasks.Finish) { f.Ending = tasks.Ending{Outcome: tasks.Cancelled} }))
	}
	sameIDs(b, "finished", b.turn(tasks.Turn{Finishes: fs}).Finished, ids...)
}
