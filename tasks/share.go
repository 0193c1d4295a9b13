package tasks

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"
	"uuid"
)

// freeFor is how long a shard that somebody gave back may lie there for a
// controller that has less than its share; then whoever sees it takes it.
const freeFor = 2 * RenewEvery

// expiryLag is how long after the end of another's lease it is looked for.
const expiryLag = 20 * time.Millisecond

// share looks who holds what and brings this controller's part to its fair
// size: each of the controllers that live shall hold as many shards as any
// other. What a dead one held is taken by whoever sees it first, whatever its
// part: fairness can wait, tasks cannot.
func (k *keeper) share(ctx context.Context) error {
	asked := time.Now()
	o, err := k.m.cfg.Store.Owners(ctx)
	if err != nil {
		return err
	}
	k.m.routes.keep(o, asked)
	want, fair := k.wanted(o)
	if len(want) > 0 {
		return k.acquire(ctx, want)
	}
	if !k.hasAcquired() {
		return k.acquire(ctx, nil) // everything is in good hands; that is an answer too
	}
	if over := k.surplus(o, fair); len(over) > 0 {
		k.m.log.Info("shards handed to another controller", "count", len(over))
		return k.giveBack(ctx, over)
	}
	return nil
}

// wanted gives the shards to take now, and how many are a fair part.
func (k *keeper) wanted(o Owners) (want []Shard, fair int) {
	now, me := time.Now(), k.m.cfg.Owner.ID
	k.mu.Lock()
	mine := make(map[Shard]bool, len(k.held))
	for s := range k.held {
		mine[s] = true
	}
	k.mu.Unlock()
	alive := map[uuid.UUID]bool{me: true}
	var owned [NumShards]bool
	for _, l := range o.Leases {
		owned[l.Shard] = true
		dead := l.Left <= 0 || l.Owner == me || slices.Contains(k.m.cfg.Former, l.Owner)
		switch {
		case mine[l.Shard]:
		case dead:
			want = append(want, l.Shard)
		default:
			alive[l.Owner] = true
			k.next = min(k.next, l.Left+expiryLag)
		}
	}
	n := max(len(alive), o.Alive)
	if k.m.leaving.Load() && max(n, o.Alive+1) > 1 { // this one is not registered any more
		return nil, 0
	}
	fair = (NumShards + n - 1) / n
	room := fair - len(mine) - len(want)
	free := map[Shard]time.Time{}
	for _, i := range rand.Perm(NumShards) {
		s := Shard(i)
		if owned[s] || mine[s] {
			continue
		}
		since, seen := k.free[s]
		if !seen {
			since = now
		}
		free[s] = since
		if room > 0 || now.Sub(since) >= freeFor {
			want = append(want, s)
			room--
		}
	}
	k.free = free
	return want, fair
}

// surplus gives what this controller holds above its fair part, once every
// other shard has found an owner.
func (k *keeper) surplus(o Owners, fair int) []Lease {
	held := k.leases()
	if len(k.free) > 0 && !k.m.leaving.Load() || len(held) <= fair {
		return nil
	}
	slices.SortFunc(held, func(a, b Lease) int { return int(b.Shard) - int(a.Shard) })
	return held[:len(held)-fair]
}

// giveBack ends the work on shards and gives them to whoever takes them. The
// loops let go first, so that no turn names a lease that is gone.
func (k *keeper) giveBack(ctx context.Context, leases []Lease) error {
	k.mu.Lock()
	for _, l := range leases {
		delete(k.held, l.Shard)
	}
	k.mu.Unlock()
	for _, l := range leases {
		done := make(chan struct{})
		k.m.loopOf(l.Shard).post(shardLeft{l.Shard, done})
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := k.m.cfg.Store.Release(ctx, k.m.cfg.Owner, leases); err != nil {
		return err
	}
	k.m.cfg.Released()
	return nil
}

// shardLeft lets go of a shard that is given back.
type shardLeft struct {
	shard Shard
	done  chan struct{}
}

func (e shardLeft) apply(l *loop) {
	shardLost{e.shard}.apply(l)
	l.out.after(func() { close(e.done) })
}

// LookAtShards lets the Manager look at once who owns what: another controller
// has given shards back. It is a hint; the next renewal sees the same.
func (m *Manager) LookAtShards() { m.keeper.ask() }
