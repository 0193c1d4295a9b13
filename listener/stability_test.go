package listener_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/listener"
)

// after lets simulated time pass, and what it brings happen.
func after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func wantState(t *testing.T, l *listener.Listener, want listener.State) {
	t.Helper()
	if r := l.Ports(); r.State != want {
		t.Fatalf("state is %s (%s), want %s", r.State, r.Reason, want)
	}
}

// steady starts a listener in memory, opens it and lets it be open for long.
func steady(t *testing.T, change ...func(*listener.Config)) (*listener.Listener, *network) {
	t.Helper()
	mem := newNetwork()
	l := start(t, append([]func(*listener.Config){func(c *listener.Config) {
		c.Listen, c.OpenDelay = mem.Listen, listener.DefaultOpenDelay
	}}, change...)...)
	l.MarkStable("test")
	if _, err := l.WaitPublic(t.Context()); err != nil {
		t.Fatal(err)
	}
	after(time.Hour)
	return l, mem
}

// Acceptance 4.
func TestUnstableInsideTheDelayCancels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen, c.OpenDelay = mem.Listen, listener.DefaultOpenDelay })
		l.MarkStable("test")
		after(time.Second)
		l.MarkUnstable("not yet")
		wantState(t, l, listener.StateControllerOnly)
		l.MarkUnstable("not yet")
		after(time.Hour)
		if r := l.Ports(); r.State != listener.StateControllerOnly || !r.OpensAt.IsZero() || r.Reason != "not yet" {
			t.Fatalf("report is %+v", r)
		}
		began := time.Now()
		l.MarkStable("now") // the delay is whole again
		if _, err := l.WaitPublic(t.Context()); err != nil || time.Since(began) != listener.DefaultOpenDelay {
			t.Fatalf("opened after %v, %v", time.Since(began), err)
		}
	})
}

// Acceptance 7.
func TestBarrierTimeoutOpensAnyway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) {
			c.Listen, c.OpenDelay = mem.Listen, listener.DefaultOpenDelay
			c.OpenBarrier = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
			c.OpenBarrierTimeout = listener.DefaultOpenBarrierTimeout
		})
		began := time.Now()
		l.MarkStable("test")
		after(listener.DefaultOpenBarrierTimeout - time.Nanosecond)
		wantState(t, l, listener.StateSettling)
		if _, err := l.WaitPublic(t.Context()); err != nil || time.Since(began) != listener.DefaultOpenBarrierTimeout {
			t.Fatalf("opened after %v, %v", time.Since(began), err)
		}
	})
}

// Acceptance 7.
func TestBarrierErrorKeepsClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		var asked atomic.Int32
		no := errors.New("peers are not ready")
		l := start(t, func(c *listener.Config) {
			c.Listen, c.Retry = mem.Listen, listener.RetryConfig{}
			c.OpenBarrierTimeout = listener.DefaultOpenBarrierTimeout
			c.OpenBarrier = func(context.Context) error {
				if asked.Add(1) < 5 {
					return no
				}
				return nil
			}
		})
		began := time.Now()
		l.MarkStable("test")
		after(14 * time.Second) // asked at 0, 1, 3, 7 and 15 s
		if r := l.Ports(); r.State != listener.StateSettling || !errors.Is(r.Err, no) || asked.Load() != 4 {
			t.Fatalf("asked %d times, report is %+v", asked.Load(), r)
		}
		if _, err := l.WaitPublic(t.Context()); err != nil || time.Since(began) != 15*time.Second {
			t.Fatalf("opened after %v, %v", time.Since(began), err)
		}
		if r := l.Ports(); r.Err != nil || asked.Load() != 5 {
			t.Errorf("asked %d times, report is %+v", asked.Load(), r)
		}
	})
}

func TestBarrierIsToldWhenTheOpeningIsCalledOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		var running atomic.Int32
		l := start(t, func(c *listener.Config) {
			c.Listen, c.OpenBarrierTimeout = mem.Listen, time.Hour
			c.OpenBarrier = func(ctx context.Context) error {
				running.Add(1)
				defer running.Add(-1)
				<-ctx.Done()
				return ctx.Err()
			}
		})
		for range 3 {
			l.MarkStable("test")
			after(time.Second)
			if running.Load() != 1 {
				t.Errorf("%d questions at once", running.Load())
			}
			l.MarkUnstable("test")
			synctest.Wait()
			if running.Load() != 0 {
				t.Error("the barrier goes on after the opening was called off")
			}
		}
		l.MarkStable("test")
		synctest.Wait()
		l.Close()
		synctest.Wait()
		if running.Load() != 0 {
			t.Error("the barrier goes on after Close")
		}
	})
}

// Acceptance 8.
func TestWarningOfAPortThatDoesNotOpenComesOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem, reg := newNetwork(), prometheus.NewRegistry()
		var text lockedBuffer
		l := start(t, func(c *listener.Config) {
			c.Listen, c.Registerer = mem.Listen, reg
			c.Logger = slog.New(slog.NewTextHandler(&text, nil))
		})
		count := func() int { return strings.Count(text.String(), "still not open") }
		after(time.Minute - time.Nanosecond)
		if count() != 0 {
			t.Fatalf("warned early:\n%s", &text)
		}
		after(time.Nanosecond)
		if got := metric(t, reg, "headgate_listener_public_late"); count() != 1 || got != 1 {
			t.Fatalf("%d warnings, metric is %v:\n%s", count(), got, &text)
		}
		l.MarkStable("test")
		after(time.Hour)
		l.MarkUnstable("test")
		after(time.Hour)
		wantState(t, l, listener.StateReclosed)
		if got := metric(t, reg, "headgate_listener_public_late"); count() != 1 || got != 0 {
			t.Fatalf("%d warnings, metric is %v:\n%s", count(), got, &text)
		}
	})
}

// Acceptance 48.
func TestUnstablePortShedsThenRefuses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		l, mem := steady(t, func(c *listener.Config) { c.Registerer = reg })
		public := publicAddr(l)
		client, err := mem.dial(public)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		alive := func() {
			t.Helper()
			go func() { _, _ = io.WriteString(server, "x") }()
			if _, err := client.Read(make([]byte, 1)); err != nil {
				t.Fatalf("the live connection broke: %v", err)
			}
		}
		l.MarkUnstable("database is down")
		after(10*time.Second - time.Nanosecond)
		wantState(t, l, listener.StateOpen)
		if r := l.Ports(); r.Stable || r.MarkReason != "database is down" {
			t.Errorf("report inside the grace is %+v", r)
		}
		after(time.Nanosecond)
		wantState(t, l, listener.StateShedding)
		alive()
		after(30*time.Second - time.Nanosecond)
		if r := l.Ports(); r.State != listener.StateShedding || !r.PublicOpen || mem.at(public) == nil {
			t.Fatalf("report while shedding is %+v", r)
		}
		after(time.Nanosecond)
		if r := l.Ports(); r.State != listener.StateReclosed || r.PublicOpen || mem.at(public) != nil {
			t.Fatalf("report after 40 s is %+v", r)
		}
		if !strings.Contains(l.Ports().Reason, "unstable for 40s: database is down") {
			t.Errorf("reason is %q", l.Ports().Reason)
		}
		alive()
		if got := metric(t, reg, "headgate_listener_transitions_total", "shedding", "reclosed"); got != 1 {
			t.Errorf("transitions_total is %v", got)
		}
		if got := metric(t, reg, "headgate_listener_public_open"); got != 0 {
			t.Errorf("public_open is %v", got)
		}
	})
}

func TestShortTroubleIsRiddenOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, _ := steady(t)
		l.MarkUnstable("hiccup")
		after(9 * time.Second)
		l.MarkStable("fine")
		after(time.Minute)
		l.MarkUnstable("trouble")
		after(11 * time.Second)
		wantState(t, l, listener.StateShedding)
		l.MarkStable("better")
		after(4 * time.Second)
		l.MarkUnstable("not yet")
		after(time.Second)
		l.MarkStable("better")
		after(5*time.Second - time.Nanosecond)
		wantState(t, l, listener.StateShedding)
		after(time.Nanosecond)
		wantState(t, l, listener.StateOpen)
		if got := len(l.Status().Transitions); got != 5 {
			t.Errorf("%d changes of state, want 5: %v", got, l.Status().Transitions)
		}
	})
}

// Acceptance 49.
func TestRecoveryOpensAfterADoubledDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, _ := steady(t)
		for _, want := range []time.Duration{4, 8, 16, 32, 60, 60} {
			l.MarkUnstable("ill")
			after(2 * time.Minute)
			wantState(t, l, listener.StateReclosed)
			l.MarkStable("well")
			began := time.Now()
			if r := l.Ports(); r.State != listener.StateSettling || r.OpensAt.Sub(began) != want*time.Second {
				t.Fatalf("state %s, opens in %v, want %d s", r.State, r.OpensAt.Sub(began), want)
			}
			if _, err := l.WaitPublic(t.Context()); err != nil || time.Since(began) != want*time.Second {
				t.Fatalf("opened after %v, %v", time.Since(began), err)
			}
			after(time.Minute)
		}
		after(time.Hour) // earlier trouble is forgotten
		l.MarkUnstable("ill")
		after(2 * time.Minute)
		l.MarkStable("well")
		if r := l.Ports(); time.Until(r.OpensAt) != 4*time.Second {
			t.Errorf("after a long steady time the delay is %v", time.Until(r.OpensAt))
		}
	})
}

// Acceptance 50.
func TestFlappingGateMovesSlowly(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for round := range 30 {
		synctest.Test(t, func(t *testing.T) {
			const minOpen = 30 * time.Second
			mem := newNetwork()
			var heard reports
			l := start(t, func(c *listener.Config) { c.Listen, c.OnPorts, c.MinOpen = mem.Listen, heard.add, minOpen })
			l.MarkStable("up")
			after(0)
			began := time.Now()
			bad, good := 500+rnd.IntN(30_000), 500+rnd.IntN(20_000)
			for time.Since(began) < 20*time.Minute {
				l.MarkUnstable("flap")
				after(time.Duration(1+rnd.IntN(bad+1)) * time.Millisecond)
				l.MarkStable("flap")
				after(time.Duration(1+rnd.IntN(good+1)) * time.Millisecond)
			}
			took := time.Since(began)
			l.Close()
			synctest.Wait()
			heard.mu.Lock()
			defer heard.mu.Unlock()
			list := heard.list[3:] // after the first opening
			if got, limit := len(list)-1, int(took/minOpen); got > limit {
				t.Errorf("round %d: %d changes in %v", round, got, took)
			}
			for i, r := range list {
				if r.State == listener.StateShedding && i == 0 && r.Since.Sub(began) < minOpen {
					t.Errorf("round %d: open for %v alone", round, r.Since.Sub(began))
				}
			}
		})
	}
}

// Acceptance 60: three controllers start together and share a barrier; the
// clients go to the first that lets them in. Without the barrier the first
// controller would have them all.
func TestBarrierSharesTheHerd(t *testing.T) {
	t.Parallel()
	for _, barrier := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			most, all := herd(t, barrier)
			t.Logf("barrier %t: one controller has %d of %d clients", barrier, most, all)
			if barrier && most*2 > all {
				t.Errorf("one controller has %d of %d clients", most, all)
			}
			if !barrier && most*2 <= all {
				t.Errorf("without a barrier the first has no more than %d of %d clients: the test shows nothing", most, all)
			}
		})
	}
}

// herd gives how many of all clients one of three controllers got at most.
// They are stable after 1, 12 and 12.5 s; clients try any of them every 3 to 12 s.
func herd(t *testing.T, barrier bool) (most, all int) {
	const clients = 600
	var stable atomic.Int32
	majority := make(chan struct{})
	net0 := newNetwork()
	var addrs []string
	var got [3]atomic.Int32
	for i := range got {
		l := start(t, func(c *listener.Config) {
			c.Listen, c.OpenDelay = net0.Listen, listener.DefaultOpenDelay
			if barrier {
				c.OpenBarrierTimeout = listener.DefaultOpenBarrierTimeout
				c.OpenBarrier = func(ctx context.Context) error {
					if stable.Add(1) == 2 {
						close(majority)
					}
					select {
					case <-majority:
						return nil
					case <-ctx.Done():
						return ctx.Err()
					}
				}
			}
		})
		addrs = append(addrs, publicAddr(l))
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				if info, _ := listener.InfoFrom(listener.ConnContext(context.Background(), c)); info.Port == listener.PortPublic {
					got[i].Add(1)
				}
				defer c.Close() // they stay
			}
		}()
		at := []time.Duration{1000, 12_000, 12_500}[i] * time.Millisecond
		go func() {
			<-time.After(at)
			l.MarkStable("test")
		}()
		defer l.Close()
	}
	done := make(chan net.Conn, clients)
	for i := range clients {
		go func() {
			rnd := rand.New(rand.NewPCG(1, uint64(i)))
			for {
				<-time.After(time.Duration(3000+rnd.IntN(9000)) * time.Millisecond)
				if c, err := net0.dial(addrs[rnd.IntN(3)]); err == nil {
					done <- c
					return
				}
			}
		}()
	}
	for range clients {
		defer (<-done).Close()
	}
	synctest.Wait()
	for i := range got {
		most, all = max(most, int(got[i].Load())), all+int(got[i].Load())
	}
	return most, all
}
