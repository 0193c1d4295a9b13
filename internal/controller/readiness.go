package controller

import (
	"sync"
	"time"

	"headgate/handlers"
)

// phase is where the start stands; the words are those of /readyz.
type phase string

const (
	phaseParse    phase = "parse"
	phaseOpen     phase = "open"
	phaseBind     phase = "bind"
	phaseDatabase phase = "database"
	phaseJoin     phase = "join"
	phaseOpening  phase = "open public"
	phaseServing  phase = "serving"
	phaseDrain    phase = "drain"
)

// readiness records the phases and the conditions that are not met. It is
// what /readyz, /status and the not-ready page show.
type readiness struct {
	mu    sync.Mutex
	phase phase
	since time.Time
	past  []pastPhase
	unmet []handlers.UnmetCondition // in the order in which they are met
}

type pastPhase struct {
	name phase
	took time.Duration
}

// newReadiness begins in phase parse, at the program's start, with every
// condition unmet.
func newReadiness(began time.Time) *readiness {
	r := &readiness{phase: phaseParse, since: began}
	for _, c := range [...][2]string{
		{"database", "not yet connected"},
		{"migrations", "wait for the database"},
		{"shards", "wait for the database"},
		{"first_sweep", "waits for the shards"},
		{"reconcile", "waits for the shards"},
		{"self_call", "waits for everything before it"},
	} {
		r.unmet = append(r.unmet, handlers.UnmetCondition{Condition: c[0], Detail: c[1]})
	}
	return r
}

// enter begins a phase and notes how long the one before took.
func (r *readiness) enter(p phase) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.past = append(r.past, pastPhase{r.phase, now.Sub(r.since)})
	r.phase, r.since = p, now
}

// explain changes why a condition is not met; an unknown one is added in
// front.
func (r *readiness) explain(condition, detail string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, c := range r.unmet {
		if c.Condition == condition {
			r.unmet[i].Detail = detail
			return
		}
	}
	r.unmet = append([]handlers.UnmetCondition{{Condition: condition, Detail: detail}}, r.unmet...)
}

// met removes a condition.
func (r *readiness) met(condition string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := r.unmet[:0:0]
	for _, c := range r.unmet {
		if c.Condition != condition {
			kept = append(kept, c)
		}
	}
	r.unmet = kept
}

// report gives the answer of /readyz.
func (r *readiness) report() handlers.Readiness {
	r.mu.Lock()
	defer r.mu.Unlock()
	return handlers.Readiness{
		Ready: r.phase == phaseServing && len(r.unmet) == 0,
		Phase: string(r.phase),
		Unmet: append([]handlers.UnmetCondition{}, r.unmet...),
	}
}

// readiness gives the answer of /readyz: the conditions that are recorded, and
// once the controller serves that of the public port, which the listener may
// have closed again.
func (c *Controller) readiness() handlers.Readiness {
	r := c.ready.report()
	if r.Phase != string(phaseServing) {
		return r
	}
	if ports := c.listener.Ports(); !ports.PublicOpen {
		r.Ready = false
		r.Unmet = append(r.Unmet, handlers.UnmetCondition{
			Condition: "public_port", Detail: "is " + string(ports.State) + ": " + ports.Reason,
		})
	}
	return r
}

// entered says when the present phase began.
func (r *readiness) entered() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.since
}

// phases gives the phases so far with their durations; the present one counts
// up to now, unless it is the last.
func (r *readiness) phases() []pastPhase {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := append([]pastPhase{}, r.past...)
	if r.phase != phaseServing {
		all = append(all, pastPhase{r.phase, time.Since(r.since)})
	}
	return all
}
