package tasks

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// keeper takes free shards, renews what is held, and knows until when that
// may be trusted without asking the database.
type keeper struct {
	m    *Manager
	wake chan struct{} // asks for a renewal now

	mu       sync.Mutex
	held     map[Shard]Lease
	trust    time.Time // monotonic; no turn and no dispatch after it
	acquired bool      // Acquire has answered at least once
	lastErr  error

	// Used by the goroutine of run alone.
	free map[Shard]time.Time // given back by others, and seen so since
	next time.Duration       // until another controller's lease ends, if that is soon
}

// run renews and acquires each RenewEvery, with a little jitter so that
// several controllers do not fall into step; and when a lease of another one,
// which has fallen silent, ends.
func (k *keeper) run(ctx context.Context) {
	for {
		k.round(ctx)
		t := time.NewTimer(min(RenewEvery-rand.N(RenewEvery/10), k.next))
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-k.wake:
			t.Stop()
		case <-t.C:
		}
	}
}

// ask lets the next round begin now.
func (k *keeper) ask() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *keeper) round(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, LeaseTerm-LeaseMargin)
	defer cancel()
	k.next = RenewEvery
	err := k.renew(ctx)
	if err == nil {
		err = k.share(ctx)
	}
	k.mu.Lock()
	changed := (err == nil) != (k.lastErr == nil)
	k.lastErr = err
	k.mu.Unlock()
	switch {
	case !changed:
	case err != nil && ctx.Err() == nil:
		k.m.log.Warn("leases cannot be renewed", "err", err)
	case err == nil:
		k.m.log.Info("leases are renewed again")
	}
}

func (k *keeper) leases() []Lease {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Values(k.held))
}

// renew prolongs what is held; what is missing in the answer is lost.
func (k *keeper) renew(ctx context.Context) error {
	held := k.leases()
	if len(held) == 0 {
		return nil
	}
	begin := time.Now()
	still, err := k.m.cfg.Store.Renew(ctx, k.m.cfg.Owner, held)
	if err != nil {
		return fmt.Errorf("renew leases: %w", err)
	}
	k.mu.Lock()
	k.trust = begin.Add(LeaseTerm - LeaseMargin)
	var gone []Shard
	for _, h := range held {
		if !slices.ContainsFunc(still, func(l Lease) bool { return l.Shard == h.Shard && l.Epoch == h.Epoch }) {
			delete(k.held, h.Shard)
			gone = append(gone, h.Shard)
		}
	}
	k.mu.Unlock()
	if len(gone) > 0 {
		k.m.log.Warn("shards lost to another controller", "shards", gone)
	}
	for _, s := range gone {
		k.m.loopOf(s).post(shardLost{s})
	}
	for _, l := range k.m.loops {
		l.wake() // turns may have waited for trust
	}
	return nil
}

// acquire takes those of the shards that are free.
func (k *keeper) acquire(ctx context.Context, want []Shard) error {
	k.mu.Lock()
	none := len(k.held) == 0
	k.mu.Unlock()
	begin := time.Now()
	got, err := k.m.cfg.Store.Acquire(ctx, k.m.cfg.Owner, k.m.cfg.Former, want)
	if err != nil {
		return fmt.Errorf("acquire leases: %w", err)
	}
	k.mu.Lock()
	if none {
		k.trust = begin.Add(LeaseTerm - LeaseMargin)
		k.held = map[Shard]Lease{}
	}
	for _, l := range got {
		k.held[l.Shard] = l
	}
	k.acquired = true
	k.mu.Unlock()
	if len(got) > 0 {
		k.m.log.Info("shards taken", "count", len(got))
	}
	for _, l := range k.m.loops {
		l.gain(got)
	}
	return nil
}

// trusted says whether the leases may still be relied on.
func (k *keeper) trusted(now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return now.Before(k.trust)
}

// hasAcquired says whether the store has answered at least once.
func (k *keeper) hasAcquired() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.acquired
}

// unmet gives the condition shards of /readyz.
func (k *keeper) unmet() (Condition, bool) {
	k.mu.Lock()
	held, acquired, trust := len(k.held), k.acquired, k.trust
	k.mu.Unlock()
	ready := 0
	for _, l := range k.m.loops {
		ready += len(l.readyLeases())
	}
	switch {
	case !acquired:
		return Condition{"shards", "No shard was asked for successfully yet."}, true
	case held > 0 && !time.Now().Before(trust):
		return Condition{"shards", fmt.Sprintf("The leases of %d shards could not be renewed in time; the database does not answer.", held)}, true
	case ready < held:
		return Condition{"shards", fmt.Sprintf("%d of %d shards are loaded.", ready, held)}, true
	}
	return Condition{}, false
}

// Held gives the shards that this controller holds now, in order.
func (m *Manager) Held() []Lease {
	held := m.keeper.leases()
	slices.SortFunc(held, func(a, b Lease) int { return int(a.Shard) - int(b.Shard) })
	return held
}

// release gives everything back, so that others need not wait for expiry.
func (k *keeper) release() {
	held := k.leases()
	if len(held) == 0 {
		return
	}
	const wait = 2 * time.Second // a clean stop must not hang on a dead database
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	if err := k.m.cfg.Store.Release(ctx, k.m.cfg.Owner, held); err != nil {
		k.m.log.Warn("shards could not be given back; they expire by themselves", "err", err)
	} else {
		k.m.cfg.Released()
	}
	k.mu.Lock()
	k.held, k.trust = nil, time.Time{}
	k.mu.Unlock()
}
