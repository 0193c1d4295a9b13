package controller

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/handlers"
)

// Times of the probing.
const (
	probeEvery   = 2 * time.Second
	probeLimit   = 3 * time.Second        // no answer after it is a failure
	startPause   = 20 * time.Millisecond  // between probes until the first verdict, felt in every start
	failedPause  = 250 * time.Millisecond // the same after a failure
	stormEvery   = 250 * time.Millisecond // while many agents are dialled, whose pace the answers set
	stormFrom    = 64                     // agents that wait
	resourceTick = 2 * time.Second
	wakeTick     = 100 * time.Millisecond
)

// marker is what the gate tells its facts to: the listener, which decides what
// follows from them.
type marker interface {
	MarkStable(reason string)
	MarkUnstable(reason string)
}

// stabilityConfig is what the gate observes and whom it tells.
type stabilityConfig struct {
	Marker    marker
	Ready     *readiness
	Database  func(context.Context) error
	SelfCall  func(context.Context) error
	Resources func() resources
	Dials     func() int      // agents that wait for their first try; nil = nobody is dialled
	Leaving   <-chan struct{} // closed: the stop has begun, facts no longer matter
	Log       *slog.Logger
	Registry  prometheus.Registerer
}

// stability runs the gate: it probes without end, tells the listener when the
// verdict changes, and answers what the status asks.
type stability struct {
	cfg   stabilityConfig
	first chan struct{} // closed at the first verdict "stable"
	turn  chan struct{} // capacity 1: the verdict has changed

	probeSeconds *prometheus.HistogramVec
	checkGauge   *prometheus.GaugeVec

	mu      sync.Mutex
	gate    *gate
	begun   bool // verdicts are told
	stable  bool // as told last
	asked   map[string]time.Time
	waiting int
}

func newStability(cfg stabilityConfig) *stability {
	s := &stability{
		cfg: cfg, first: make(chan struct{}), turn: make(chan struct{}, 1),
		gate: newGate(time.Now()), asked: map[string]time.Time{},
		probeSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headgate_gate_probe_seconds", Help: "Time of a probe of the stability gate, by what was asked; without an answer its limit.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2, 3},
		}, []string{"probe"}),
		checkGauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headgate_gate_check", Help: "1 while a check of the stability gate holds.",
		}, []string{"check"}),
	}
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(s.probeSeconds, s.checkGauge)
	}
	return s
}

// begin lets verdicts count: all that is needed beside the checks is there.
func (s *stability) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begun = true
	s.tell()
}

// run probes until ctx ends. When the drain begins it stops probing, since
// the ports close then.
func (s *stability) run(ctx context.Context) error {
	probing, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	for name, ask := range map[string]func(context.Context) error{checkDatabase: s.cfg.Database, checkSelfCall: s.cfg.SelfCall} {
		wg.Go(func() { s.probe(probing, name, ask) })
	}
	wg.Go(func() { s.watchResources(probing) })
	wg.Go(func() { s.watchScheduler(probing) })
	select {
	case <-s.cfg.Leaving:
	case <-ctx.Done():
	}
	cancel()
	wg.Wait()
	<-ctx.Done()
	return nil
}

// errNoAnswer is of a probe that has waited long enough.
var errNoAnswer = errors.New("no answer within " + probeLimit.String())

// probe asks again and again. What does not answer is not asked a second time
// beside the first, so that silence costs one goroutine.
func (s *stability) probe(ctx context.Context, name string, ask func(context.Context) error) {
	var answer chan error // of the question that is open; nil = none
	var began time.Time
	for ctx.Err() == nil {
		round := time.Now()
		if answer == nil {
			answer, began = make(chan error, 1), round
			s.asking(name, began)
			open := answer
			go func() {
				asking, cancel := context.WithTimeout(ctx, probeLimit)
				defer cancel()
				open <- ask(asking)
			}()
		}
		limit := time.NewTimer(probeLimit)
		select {
		case err := <-answer:
			answer = nil
			s.note(name, time.Since(began), err)
		case <-limit.C:
			s.note(name, time.Since(began), errNoAnswer)
		case <-ctx.Done():
		}
		limit.Stop()
		pause(ctx, time.Until(round.Add(s.pace(name))))
	}
}

// asking notes that a question is open.
func (s *stability) asking(name string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked[name] = at
}

// note takes the end of one probe.
func (s *stability) note(name string, took time.Duration, err error) {
	s.probeSeconds.WithLabelValues(name).Observe(took.Seconds())
	s.mu.Lock()
	defer s.mu.Unlock()
	if !errors.Is(err, errNoAnswer) {
		delete(s.asked, name)
	}
	if errors.Is(err, context.Canceled) {
		return // our own end
	}
	s.gate.probed(time.Now(), name, took, err)
	s.tell()
}

// pace gives the time from one probe to the next.
func (s *stability) pace(name string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.gate.check(name)
	started := false
	select {
	case <-s.first:
		started = true
	default:
	}
	switch {
	case !started && c.failed > 0:
		return failedPause
	case !started && !c.ok:
		return startPause
	case !started || name == checkSelfCall && s.waiting > stormFrom:
		return stormEvery
	}
	return probeEvery
}

// watchResources looks at what may run out.
func (s *stability) watchResources(ctx context.Context) {
	for ctx.Err() == nil {
		r, waiting := s.cfg.Resources(), 0
		if s.cfg.Dials != nil {
			waiting = s.cfg.Dials()
		}
		s.mu.Lock()
		now := time.Now()
		s.waiting = waiting
		s.gate.used(now, checkDescriptors, r.Descriptors, r.DescriptorLimit, "the descriptors that this process may open")
		s.gate.used(now, checkMemory, r.Memory, r.MemoryLimit, "GOMEMLIMIT")
		s.gate.dialling(now, waiting)
		s.tell()
		s.mu.Unlock()
		pause(ctx, resourceTick)
	}
}

// watchScheduler measures how late a timer rings.
func (s *stability) watchScheduler(ctx context.Context) {
	for ctx.Err() == nil {
		due := time.Now().Add(wakeTick)
		pause(ctx, wakeTick)
		if ctx.Err() != nil {
			return
		}
		now := time.Now()
		s.mu.Lock()
		was := s.gate.check(checkScheduler).ok
		s.gate.woke(now, now.Sub(due))
		if s.gate.check(checkScheduler).ok != was {
			s.tell()
		}
		s.mu.Unlock()
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// tell carries the present checks to readiness and metrics, and a changed
// verdict to the listener. The caller holds mu, which keeps the marks in order;
// the marker does not block.
func (s *stability) tell() {
	select {
	case <-s.cfg.Leaving:
		return
	default:
	}
	for _, c := range s.gate.checks {
		holds := 0.0
		if c.ok {
			holds = 1
			s.cfg.Ready.met(c.name)
		} else {
			s.cfg.Ready.explain(c.name, c.detail)
		}
		s.checkGauge.WithLabelValues(c.name).Set(holds)
	}
	stable, why := s.gate.verdict()
	if !s.begun || stable == s.stable {
		return
	}
	s.stable = stable
	if stable {
		s.cfg.Log.Info("this controller is fit to serve", "why", why)
		s.cfg.Marker.MarkStable(why)
		select {
		case <-s.first:
		default:
			close(s.first)
		}
	} else {
		s.cfg.Log.Warn("this controller is not fit to serve", "why", why)
		s.cfg.Marker.MarkUnstable(why)
	}
	select {
	case s.turn <- struct{}{}:
	default: // it is known already that something changed
	}
}

// isStable gives the verdict as it was told last; nobody is told "stable" of a
// controller that stops.
func (s *stability) isStable() bool {
	select {
	case <-s.cfg.Leaving:
		return false
	default:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stable
}

// checks gives the checks as the status shows them.
func (s *stability) checks() []handlers.Check {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gate.list()
}

// database says whether it answered the last probe, and since when a change of
// that counts.
func (s *stability) database() handlers.DatabaseStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.gate.check(checkDatabase)
	if c.ok && c.failed == 0 {
		since := stamp(c.since)
		return handlers.DatabaseStatus{Reachable: true, Since: &since}
	}
	detail, since := c.detail, stamp(c.since)
	if !c.down.IsZero() {
		since = stamp(c.down)
	}
	return handlers.DatabaseStatus{Reachable: c.failed == 0 && !c.last.IsZero(), Detail: &detail, Since: &since}
}

// lag gives how long a call to ourselves takes now, one that is still open
// included.
func (s *stability) lag() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	slow := s.gate.recent()
	if at, open := s.asked[checkSelfCall]; open {
		slow = max(slow, time.Since(at))
	}
	return slow
}
