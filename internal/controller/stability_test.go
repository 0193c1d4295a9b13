package controller

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// marked records what the gate says.
type marked struct {
	mu    sync.Mutex
	marks []string
	last  string
}

func (m *marked) MarkStable(string) { m.add("stable", "") }

func (m *marked) MarkUnstable(reason string) { m.add("unstable", reason) }

func (m *marked) add(mark, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.marks, m.last = append(m.marks, mark), reason
}

func (m *marked) all() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.marks, " ")
}

// gateRig runs a gate in simulated time.
type gateRig struct {
	*stability
	marks    *marked
	ready    *readiness
	leave    func()
	registry *prometheus.Registry
	silent   atomic.Bool // the database gives no answer, whatever its context says
	hung     atomic.Bool // calls to ourselves end only with their context
	asked    atomic.Int32
	open     atomic.Int32 // questions without an answer
}

func newGateRig(t *testing.T) *gateRig {
	t.Helper()
	r := &gateRig{marks: &marked{}, ready: newReadiness(time.Now()), registry: prometheus.NewRegistry()}
	for _, c := range r.ready.report().Unmet {
		r.ready.met(c.Condition)
	}
	r.ready.enter(phaseServing)
	leaving := make(chan struct{})
	r.leave = sync.OnceFunc(func() { close(leaving) })
	over := make(chan struct{})
	r.stability = newStability(stabilityConfig{
		Marker: r.marks, Ready: r.ready, Leaving: leaving, Log: slog.New(slog.DiscardHandler), Registry: r.registry,
		Resources: func() resources { return resources{} },
		SelfCall: func(ctx context.Context) error {
			if r.hung.Load() {
				<-ctx.Done()
			}
			return nil
		},
		Database: func(context.Context) error {
			r.asked.Add(1)
			r.open.Add(1)
			defer r.open.Add(-1)
			for r.silent.Load() {
				select {
				case <-time.After(100 * time.Millisecond):
				case <-over:
					return nil
				}
			}
			return nil
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.run(ctx) }()
	t.Cleanup(func() {
		close(over)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return r
}

// gauge gives the metric of a check.
func (r *gateRig) gauge(t *testing.T, check string) float64 {
	t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "headgate_gate_check" && m.GetLabel()[0].GetValue() == check {
				return m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no metric for %s", check)
	return 0
}

func (r *gateRig) unmet() []string {
	var names []string
	for _, u := range r.ready.report().Unmet {
		names = append(names, u.Condition)
	}
	return names
}

func TestTheGateTellsNothingBeforeItShall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t)
		time.Sleep(10 * time.Second)
		if got := r.marks.all(); got != "" || r.isStable() {
			t.Errorf("told %q, stable %v", got, r.isStable())
		}
		r.begin()
		<-r.first
		if got := r.marks.all(); got != "stable" || !r.isStable() {
			t.Errorf("told %q, stable %v", got, r.isStable())
		}
	})
}

func TestASilentDatabaseIsUnstableUntilItAnswersAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t)
		r.begin()
		<-r.first
		time.Sleep(time.Minute)
		r.silent.Store(true)
		time.Sleep(10 * time.Second)
		if got := r.marks.all(); got != "stable unstable" || !strings.HasPrefix(r.marks.last, "database: ") {
			t.Errorf("told %q because %q", got, r.marks.last)
		}
		if got := r.unmet(); !slices.Equal(got, []string{checkDatabase}) || r.ready.report().Ready {
			t.Errorf("unmet %v", got)
		}
		if db := r.database(); db.Reachable || db.Detail == nil || time.Since(*db.Since) < 8*time.Second {
			t.Errorf("the database: %+v", db)
		}
		if r.gauge(t, checkDatabase) != 0 || r.gauge(t, checkSelfCall) != 1 {
			t.Errorf("metrics: database %v, self-call %v", r.gauge(t, checkDatabase), r.gauge(t, checkSelfCall))
		}
		time.Sleep(time.Minute)
		if n := r.open.Load(); n != 1 {
			t.Errorf("%d questions wait for a silent server, want one", n)
		}
		r.silent.Store(false)
		time.Sleep(4 * probeEvery)
		if got := r.marks.all(); got != "stable unstable stable" || len(r.unmet()) != 0 || !r.ready.report().Ready {
			t.Errorf("told %q, unmet %v", got, r.unmet())
		}
		if db := r.database(); !db.Reachable || db.Detail != nil {
			t.Errorf("the database: %+v", db)
		}
	})
}

func TestTheGateProbesEveryTwoSecondsAndIsQuietInADrain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t)
		r.begin()
		<-r.first
		before := r.asked.Load()
		time.Sleep(time.Minute)
		if n := r.asked.Load() - before; n < 29 || n > 31 {
			t.Errorf("%d probes a minute, want 30", n)
		}
		r.leave()
		synctest.Wait()
		before = r.asked.Load()
		r.silent.Store(true)
		time.Sleep(time.Minute)
		if n := r.asked.Load() - before; n != 0 || r.marks.all() != "stable" || r.isStable() {
			t.Errorf("%d probes, told %q, stable %v", n, r.marks.all(), r.isStable())
		}
	})
}

func TestThePaceOfDialsSeesACallThatIsStillOpen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newGateRig(t)
		r.begin()
		<-r.first
		if got := r.lag(); got > time.Millisecond {
			t.Errorf("lag %v", got)
		}
		r.hung.Store(true)
		time.Sleep(probeEvery + time.Second) // the next call has been open for a second at least
		if got := r.lag(); got < time.Second || got > probeLimit {
			t.Errorf("lag %v", got)
		}
	})
}
