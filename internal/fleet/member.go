package fleet

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"headgate/tasks"
)

// member is one enrolled agent in memory: its row, its connection, and the
// one goroutine that keeps the connection.
type member struct {
	num tasks.AgentNum // never changes
	id  uuid.UUID      // never changes

	// op serializes changes of the row together with what Tasks and listeners
	// are told of them, so that nobody hears them in the wrong order. It is
	// held over calls to Store and Tasks, never over the agent's network.
	op sync.Mutex

	session atomic.Pointer[session] // nil when none is up
	kick    chan struct{}           // cuts a back-off short

	mu        sync.Mutex // guards all below; held over nothing but memory
	row       Agent
	live      Live
	pending   string        // quarantine asked for and not yet stored: its reason
	ledger    uuid.UUID     // last one seen on a session
	settled   bool          // the ledger may be recorded, see session.settle; of this lease
	instances [2]instanceAt // the last two processes that answered
	refusal   refusal       // of our epoch; zero = none
	lease     tasks.Lease   // of the loop that runs
	stop      context.CancelCauseFunc
	done      chan struct{} // closed when the loop has ended; nil = never started
}

type instanceAt struct {
	id uuid.UUID
	at time.Time
}

func newMember(a Agent) *member {
	return &member{num: a.Num, id: a.ID, kick: make(chan struct{}, 1), row: a, live: Live{Health: HealthElsewhere, Since: time.Now()}}
}

// agent gives what the queue needs to know. Removed agents stay in memory
// only for as long as somebody holds the member.
func (m *member) agent() tasks.Agent {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := tasks.Agent{
		Num: m.num, ID: m.id, Name: m.row.Name, LedgerID: m.row.LedgerID,
		Paused: !m.row.PausedAt.IsZero(), PausedBy: m.row.PausedBy, PausedAt: m.row.PausedAt,
		Quarantined: m.row.Status == Quarantined, Removed: m.row.Status == Removed,
		Why: m.row.StatusWhy,
	}
	if !a.Quarantined && !a.Removed {
		a.Why, a.Expired = m.live.sentence(time.Now()), m.live.Cause == CauseExpired
	}
	return a
}

// view gives a copy for lists and pages.
func (m *member) view(now time.Time) View {
	s := m.session.Load()
	m.mu.Lock()
	defer m.mu.Unlock()
	v := View{Agent: m.row, Live: m.live}
	v.Live.Sentence = m.live.sentence(now)
	if s != nil {
		v.Live.RTT = time.Duration(s.rtt.Load())
		v.Live.LastHeard, v.Live.ClockSkew = time.Unix(0, s.heard.Load()), s.skew.Load()
	}
	return v
}

// nudge ends a back-off at once.
func (m *member) nudge() {
	select {
	case m.kick <- struct{}{}:
	default: // one is enough
	}
}

// end ends the member's session, if there is one, and gives the reason.
func (m *member) end(t *trouble) {
	if s := m.session.Load(); s != nil {
		s.cancel(t)
	}
}

// registry finds members by id, number and name, and keeps them in the order
// of lists. Members are added and removed under its lock; a member's own state
// is guarded by the member.
type registry struct {
	mu     sync.RWMutex
	byID   map[uuid.UUID]*member
	byNum  map[tasks.AgentNum]*member
	names  map[*member]string // as indexed
	byName map[string][]*member
	order  []place // nil = must be made anew
}

// place is a member's place in lists.
type place struct {
	name string
	id   uuid.UUID
	m    *member
}

func (p place) compare(q place) int {
	if c := strings.Compare(p.name, q.name); c != 0 {
		return c
	}
	return slices.Compare(p.id[:], q.id[:])
}

func newRegistry() *registry {
	return &registry{byID: map[uuid.UUID]*member{}, byNum: map[tasks.AgentNum]*member{}, names: map[*member]string{}, byName: map[string][]*member{}}
}

func (r *registry) num(n tasks.AgentNum) *member {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.byNum[n]
}

func (r *registry) id(id uuid.UUID) *member {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.byID[id]
}

func (r *registry) named(name string) []*member {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Clone(r.byName[name])
}

// all gives every member in the order of lists.
func (r *registry) all() []place {
	r.mu.RLock()
	order := r.order
	r.mu.RUnlock()
	if order != nil {
		return order
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.order == nil {
		r.order = make([]place, 0, len(r.byID))
		for m, name := range r.names {
			r.order = append(r.order, place{name, m.id, m})
		}
		slices.SortFunc(r.order, place.compare)
	}
	return r.order
}

// put adds the agent or gives the member that is there already; its name in
// the indexes becomes that of a.
func (r *registry) put(a Agent) (m *member, fresh bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m = r.byID[a.ID]
	if m != nil && m.num != a.Num { // removed and paired again while we looked away
		r.dropLocked(m)
		m = nil
	}
	if m == nil {
		m, fresh = newMember(a), true
		r.byID[a.ID], r.byNum[a.Num] = m, m
		r.indexLocked(m, a.Name)
	} else if r.names[m] != a.Name {
		r.unindexLocked(m)
		r.indexLocked(m, a.Name)
	}
	return m, fresh
}

func (r *registry) drop(m *member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID[m.id] == m {
		r.dropLocked(m)
	}
}

func (r *registry) dropLocked(m *member) {
	r.unindexLocked(m)
	delete(r.byID, m.id)
	delete(r.byNum, m.num)
}

func (r *registry) indexLocked(m *member, name string) {
	r.names[m] = name
	r.byName[name] = append(r.byName[name], m)
	r.order = nil
}

func (r *registry) unindexLocked(m *member) {
	name := r.names[m]
	delete(r.names, m)
	r.order = nil
	rest := slices.DeleteFunc(r.byName[name], func(o *member) bool { return o == m })
	if r.byName[name] = rest; len(rest) == 0 {
		delete(r.byName, name)
	}
}
