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

func (b *bench) finish(agent int, id tasks.ID, attempt int, change ...func(*tasks.Finish)) tasks.Finish {
	f := tasks.Finish{
		Agent: b.agents[agent], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: id, Attempt: attempt},
		StartedAt: time.Now(), Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"ok":true}`)},
	}
	if attempt > 0 {
		f.Epoch = b.epoch(agent)
	}
	for _, c := range change {
		c(&f)
	}
	return f
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

func testFinish(b *bench) {
	id := b.put(b.insert(0, started))[0]
	for what, f := range map[string]tasks.Finish{
		"old attempt":   b.finish(0, id, 2),
		"other agent":   b.finish(1, id, 1),
		"other epoch":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Epoch++ }),
		"not started":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Epoch = 0 }),
		"other place":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Later = true }),
		"other order":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Priority-- }),
		"other task id": b.finish(0, b.id(), 1),
	} {
		sameIDs(b, what, b.turn(tasks.Turn{Finishes: []tasks.Finish{f}}).Finished)
		b.state(id, tasks.StateWaiting, 1)
	}
	sameIDs(b, "finished", b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, id, 1)}}).Finished, id)
	done := b.state(id, tasks.StateCompleted, 1)
	if done.CompletedAt.IsZero() || done.StartedAt.IsZero() || done.Ending.Outcome != tasks.Succeeded {
		b.Errorf("completed task: %+v", done)
	}
	again := b.finish(0, id, 1, func(f *tasks.Finish) { f.Ending.Outcome = tasks.Failed })
	sameIDs(b, "finished again", b.turn(tasks.Turn{Finishes: []tasks.Finish{again}}).Finished)
	if d := cmp.Diff(done, b.task(id)); d != "" {
		b.Errorf("a completed task changed:\n%s", d)
	}
}

func testFinishUnstarted(b *bench) {
	cancelled := func(f *tasks.Finish) {
		f.Ending = tasks.Ending{Outcome: tasks.Cancelled, Reason: tasks.ReasonCancelled, Detail: "Cancelled by user:a."}
		f.StartedAt = time.Time{}
	}
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(30 * time.Minute) }
	ids := b.put(b.insert(0), b.insert(0, later))
	r := b.turn(tasks.Turn{Finishes: []tasks.Finish{
		b.finish(0, ids[0], 0, cancelled),
		b.finish(0, ids[1], 0, cancelled, func(f *tasks.Finish) { f.Later = true }),
	}})
	sameIDs(b, "cancelled", r.Finished, ids...)
	for _, id := range ids {
		got := b.state(id, tasks.StateCompleted, 0)
		if got.Ending.Outcome != tasks.Cancelled || !got.StartedAt.IsZero() || got.Ending.Reason != tasks.ReasonCancelled {
			b.Errorf("cancelled task: %+v", got)
		}
	}
}

func testEnding(b *bench) {
	code := 3
	endings := []tasks.Ending{
		{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"a": [1, 2.50, "\u0000", "é"], "a": null}`), OutputBytes: 1 << 40},
		{
			Outcome: tasks.Failed, Reason: "exit_code", Detail: "It ended with 3.",
			Exit: &tasks.Exit{Code: &code, UserMS: 1, SystemMS: 2, MaxRSSBytes: 3}, OutputBytes: 12,
		},
		{Outcome: tasks.TimedOut, Reason: "timeout", Detail: "Too long.", Exit: &tasks.Exit{Signal: "SIGKILL"}},
		{Outcome: tasks.Rejected, Reason: "policy", Detail: "Not allowed.", Exit: &tasks.Exit{SpawnError: "no such file"}},
		{Outcome: tasks.Unknown, Reason: tasks.ReasonNoWord, Detail: "No word.", ResultBytes: []byte{0, 255, 1}},
	}
	var fs []tasks.Finish
	for _, e := range endings {
		id := b.put(b.insert(0, started))[0]
		fs = append(fs, b.finish(0, id, 1, func(f *tasks.Finish) { f.Ending = e }))
	}
	b.turn(tasks.Turn{Finishes: fs})
	for i, f := range fs {
		if d := cmp.Diff(endings[i], b.task(f.ID).Ending, cmpopts.EquateEmpty()); d != "" {
			b.Errorf("ending %d (-want +got):\n%s", i, d)
		}
	}
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

func testOutput(b *bench) {
	id := b.put(b.insert(0, started))[0]
	chunk := func(seq int, stream string, off int64, data string) tasks.OutputRow {
		return tasks.OutputRow{Agent: b.agents[0], OutputChunk: tasks.OutputChunk{
			Ref: tasks.Ref{ID: id, Attempt: 1}, Seq: seq, Stream: stream, Offset: off,
			At: time.Now().UTC().Truncate(time.Millisecond), Data: []byte(data),
		}}
	}
	rows := []tasks.OutputRow{chunk(0, "stdout", 0, "a\x00\xff"), chunk(1, "stderr", 0, "warn"), chunk(2, "stdout", 3, "b")}
	b.turn(tasks.Turn{Output: rows[:2]})
	b.turn(tasks.Turn{Output: rows[1:]})
	b.turn(tasks.Turn{Output: rows, Finishes: []tasks.Finish{b.finish(0, id, 1)}})
	got, err := b.e.Output(b.ctx, id, 0, 10)
	if err != nil {
		b.Fatal(err)
	}
	want := []tasks.OutputChunk{rows[0].OutputChunk, rows[1].OutputChunk, rows[2].OutputChunk}
	if d := cmp.Diff(want, got, cmpopts.EquateApproxTime(time.Millisecond)); d != "" {
		b.Errorf("output (-want +got):\n%s", d)
	}
	if part, err := b.e.Output(b.ctx, id, 1, 1); err != nil || len(part) != 1 || part[0].Seq != 1 {
		b.Errorf("from 1, at most 1: %v, %v", part, err)
	}
	if none, err := b.e.Output(b.ctx, b.id(), 0, 10); err != nil || len(none) != 0 {
		b.Errorf("of no task: %v, %v", none, err)
	}
}

func testLate(b *bench) {
	ids := b.put(b.insert(0, started), b.insert(1, started), b.insert(2, started))
	b.turn(tasks.Turn{Finishes: []tasks.Finish{
		b.finish(0, ids[0], 1),
		b.finish(1, ids[1], 1, func(f *tasks.Finish) { f.Ending = tasks.Ending{Outcome: tasks.Unknown, Reason: tasks.ReasonNoWord} }),
	}})
	before := []*tasks.Task{b.task(ids[0]), b.task(ids[1]), b.task(ids[2])}
	late := []tasks.Finish{
		b.finish(0, ids[0], 1), // the very one that is stored
		b.finish(1, ids[1], 1), // its stored outcome is ours, not the agent's
		b.finish(2, ids[2], 1), // not completed
		b.finish(2, ids[1], 1), // of another agent
		b.finish(0, b.id(), 1), // of no task
	}
	for range 2 {
		if err := b.e.RecordLate(b.ctx, late); err != nil {
			b.Fatalf("record late: %v", err)
		}
	}
	for i, t := range before {
		if d := cmp.Diff(t, b.task(ids[i])); d != "" {
			b.Errorf("a late answer changed task %d:\n%s", ids[i], d)
		}
	}
	if b.e.Late == nil {
		return
	}
	for i, want := range []int{0, 1, 0} {
		if n := b.e.Late(ids[i]); n != want {
			b.Errorf("%d late answers kept for task %d of the list, want %d", n, i, want)
		}
	}
}

func testCancelMark(b *bench) {
	ids := b.put(b.insert(0, started), b.insert(0))
	mark := func(id tasks.ID, attempt int) tasks.CancelMark {
		return tasks.CancelMark{Agent: b.agents[0], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: id, Attempt: attempt}, Actor: "user:a"}
	}
	sameIDs(b, "marked", b.turn(tasks.Turn{Cancels: []tasks.CancelMark{mark(ids[0], 1), mark(ids[1], 0)}}).Marked, ids[0])
	sameIDs(b, "old attempt", b.turn(tasks.Turn{Cancels: []tasks.CancelMark{mark(ids[0], 2)}}).Marked)
	got := b.state(ids[0], tasks.StateWaiting, 1)
	if got.CancelRequestedAt.IsZero() || !b.task(ids[1]).CancelRequestedAt.IsZero() {
		b.Error("the mark is missing or on the wrong task")
	}
	l, err := b.e.Load(b.ctx, allShards())
	if err != nil || len(l.Started) != 1 || l.Started[0].CancelRequestedAt.IsZero() {
		b.Errorf("load after a cancel: %+v, %v", l, err)
	}
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

func testPoison(b *bench) {
	id := b.put(b.insert(0, started))[0]
	good := b.insert(1)
	bad := b.finish(0, id, 1, func(f *tasks.Finish) { f.Ending.Detail = "a\x00b" })
	_, err := b.tryTurn(tasks.Turn{Inserts: []tasks.Insert{good}, Finishes: []tasks.Finish{bad}})
	if _, ok := errors.AsType[*tasks.PoisonError](err); !ok {
		b.Fatalf("a turn with NUL in a text: %v, want a PoisonError", err)
	}
	b.state(id, tasks.StateWaiting, 1)
	if _, err := b.e.Task(b.ctx, good.ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("half of a refused turn was stored: %v", err)
	}
	b.turn(tasks.Turn{Inserts: []tasks.Insert{good}})
}

func (b *bench) fenced(o tasks.Owner, leases map[tasks.Shard]tasks.Lease) {
	b.Helper()
	x := b.insert(0)
	x.Epoch = leases[tasks.ShardOf(b.ids[0])].Epoch
	t := tasks.Turn{Owner: o.ID, Leases: slices.Collect(maps.Values(leases)), Inserts: []tasks.Insert{x}}
	if _, err := b.e.Turn(b.ctx, &t); !errors.Is(err, tasks.ErrFenced) {
		b.Fatalf("a turn of an old owner: %v, want ErrFenced", err)
	}
	if _, err := b.e.Task(b.ctx, x.ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("a fenced turn wrote: %v", err)
	}
}

func testLeases(b *bench) {
	two := tasks.Owner{ID: uuid.NewV4(), Addr: "127.0.0.1:2", Name: "two"}
	if got := b.acquire(two, nil); len(got) != 0 {
		b.Fatalf("a second owner took %d held shards", len(got))
	}
	again := b.acquire(b.me, nil)
	for s, l := range again {
		if l.Epoch <= b.leases[s].Epoch || l.Owner != b.me.ID || l.Shard != s {
			b.Errorf("lease %+v after %+v", l, b.leases[s])
		}
	}
	still, err := b.e.Renew(b.ctx, b.me, slices.Collect(maps.Values(b.leases)))
	if err != nil || len(still) != 0 {
		b.Errorf("renewed %d leases of an old epoch, %v", len(still), err)
	}
	still, err = b.e.Renew(b.ctx, b.me, slices.Collect(maps.Values(again)))
	if err != nil || len(still) != tasks.NumShards {
		b.Errorf("renewed %d leases, %v", len(still), err)
	}
	owners, err := b.e.Owners(b.ctx)
	if err != nil || len(owners) != tasks.NumShards || owners[0].Owner != b.me.ID || owners[0].Addr != b.me.Addr {
		b.Errorf("owners: %+v, %v", owners, err)
	}
	b.fenced(b.me, b.leases)
}

func testFencing(b *bench) {
	two := tasks.Owner{ID: uuid.NewV4(), Addr: "127.0.0.1:2", Name: "two"}
	got := b.acquire(two, []uuid.UUID{uuid.NewV4(), b.me.ID})
	if len(got) != tasks.NumShards {
		b.Fatalf("took %d shards of a former owner, want all", len(got))
	}
	b.fenced(b.me, b.leases)
	b.fenced(b.me, got)
	if still, err := b.e.Renew(b.ctx, b.me, slices.Collect(maps.Values(b.leases))); err != nil || len(still) != 0 {
		b.Errorf("the old owner renewed %d leases, %v", len(still), err)
	}
	if err := b.e.Release(b.ctx, b.me, slices.Collect(maps.Values(b.leases))); err != nil {
		b.Errorf("release of what was lost: %v", err)
	}
	if back := b.acquire(b.me, nil); len(back) != 0 {
		b.Errorf("the old owner's release freed %d shards of the new one", len(back))
	}
}

func testExpiry(b *bench) {
	if b.e.ExpireLeases == nil {
		b.Skip("this store cannot expire leases at will")
	}
	b.e.ExpireLeases()
	b.fenced(b.me, b.leases)
	if owners, err := b.e.Owners(b.ctx); err != nil || len(owners) != 0 {
		b.Errorf("owners of expired shards: %v, %v", owners, err)
	}
	two := tasks.Owner{ID: uuid.NewV4(), Addr: "127.0.0.1:2", Name: "two"}
	got := b.acquire(two, nil)
	if len(got) != tasks.NumShards {
		b.Fatalf("took %d expired shards, want all", len(got))
	}
	for s, l := range got {
		if l.Epoch <= b.leases[s].Epoch {
			b.Errorf("epoch of shard %d went from %d to %d", s, b.leases[s].Epoch, l.Epoch)
		}
	}
}

func testRelease(b *bench) {
	if err := b.e.Release(b.ctx, b.me, slices.Collect(maps.Values(b.leases))); err != nil {
		b.Fatal(err)
	}
	b.fenced(b.me, b.leases)
	two := tasks.Owner{ID: uuid.NewV4(), Addr: "127.0.0.1:2", Name: "two"}
	if got := b.acquire(two, nil); len(got) != tasks.NumShards {
		b.Fatalf("took %d released shards, want all", len(got))
	}
}

func testLoad(b *bench) {
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Minute) }
	run := b.insert(0, started, func(x *tasks.Insert) { x.Args = `{"deep":[1]}`; x.Delivery = kinds.DeliveryOnce })
	b.put(run, b.insert(0), b.insert(0), b.insert(1), b.insert(1, later))
	l, err := b.e.Load(b.ctx, allShards())
	if err != nil {
		b.Fatal(err)
	}
	if d := cmp.Diff(map[tasks.AgentNum]int{b.agents[0]: 2, b.agents[1]: 1}, l.Depth); d != "" || l.Later != 1 || len(l.Started) != 1 {
		b.Fatalf("loaded %+v", l)
	}
	s := l.Started[0]
	if s.ID != run.ID || s.Attempt != 1 || s.Epoch != run.Epoch || s.StartedAt.IsZero() || s.Args != run.Args ||
		s.Delivery != kinds.DeliveryOnce || s.Timeout != run.Timeout || s.Agent != run.Agent || s.Priority != run.Priority {
		b.Errorf("started row %+v of %+v", s, run)
	}
	one, err := b.e.Load(b.ctx, []tasks.Shard{tasks.ShardOf(b.ids[1])})
	if err != nil || len(one.Started) != 0 || len(one.Depth) != 1 || one.Depth[b.agents[1]] != 1 {
		b.Errorf("one shard: %+v, %v", one, err)
	}
	// A new owner finishes under the epoch of the row, with its own lease.
	b.leases = b.acquire(tasks.Owner{ID: b.me.ID, Addr: b.me.Addr}, nil)
	f := b.finish(0, run.ID, 1, func(f *tasks.Finish) { f.Epoch = run.Epoch })
	sameIDs(b, "finished by the new owner", b.turn(tasks.Turn{Finishes: []tasks.Finish{f}}).Finished, run.ID)
}

func testFind(b *bench) {
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Minute) }
	ids := b.put(b.insert(0), b.insert(1, started), b.insert(2, later))
	for i, id := range ids {
		r, err := b.e.Find(b.ctx, id)
		if err != nil {
			b.Fatalf("find %d: %v", i, err)
		}
		isStarted := i == 1
		if r.ID != id || r.Agent != b.agents[i] || r.Priority != tasks.DefaultPriority || r.Later != (i == 2) ||
			r.StartedAt.IsZero() == isStarted || (r.Epoch != 0) != isStarted || (r.Attempt == 1) != isStarted {
			b.Errorf("find %d: %+v", i, r)
		}
	}
}

func (b *bench) list(f tasks.Filter) []tasks.ID {
	b.Helper()
	got, err := b.e.Tasks(b.ctx, f)
	if err != nil {
		b.Fatalf("list %+v: %v", f, err)
	}
	var ids []tasks.ID
	for _, t := range got {
		ids = append(ids, t.ID)
	}
	return ids
}

func testLists(b *bench) {
	kind := func(k string) func(*tasks.Insert) { return func(x *tasks.Insert) { x.Kind = k } }
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Minute) }
	ids := b.put(
		b.insert(0), b.insert(0, started), b.insert(1, kind("cmd.run"), started),
		b.insert(1, later), b.insert(2, ago), b.insert(2, started, kind("cmd.run")), b.insert(2),
	)
	b.turn(tasks.Turn{Finishes: []tasks.Finish{
		b.finish(1, ids[2], 1, func(f *tasks.Finish) {
			f.Ending = tasks.Ending{Outcome: tasks.Failed, Reason: "exit_code", Detail: "3."}
		}),
		b.finish(2, ids[5], 1),
	}})
	pick := func(at ...int) (out []tasks.ID) {
		for _, i := range at {
			out = append(out, ids[i])
		}
		return out
	}
	now := time.Now()
	for name, c := range map[string]struct {
		f    tasks.Filter
		want []tasks.ID
	}{
		"all, newest first":       {tasks.Filter{}, pick(6, 5, 4, 3, 2, 1, 0)},
		"all, oldest first":       {tasks.Filter{Ascending: true}, pick(0, 1, 2, 3, 4, 5, 6)},
		"new":                     {tasks.Filter{States: []tasks.State{tasks.StateNew}}, pick(6, 4, 3, 0)},
		"waiting":                 {tasks.Filter{States: []tasks.State{tasks.StateWaiting}}, pick(1)},
		"completed":               {tasks.Filter{States: []tasks.State{tasks.StateCompleted}}, pick(5, 2)},
		"new or waiting":          {tasks.Filter{States: []tasks.State{tasks.StateNew, tasks.StateWaiting}, Ascending: true}, pick(0, 1, 3, 4, 6)},
		"waiting or completed":    {tasks.Filter{States: []tasks.State{tasks.StateWaiting, tasks.StateCompleted}}, pick(5, 2, 1)},
		"failed":                  {tasks.Filter{Outcomes: []tasks.Outcome{tasks.Failed}}, pick(2)},
		"succeeded or unknown":    {tasks.Filter{Outcomes: []tasks.Outcome{tasks.Succeeded, tasks.Unknown}}, pick(5)},
		"failed but new":          {tasks.Filter{States: []tasks.State{tasks.StateNew}, Outcomes: []tasks.Outcome{tasks.Failed}}, nil},
		"one agent":               {tasks.Filter{Agents: []tasks.AgentNum{b.agents[1]}}, pick(3, 2)},
		"two agents":              {tasks.Filter{Agents: []tasks.AgentNum{b.agents[0], b.agents[1]}}, pick(3, 2, 1, 0)},
		"agent and state":         {tasks.Filter{Agents: []tasks.AgentNum{b.agents[0]}, States: []tasks.State{tasks.StateWaiting}}, pick(1)},
		"kind":                    {tasks.Filter{Kinds: []string{"cmd.run"}}, pick(5, 2)},
		"kind and outcome":        {tasks.Filter{Kinds: []string{"cmd.run"}, Outcomes: []tasks.Outcome{tasks.Failed}}, pick(2)},
		"created after":           {tasks.Filter{CreatedAfter: now.Add(-10 * time.Minute), Agents: []tasks.AgentNum{b.agents[2]}}, pick(6, 5)},
		"created before":          {tasks.Filter{CreatedBefore: now.Add(-10 * time.Minute)}, pick(4)},
		"label":                   {tasks.Filter{Labels: map[string]string{"site": "g"}}, pick(6, 5, 4)},
		"two labels":              {tasks.Filter{Labels: map[string]string{"site": "b", "tier": "edge"}}, pick(3, 2)},
		"unknown label":           {tasks.Filter{Labels: map[string]string{"site": "x"}}, nil},
		"query by agent name":     {tasks.Filter{Query: "gam"}, pick(6, 5, 4)},
		"query by kind":           {tasks.Filter{Query: "cmd"}, pick(5, 2)},
		"query by id":             {tasks.Filter{Query: ids[3].String()}, pick(3)},
		"query is no pattern":     {tasks.Filter{Query: "%"}, nil},
		"query never in args":     {tasks.Filter{Query: `{"n`}, nil},
		"limit":                   {tasks.Filter{Limit: 2}, pick(6, 5)},
		"cursor, newest first":    {tasks.Filter{After: ids[5], Limit: 2}, pick(4, 3)},
		"cursor, oldest first":    {tasks.Filter{After: ids[1], Ascending: true, Limit: 2}, pick(2, 3)},
		"cursor with state":       {tasks.Filter{After: ids[4], States: []tasks.State{tasks.StateNew}}, pick(3, 0)},
		"cursor at the end":       {tasks.Filter{After: ids[0]}, nil},
		"agent, cursor, up":       {tasks.Filter{Agents: []tasks.AgentNum{b.agents[2]}, After: ids[4], Ascending: true}, pick(5, 6)},
		"completed, cursor, up":   {tasks.Filter{States: []tasks.State{tasks.StateCompleted}, After: ids[2], Ascending: true}, pick(5)},
		"outcome, cursor":         {tasks.Filter{Outcomes: []tasks.Outcome{tasks.Failed, tasks.Succeeded}, After: ids[5]}, pick(2)},
		"several queries at odds": {tasks.Filter{Query: "gam", Kinds: []string{"core.echo"}, States: []tasks.State{tasks.StateNew}}, pick(6, 4)},
	} {
		if got := b.list(c.f); !slices.Equal(got, c.want) {
			b.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
	got, err := b.e.Tasks(b.ctx, tasks.Filter{Limit: 3, States: []tasks.State{tasks.StateCompleted}})
	if err != nil || len(got) != 2 || got[0].Agent.Name != "gamma" || got[0].Agent.ID != b.ids[2] || got[1].Ending.Reason != "exit_code" {
		b.Errorf("a page shows %+v, %v", got, err)
	}
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

func testPoints(b *bench) {
	at := time.Now().UTC().Truncate(time.Minute)
	p := func(name string, ago time.Duration, v string) tasks.Point {
		return tasks.Point{Name: name, At: at.Add(-ago), Value: json.RawMessage(v)}
	}
	all := []tasks.Point{p("a", 2*time.Minute, `{"n":1}`), p("a", time.Minute, `{"n":2}`), p("b", 0, `3`)}
	for range 2 {
		if err := b.e.SavePoints(b.ctx, all); err != nil {
			b.Fatal(err)
		}
	}
	if err := b.e.SavePoints(b.ctx, []tasks.Point{p("a", time.Minute, `{"n":4}`)}); err != nil {
		b.Fatal(err)
	}
	got, err := b.e.Points(b.ctx, "a", at.Add(-time.Hour))
	if err != nil || len(got) != 2 || !got[0].At.Equal(all[0].At) || string(got[1].Value) != `{"n":4}` {
		b.Errorf("points: %v, %v", got, err)
	}
	if got, err := b.e.Points(b.ctx, "a", at.Add(-90*time.Second)); err != nil || len(got) != 1 {
		b.Errorf("points since: %v, %v", got, err)
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

func testNoTask(b *bench) {
	id := b.id()
	if _, err := b.e.Task(b.ctx, id); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("task: %v", err)
	}
	if _, err := b.e.Find(b.ctx, id); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("find: %v", err)
	}
	done := b.put(b.insert(0, started))[0]
	b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, done, 1)}})
	if _, err := b.e.Find(b.ctx, done); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("find of a completed task: %v", err)
	}
}

func testHardStrings(b *bench) {
	hard := "a'b\"c\\d{e},f%_ \u2028 é 日本 \U0001F9EA $1 --"
	args, err := json.Marshal(map[string]string{"s": hard, "nul": "\x00"})
	if err != nil {
		b.Fatal(err)
	}
	x := b.insert(0, started, func(x *tasks.Insert) { x.Args, x.Actor, x.Kind = string(args), hard, hard })
	b.put(x)
	ending := tasks.Ending{Outcome: tasks.Failed, Reason: hard, Detail: hard, Result: args}
	b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, x.ID, 1, func(f *tasks.Finish) { f.Ending = ending })}})
	got := b.task(x.ID)
	if string(got.Args) != x.Args || got.Actor != hard || got.Kind != hard {
		b.Errorf("read back %+v", got)
	}
	if d := cmp.Diff(ending, got.Ending, cmpopts.EquateEmpty()); d != "" {
		b.Errorf("ending (-want +got):\n%s", d)
	}
}

func testContext(b *bench) {
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	x := b.insert(0)
	t := tasks.Turn{Owner: b.me.ID, Leases: slices.Collect(maps.Values(b.leases)), Inserts: []tasks.Insert{x}}
	if _, err := b.e.Turn(ctx, &t); err == nil {
		b.Error("a turn with an ended context succeeded")
	}
	if _, err := b.e.Tasks(ctx, tasks.Filter{}); err == nil {
		b.Error("a list with an ended context succeeded")
	}
	if _, err := b.e.Task(b.ctx, x.ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("a turn that was never begun wrote: %v", err)
	}
}
