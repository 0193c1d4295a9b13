package fleet

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headgate/tasks"
)

// gateTrial is a gate in simulated time and what it has admitted.
type gateTrial struct {
	*gate
	began time.Time
	lag   atomic.Int64

	mu       sync.Mutex
	admitted []admitted // in order
	callers  sync.WaitGroup
}

type admitted struct {
	caller
	after time.Duration // since the trial began
}

func newGateTrial(l Limits) *gateTrial {
	g := &gateTrial{began: time.Now()}
	g.gate = newGate(l.withDefaults(), func() time.Duration { return time.Duration(g.lag.Load()) }, func(time.Duration) {})
	return g
}

// dial asks for n dials that each take a while, one agent after the other.
func (g *gateTrial) dial(n int, took time.Duration, c caller) {
	for i := range n {
		one := c
		one.agent = c.agent + tasks.AgentNum(i)
		g.callers.Go(func() {
			p, err := g.enter(context.Background(), one)
			if err != nil {
				panic(err) // its context never ends
			}
			g.mu.Lock()
			g.admitted = append(g.admitted, admitted{one, time.Since(g.began)})
			g.mu.Unlock()
			time.Sleep(took)
			p.leave()
		})
		synctest.Wait() // in this order
	}
}

// until gives how many were admitted before a moment.
func (g *gateTrial) until(d time.Duration) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, a := range g.admitted {
		if a.after < d {
			n++
		}
	}
	return n
}

func between(t *testing.T, what string, got, low, high int) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s: %d, want %d to %d", what, got, low, high)
	}
}

const handshake = 10 * time.Millisecond

func TestAFewLostAgentsAreDialledAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000})
		for range 3 {
			before := len(g.admitted)
			g.dial(64, handshake, caller{})
			between(t, "admitted without waiting", len(g.admitted)-before, 64, 64)
			g.callers.Wait()
			time.Sleep(10 * time.Second)
		}
		if l := g.load(); l != (DialLoad{Rate: rampFloor}) {
			t.Errorf("at rest the load is %+v", l)
		}
	})
}

func TestAStormBeginsSlowlyAndDoubles(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000})
		g.dial(10_000, handshake, caller{})
		between(t, "waiting", g.load().Waiting, 9936, 9936)
		g.callers.Wait()
		// 64 at once, then 100, 200, 400, 800, 1,600 and 2,000 a second.
		between(t, "in the first second", g.until(time.Second), 150, 166)
		between(t, "in two", g.until(2*time.Second), 330, 370)
		between(t, "in three", g.until(3*time.Second), 700, 780)
		between(t, "in four", g.until(4*time.Second), 1450, 1600)
		between(t, "in five", g.until(5*time.Second), 2950, 3200)
		last := g.admitted[len(g.admitted)-1].after
		if last > 10*time.Second { // 15 s are promised for all, with start and handshakes
			t.Errorf("the last of 10,000 was admitted after %s", last)
		}
		for i, a := range g.admitted {
			if i >= 2000 && a.after-g.admitted[i-2000].after < 960*time.Millisecond {
				t.Fatalf("2,000 dials began within %s", a.after-g.admitted[i-2000].after)
			}
		}
	})
}

func TestTheRampRestartsOnlyAfterRest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000})
		g.dial(5000, handshake, caller{})
		g.callers.Wait()
		time.Sleep(5 * time.Second)
		again := time.Since(g.began)
		g.dial(1000, handshake, caller{})
		g.callers.Wait()
		between(t, "of 1,000 within a second of the next storm soon after", g.until(again+time.Second)-5000, 1000, 1000)
		time.Sleep(time.Minute)
		later := time.Since(g.began)
		g.dial(1000, handshake, caller{})
		g.callers.Wait()
		between(t, "of 1,000 within a second of one a minute later", g.until(later+time.Second)-6000, 150, 166)
	})
}

func TestASlowControllerBrakesItsDials(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000})
		g.dial(10_000, handshake, caller{})
		rates := func(lag time.Duration, want ...float64) {
			g.lag.Store(int64(lag))
			for _, w := range want {
				time.Sleep(time.Second)
				synctest.Wait()
				if got := g.load().Rate; got != w {
					t.Errorf("with a delay of %s the rate is %.0f, want %.0f", lag, got, w)
				}
			}
		}
		time.Sleep(50 * time.Millisecond) // a step begins with the first who waits
		rates(0, 200, 400)
		rates(100*time.Millisecond, 400, 400)
		rates(99*time.Millisecond, 800)
		rates(500*time.Millisecond, 400, 200, 100, 100)
		rates(200*time.Millisecond, 100)
		rates(0, 200, 400, 800, 1600, 2000, 2000)
		g.callers.Wait()
	})
}

func TestOnlySoManyHandshakesAreUnderWay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000, SlowAfter: time.Minute})
		g.dial(1000, time.Second, caller{})
		for g.load().Waiting > 0 {
			if n := g.load().InFlight; n > defaultDials {
				panic(fmt.Sprint(n, " handshakes are under way")) // the callers would keep the bubble
			}
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		g.callers.Wait()
		between(t, "in ten seconds", g.until(10*time.Second), 9*defaultDials, 10*defaultDials)
	})
}

func TestAgentsWithTasksAreDialledFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000})
		g.dial(1000, handshake, caller{})
		g.dial(200, handshake, caller{agent: 5000, urgent: true})
		between(t, "urgent", g.load().Urgent, 200, 200)
		g.callers.Wait()
		var urgent, rest int
		var order []tasks.AgentNum
		for _, a := range g.admitted[64:] { // the first had no competition
			if a.urgent {
				urgent++
			} else if urgent < 200 {
				rest++
			}
			if !a.urgent {
				order = append(order, a.agent)
			}
		}
		between(t, "others before the last with tasks", rest, 48, 52) // a fifth, no more and no less
		if !slices.IsSorted(order) {
			t.Error("agents of one lane did not go in the order in which they came")
		}
	})
}

// TestAgentsThatDoNotAnswerHoldUpNobody has five times as many agents that
// never answer as others.
func TestAgentsThatDoNotAnswerHoldUpNobody(t *testing.T) {
	t.Parallel()
	for name, silent := range map[string]bool{"found out now": false, "known": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := newGateTrial(Limits{DialRate: 2000})
				g.dial(900, defaultConnectTimeout, caller{silent: silent, urgent: true})
				g.dial(4100, defaultConnectTimeout, caller{silent: true, agent: 1000, urgent: true})
				began := time.Since(g.began)
				g.dial(1000, handshake, caller{agent: 10_000})
				for l := g.load(); l.Waiting+l.Silent > 0; l = g.load() {
					if l.Slow > defaultSlowDials || time.Since(g.began) > 10*time.Minute {
						panic(fmt.Sprintf("after %s the load is %+v", time.Since(g.began), l)) // the callers would never end
					}
					time.Sleep(100 * time.Millisecond)
				}
				g.callers.Wait()
				var last time.Duration
				for _, a := range g.admitted {
					if a.agent >= 10_000 {
						last = a.after - began
					}
				}
				if last > 7*time.Second {
					t.Errorf("the last that answers was admitted after %s", last)
				}
				if l := g.load(); l.InFlight != 0 || l.Slow != 0 || l.Waiting != 0 || l.Silent != 0 {
					t.Errorf("in the end the load is %+v", l)
				}
			})
		})
	}
}

// TestASlowDialThatIsAnsweredIsAHandshake: a network that comes back must not
// bring more handshakes at once than there are places.
func TestASlowDialThatIsAnsweredIsAHandshake(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{Dials: 4, DialRate: 2000})
		var passes []*pass
		for range 6 {
			p, err := g.enter(t.Context(), caller{silent: true})
			if err != nil {
				t.Fatal(err)
			}
			passes = append(passes, p)
			time.Sleep(handshake)
		}
		for _, p := range passes {
			p.answered()
		}
		if l := g.load(); l.InFlight != 6 || l.Slow != 0 {
			t.Errorf("load %+v", l)
		}
		g.dial(1, handshake, caller{})
		for i, p := range passes[:3] {
			between(t, "waiting", g.load().Waiting, 1, 1)
			if i < 2 {
				p.leave()
			}
			synctest.Wait()
		}
		passes[2].leave()
		synctest.Wait()
		between(t, "waiting", g.load().Waiting, 0, 0)
		g.callers.Wait()
		time.Sleep(defaultSlowAfter)
		synctest.Wait()
		if l := g.load(); l.InFlight != 0 || l.Slow != 3 { // answered, but then not a word
			t.Errorf("load %+v", l)
		}
		for _, p := range passes[3:] {
			p.leave()
		}
		if l := g.load(); l.InFlight != 0 || l.Slow != 0 {
			t.Errorf("load %+v", l)
		}
	})
}

func TestWhoDoesNotWaitAnyLongerLosesItsTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newGateTrial(Limits{DialRate: 2000, Dials: 1, SlowDials: 1})
		held, err := g.enter(t.Context(), caller{})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 300 {
			c := caller{agent: tasks.AgentNum(i + 1), urgent: i%3 == 1, silent: i%3 == 2}
			g.callers.Go(func() {
				if p, err := g.enter(ctx, c); err == nil {
					p.leave()
				}
			})
		}
		synctest.Wait()
		cancel()
		held.leave() // some are admitted at the moment at which they give up
		g.callers.Wait()
		if l := g.load(); l.InFlight != 0 || l.Slow != 0 || l.Waiting != 0 || l.Silent != 0 {
			t.Errorf("load %+v", l)
		}
		g.dial(1, handshake, caller{})
		g.callers.Wait()
		between(t, "admitted afterwards", len(g.admitted), 1, 1)
	})
}

// However many agents are away, those that tasks wait for are dialled about
// eagerDials times a second in all, and no more.
func TestEagerDialsAreBounded(t *testing.T) {
	t.Parallel()
	f := &Fleet{cfg: Config{Limits: Limits{}.withDefaults()}}
	for away, want := range map[int64]time.Duration{1: defaultBackoffWork, 100: defaultBackoffWork, 10_000: 10_000 * time.Second / eagerDials} {
		f.away.Store(away)
		for range 100 {
			if d := f.eager(); d < want/2 || d > want {
				t.Errorf("with %d away: %s, want half of %s to all of it", away, d, want)
			}
		}
	}
}

// TestJitterIsTakenOffAfterTheCap: agents at the cap must not dial in step.
func TestJitterIsTakenOffAfterTheCap(t *testing.T) {
	t.Parallel()
	l := Limits{}.withDefaults()
	for failures, want := range map[int]time.Duration{
		1: time.Second, 2: 1600 * time.Millisecond, 5: 6553600 * time.Microsecond, 10: time.Minute, 100: time.Minute, 10_000: time.Minute,
	} {
		var sum, low, high float64
		low = math.Inf(1)
		const n = 2000
		for range n {
			d := delay(l, failures).Seconds()
			sum, low, high = sum+d, min(low, d), max(high, d)
		}
		w := want.Seconds()
		if low < w/2 || high > w || low > 0.52*w || high < 0.98*w || math.Abs(sum/n-0.75*w) > 0.03*w {
			t.Errorf("after %d failures: %.2f to %.2f s, mean %.2f, want half of %.2f s to all of it", failures, low, high, sum/n, w)
		}
	}
}
