package controller

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"headgate/handlers"
)

// The checks of the gate, by the names under which /readyz, the status and the
// metrics show them.
const (
	checkDatabase    = "database"
	checkSelfCall    = "self_call"
	checkDescriptors = "descriptors"
	checkMemory      = "memory"
	checkScheduler   = "scheduler"
	checkOutbound    = "outbound"
)

// The rules of the gate. Each has a way back that is harder than the way in,
// so that a controller at the edge does not flap.
const (
	failuresInRow = 3               // of a probe make its check fail
	downTerm      = 5 * time.Second // so long without a success does too
	slowProbe     = 2 * time.Second // p95 above it does too
	goodProbe     = time.Second     // a success within it counts for the way back
	goodInRow     = 3               // so many of them end the failure
	probeWindow   = 20              // probes that p95 is taken of
	recentProbes  = 5               // of them those that say how slow it is now

	tightUse = 0.90 // of descriptors or memory fails the check
	easyUse  = 0.85 // below it the check holds again

	lateWake    = 250 * time.Millisecond // a timer that rings later shows that nobody is scheduled
	lateTerm    = 5 * time.Second        // of nothing but such wakes fails the check; as long without ends it
	lateAtLeast = 4                      // wakes, so that one long stop of the machine is no failure

	manyDials    = 256                    // waiting are a storm
	stormSlow    = 500 * time.Millisecond // and hurt when a call to ourselves takes this long
	stormyRounds = 3                      // of both in a row fail the check, as many without end it
)

// check is one condition of the gate.
type check struct {
	name   string
	ok     bool
	since  time.Time // of ok
	last   time.Time // when it was last looked at; zero = never
	detail string

	failed int       // probes in a row
	good   int       // probes in a row
	down   time.Time // begin of the first failed probe since the last success; zero = none
	took   []time.Duration

	late     int       // wakes in a row
	lateFrom time.Time // zero = the last wake was in time
	calmFrom time.Time // zero = the last wake was late

	rounds int // in a row that speak against the present state
}

// set changes the state of the check when it is another one.
func (c *check) set(now time.Time, ok bool) {
	if c.ok != ok {
		c.ok, c.since = ok, now
	}
}

// gate decides whether this controller is fit to serve the public. It is told
// what was observed and when; it starts nothing and knows no clock. It is not
// safe for use by several goroutines.
type gate struct{ checks []*check }

// newGate begins with the two probes unproven and nothing against the rest.
func newGate(now time.Time) *gate {
	g := &gate{}
	for _, name := range []string{checkDatabase, checkSelfCall, checkDescriptors, checkMemory, checkScheduler, checkOutbound} {
		c := &check{name: name, since: now}
		if name == checkDatabase || name == checkSelfCall {
			c.detail = "not yet asked"
		} else {
			c.ok = true
		}
		g.checks = append(g.checks, c)
	}
	return g
}

func (g *gate) check(name string) *check {
	return g.checks[slices.IndexFunc(g.checks, func(c *check) bool { return c.name == name })]
}

// probed notes one answer, or none, of the database or of ourselves.
func (g *gate) probed(now time.Time, name string, took time.Duration, err error) {
	c := g.check(name)
	c.last = now
	c.took = append(c.took, took)
	if len(c.took) > probeWindow {
		c.took = slices.Delete(c.took, 0, 1)
	}
	switch {
	case err != nil:
		c.failed++
		c.good = 0
		if c.down.IsZero() {
			c.down = now.Add(-took)
		}
	default:
		c.failed, c.down = 0, time.Time{}
		if c.good++; took > goodProbe {
			c.good = 0
		}
	}
	slow := len(c.took) == probeWindow && p95(c.took) > slowProbe
	switch {
	case c.ok && (c.failed >= failuresInRow || !c.down.IsZero() && now.Sub(c.down) >= downTerm || slow):
		c.set(now, false)
	case !c.ok && c.good >= goodInRow:
		c.set(now, true)
		c.took = nil
	}
	c.detail = c.probeDetail(now, took, err, slow)
}

// probeDetail says in one sentence how the last probe went.
func (c *check) probeDetail(now time.Time, took time.Duration, err error, slow bool) string {
	switch {
	case err != nil && c.failed > 1:
		return fmt.Sprintf("failed %d times in %s: %s", c.failed, brief(now.Sub(c.down)), sentence(err))
	case err != nil:
		return "failed once: " + sentence(err)
	case slow:
		return fmt.Sprintf("one in twenty takes longer than %s", brief(slowProbe))
	case !c.ok:
		return fmt.Sprintf("answered in %s, %d of %d quick answers in a row", brief(took), c.good, goodInRow)
	}
	return "answered in " + brief(took)
}

// used notes how much of a bounded resource is taken; text says of what.
func (g *gate) used(now time.Time, name string, used, limit float64, text string) {
	c := g.check(name)
	c.last = now
	if limit <= 0 {
		c.detail = "no limit is set"
		c.set(now, true)
		return
	}
	share := used / limit
	switch {
	case share > tightUse:
		c.set(now, false)
	case share < easyUse:
		c.set(now, true)
	}
	c.detail = fmt.Sprintf("%.0f %% of %s", share*100, text)
}

// woke notes how late a timer rang.
func (g *gate) woke(now time.Time, lag time.Duration) {
	c := g.check(checkScheduler)
	c.last = now
	if lag > lateWake {
		c.calmFrom = time.Time{}
		if c.late++; c.lateFrom.IsZero() {
			c.lateFrom = now.Add(-lag)
		}
		if c.late >= lateAtLeast && now.Sub(c.lateFrom) >= lateTerm {
			c.set(now, false)
		}
	} else {
		c.late, c.lateFrom = 0, time.Time{}
		if c.calmFrom.IsZero() {
			c.calmFrom = now
		}
		if now.Sub(c.calmFrom) >= lateTerm {
			c.set(now, true)
		}
	}
	c.detail = "work is begun " + brief(lag) + " after it is due"
}

// dialling notes how many agents wait to be dialled. A storm of dials counts
// only while it slows down calls to ourselves: agents that cannot be reached
// must not keep the public out.
func (g *gate) dialling(now time.Time, waiting int) {
	c := g.check(checkOutbound)
	c.last = now
	slow := g.recent()
	hurts := waiting > manyDials && slow > stormSlow
	if c.ok == !hurts {
		c.rounds = 0
	} else if c.rounds++; c.rounds >= stormyRounds {
		c.set(now, !hurts)
		c.rounds = 0
	}
	c.detail = fmt.Sprintf("%d agents wait to be dialled", waiting)
	if hurts {
		c.detail += ", and a call to myself takes " + brief(slow)
	}
}

// recent gives the longest of the last calls to ourselves.
func (g *gate) recent() time.Duration {
	took := g.check(checkSelfCall).took
	if len(took) == 0 {
		return 0
	}
	return slices.Max(took[max(0, len(took)-recentProbes):])
}

// verdict says whether all checks hold; why is a sentence for operators.
func (g *gate) verdict() (stable bool, why string) {
	var bad []string
	for _, c := range g.checks {
		if !c.ok {
			bad = append(bad, c.name+": "+c.detail)
		}
	}
	if len(bad) > 0 {
		return false, strings.Join(bad, "; ")
	}
	return true, "the database answers, a call to myself succeeds, and resources suffice"
}

// list gives the checks as the status shows them.
func (g *gate) list() []handlers.Check {
	list := make([]handlers.Check, 0, len(g.checks))
	for _, c := range g.checks {
		shown := handlers.Check{Name: c.name, OK: c.ok, Since: stamp(c.since), Detail: c.detail}
		if !c.last.IsZero() {
			last := stamp(c.last)
			shown.Last = &last
		}
		list = append(list, shown)
	}
	return list
}

// stamp gives a time as answers show it.
func stamp(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

// p95 gives the value that one in twenty is above; took is not changed.
func p95(took []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(took))
	return sorted[(len(sorted)*95+99)/100-1]
}

// brief gives a duration with as many digits as people read.
func brief(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(100 * time.Microsecond).String()
}
