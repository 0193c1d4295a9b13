package tasktest

import (
	"errors"
	"slices"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
)

// retryKeyOf makes the key under which everybody's retry of a task is stored.
func retryKeyOf(id tasks.ID) *tasks.Idempotency {
	return &tasks.Idempotency{Route: tasks.RetryRoute, Key: id.String(), Hash: [32]byte{1}, Lasting: true}
}

func testLastingKey(b *bench) {
	first := b.put(b.insert(0, started))[0]
	b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, first, 1)}})
	if got := b.task(first).RetriedAs; got != 0 {
		b.Fatalf("a task that nobody has retried was retried as %d", got)
	}
	retry := func(x *tasks.Insert) { x.RetryOf, x.Key = first, retryKeyOf(first) }
	short := &tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k", Hash: [32]byte{2}}
	again := b.insert(0, retry)
	plain := b.insert(1, func(x *tasks.Insert) { x.Key = short })
	b.put(again, plain)
	if got := b.task(first); got.RetriedAs != again.ID || got.State != tasks.StateCompleted {
		b.Errorf("the task that was retried: %+v, want it retried as %d", got, again.ID)
	}
	if got := b.task(again.ID); got.RetryOf != first || got.RetriedAs != 0 {
		b.Errorf("the retry: %+v", got)
	}
	b.e.ExpireKeys()
	third, free := b.insert(0, retry), b.insert(1, func(x *tasks.Insert) { x.Key = short })
	sameIDs(b, "inserted after the keys' time", b.turn(tasks.Turn{Inserts: []tasks.Insert{third, free}}).Inserted, free.ID)
	if _, err := b.e.Task(b.ctx, third.ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("a second retry left a task: %v", err)
	}
	rows, err := b.e.Replay(b.ctx, *retryKeyOf(first))
	if err != nil || len(rows) != 1 || rows[0].ID != again.ID {
		b.Errorf("the key of the retry: %v, %v", rows, err)
	}
}

func testCancelStays(b *bench) {
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Minute) }
	ids := b.put(b.insert(0, started), b.insert(0), b.insert(0, later), b.insert(1, started), b.insert(2, started))
	mark := func(agent int, id tasks.ID, actor string) tasks.CancelMark {
		return tasks.CancelMark{Agent: b.agents[agent], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: id, Attempt: 1}, Actor: actor}
	}
	b.turn(tasks.Turn{Cancels: []tasks.CancelMark{mark(0, ids[0], "user:a"), mark(2, ids[4], "user:c")}})
	asked := b.task(ids[0]).CancelRequestedAt
	if got := b.task(ids[0]); asked.IsZero() || got.CancelActor != "user:a" {
		b.Fatalf("a marked task: %+v", got)
	}
	b.turn(tasks.Turn{Cancels: []tasks.CancelMark{mark(0, ids[0], "user:b")}}) // the first one stays
	l, err := b.e.Load(b.ctx, allShards())
	if err != nil || !slices.ContainsFunc(l.Started, func(s tasks.Started) bool {
		return s.ID == ids[0] && s.CancelActor == "user:a" && s.CancelRequestedAt.Equal(asked)
	}) {
		b.Errorf("load gives %+v, %v", l, err)
	}
	ended := func(f *tasks.Finish) { f.Ending, f.CancelActor = tasks.Ending{Outcome: tasks.Cancelled}, "user:d" }
	sameIDs(b, "ended", b.turn(tasks.Turn{
		Finishes: []tasks.Finish{
			b.finish(0, ids[0], 1), b.finish(0, ids[1], 0, ended), b.finish(1, ids[3], 1),
			b.finish(0, ids[2], 0, ended, func(f *tasks.Finish) { f.Later = true }),
		},
		Requeues: []tasks.Requeue{b.requeue(2, ids[4], 1, time.Time{})},
	}).Finished, ids[:4]...)
	if got := b.state(ids[0], tasks.StateCompleted, 1); !got.CancelRequestedAt.Equal(asked) || got.CancelActor != "user:a" {
		b.Errorf("who asked and when is lost with the end: %+v, asked at %v", got, asked)
	}
	for _, id := range ids[1:3] {
		if got := b.state(id, tasks.StateCompleted, 0); !got.CancelRequestedAt.Equal(got.CompletedAt) || got.CancelActor != "user:d" {
			b.Errorf("ended before it had started: %+v", got)
		}
	}
	for _, id := range ids[3:] {
		if got := b.task(id); !got.CancelRequestedAt.IsZero() || got.CancelActor != "" {
			b.Errorf("nobody asks for the end of task %d: %+v", id, got)
		}
	}
}

func testRemoved(b *bench) {
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Hour) }
	ids := b.put(b.insert(0, started), b.insert(0), b.insert(0), b.insert(0, later), b.insert(1), b.insert(2, later))
	look := func(within time.Duration, want ...int) {
		b.Helper()
		got, err := b.e.Removed(b.ctx, allShards(), within)
		if err != nil || len(got) != len(want) {
			b.Fatalf("removed within %v: %+v, %v; want %d", within, got, err, len(want))
		}
		for i, n := range want {
			if a := got[i]; a.Num != b.agents[n] || a.ID != b.ids[n] || a.Name == "" || !a.Removed {
				b.Errorf("removed within %v: %+v", within, a)
			}
		}
	}
	look(0)
	b.e.RemoveAgent(b.agents[0])
	b.e.RemoveAgent(b.agents[2])
	look(0, 0, 2)
	look(time.Hour, 0, 2)
	look(time.Microsecond)
	if got, err := b.e.Removed(b.ctx, []tasks.Shard{tasks.ShardOf(b.ids[1])}, 0); err != nil || len(got) != 0 {
		b.Errorf("removed agents of another shard: %+v, %v", got, err)
	}
	open, err := b.e.Abandoned(b.ctx, []tasks.AgentNum{b.agents[0], b.agents[2]}, 100)
	if err != nil {
		b.Fatal(err)
	}
	var found []tasks.ID
	for i := range open {
		found = append(found, open[i].ID)
		open[i].Ending = tasks.Ending{Outcome: tasks.Cancelled, Reason: tasks.ReasonAgentRemoved}
	}
	sameIDs(b, "abandoned", found, ids[1], ids[2], ids[3], ids[5])
	if some, err := b.e.Abandoned(b.ctx, []tasks.AgentNum{b.agents[0], b.agents[2]}, 2); err != nil || len(some) != 2 {
		b.Errorf("a page of them: %+v, %v", some, err)
	}
	sameIDs(b, "ended", b.turn(tasks.Turn{Finishes: open}).Finished, found...)
	look(0, 0) // it still has a started one
	b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, ids[0], 1)}})
	look(0)
}

func testAlike(b *bench) {
	same := []tasks.Insert{b.insert(0), b.insert(0)}
	other := []tasks.Insert{
		b.insert(0, started),
		b.insert(1),
		b.insert(0, func(x *tasks.Insert) { x.Args = `{"n":1}` }),
		b.insert(0, func(x *tasks.Insert) { x.Kind = kinds.Ping }),
		b.insert(0, func(x *tasks.Insert) { x.Delivery = kinds.DeliveryOnce }),
		b.insert(0, func(x *tasks.Insert) { x.Priority++ }),
		b.insert(0, func(x *tasks.Insert) { x.Timeout += time.Second }),
		b.insert(0, func(x *tasks.Insert) { x.ExpiresAt = x.ExpiresAt.Add(time.Hour) }),
		b.insert(0, func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Minute) }),
	}
	b.put(slices.Concat(same, other)...)
	newer := b.insert(0, func(x *tasks.Insert) { x.ExpiresAt = same[1].ExpiresAt })
	got, err := b.e.Alike(b.ctx, []tasks.Insert{b.insert(2), newer, b.insert(1)})
	if err != nil || len(got) != 3 {
		b.Fatalf("alike: %v, %v", got, err)
	}
	var found []tasks.ID
	for i, r := range got[1] {
		if behind := 6 - i; r.Attempt != 0 || r.Behind != behind { // all but the started, the urgent and the later one
			b.Errorf("alike gives %+v, want %d behind it", r, behind)
		}
		found = append(found, r.ID)
	}
	inOrder(b, "alike", found, same[0].ID, same[1].ID)
	if len(got[0]) != 0 || len(got[2]) != 1 || got[2][0].ID != other[1].ID {
		b.Errorf("alike of other agents: %v", got)
	}
}

func testReplaced(b *bench) {
	older := b.put(b.insert(0), b.insert(0))
	newer := b.insert(0)
	replace := func(id tasks.ID) tasks.Finish {
		return b.finish(0, id, 0, func(f *tasks.Finish) {
			f.Ending = tasks.Ending{Outcome: tasks.Cancelled, Reason: tasks.ReasonSuperseded, Detail: "by " + newer.ID.String()}
		})
	}
	b.turn(tasks.Turn{Claims: []tasks.Claim{b.claim(0, older[1], 1)}})
	r := b.turn(tasks.Turn{Inserts: []tasks.Insert{newer}, Finishes: []tasks.Finish{replace(older[0]), replace(older[1])}})
	sameIDs(b, "inserted", r.Inserted, newer.ID)
	sameIDs(b, "replaced", r.Finished, older[0]) // the other one has started meanwhile
	if got := b.state(older[0], tasks.StateCompleted, 0); got.Ending.Reason != tasks.ReasonSuperseded {
		b.Errorf("the replaced task: %+v", got.Ending)
	}
	b.state(older[1], tasks.StateWaiting, 1)
	inOrder(b, "what waits", b.refill(0, 10), newer.ID)
}

func testPosition(b *bench) {
	urgent := b.insert(0, func(x *tasks.Insert) { x.Priority = 1 })
	ids := b.put(b.insert(0, started), b.insert(0), b.insert(0), urgent, b.insert(1), b.insert(0))
	later := b.insert(0, func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Hour) })
	b.put(later)
	for i, want := range []int{0, 2, 3, 1, 1, 4} {
		agent, priority := b.agents[0], tasks.DefaultPriority
		if i == 4 {
			agent = b.agents[1]
		}
		if i == 3 {
			priority = 1
		}
		if got, err := b.e.Position(b.ctx, agent, priority, ids[i]); err != nil || got != want {
			b.Errorf("task %d stands at %d, want %d; %v", i, got, want, err)
		}
	}
	for _, id := range []tasks.ID{later.ID, 999_999} {
		if got, err := b.e.Position(b.ctx, b.agents[0], tasks.DefaultPriority, id); err != nil || got != 0 {
			b.Errorf("task %d stands at %d, want nowhere; %v", id, got, err)
		}
	}
}
