package tasktest

import (
	"context"
	"errors"
	"sync"
	"time"
	"uuid"

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
	frozen  chan struct{} // closed when it thaws; nil = not frozen
	ids     chan struct{} // closed when ids may be taken again; nil = they may
	watch   func(t *tasks.Turn, r *tasks.TurnResult, err error)
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

// Freeze stops every call where it is, before or after its effect, until Thaw:
// a process that was stopped between two instructions.
func (f *Faults) Freeze() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen == nil {
		f.frozen = make(chan struct{})
	}
}

// Thaw lets the calls go on.
func (f *Faults) Thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen != nil {
		close(f.frozen)
		f.frozen = nil
	}
}

// HoldIDs stops every call of TakeIDs until the function that it gives is called.
func (f *Faults) HoldIDs() (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	held := make(chan struct{})
	f.ids = held
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.ids = nil
		close(held)
	}
}

// OnCommit is told what becomes of each turn in the store, whatever its caller
// is told.
func (f *Faults) OnCommit(watch func(t *tasks.Turn, r *tasks.TurnResult, err error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watch = watch
}

// stand waits while frozen; it says whether it had to.
func (f *Faults) stand() bool {
	f.mu.Lock()
	c := f.frozen
	f.mu.Unlock()
	if c == nil {
		return false
	}
	<-c
	return true
}

// Turns counts the turns that were tried.
func (f *Faults) Turns() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.turns
}

func (f *Faults) broken() error {
	f.stand()
	return f.failing()
}

func (f *Faults) failing() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down {
		return ErrBroken
	}
	return nil
}

// Turn implements tasks.Queue.
func (f *Faults) Turn(ctx context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	if f.stand() {
		ctx = context.WithoutCancel(ctx) // the statement was on its way already
	}
	defer f.stand()
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
	f.mu.Lock()
	watch := f.watch
	f.mu.Unlock()
	r, err := f.watched(ctx, t, watch)
	if err == nil && fault == UnknownDone {
		return nil, &tasks.UnknownError{Result: r, Err: ErrBroken}
	}
	return r, err
}

// watched writes a turn. Who watches is told under the lock of the store, so
// that turns of several controllers are told in the order of their commits.
func (f *Faults) watched(ctx context.Context, t *tasks.Turn, watch func(*tasks.Turn, *tasks.TurnResult, error)) (*tasks.TurnResult, error) {
	if watch == nil {
		return f.Store.Turn(ctx, t)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f.Store.mu.Lock()
	defer f.Store.mu.Unlock()
	r, err := f.Store.turn(t, true)
	watch(t, r, err)
	return r, err
}

// Settle implements tasks.Queue.
func (f *Faults) Settle(ctx context.Context, t *tasks.Turn, r *tasks.TurnResult) (bool, error) {
	f.stand()
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
	f.mu.Lock()
	held := f.ids
	f.mu.Unlock()
	if held != nil {
		<-held
	}
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
	f.stand()
	f.mu.Lock()
	fail := f.down || f.renews
	f.mu.Unlock()
	if fail {
		return nil, ErrBroken
	}
	return f.Store.Renew(ctx, me, held)
}

// Acquire implements tasks.Leases.
func (f *Faults) Acquire(ctx context.Context, me tasks.Owner, former []uuid.UUID, shards []tasks.Shard) ([]tasks.Lease, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Acquire(ctx, me, former, shards)
}

// Overdue implements tasks.Queue.
func (f *Faults) Overdue(ctx context.Context, shards []tasks.Shard, limit int) ([]tasks.Finish, error) {
	if err := f.broken(); err != nil {
		return nil, err
	}
	return f.Store.Overdue(ctx, shards, limit)
}
