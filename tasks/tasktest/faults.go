package tasktest

import (
	"context"
	"errors"
	"sync"
	"time"

	"headgate/tasks"
)

// ErrBroken is what a broken store answers.
var ErrBroken = errors.New("tasktest: the store is broken")

// Fault is what happens to one turn.
type Fault int

// The faults of a turn.
const (
	None          Fault = iota
	Broken              // nothing is written
	UnknownDone         // written, but the answer is lost
	UnknownUndone       // not written, and nobody knows
	Fenced              // refused as if the lease were lost
)

// Faults is a Store whose calls fail on demand.
type Faults struct {
	*Store
	mu      sync.Mutex
	turn    func(t *tasks.Turn) Fault
	poison  func(t *tasks.Turn) error
	down    bool
	renews  bool // Renew fails
	settles int  // Settle fails as often
	turns   int
}

// NewFaults wraps a Store; nothing fails at first.
func NewFaults(s *Store) *Faults { return &Faults{Store: s} }

// OnTurn decides about each turn; nil = no faults.
func (f *Faults) OnTurn(decide func(t *tasks.Turn) Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.turn = decide
}

// Poison decides which turns are refused for their data.
func (f *Faults) Poison(decide func(t *tasks.Turn) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.poison = decide
}

// Down makes every call of the queue, of leases and of reads fail.
func (f *Faults) Down(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = down
}

// FailRenews makes leases impossible to renew, and nothing else.
func (f *Faults) FailRenews(fail bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.renews = fail
}

// FailSettles makes the next n calls of Settle fail.
func (f *Faults) FailSettles(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.settles = n
}

// Turns counts the turns that were tried.
func (f *Faults) Turns() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.turns
}

func (f *Faults) broken() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down {
		return ErrBroken
	}
	return nil
}

// Turn implements tasks.Queue.
func (f *Faults) Turn(ctx context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	f.mu.Lock()
	f.turns++
	decide, poison, down := f.turn, f.poison, f.down
	f.mu.Unlock()
	if poison != nil {
		if err := poison(t); err != nil {
			return nil, err
		}
	}
	fault := None
	if decide != nil {
		fault = decide(t)
	}
	switch {
	case down || fault == Broken:
		return nil, ErrBroken
	case fault == Fenced:
		return nil, tasks.ErrFenced
	case fault == UnknownUndone:
		r, err := f.DryRun(t)
		if err != nil {
			return nil, err
		}
		return nil, &tasks.UnknownError{Result: r, Err: ErrBroken}
	}
	r, err := f.Store.Turn(ctx, t)
	if err == nil && fault == UnknownDone {
		return nil, &tasks.UnknownError{Result: r, Err: ErrBroken}
	}
	return r, err
}

// Settle implements tasks.Queue.
func (f *Faults) Settle(ctx context.Context, t *tasks.Turn, r *tasks.TurnResult) (bool, error) {
	f.mu.Lock()
	fail := f.down || f.settles > 0
	if f.settles > 0 {
		f.settles--
	}
	f.mu.Unlock()
	if fail {
		return false, ErrBroken
	}
	return f.Store.Settle(ctx, t, r)
}

// TakeIDs implements tasks.Queue.
func (f *Faults) TakeIDs(ctx context.Context) (tasks.ID, error) {
	if err := f.broken(); err != nil {
		return 0, err
	}
	return f.Store.TakeIDs(ctx)
}

// Load implements tasks.Queue.
func (f *Faults) Load(ctx context.Context, shards []tasks.Shard) (*tasks.Loaded, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Load(ctx, shards)
}

// Refill implements tasks.Queue.
func (f *Faults) Refill(ctx context.Context, reqs []tasks.RefillRequest) ([]tasks.Queued, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Refill(ctx, reqs)
}

// Due implements tasks.Queue.
func (f *Faults) Due(ctx context.Context, shards []tasks.Shard, limit int) ([]tasks.DueTask, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Due(ctx, shards, limit)
}

// Removed implements tasks.Queue.
func (f *Faults) Removed(ctx context.Context, shards []tasks.Shard, within time.Duration) ([]tasks.Agent, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Removed(ctx, shards, within)
}

// Abandoned implements tasks.Queue.
func (f *Faults) Abandoned(ctx context.Context, agents []tasks.AgentNum, limit int) ([]tasks.Finish, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Abandoned(ctx, agents, limit)
}

// Alike implements tasks.Queue.
func (f *Faults) Alike(ctx context.Context, inserts []tasks.Insert) ([][]tasks.Like, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Alike(ctx, inserts)
}

// Renew implements tasks.Leases.
func (f *Faults) Renew(ctx context.Context, me tasks.Owner, held []tasks.Lease) ([]tasks.Lease, error) {
	f.mu.Lock()
	fail := f.down || f.renews
	f.mu.Unlock()
	if fail {
		return nil, ErrBroken
	}
	return f.Store.Renew(ctx, me, held)
}
