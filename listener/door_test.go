package listener_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/listener"
)

// simulated runs f in simulated time with an open listener that has the limits
// given; its connections are answered with the name of their port.
func simulated(t *testing.T, limits listener.Limits, f func(s *sim), change ...func(*listener.Config)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &sim{T: t, network: newNetwork(), reg: prometheus.NewRegistry()}
		s.l = start(t, append([]func(*listener.Config){func(c *listener.Config) {
			c.Listen, c.Registerer, c.Limits = s.Listen, s.reg, limits
		}}, change...)...)
		s.public = open(t, s.l)
		defer s.l.Close()
		f(s)
	})
}

type sim struct {
	*testing.T
	*network
	l      *listener.Listener
	reg    *prometheus.Registry
	public string
}

func (s *sim) refused(reason string) float64 {
	return metric(s.T, s.reg, "headgate_listener_refused_total", "public", reason)
}

// crowd asks n times at once from an address, and counts the answers.
func (s *sim) crowd(n int, from string) (answered int) {
	var count atomic.Int64
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if s.askFrom(s.public, from) == "public" {
				count.Add(1)
			}
		})
	}
	wg.Wait()
	return int(count.Load())
}

func TestSourceThatComesTooFastWaits(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{}, func(s *sim) {
		answer(s.T, s.l)
		began := time.Now()
		if got := s.crowd(60, "192.0.2.1"); got != 60 {
			s.Errorf("%d of 60 were served", got)
		}
		if took := time.Since(began); took < 900*time.Millisecond || took > 1100*time.Millisecond {
			s.Errorf("the last 20 came through in %v, want 1 s", took)
		}
		<-time.After(time.Minute)
		began = time.Now()
		// 40 at once, 20 a second for 5 s; of 128 places the last 28 wait in vain.
		if got := s.crowd(400, "192.0.2.1"); got < 138 || got > 141 {
			s.Errorf("%d of 400 were served, want 140", got)
		}
		if took := time.Since(began); took > 5*time.Second {
			s.Errorf("the last refusal came after %v", took)
		}
		// One whose time is up in the moment its token comes counts as waited.
		if got := s.refused("rate_source") + s.refused("queue_wait"); got < 259 || got > 262 {
			s.Errorf("%v refused, want 260", got)
		}
	})
}

// TestNoisySourceStarvesNobody is fact 8: one source comes ten times as often
// as all may, and 200 honest attempts all succeed at once; so do those on the
// controller port. Acceptance 36.
func TestNoisySourceStarvesNobody(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{PublicRate: listener.Rate{PerSecond: 300, Burst: 300}}, func(s *sim) {
		answer(s.T, s.l)
		ctx, cancel := context.WithCancel(s.Context())
		var noise sync.WaitGroup
		noise.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				for range 30 {
					noise.Go(func() { s.askFrom(s.public, "198.51.100.1") })
				}
			}
		})
		worst := time.Duration(0)
		for i := range 200 {
			<-time.After(25 * time.Millisecond)
			began := time.Now()
			if got := s.askFrom(s.public, fmt.Sprintf("192.0.2.%d", i%50)); got != "public" {
				s.Fatalf("honest attempt %d was refused", i)
			}
			worst = max(worst, time.Since(began))
			began = time.Now()
			if got := s.askFrom(s.l.Addr().String(), "198.51.100.1"); got != "controller" || time.Since(began) > 0 {
				s.Fatalf("controller port answers %q after %v", got, time.Since(began))
			}
		}
		cancel()
		noise.Wait()
		if worst > 6*time.Millisecond {
			s.Errorf("the slowest honest attempt took %v", worst)
		}
		if s.refused("rate_source") == 0 {
			s.Error("nothing was refused: the noise was none")
		}
	})
}

// Acceptance 37: with both lanes waiting the known have four of five turns.
func TestKnownSourcesAreServedFirst(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{PublicRate: listener.Rate{PerSecond: 100, Burst: 1}, QueueWait: time.Minute}, func(s *sim) {
		answer(s.T, s.l)
		s.l.SetKnown([]netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")})
		var known, unknown atomic.Int64
		var wg sync.WaitGroup
		for i := range 10 {
			for range 20 {
				wg.Go(func() { s.askFrom(s.public, fmt.Sprintf("198.51.100.%d", i)); unknown.Add(1) })
				wg.Go(func() { s.askFrom(s.public, fmt.Sprintf("192.0.2.%d", i)); known.Add(1) })
			}
		}
		<-time.After(2005 * time.Millisecond) // 200 turns
		if k, u := known.Load(), unknown.Load(); k < 158 || k > 162 || u < 39 || u > 42 {
			s.Errorf("of 200 turns the known had %d, the unknown %d", k, u)
		}
		q := s.l.Status().Admission.Queue
		if q.Known == 0 || q.Unknown == 0 {
			s.Errorf("the queue is %+v", q)
		}
		wg.Wait()
		if got := known.Load() + unknown.Load(); got != 400 {
			s.Errorf("%d were served", got)
		}
	})
}

// TestMembersOfANATAllJoin has 300 agents behind one address that come at once,
// authenticate, stay, and come again when they are reset. Acceptance 38.
func TestMembersOfANATAllJoin(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{PublicRate: listener.Rate{PerSecond: 400, Burst: 400}}, func(s *sim) {
		go func() {
			for i := 0; ; i++ {
				c, err := s.l.Accept()
				if err != nil {
					return
				}
				listener.Authenticated(listener.ConnContext(context.Background(), c), fmt.Sprint("agent ", i))
				go func() {
					defer c.Close()
					_, _ = io.WriteString(c, "in")
					_, _ = c.Read(make([]byte, 1)) // until the client leaves
				}()
			}
		}()
		began := time.Now()
		var joined []net.Conn
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range 300 {
			wg.Go(func() {
				for try := 0; ; try++ {
					c, err := s.dialFrom(s.public, "203.0.113.9")
					if err == nil {
						if _, err = io.ReadFull(c, make([]byte, 2)); err == nil {
							mu.Lock()
							joined = append(joined, c)
							mu.Unlock()
							return
						}
						c.Close()
					}
					<-time.After(time.Second + time.Duration(i)*time.Millisecond)
				}
			})
		}
		wg.Wait()
		if took := time.Since(began); took > 20*time.Second {
			s.Errorf("the last joined after %v", took)
		}
		st := s.l.Status()
		if n := st.Public.Classes[listener.ClassUser]; n != 300 || st.Admission.Identities != 300 {
			s.Errorf("%d connections of %d identities", n, st.Admission.Identities)
		}
		late, err := s.dialFrom(s.public, "203.0.113.9")
		if err != nil {
			s.Fatal(err)
		}
		if _, err := io.ReadFull(late, make([]byte, 2)); err != nil {
			s.Errorf("300 authenticated connections leave their source no place: %v", err)
		}
		late.Close()
		for _, c := range joined {
			c.Close()
		}
		synctest.Wait()
		if st := s.l.Status(); st.Admission.Identities != 0 || st.Public.Conns != 0 {
			s.Errorf("still counted: %+v", st.Public)
		}
	})
}

func TestIdentityBudgetIsBounded(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{IdentityConns: listener.IdentityConns{User: 3}, SourceConns: 2}, func(s *sim) {
		var held []net.Conn
		admit := func() bool {
			client, err := s.dialFrom(s.public, "192.0.2.1")
			if err != nil {
				s.Fatal(err)
			}
			held = append(held, client)
			got := make(chan net.Conn, 1)
			go func() {
				c, err := s.l.Accept()
				if err == nil {
					got <- c
				}
			}()
			synctest.Wait()
			select {
			case c := <-got:
				ctx := listener.ConnContext(s.Context(), c)
				for range 3 {
					listener.Authenticated(ctx, "ann")
				}
				if info, _ := listener.InfoFrom(ctx); info.Identity != "ann" || info.Class != listener.ClassUser || info.Source.String() != "192.0.2.1" {
					s.Errorf("info is %+v", info)
				}
				held = append(held, c)
				return true
			default:
				go s.askFrom(s.l.Addr().String(), "192.0.2.1") // for the Accept that waits
				held = append(held, <-got)
				return false
			}
		}
		for i := range 5 { // three of the identity, two of the source
			if !admit() {
				s.Fatalf("connection %d was refused", i)
			}
		}
		if admit() {
			s.Error("a sixth was admitted")
		}
		if got := s.refused("source_conns"); got != 1 {
			s.Errorf("%v refused", got)
		}
		for _, c := range held {
			c.Close()
		}
	})
}

// TestCaps fills the port up: above the soft cap connections are delivered to
// be sent away, above the hard cap reset, and those that live stay. The
// controller port answers all the time. Acceptance 42 and 43.
func TestCaps(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{MaxConns: 20}, func(s *sim) {
		served := make(chan net.Conn, 100)
		go func() {
			for {
				c, err := s.l.Accept()
				if err != nil {
					return
				}
				if info, _ := listener.InfoFrom(listener.ConnContext(context.Background(), c)); info.Port == listener.PortController {
					_, _ = io.WriteString(c, "alive")
					c.Close()
					continue
				}
				served <- c
			}
		}()
		var clients, ours []net.Conn
		for i := range 22 {
			c, err := s.dialFrom(s.public, fmt.Sprintf("192.0.2.%d", i))
			if err != nil {
				s.Fatal(err)
			}
			clients, ours = append(clients, c), append(ours, <-served)
			ctx := listener.ConnContext(s.Context(), ours[i])
			if info, _ := listener.InfoFrom(ctx); info.Shed != (i >= 20) {
				s.Errorf("connection %d: shed is %v", i+1, info.Shed)
			}
		}
		seen := map[time.Duration]bool{}
		for range 20 {
			d := listener.RetryAfter(listener.ConnContext(s.Context(), ours[21]))
			if seen[d] = true; d < 500*time.Millisecond || d > 48*time.Second {
				s.Errorf("retry after %v", d)
			}
		}
		if len(seen) < 10 {
			s.Errorf("20 clients are told %d moments", len(seen))
		}
		if got := s.askFrom(s.public, "192.0.2.99"); got != "" || s.refused("hard_cap") != 1 {
			s.Errorf("above the hard cap: %q, %v refused", got, s.refused("hard_cap"))
		}
		if got := s.askFrom(s.l.Addr().String(), "192.0.2.99"); got != "alive" {
			s.Errorf("controller port answers %q", got)
		}
		if err := s.l.UpdateLimits(listener.Limits{MaxConns: 2}); err != nil {
			s.Fatal(err)
		}
		<-time.After(time.Hour)
		for i, c := range ours { // the oldest streams go on
			go io.WriteString(c, "x")
			if _, err := io.ReadFull(clients[i], make([]byte, 1)); err != nil {
				s.Errorf("connection %d was ended: %v", i, err)
			}
		}
		if got := metric(s.T, s.reg, "headgate_listener_shed_total"); got != 2 {
			s.Errorf("%v shed", got)
		}
		for i := range ours {
			ours[i].Close()
			clients[i].Close()
		}
	})
}

func TestAdviceToStayAwayFollowsTheLoad(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{MaxConns: 1}, func(s *sim) {
		ctxs := make(chan context.Context)
		go func() {
			for {
				c, err := s.l.Accept()
				if err != nil {
					return
				}
				ctxs <- listener.ConnContext(context.Background(), c)
				if info, _ := listener.InfoFrom(listener.ConnContext(context.Background(), c)); info.Shed {
					c.Close()
				}
			}
		}()
		first, err := s.dialFrom(s.public, "192.0.2.1")
		if err != nil {
			s.Fatal(err)
		}
		defer first.Close()
		<-ctxs
		var ctx context.Context
		for i := range 10 {
			go s.askFrom(s.public, fmt.Sprintf("192.0.2.%d", 10+i))
			ctx = <-ctxs
			<-time.After(time.Second)
		}
		if d := listener.RetryAfter(ctx); d < 16*time.Second || d > 48*time.Second {
			s.Errorf("after 10 s of load: %v, want 16 to 48 s", d)
		}
		<-time.After(time.Minute)
		if d := listener.RetryAfter(ctx); d < 500*time.Millisecond || d > 1500*time.Millisecond {
			s.Errorf("after a minute of calm: %v, want 0.5 to 1.5 s", d)
		}
		if d := listener.RetryAfter(s.Context()); d != time.Second {
			s.Errorf("without a connection: %v", d)
		}
	})
}

// Acceptance 44.
func TestObserveCountsAndRefusesNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range []listener.LimitMode{listener.ModeObserve, listener.ModeOff} {
		simulated(t, listener.Limits{Mode: mode, MaxConns: 100, SourceConns: 300}, func(s *sim) {
			answer(s.T, s.l)
			if got := s.crowd(400, "192.0.2.1"); got != 400 {
				s.Errorf("%s: %d of 400 served", mode, got)
			}
			<-time.After(10 * time.Second)
			would := 0.0
			for _, reason := range []string{"rate_source", "queue_full", "queue_wait", "source_conns", "hard_cap", "fd", "shedding"} {
				if got := s.refused(reason); got != 0 {
					s.Errorf("%s: %v refused for %s", mode, got, reason)
				}
				would += metric(s.T, s.reg, "headgate_listener_would_refuse_total", reason)
			}
			if (would > 0) != (mode == listener.ModeObserve) {
				s.Errorf("%s: %v would have been refused", mode, would)
			}
			if q := s.l.Status().Admission.Queue; q.Unknown != 0 {
				s.Errorf("%s: %d still stand in the queue", mode, q.Unknown)
			}
		})
	}
}

// TestObserveCountsAConnectionOnce has connections that are over two limits.
func TestObserveCountsAConnectionOnce(t *testing.T) {
	t.Parallel()
	limits := wide()
	limits.Mode, limits.SourceConns, limits.QueuePerSource = listener.ModeObserve, 1, 1
	limits.SourceRate = listener.Rate{PerSecond: 0.001, Burst: 1}
	simulated(t, limits, func(s *sim) {
		for range 4 { // they are held: nobody calls Accept
			c, err := s.dialFrom(s.public, "192.0.2.1")
			if err != nil {
				s.Fatal(err)
			}
			defer c.Close()
		}
		<-time.After(20 * time.Second)
		would := 0.0
		for _, reason := range []string{"rate_source", "queue_full", "queue_wait", "source_conns"} {
			would += metric(s.T, s.reg, "headgate_listener_would_refuse_total", reason)
		}
		if would != 3 {
			s.Errorf("%v would have been refused, want 3", would)
		}
	})
}

func TestChangeOfModeLetsWaitersIn(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{SourceRate: listener.Rate{PerSecond: 0.1, Burst: 1}}, func(s *sim) {
		answer(s.T, s.l)
		done := make(chan int, 1)
		go func() { done <- s.crowd(50, "192.0.2.1") }()
		<-time.After(time.Second)
		if q := s.l.Status().Admission.Queue; q.Unknown != 49 {
			s.Fatalf("%d wait", q.Unknown)
		}
		if err := s.l.UpdateLimits(listener.Limits{Mode: listener.ModeOff}); err != nil {
			s.Fatal(err)
		}
		if got := <-done; got != 50 {
			s.Errorf("%d of 50 served", got)
		}
	})
}

func TestUpdateLimits(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{}, func(s *sim) {
		answer(s.T, s.l)
		s.crowd(40, "192.0.2.1")
		err := s.l.UpdateLimits(listener.Limits{
			Mode: "perhaps", PublicRate: listener.Rate{PerSecond: -1}, KnownFactor: 0.5, Queue: 10, QueuePerSource: 11, MaxConns: -1, QueueWait: -1,
		})
		for _, want := range []string{"mode", "public rate", "known factor", "queue per source", "max conns", "queue wait"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				s.Errorf("error does not name %s: %v", want, err)
			}
		}
		if got := s.l.Status().Admission.Limits.Mode; got != listener.ModeEnforce {
			s.Errorf("a bad update changed the mode to %s", got)
		}
		// More is allowed from now on, but nothing is given for the past.
		if err := s.l.UpdateLimits(listener.Limits{SourceRate: listener.Rate{PerSecond: 100, Burst: 1000}}); err != nil {
			s.Fatal(err)
		}
		began := time.Now()
		if got := s.crowd(50, "192.0.2.1"); got != 50 {
			s.Errorf("%d of 50 served", got)
		}
		if took := time.Since(began); took < 450*time.Millisecond || took > 550*time.Millisecond {
			s.Errorf("50 more took %v at 100 a second", took)
		}
	})
}

// TestSheddingAdmitsOnlyTheKnown goes through the real states.
func TestSheddingAdmitsOnlyTheKnown(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{}, func(s *sim) {
		answer(s.T, s.l)
		s.l.SetKnown([]netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")})
		<-time.After(time.Minute)
		s.l.MarkUnstable("test")
		<-time.After(11 * time.Second)
		if st := s.l.Status(); st.State != listener.StateShedding || !st.Admission.OnlyKnown {
			s.Fatalf("state is %s", st.State)
		}
		if got := s.askFrom(s.public, "192.0.2.1"); got != "public" {
			s.Error("a known source was refused")
		}
		if got := s.askFrom(s.public, "192.0.2.2"); got != "" || s.refused("shedding") != 1 {
			s.Errorf("a stranger: %q", got)
		}
	})
}

func TestOpeningBeginsSlowly(t *testing.T) {
	t.Parallel()
	simulated(t, listener.Limits{PublicRate: listener.Rate{PerSecond: 100, Burst: 100}}, func(s *sim) {
		answer(s.T, s.l)
		served := 0
		for i := range 100 {
			if began := time.Now(); s.askFrom(s.public, fmt.Sprintf("192.0.2.%d", i)) == "public" && time.Since(began) == 0 {
				served++
			} else {
				break
			}
		}
		if served != 25 {
			s.Errorf("%d were served at once, want a quarter of 100", served)
		}
	}, func(c *listener.Config) { c.OpenRamp = 10 * time.Second })
}

// Acceptance 49: the slow start after a re-opening too.
func TestOpeningAgainBeginsSlowly(t *testing.T) {
	t.Parallel()
	const rate = 100
	limits := listener.Limits{PublicRate: listener.Rate{PerSecond: rate, Burst: 1}, SourceRate: listener.Rate{PerSecond: 1, Burst: 1}}
	simulated(t, limits, func(s *sim) {
		answer(s.T, s.l)
		firstSecond := func() (served int64) {
			var count atomic.Int64
			var wg sync.WaitGroup
			began := time.Now()
			for i := range 3 * rate { // more than come in at the full rate; each from elsewhere
				wg.Go(func() {
					if s.askFrom(s.public, fmt.Sprintf("192.0.%d.%d", 2+i/250, i%250)) == "public" && time.Since(began) <= time.Second {
						count.Add(1)
					}
				})
			}
			wg.Wait()
			return count.Load()
		}
		about := func(when string, want int64) {
			if got := firstSecond(); got < want*8/10 || got > want*14/10 { // the rate grows during the second
				s.Errorf("%s: %d were let in within a second, want about %d", when, got, want)
			}
			after(time.Hour)
		}
		about("after the first opening", rate/4)
		about("when the slow start is over", rate)
		s.l.MarkUnstable("ill")
		after(2 * time.Minute)
		wantState(s.T, s.l, listener.StateReclosed)
		s.l.MarkStable("well")
		if _, err := s.l.WaitPublic(s.Context()); err != nil {
			s.Fatal(err)
		}
		about("after the opening again", rate/4)
	}, func(c *listener.Config) { c.OpenRamp = listener.DefaultOpenRamp })
}

func TestRefusalsAreLoggedOnceForEachSource(t *testing.T) {
	t.Parallel()
	var log lockedBuffer
	simulated(t, listener.Limits{QueuePerSource: 1, QueueWait: time.Millisecond}, func(s *sim) {
		answer(s.T, s.l)
		for i := range 3 {
			s.crowd(100, fmt.Sprintf("192.0.2.%d", i))
		}
		<-time.After(11 * time.Second)
		lines := strings.Count(log.String(), "connections over the limits")
		if lines != 3 || !strings.Contains(log.String(), "source=192.0.2.1 count=60 reason=rate_source mode=enforce") {
			s.Errorf("%d lines:\n%s", lines, log.String())
		}
		top := s.l.Status().Admission.Top
		if len(top) != 3 || top[0].Refused != 60 || top[0].Class != listener.ClassUnknown {
			s.Errorf("top sources: %+v", top)
		}
	}, func(c *listener.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
}
