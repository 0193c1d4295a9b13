package fleet

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/fault"
	"headgate/internal/pki"
	"headgate/tasks"
)

// Tasks is the queue as the fleet sees it; *tasks.Manager implements it.
//
// The fleet calls it with none of its own locks held that a call back into
// Runner would need. Per agent the calls come one after the other: SessionUp,
// then any of Accepted, Output, Final and Refused, then SessionDown. A method
// that blocks holds up that agent alone.
type Tasks interface {
	SessionUp(s tasks.Session)
	SessionDown(agent tasks.AgentNum, why string)
	Accepted(agent tasks.AgentNum, ref tasks.Ref)
	Output(agent tasks.AgentNum, c tasks.OutputChunk)
	Final(agent tasks.AgentNum, f tasks.Final)
	Refused(agent tasks.AgentNum, r tasks.Refusal)
	AgentChanged(a tasks.Agent)
}

// Event says that an agent changed, for pages that follow it live.
type Event struct {
	What EventKind
	View View
}

// EventKind is what an Event is about.
type EventKind string

// The kinds of events.
const (
	EventHealth  EventKind = "health"  // Live.Health became another
	EventChanged EventKind = "changed" // the row changed
	EventPaired  EventKind = "paired"  // a new agent
	EventRemoved EventKind = "removed"
)

// Config is what a Fleet needs. Store, Dir, ControllerID and FleetName are
// required.
type Config struct {
	Store        Store
	Dir          *pki.Dir // holds the key of the fleet's CA
	ControllerID uuid.UUID
	FleetName    string // of a new fleet; an existing one has its name in its CA
	Version      string // of this program

	Limits        Limits
	AllowLoopback bool                      // agents on this machine
	Deny          func(netip.AddrPort) bool // our own listeners and the database; nil = none
	// HasWork says whether tasks wait for an agent; such agents are dialled
	// first. It must not block; nil = nobody knows.
	HasWork func(tasks.AgentNum) bool
	// ProbeLag gives how long this controller lately took to answer its own
	// probe (p95). The pace of dials follows it after a start and after the
	// loss of many agents: from 100 ms on it does not grow, from 500 ms on it
	// halves. It must not block; nil = no brake.
	ProbeLag func() time.Duration

	// PingElsewhere pings an agent through the controller that is connected to
	// it; nil = nobody can.
	PingElsewhere func(ctx context.Context, agent tasks.Agent) (Pong, error)

	Logger     *slog.Logger          // nil = discard
	Registerer prometheus.Registerer // nil = not exported
	// Publish is told of changes; it must not block. nil = nobody listens.
	Publish func(Event)
}

// Fleet is the controller's side of the agents. It implements tasks.Runner.
type Fleet struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	reg     *registry
	dialer  *dialer
	gate    *gate
	kinds   kindCache
	pairs   pairLimiter
	tasks   Tasks

	// Set by EnsureCA, before Run.
	authority *pki.Authority
	identity  *pki.Identity
	roots     *pki.Roots

	messages sync.Pool // of *messages

	reload chan struct{} // cap 1: re-read the rows soon
	upkeep chan struct{} // cap 1: members have something to be stored
	away   atomic.Int64  // members between two dials

	mu    sync.Mutex // guards all below; held over nothing but memory
	ctx   context.Context
	loops sync.WaitGroup // one per kept member
	held  [tasks.NumShards]holding
	dirty map[*member]struct{} // for upkeep

	enrolling []Agent // seen by the last read; settleEnrolling looks after them
}

var _ tasks.Runner = (*Fleet)(nil)

// New makes a Fleet. Attach, EnsureCA and Load come before Run.
func New(cfg Config) (*Fleet, error) {
	if cfg.Store == nil || cfg.Dir == nil || cfg.ControllerID == uuid.Nil() || cfg.FleetName == "" {
		return nil, errors.New("fleet: Store, Dir, ControllerID and FleetName are required")
	}
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Publish == nil {
		cfg.Publish = func(Event) {}
	}
	if cfg.HasWork == nil {
		cfg.HasWork = func(tasks.AgentNum) bool { return false }
	}
	m := newMetrics(cfg.Registerer)
	g := newGate(cfg.Limits, cfg.ProbeLag, m.sawDialWait)
	registerGate(cfg.Registerer, g)
	return &Fleet{
		cfg:      cfg,
		log:      cfg.Logger.With("component", "fleet"),
		metrics:  m,
		reg:      newRegistry(),
		dialer:   newDialer(cfg.Limits, dialPolicy{allowLoopback: cfg.AllowLoopback, deny: cfg.Deny}),
		gate:     g,
		pairs:    pairLimiter{perMinute: cfg.Limits.PairsPerMinute},
		messages: sync.Pool{New: newMessages},
		reload:   make(chan struct{}, 1),
		upkeep:   make(chan struct{}, 1),
		dirty:    map[*member]struct{}{},
	}, nil
}

// Attach names the queue. It must be called before Load.
func (f *Fleet) Attach(t Tasks) { f.tasks = t }

// Load reads who is enrolled and tells the queue of each agent.
func (f *Fleet) Load(ctx context.Context) error {
	if f.tasks == nil {
		return errors.New("fleet: Attach must come before Load")
	}
	return f.read(ctx)
}

// Reload is the hint that rows have changed; they are read soon by Run.
func (f *Fleet) Reload() { wake(f.reload) }

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // already awake
	}
}

// Run keeps the connections to the agents of the shards that are owned, until
// ctx ends; it returns when every connection is closed.
func (f *Fleet) Run(ctx context.Context) error {
	if f.tasks == nil || f.identity == nil {
		return errors.New("fleet: Attach and EnsureCA must come before Run")
	}
	if err := f.begin(ctx); err != nil {
		return err
	}
	for _, p := range f.reg.all() {
		f.arrange(p.m)
	}
	var background sync.WaitGroup
	background.Go(func() { f.maintain(ctx) })
	background.Go(func() { f.settleEnrolling(ctx) })
	f.watch(ctx)
	background.Wait()
	f.loops.Wait()
	return nil
}

func (f *Fleet) begin(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx != nil {
		return errors.New("fleet: Run may be called once")
	}
	f.ctx = ctx
	return nil
}

// watch looks over all sessions once a second: it gives up those that have
// fallen silent and asks quiet agents for their status. One goroutine does
// that for all agents, where a timer each would cost memory.
func (f *Fleet) watch(ctx context.Context) {
	tick := time.NewTicker(pulseTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, p := range f.reg.all() {
				if s := p.m.session.Load(); s != nil {
					s.pulse(now)
				}
			}
		}
	}
}

// maintain does what needs the database: re-reading rows, storing what
// sessions and the queue have asked for, renewing our own certificate.
func (f *Fleet) maintain(ctx context.Context) {
	every := time.NewTicker(f.cfg.Limits.ReloadEvery)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.upkeep:
			f.store(ctx)
			continue
		case <-f.reload:
		case <-every.C:
		}
		f.renewIdentity(time.Now())
		f.store(ctx)
		if err := f.read(ctx); err != nil && ctx.Err() == nil {
			f.log.Warn("cannot read the agents' rows", "err", err)
			if f.unread() { // their agents wait for it
				wake(f.reload)
				pause(ctx, reloadRetry)
			}
		}
		pause(ctx, reloadPause)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// read brings memory up to date with the rows.
func (f *Fleet) read(ctx context.Context) error {
	before := f.reg.all() // who is missing in an answer asked for later is gone
	f.mu.Lock()
	held := f.held
	f.mu.Unlock()
	rows, err := f.cfg.Store.Agents(ctx)
	if err != nil {
		return err
	}
	seen := make(map[*member]bool, len(rows))
	var enrolling []Agent
	for _, row := range rows {
		if row.Status == Enrolling {
			enrolling = append(enrolling, row) // not an agent yet
			continue
		}
		m, fresh := f.join(row)
		seen[m] = true
		f.apply(m, row, fresh, EventChanged)
	}
	for _, p := range before {
		if !seen[p.m] {
			p.m.op.Lock()
			f.forget(p.m)
			p.m.op.Unlock()
		}
	}
	f.mu.Lock()
	f.enrolling = enrolling
	f.mu.Unlock()
	f.sawRows(held)
	return nil
}

// sawRows notes that the rows were read while those shards were held, and lets
// the agents of new ones be dialled.
func (f *Fleet) sawRows(then [tasks.NumShards]holding) {
	news := false
	f.mu.Lock()
	for i := range f.held {
		h := &f.held[i]
		if h.owned && !h.read && then[i].owned && then[i].lease.Epoch == h.lease.Epoch {
			h.read, news = true, true
		}
	}
	f.mu.Unlock()
	if !news {
		return
	}
	for _, p := range f.reg.all() {
		f.arrange(p.m)
	}
}

// unread says whether shards are held whose rows were not read since.
func (f *Fleet) unread() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.held[:], func(h holding) bool { return h.owned && !h.read })
}

// join adds the agent or gives the member that is there already.
func (f *Fleet) join(row Agent) (m *member, fresh bool) {
	m, fresh = f.reg.put(row)
	if fresh {
		f.metrics.agents.WithLabelValues(string(HealthElsewhere)).Inc()
	}
	return m, fresh
}

// apply takes over a row that was read. An older one than we have is ignored.
// What an agent says of itself does not raise the revision: while it is not
// kept here, another controller may have recorded it.
func (f *Fleet) apply(m *member, row Agent, fresh bool, what EventKind) {
	m.op.Lock()
	defer m.op.Unlock()
	m.mu.Lock()
	changed := fresh || row.Revision > m.row.Revision ||
		row.Revision == m.row.Revision && m.stop == nil && !sameWords(&row, &m.row)
	m.mu.Unlock()
	if changed {
		f.take(m, row, what)
	}
}

// sameWords says whether an agent has said the same of itself in two rows.
func sameWords(a, b *Agent) bool {
	return a.LedgerID == b.LedgerID && a.Version == b.Version && a.Hostname == b.Hostname && a.OS == b.OS && a.FactsAt.Equal(b.FactsAt)
}

// take puts a row into memory and tells everybody; the caller holds m.op.
func (f *Fleet) take(m *member, row Agent, what EventKind) {
	m.mu.Lock()
	if m.pending != "" && row.Status == Active {
		row.Status, row.StatusWhy = Quarantined, m.pending // asked for, not yet stored
	}
	moved := !sameAddresses(m.row.Addresses, row.Addresses)
	m.row = row
	m.mu.Unlock()
	f.reg.put(row)
	f.tasks.AgentChanged(m.agent())
	f.arrange(m)
	if moved {
		m.leaveAddress()
	}
	f.cfg.Publish(Event{What: what, View: m.view(time.Now())})
}

// forget removes a member from memory; the caller holds m.op.
func (f *Fleet) forget(m *member) {
	m.mu.Lock()
	gone := m.row.Status == Removed
	m.row.Status = Removed
	health := m.live.Health
	m.mu.Unlock()
	if gone {
		return
	}
	f.metrics.agents.WithLabelValues(string(health)).Dec()
	f.reg.drop(m)
	f.tasks.AgentChanged(m.agent())
	f.arrange(m)
	f.cfg.Publish(Event{What: EventRemoved, View: m.view(time.Now())})
}

// ready gives the authority, or says that the fleet has none yet.
func (f *Fleet) ready() (*pki.Authority, error) {
	if f.authority == nil {
		return nil, fault.New(fault.Unavailable, CodeFleetNotReady, "The fleet's certificate authority is not loaded yet.").
			WithHint("Wait until the controller is ready.")
	}
	return f.authority, nil
}
