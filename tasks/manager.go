package tasks

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"github.com/prometheus/client_golang/prometheus"
)

// Limits of the Manager, each with its default.
const (
	DefaultAgentDepth  = 10_000           // tasks that wait for one agent: a day of one each 9 s
	DefaultTotalDepth  = 1_000_000        // tasks that wait in all: what the lists are measured with
	DefaultTurnItems   = 1_000            // of each sort in one turn: larger turns are no faster, but make others wait
	DefaultTurnBytes   = 4 << 20          // of payload in one turn: about 20 ms of writing
	DefaultTurnOutput  = 1 << 20          // of output among it, so that those who print do not make others wait
	DefaultTaskOutput  = 128 << 20        // kept of one attempt's output: twice what an agent keeps, so only a liar meets it
	DefaultInboxItems  = 100_000          // submissions under way: ten of the largest batches
	DefaultInboxBytes  = 64 << 20         // of submissions under way: bounds memory under a flood
	DefaultSubmitWait  = 10 * time.Second // until a submitter is told that the answer is unknown
	DefaultSweepEvery  = time.Second      // what makes progress certain within 2 s
	DefaultCancelGrace = 5 * time.Second  // after its timeout a task is cancelled; the agent should have ended it
	DefaultForcedGrace = time.Minute      // after its timeout a task without a word becomes unknown
	DefaultAwayGrace   = 30 * time.Second // after a cancel, for an agent that is away: as long as a dead peer takes to be noticed
	RemovedGrace       = 10 * time.Second // until a task that a removed agent had in hand is unknown: nobody will hear of it
	DefaultStoreWait   = 15 * time.Second // for one call of the store: as long as a lease lasts

	// DefaultTakeOverWait is how long a request waits for another controller to
	// answer, or for its successor: a take-over takes no longer.
	DefaultTakeOverWait = 20 * time.Second
)

// Limits bounds the Manager; zero fields mean the defaults above.
type Limits struct {
	AgentDepth  int
	TotalDepth  int
	TurnItems   int
	TurnBytes   int
	TurnOutput  int
	TaskOutput  int
	InboxItems  int
	InboxBytes  int
	SubmitWait  time.Duration
	SweepEvery  time.Duration
	CancelGrace time.Duration
	ForcedGrace time.Duration
	AwayGrace   time.Duration
	StoreWait   time.Duration

	TakeOverWait time.Duration
}

// DefaultLimits gives the limits with the defaults above.
func DefaultLimits() Limits { return Limits{}.withDefaults() }

func (l Limits) withDefaults() Limits {
	or := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	orTime := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	or(&l.AgentDepth, DefaultAgentDepth)
	or(&l.TotalDepth, DefaultTotalDepth)
	or(&l.TurnItems, DefaultTurnItems)
	or(&l.TurnBytes, DefaultTurnBytes)
	or(&l.TurnOutput, DefaultTurnOutput)
	or(&l.TaskOutput, DefaultTaskOutput)
	or(&l.InboxItems, DefaultInboxItems)
	or(&l.InboxBytes, DefaultInboxBytes)
	orTime(&l.SubmitWait, DefaultSubmitWait)
	orTime(&l.SweepEvery, DefaultSweepEvery)
	orTime(&l.CancelGrace, DefaultCancelGrace)
	orTime(&l.ForcedGrace, DefaultForcedGrace)
	orTime(&l.AwayGrace, DefaultAwayGrace)
	orTime(&l.StoreWait, DefaultStoreWait)
	orTime(&l.TakeOverWait, DefaultTakeOverWait)
	return l
}

// Config is what a Manager is made of. Store, Runner and Owner are needed.
type Config struct {
	Store  Store
	Runner Runner
	Peers  Peers // nil = what another controller owns is refused at once
	Hub    *Hub  // nil = one of its own
	Owner  Owner
	// Former are earlier starts from the same data directory; its lock proves
	// that they are dead, so their shards are taken at once.
	Former []uuid.UUID
	// Released is called when shards were given back, so that others may be
	// woken up; it must not block. nil = nobody is.
	Released   func()
	Loops      int // write loops; 0 = 1. Shards are dealt to them in turn.
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil = metrics are kept, but nowhere shown
	Limits     Limits
}

// Manager is the one writer of the shards that this controller holds. It
// implements Sessions; Service is its face for people and programs.
//
// All methods may be called from any goroutine, also before and after Run;
// they hand over and return, except those of Service that wait for the disk.
type Manager struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	stats   *stats
	hooks   *hooks
	loops   []*loop
	ids     idSource
	keeper  *keeper
	routes  *routes

	draining atomic.Bool
	leaving  atomic.Bool   // shards go to others
	mine     atomic.Uint32 // a bit for each shard that is held and loaded

	inboxItems atomic.Int64
	inboxBytes atomic.Int64

	dirMu    sync.RWMutex // guards the maps below and running
	dir      map[AgentNum]Agent
	places   map[AgentNum]Shard
	unplaced map[AgentNum]sessionUp // sessions of agents whose shard is not known yet
	downs    map[AgentNum]uint64    // how many sessions of the agent have ended
	running  bool

	// handMu is held while assignments are handed over and while the end of a
	// session is noted. Without it an assignment decided in one session could
	// travel on the next one, whose SessionUp, said before, does not name it:
	// it would be given back and run twice.
	handMu sync.Mutex

	ownMu sync.Mutex // orders the calls of Runner.Own
}

// NewManager makes a Manager; Run starts it.
func NewManager(cfg Config) *Manager {
	if cfg.Loops <= 0 {
		cfg.Loops = 1
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Released == nil {
		cfg.Released = func() {}
	}
	if cfg.Hub == nil {
		cfg.Hub = NewHub()
	}
	cfg.Limits = cfg.Limits.withDefaults()
	m := &Manager{
		cfg: cfg, log: cfg.Logger,
		dir: map[AgentNum]Agent{}, places: map[AgentNum]Shard{}, unplaced: map[AgentNum]sessionUp{},
		downs: map[AgentNum]uint64{},
	}
	m.stats = newStats(cfg.Owner.ID)
	m.metrics = newMetrics(cfg.Registerer, m)
	m.hooks = newHooks(cfg.Logger)
	for n := range cfg.Loops {
		m.loops = append(m.loops, newLoop(m, n))
	}
	m.routes = newRoutes(m)
	m.keeper = &keeper{m: m, wake: make(chan struct{}, 1)}
	return m
}

// Run holds the shards and works until ctx ends. It then finishes the turn
// under way, gives the shards back and returns nil. Tasks that agents have in
// hand stay with them; whoever owns the shard next asks the agents first.
func (m *Manager) Run(ctx context.Context) error {
	m.dirMu.Lock()
	if m.running {
		m.dirMu.Unlock()
		return errors.New("run the task manager: it was already started")
	}
	m.running = true
	m.dirMu.Unlock()

	var loops, others sync.WaitGroup
	for _, l := range m.loops {
		loops.Go(func() { l.run(ctx) })
	}
	others.Go(func() { m.keeper.run(ctx) })
	others.Go(func() { m.hooks.run(ctx) })
	others.Go(func() { m.runSeries(ctx) })
	loops.Wait()
	others.Wait()
	m.keeper.release()
	return nil
}

// Drain stops handing out tasks; submissions are still stored and results
// still taken. It is the step before the end of Run's context.
func (m *Manager) Drain() { m.draining.Store(true) }

// HandOver gives the shards to other controllers, if any lives, and takes no
// more: this one is about to stop, and what it still gets is passed on. Without
// others it goes on as it is until Run ends. The caller has signed this
// controller off before, so that nobody leaves it a part.
func (m *Manager) HandOver() {
	m.leaving.Store(true)
	m.keeper.ask()
}

// Hub gives the Hub that the Manager tells of changes.
func (m *Manager) Hub() *Hub { return m.cfg.Hub }

// OnCompleted registers a function that is called after the commit for every
// task of the kind that its agent had and that completes here. Functions run
// one after another on a goroutine of their own, and one that panics harms
// nobody. Calls are lost when the process ends before them, and dropped and
// logged when they fall too far behind: whoever needs each one catches up from
// the results. Call it before Run.
func (m *Manager) OnCompleted(kind string, f func(ctx context.Context, c Completed)) {
	m.hooks.add(kind, f)
}

// Completed is what completion hooks are told.
type Completed struct {
	ID          ID
	Agent       AgentNum
	Kind        string
	Ending      Ending
	CompletedAt time.Time
}

// Condition is something that is not yet as it must be.
type Condition struct {
	Name   string // shards, first_sweep or reconcile
	Detail string // a sentence
}

// Ready gives the unmet conditions of /readyz; none means ready.
func (m *Manager) Ready() []Condition {
	var unmet []Condition
	if c, ok := m.keeper.unmet(); ok {
		unmet = append(unmet, c)
	}
	swept, reconciling := true, true
	for _, l := range m.loops {
		swept = swept && l.swept.Load()
		reconciling = reconciling && l.owned.Load()
	}
	if !swept {
		unmet = append(unmet, Condition{"first_sweep", "The first pass over the queue has not ended yet."})
	}
	if !reconciling {
		unmet = append(unmet, Condition{"reconcile", "The agents have not yet been asked about the tasks that they had in hand."})
	}
	return unmet
}

func (m *Manager) loopOf(s Shard) *loop { return m.loops[int(s)%len(m.loops)] }

// place remembers where an agent belongs, and lets a session in that came
// before that was known.
func (m *Manager) place(num AgentNum, s Shard) {
	m.dirMu.RLock()
	have, ok := m.places[num]
	m.dirMu.RUnlock()
	if ok && have == s {
		return
	}
	m.dirMu.Lock()
	m.places[num] = s
	session, waiting := m.unplaced[num]
	delete(m.unplaced, num)
	m.dirMu.Unlock()
	if waiting {
		m.loopOf(s).post(session)
	}
}

// loopOfAgent gives the loop of an agent whose shard is known.
func (m *Manager) loopOfAgent(num AgentNum) (*loop, Shard, bool) {
	m.dirMu.RLock()
	s, ok := m.places[num]
	m.dirMu.RUnlock()
	if !ok {
		return nil, 0, false
	}
	return m.loopOf(s), s, true
}

// epochOf gives the number under which the agent is held here; false when it
// is not, or may not be any more.
func (m *Manager) epochOf(num AgentNum) (int64, bool) {
	l, shard, ok := m.loopOfAgent(num)
	if !ok || !m.keeper.trusted(time.Now()) {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epoch(shard)
}

// known gives what was told of an agent.
func (m *Manager) known(num AgentNum) (Agent, bool) {
	m.dirMu.RLock()
	defer m.dirMu.RUnlock()
	a, ok := m.dir[num]
	return a, ok
}

// AgentChanged implements Sessions.
func (m *Manager) AgentChanged(a Agent) {
	m.dirMu.Lock()
	m.dir[a.Num] = a
	m.dirMu.Unlock()
	m.loopOf(a.Shard()).post(agentChanged{a})
	m.place(a.Num, a.Shard())
}

// SessionUp implements Sessions.
func (m *Manager) SessionUp(s Session) {
	m.dirMu.Lock()
	shard, ok := m.places[s.Agent]
	e := sessionUp{s, m.downs[s.Agent]}
	if !ok {
		m.unplaced[s.Agent] = e
	}
	m.dirMu.Unlock()
	if ok {
		m.loopOf(shard).post(e)
	}
}

// SessionDown implements Sessions. It waits for assignments that are being
// handed over at this moment, so that none of them meets the next session:
// the caller must hold no lock that Runner.Execute needs.
func (m *Manager) SessionDown(agent AgentNum, why string) {
	m.handMu.Lock()
	m.dirMu.Lock()
	shard, ok := m.places[agent]
	delete(m.unplaced, agent)
	m.downs[agent]++
	m.dirMu.Unlock()
	m.handMu.Unlock()
	if ok {
		m.loopOf(shard).post(sessionDown{agent, why})
	}
}

// hand gives assignments to the agents, each on the session that it was
// decided for, or not at all: the next SessionUp then says that the agent has
// never seen it.
func (m *Manager) hand(execs []assigned) {
	m.handMu.Lock()
	defer m.handMu.Unlock()
	m.dirMu.RLock()
	for i := range execs {
		execs[i].stale = m.downs[execs[i].Agent] != execs[i].downs
	}
	m.dirMu.RUnlock()
	for i := range execs {
		if !execs[i].stale {
			m.cfg.Runner.Execute(execs[i].Assignment)
		}
	}
}

// assigned is an assignment with the session that it was decided for.
type assigned struct {
	Assignment
	downs uint64
	stale bool
}

// Accepted implements Sessions.
func (m *Manager) Accepted(agent AgentNum, ref Ref) { m.postTo(agent, accepted{agent, ref}) }

// Output implements Sessions.
func (m *Manager) Output(agent AgentNum, c OutputChunk) { m.postTo(agent, output{agent, c}) }

// Final implements Sessions.
func (m *Manager) Final(agent AgentNum, f Final) { m.postTo(agent, final{agent, f}) }

// Refused implements Sessions.
func (m *Manager) Refused(agent AgentNum, r Refusal) { m.postTo(agent, refused{agent, r}) }

func (m *Manager) postTo(agent AgentNum, e event) {
	if l, _, ok := m.loopOfAgent(agent); ok {
		l.post(e)
	}
}

// publishOwned tells the Runner the complete set of shards that are loaded.
func (m *Manager) publishOwned() {
	m.ownMu.Lock()
	defer m.ownMu.Unlock()
	var all []Lease
	for _, l := range m.loops {
		all = append(all, l.readyLeases()...)
	}
	var mine uint32
	for _, l := range all {
		mine |= 1 << l.Shard
	}
	m.mine.Store(mine)
	m.cfg.Runner.Own(all)
	for _, l := range m.loops {
		l.owned.Store(true)
	}
}
