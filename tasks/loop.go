package tasks

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// loop is one write loop. Its goroutine alone changes what it holds: it takes
// whatever has arrived, makes a turn of it, commits, and only then acts.
type loop struct {
	m   *Manager
	log *slog.Logger

	in     inbox
	signal chan struct{} // something has arrived
	deaf   atomic.Bool   // tests lose every wake-up

	swept   atomic.Bool  // the first sweep has ended
	owned   atomic.Bool  // Runner.Own was called after loading
	waiting atomic.Int64 // depth and later, for the other loops

	// mu guards what follows against readers (Explain, Stats). Only the
	// loop's goroutine writes, and it reads without the lock.
	mu     sync.Mutex
	shards map[Shard]*held
	agents map[AgentNum]*agent
	depth  int // tasks in state new, without those for later
	later  int
	// failing is since when the store does not work; zero = it does.
	failing time.Time

	// Used by the loop's goroutine alone.
	subs     []*submission   // taken from the inbox, not yet on disk
	ops      []*op           // everything else that wants to be written, in order of arrival
	pinned   map[ID]struct{} // unstarted tasks that one of ops is about
	dirty    []*agent        // may be able to start something
	removing map[AgentNum]*agent
	early    map[AgentNum]sessionUp // sessions of shards that are not loaded yet
	asked    time.Time              // when removed agents were last looked for; zero = look at all
	late     []Finish
	now      time.Time // of the pass under way
	turnNo   uint64
	nextTick time.Time
	again    bool // the sweep found full pages
	idless   bool // submissions wait for ids that another loop takes
	inDoubt  bool // stopped while a commit was unknown
	out      effects
	backoff  time.Duration
	plan     plan
	buffer   Turn // the turn under way; its lists are used again
}

// held is a shard that this loop owns.
type held struct {
	lease Lease
	ready bool // loaded
	later int  // its part of loop.later
}

// inbox collects what arrives while the loop is busy.
type inbox struct {
	mu     sync.Mutex
	subs   []*submission
	events []event
}

// event is something that changes the loop's memory. apply runs on the loop's
// goroutine with mu held.
type event interface{ apply(l *loop) }

// retryMin and retryMax bound the pause after an error of the store.
const (
	retryMin = 20 * time.Millisecond
	retryMax = time.Second
)

func newLoop(m *Manager, n int) *loop {
	return &loop{
		m: m, log: m.log.With("loop", n), signal: make(chan struct{}, 1),
		shards: map[Shard]*held{}, agents: map[AgentNum]*agent{},
		pinned: map[ID]struct{}{}, removing: map[AgentNum]*agent{}, early: map[AgentNum]sessionUp{},
	}
}

// post hands an event over.
func (l *loop) post(e event) {
	l.in.mu.Lock()
	l.in.events = append(l.in.events, e)
	l.in.mu.Unlock()
	l.wake()
}

// submit hands submissions over.
func (l *loop) submit(subs ...*submission) {
	l.in.mu.Lock()
	l.in.subs = append(l.in.subs, subs...)
	l.in.mu.Unlock()
	l.wake()
}

// wake is a hint; a lost one costs at most the time to the next sweep.
func (l *loop) wake() {
	if l.deaf.Load() {
		return
	}
	select {
	case l.signal <- struct{}{}:
	default:
	}
}

// gain hands over the shards of this loop among what was acquired.
func (l *loop) gain(got []Lease) {
	var mine []Lease
	for _, lease := range got {
		if l.m.loopOf(lease.Shard) == l {
			mine = append(mine, lease)
		}
	}
	if len(mine) > 0 || !l.owned.Load() {
		l.post(shardsGained{mine})
	}
}

// run works until ctx ends, then answers everybody who still waits.
func (l *loop) run(ctx context.Context) {
	tick := time.NewTicker(l.m.cfg.Limits.SweepEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		more := l.pass(ctx)
		if more && l.backoff == 0 {
			continue
		}
		l.sleep(ctx, tick.C)
	}
	l.shutdown()
}

// sleep waits for a signal, the next sweep, or the end of a back-off.
func (l *loop) sleep(ctx context.Context, tick <-chan time.Time) {
	if l.backoff > 0 {
		t := time.NewTimer(l.backoff + rand.N(l.backoff))
		defer t.Stop()
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		return
	}
	select {
	case <-ctx.Done():
	case <-l.signal:
	case <-tick:
		l.nextTick = time.Time{}
	}
}

// pass does one round: arrivals, sweep if it is time, one turn, effects. It
// says whether there is more to do at once.
func (l *loop) pass(ctx context.Context) bool {
	subs, events := l.take()
	l.now = time.Now()
	l.mu.Lock()
	l.subs = append(l.subs, subs...)
	for _, e := range events {
		e.apply(l)
	}
	l.mu.Unlock()
	l.flush()

	err := l.load(ctx)
	if err == nil {
		err = l.flushLate(ctx)
	}
	if err == nil && (l.again || !l.now.Before(l.nextTick)) {
		err = l.sweep(ctx)
	}
	trusted := l.m.keeper.trusted(l.now)
	if err == nil && trusted {
		err = l.turn(ctx)
	}
	if err != nil || !trusted {
		l.dropWithdrawn()
	}
	l.failed(ctx, err)
	return trusted && (l.again || len(l.dirty) > 0 || len(l.ops) > 0 || len(l.subs) > 0 && !l.idless || len(l.removing) > 0)
}

// dropWithdrawn lets go of submissions whose submitters have left, so that
// they do not pile up while nothing can be stored.
func (l *loop) dropWithdrawn() {
	l.subs = slices.DeleteFunc(l.subs, func(s *submission) bool { return s.state.Load() == subWithdrawn })
}

func (l *loop) take() ([]*submission, []event) {
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	subs, events := l.in.subs, l.in.events
	l.in.subs, l.in.events = nil, nil
	return subs, events
}

// failed notes a failure of the store, or that it works again. The log says
// each change once.
func (l *loop) failed(ctx context.Context, err error) {
	switch {
	case err == nil && l.backoff > 0:
		l.backoff = 0
		l.setFailing(time.Time{})
		l.log.Info("the queue's store works again")
	case err == nil || ctx.Err() != nil:
	case l.backoff == 0:
		l.backoff = retryMin
		l.setFailing(time.Now())
		l.log.Warn("the queue's store does not work; trying again", "err", err)
	default:
		l.backoff = min(2*l.backoff, retryMax)
	}
}

func (l *loop) setFailing(since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failing = since
}

// storeContext bounds one call of the store.
func (l *loop) storeContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, l.m.cfg.Limits.StoreWait)
}

// turn makes, commits and applies one turn.
func (l *loop) turn(ctx context.Context) error {
	if err := l.fill(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	p := l.build()
	l.mu.Unlock()
	var err error
	if len(p.ops) > 0 {
		err = l.commit(ctx, p)
	}
	l.mu.Lock()
	l.now = time.Now()
	l.settle(p)
	l.mu.Unlock()
	l.flush()
	if err == ErrFenced { //nolint:errorlint // commit returns the bare value
		l.m.metrics.fenced.Inc()
		l.log.Warn("a turn was fenced: a lease is not ours any more")
		l.m.keeper.ask() // its answer says which shards are lost
	}
	return err
}

// load reads the shards that were gained and are not in memory yet.
func (l *loop) load(ctx context.Context) error {
	loaded := false
	for s, h := range l.shards {
		if h.ready {
			continue
		}
		if err := l.loadShard(ctx, s, h); err != nil {
			return err
		}
		loaded = true
	}
	if loaded || !l.owned.Load() && l.m.keeper.hasAcquired() {
		l.m.publishOwned()
	}
	return nil
}

func (l *loop) loadShard(ctx context.Context, s Shard, h *held) error {
	ctx, cancel := l.storeContext(ctx)
	defer cancel()
	loaded, err := l.m.cfg.Store.Load(ctx, []Shard{s})
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.later += loaded.Later
	h.later = loaded.Later
	for num, depth := range loaded.Depth {
		a := l.agent(num, s)
		a.depth, a.more = depth, depth > 0
		l.depth += depth
	}
	for _, st := range loaded.Started {
		a := l.agent(st.Agent, s)
		f := &flight{
			q: st.Queued, epoch: st.Epoch, startedAt: st.StartedAt, loaded: l.now,
			cancelAsked: earlier(st.CancelRequestedAt, l.now), markedAt: st.CancelRequestedAt, markedBy: st.CancelActor,
		}
		f.since = l.now.Add(-max(0, l.now.Sub(st.StartedAt)))
		a.flights = append(a.flights, f)
	}
	for _, a := range l.agents {
		if a.shard == s && a.info.Removed {
			l.removing[a.num] = a
		}
	}
	h.ready = true
	l.nextTick = time.Time{} // what is due here is looked at in this pass
	l.asked = time.Time{}    // and which of its agents were removed before
	l.m.ids.drop()           // an older owner may have used higher ids than ours
	for num, up := range l.early {
		if _, shard, _ := l.m.loopOfAgent(num); shard == s {
			delete(l.early, num)
			up.apply(l)
		}
	}
	l.counted()
	return nil
}

// readyLeases gives the leases of the shards that are loaded.
func (l *loop) readyLeases() []Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []Lease
	for _, h := range l.shards {
		if h.ready {
			all = append(all, h.lease)
		}
	}
	return all
}

// shardsGained brings leases; their rows are read before anything else.
type shardsGained struct{ leases []Lease }

func (e shardsGained) apply(l *loop) {
	for _, lease := range e.leases {
		l.forget(lease.Shard)
		l.shards[lease.Shard] = &held{lease: lease}
	}
}

// shardLost says that somebody else holds the shard.
type shardLost struct{ shard Shard }

func (e shardLost) apply(l *loop) {
	if _, ok := l.shards[e.shard]; !ok {
		return
	}
	l.forget(e.shard)
	delete(l.shards, e.shard)
	l.out.after(l.m.publishOwned)
}

// forget drops the memory of a shard. What still wanted to be written is
// dropped too: the agents keep their results until somebody has stored them.
func (l *loop) forget(s Shard) {
	h, ok := l.shards[s]
	if !ok {
		return
	}
	h.ready = false
	l.later -= h.later
	h.later = 0
	keep := l.ops[:0]
	for _, o := range l.ops {
		if o.a.shard != s {
			keep = append(keep, o)
			continue
		}
		delete(l.pinned, o.id())
		o.answer(&l.out, errNotOwner())
	}
	clear(l.ops[len(keep):])
	l.ops = keep
	for num, a := range l.agents {
		if a.shard == s {
			l.depth -= a.depth
			a.gone = true
			delete(l.agents, num)
			delete(l.removing, num)
		}
	}
	l.counted()
}

// reload drops and re-reads a shard whose memory and disk have parted.
func (l *loop) reload(s Shard) {
	h := l.shards[s]
	if h == nil || !h.ready {
		return
	}
	var up []AgentNum
	for num, a := range l.agents {
		if a.shard == s && a.session {
			up = append(up, num)
		}
	}
	l.forget(s)
	l.out.after(func() {
		for _, num := range up {
			l.m.cfg.Runner.Reconnect(num, "the controller reads its queue again")
		}
	})
}

// shutdown answers everybody who still waits.
func (l *loop) shutdown() {
	subs, events := l.take()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range append(l.subs, subs...) {
		s.answer(errStopping())
	}
	l.subs = nil
	for _, o := range l.ops {
		o.answer(&l.out, errStopping())
	}
	for _, e := range events {
		if c, ok := e.(*cancelRequest); ok {
			c.answer(errStopping())
		}
	}
	l.ops = nil
	l.out.answers()
}
