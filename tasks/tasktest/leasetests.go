package tasktest

import (
	"errors"
	"maps"
	"slices"
	"time"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"

	"github.com/google/go-cmp/cmp"
)

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
	if held := owners.Leases; err != nil || len(held) != tasks.NumShards || held[0].Owner != b.me.ID || held[0].Addr != b.me.Addr ||
		held[0].Left <= 0 || held[0].Left > tasks.LeaseTerm {
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

// Cases Q29.
func testExpiry(b *bench) {
	if b.e.ExpireLeases == nil {
		b.Skip("this store cannot expire leases at will")
	}
	b.e.ExpireLeases()
	b.fenced(b.me, b.leases)
	if owners, err := b.e.Owners(b.ctx); err != nil || len(owners.Leases) != tasks.NumShards || owners.Leases[0].Left > 0 {
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
