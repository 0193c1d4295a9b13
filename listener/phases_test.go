package listener_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/listener"
)

// Acceptance 1.
func TestPublicRefusesUntilStable(t *testing.T) {
	t.Parallel()
	l := start(t)
	answer(t, l)
	wantAnswer(t, l.Addr().String(), listener.PortController)
	wantRefused(t, publicAddr(l))
	wantAnswer(t, open(t, l), listener.PortPublic)
	wantAnswer(t, l.Addr().String(), listener.PortController)
}

// Acceptance 2.
func TestPublicOpensExactlyAfterTheDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen, c.OpenDelay = mem.Listen, listener.DefaultOpenDelay })
		l.MarkStable("test")
		opensAt := time.Now().Add(listener.DefaultOpenDelay)
		if r := l.Ports(); r.State != listener.StateSettling || !r.OpensAt.Equal(opensAt) {
			t.Fatalf("state %s, opens at %v; want settling, %v", r.State, r.OpensAt, opensAt)
		}
		<-time.After(listener.DefaultOpenDelay - time.Nanosecond)
		synctest.Wait()
		if mem.at(publicAddr(l)) != nil {
			t.Fatal("public port accepts inside the delay")
		}
		if _, err := l.WaitPublic(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !time.Now().Equal(opensAt) || mem.at(publicAddr(l)) == nil {
			t.Fatalf("opened at %v, want %v", time.Now(), opensAt)
		}
	})
}

// Acceptance 3.
func TestZeroDelayOpensAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen = mem.Listen })
		began := time.Now()
		open(t, l)
		if took := time.Since(began); took != 0 {
			t.Fatalf("opening took %v of simulated time, want none", took)
		}
	})
}

// Acceptance 5.
func TestManyMarksAreOneOpening(t *testing.T) {
	t.Parallel()
	var heard reports
	l := start(t, func(c *listener.Config) { c.OnPorts = heard.add })
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() { l.MarkStable("test") })
	}
	wg.Wait()
	open(t, l)
	l.Close()
	want := []listener.State{listener.StateControllerOnly, listener.StateSettling, listener.StateOpen, listener.StateClosed}
	waitFor(t, "the last report", func() bool { return slices.Contains(heard.states(), listener.StateClosed) })
	if d := cmp.Diff(want, heard.states()); d != "" {
		t.Fatalf("states heard (-want +got):\n%s", d)
	}
}

// Acceptance 6.
func TestCloseInsideTheDelayDoesNotWaitForIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen, c.OpenDelay = mem.Listen, time.Hour })
		l.MarkStable("test")
		synctest.Wait() // the port's goroutine is inside the delay
		began := time.Now()
		l.Close()
		if took := time.Since(began); took != 0 {
			t.Fatalf("Close took %v", took)
		}
		if got := mem.tries(publicAddr(l)); got != 1 {
			t.Fatalf("public port was opened %d times, want only at the start", got)
		}
	})
}

// Acceptance 10.
func TestFirstReportComesBeforeNewReturns(t *testing.T) {
	t.Parallel()
	var heard reports
	l := start(t, func(c *listener.Config) { c.OnPorts = heard.add })
	heard.mu.Lock()
	defer heard.mu.Unlock()
	if len(heard.list) == 0 {
		t.Fatal("no report when New returned")
	}
	first := heard.list[0]
	if first.State != listener.StateControllerOnly || first.PublicOpen {
		t.Fatalf("first report is %+v", first)
	}
	if first.Controller[0].String() != l.Addr().String() || first.Public[0].Port() == 0 {
		t.Fatalf("addresses of the first report are %v and %v", first.Controller, first.Public)
	}
}

func TestNewGivesUpOnACallbackThatHangs(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	defer close(release)
	_, err := listener.New(ctx, config(func(c *listener.Config) {
		c.OnPorts = func(listener.PortReport) { cancel(); <-release }
	}))
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("New: %v, want context.Canceled", err)
	}
}

// Acceptance 11. Acceptance 12.
func TestNumbersOfPortZeroStayTrue(t *testing.T) {
	t.Parallel()
	var heard reports
	l := start(t, func(c *listener.Config) { c.OnPorts = heard.add })
	answer(t, l)
	before, addr := publicAddr(l), l.Addr().String()
	if got := open(t, l); got != before {
		t.Fatalf("public port opened at %s, %s was reported before", got, before)
	}
	wantAnswer(t, before, listener.PortPublic)
	l.Close()
	if l.Addr().String() != addr {
		t.Fatalf("Addr changed from %s to %s", addr, l.Addr())
	}
	heard.mu.Lock()
	defer heard.mu.Unlock()
	for _, r := range heard.list {
		if r.Public[0].String() != before || r.Controller[0].String() != addr {
			t.Errorf("report of %s says %v and %v", r.State, r.Controller, r.Public)
		}
	}
}

// Acceptance 10.
func TestSlowCallbackDelaysOnlyCallbacks(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var heard reports
	l := start(t, func(c *listener.Config) {
		c.OnPorts = func(r listener.PortReport) {
			if r.State == listener.StateSettling {
				<-release
			}
			heard.add(r)
		}
	})
	answer(t, l)
	wantAnswer(t, open(t, l), listener.PortPublic)
	l.Close() // returns although the callback still runs
	if got := heard.states(); len(got) != 1 {
		t.Fatalf("heard %v while the callback hung", got)
	}
	close(release)
	want := []listener.State{listener.StateControllerOnly, listener.StateSettling, listener.StateOpen, listener.StateClosed}
	waitFor(t, "all reports in order", func() bool { return slices.Equal(want, heard.states()) })
}

// Acceptance 10.
func TestCallbackMayCallTheListener(t *testing.T) {
	t.Parallel()
	var l *listener.Listener
	assigned, done := make(chan struct{}), make(chan struct{})
	cfg := config(func(c *listener.Config) {
		c.OnPorts = func(r listener.PortReport) {
			if r.State == listener.StateControllerOnly {
				return // New has not returned
			}
			<-assigned
			_, _ = l.Status(), l.Ports()
			l.MarkStable("again")
			l.Close()
			if r.State == listener.StateClosed {
				close(done)
			}
		}
	})
	var err error
	if l, err = listener.New(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	close(assigned)
	l.MarkStable("test")
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("callback hangs in the listener")
	}
}

func TestPublicPortThatCannotOpenIsTriedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen, c.Retry = mem.Listen, listener.RetryConfig{} })
		public, controller := publicAddr(l), l.Addr().String()
		mem.breakAt(public, net.ErrWriteToConnected)
		began := time.Now()
		l.MarkStable("test")
		// Attempts at 0, 1, 3, 7, 15, 31, 61, 91 s: doubling pauses, then 30 s.
		<-time.After(91*time.Second + time.Millisecond)
		synctest.Wait()
		if got := mem.tries(public) - 1; got != 8 {
			t.Errorf("%d attempts in 91 s, want 8", got)
		}
		if s := l.Status(); s.State != listener.StatePublicFailed || s.Error == "" || s.OpensAt.Sub(began) != 121*time.Second {
			t.Errorf("status is %+v", s)
		}
		answer(t, l)
		if c, err := mem.dial(controller); err != nil {
			t.Errorf("controller port: %v", err)
		} else {
			c.Close()
		}
		mem.breakAt(public, nil)
		if _, err := l.WaitPublic(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != 121*time.Second {
			t.Errorf("opened after %v, want 121 s", took)
		}
		if r := l.Ports(); r.Err != nil || !r.PublicOpen {
			t.Errorf("report after opening is %+v", r)
		}
		l.Close()
	})
}

func TestWaitPublicEnds(t *testing.T) {
	t.Parallel()
	l := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.WaitPublic(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	result := make(chan error, 1)
	go func() {
		_, err := l.WaitPublic(context.Background())
		result <- err
	}()
	l.Close()
	if err := <-result; !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
