package tasks

import (
	"encoding/json"
	"sync"
	"time"
	"uuid"
)

// Stats is what this controller knows of its queue, from memory alone.
type Stats struct {
	Since     time.Time         // of the counters: the start of the controller
	New       int               // in state new, Later included
	Later     int               // of them waiting for not_before or a back-off
	Waiting   int               // in state waiting-for-agent-response
	Submitted int64             // since the start
	Completed map[Outcome]int64 // since the start
	Sessions  int               // agents with a session, as the queue sees it

	Oldest        time.Time // created_at of the oldest task whose turn is next; zero = none waits
	PerMinute     float64   // tasks completed in the last full minute
	SubmitsMinute float64   // tasks submitted in the last full minute
	Wait          Quantiles // submitted to started, over the last hour
	Run           Quantiles // started to completed, over the last hour
}

// Quantiles are bounds below which a share of the values lies.
type Quantiles struct {
	Count         uint64
	P50, P95, P99 time.Duration
}

// AgentStats is what the queue knows of one agent.
type AgentStats struct {
	Agent   AgentNum
	ID      uuid.UUID
	Depth   int       // tasks in state new, without those for later
	Busy    ID        // the task in the slot, 0 = none
	Kind    string    // of the task in the slot
	Since   time.Time // since when it is there, by the store's clock
	Oldest  time.Time // created_at of the next task; zero = none, or not read yet
	Session bool
}

// SeriesMinute is the name of the series that Managers keep: one point a minute
// whose value is a MinutePoint, each start of a controller under this name, a
// slash and its own.
const SeriesMinute = "tasks.minute"

// seriesSpan is how much of the series is read back at the start and kept.
const seriesSpan = 24 * time.Hour

// MinutePoint is what happened in one minute.
type MinutePoint struct {
	Submitted int64             `json:"submitted"`
	Completed map[Outcome]int64 `json:"completed"`
	New       int               `json:"new"`
	Waiting   int               `json:"waiting"`
	WaitP50   float64           `json:"wait_p50_ms"`
	WaitP95   float64           `json:"wait_p95_ms"`
	WaitP99   float64           `json:"wait_p99_ms"`
	RunP50    float64           `json:"run_p50_ms"`
	RunP95    float64           `json:"run_p95_ms"`
	RunP99    float64           `json:"run_p99_ms"`
}

// minute collects the minute under way.
type minute struct {
	submitted int64
	completed map[Outcome]int64
	wait, run histogram
}

func newMinute() *minute { return &minute{completed: map[Outcome]int64{}} }

// minutesKept is how far Stats looks back for its quantiles.
const minutesKept = 60

type loopCounts struct {
	depth, later, flights, sessions int
	idle                            time.Duration
	oldest                          time.Time
	flight                          time.Time // since when the oldest task in flight is there
}

type stats struct {
	mu        sync.Mutex
	since     time.Time
	total     int64
	byOutcome map[Outcome]int64
	now       *minute
	last      []*minute // full minutes, newest last
	loops     map[*loop]*loopCounts
	series    string  // name of this controller's points
	points    []Point // the series of all controllers together, oldest first
}

func newStats(owner uuid.UUID) *stats {
	return &stats{series: SeriesMinute + "/" + owner.String(), since: time.Now(), byOutcome: map[Outcome]int64{}, now: newMinute(), loops: map[*loop]*loopCounts{}}
}

func (s *stats) of(l *loop) *loopCounts {
	c := s.loops[l]
	if c == nil {
		c = &loopCounts{}
		s.loops[l] = c
	}
	return c
}

// setDepth takes the counts of a loop over.
func (s *stats) setDepth(l *loop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.of(l)
	c.depth, c.later = l.depth, l.later
}

// swept takes over what only a look at every agent tells.
func (s *stats) swept(l *loop, c loopCounts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.depth, c.later = l.depth, l.later
	*s.of(l) = c
}

func (s *stats) submitted() {
	s.mu.Lock()
	s.total++
	s.now.submitted++
	s.mu.Unlock()
}

func (s *stats) started(l *loop, now, created time.Time) {
	s.mu.Lock()
	s.of(l).flights++
	s.now.wait.add(now.Sub(created))
	s.mu.Unlock()
}

// landed counts a task that has left the slot.
func (s *stats) landed(l *loop) {
	s.mu.Lock()
	s.of(l).flights--
	s.mu.Unlock()
}

// completed counts a completion; ran is how long it was started, below zero
// when it never was.
func (s *stats) completed(o Outcome, ran time.Duration) {
	s.mu.Lock()
	s.byOutcome[o]++
	s.now.completed[o]++
	if ran >= 0 {
		s.now.run.add(ran)
	}
	s.mu.Unlock()
}

func (s *stats) sum() (c loopCounts) {
	for _, l := range s.loops {
		c.depth += l.depth
		c.later += l.later
		c.flights += l.flights
		c.sessions += l.sessions
		c.idle = max(c.idle, l.idle)
		if !l.oldest.IsZero() && (c.oldest.IsZero() || l.oldest.Before(c.oldest)) {
			c.oldest = l.oldest
		}
		if !l.flight.IsZero() && (c.flight.IsZero() || l.flight.Before(c.flight)) {
			c.flight = l.flight
		}
	}
	return c
}

func (s *stats) counts() loopCounts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sum()
}

func quantiles(h *histogram) Quantiles {
	return Quantiles{Count: h.count, P50: h.quantile(0.5), P95: h.quantile(0.95), P99: h.quantile(0.99)}
}

// Stats gives the counters of this controller.
func (m *Manager) Stats() Stats {
	s := m.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.sum()
	wait, run := s.now.wait, s.now.run
	for _, old := range s.last {
		wait.merge(&old.wait)
		run.merge(&old.run)
	}
	out := Stats{
		Since: s.since, New: c.depth + c.later, Later: c.later, Waiting: c.flights, Submitted: s.total,
		Completed: map[Outcome]int64{}, Sessions: c.sessions, Oldest: c.oldest, Wait: quantiles(&wait), Run: quantiles(&run),
	}
	for o, n := range s.byOutcome {
		out.Completed[o] = n
	}
	if n := len(s.last); n > 0 {
		for _, k := range s.last[n-1].completed {
			out.PerMinute += float64(k)
		}
		out.SubmitsMinute = float64(s.last[n-1].submitted)
	}
	return out
}

// AgentStats gives what the queue holds for one agent; false when another
// controller owns it or nothing is known of it.
func (m *Manager) AgentStats(num AgentNum) (AgentStats, bool) {
	l, _, ok := m.loopOfAgent(num)
	if !ok {
		return AgentStats{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.agents[num]
	if a == nil {
		return AgentStats{}, false
	}
	return a.stats(), true
}

// HasWork says whether tasks wait for an agent, or one is with it.
func (m *Manager) HasWork(num AgentNum) bool {
	s, ok := m.AgentStats(num)
	return ok && (s.Depth > 0 || s.Busy != 0)
}

// AllAgentStats gives the same for every agent of this controller's shards.
func (m *Manager) AllAgentStats() []AgentStats {
	var all []AgentStats
	for _, l := range m.loops {
		l.mu.Lock()
		for _, a := range l.agents {
			all = append(all, a.stats())
		}
		l.mu.Unlock()
	}
	return all
}

func (a *agent) stats() AgentStats {
	s := AgentStats{Agent: a.num, ID: a.info.ID, Depth: a.depth, Session: a.session}
	if len(a.flights) > 0 {
		f := a.flights[0]
		s.Busy, s.Kind, s.Since = f.q.ID, f.q.Kind, f.startedAt
	}
	if len(a.next) > 0 {
		s.Oldest = a.next[0].CreatedAt
	}
	return s
}

// Series gives the points of the last time, oldest first, each with a
// MinutePoint as its value.
func (m *Manager) Series(since time.Time) []Point {
	m.stats.mu.Lock()
	defer m.stats.mu.Unlock()
	var out []Point
	for _, p := range m.stats.points {
		if !p.At.Before(since) {
			out = append(out, p)
		}
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// cut ends the minute under way and gives its point.
func (s *stats) cut(at time.Time) Point {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, n := s.sum(), s.now
	v, err := json.Marshal(MinutePoint{
		Submitted: n.submitted, Completed: n.completed, New: c.depth + c.later, Waiting: c.flights,
		WaitP50: ms(n.wait.quantile(0.5)), WaitP95: ms(n.wait.quantile(0.95)), WaitP99: ms(n.wait.quantile(0.99)),
		RunP50: ms(n.run.quantile(0.5)), RunP95: ms(n.run.quantile(0.95)), RunP99: ms(n.run.quantile(0.99)),
	})
	if err != nil {
		v = json.RawMessage("{}") // numbers and fixed names: cannot be
	}
	p := Point{Name: s.series, At: at, Value: v}
	s.now = newMinute()
	s.last = append(s.last, n)
	if len(s.last) > minutesKept {
		s.last = append(s.last[:0], s.last[len(s.last)-minutesKept:]...)
	}
	s.points = append(s.points, p)
	for len(s.points) > 0 && s.points[0].At.Before(at.Add(-seriesSpan)) {
		s.points = s.points[1:]
	}
	return p
}
