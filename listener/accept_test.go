package listener_test

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"headgate/listener"
)

// Acceptance 24.
func TestAcceptAfterCloseIsErrClosedForAll(t *testing.T) {
	t.Parallel()
	l := start(t)
	results := make(chan error, 64)
	for range cap(results) {
		go func() {
			_, err := l.Accept()
			results <- err
		}()
	}
	l.Close()
	for range cap(results) {
		if err := <-results; !errors.Is(err, net.ErrClosed) {
			t.Fatalf("waiting Accept: %v", err)
		}
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("Accept after Close: %v", err)
	}
}

// TestRefusedConnectionsNeverReachServe resets 10,000 connections because their
// source holds as many as it may, under a running http.Server. Acceptance 21.
func TestRefusedConnectionsNeverReachServe(t *testing.T) {
	t.Parallel()
	server, _ := certificate(t)
	reg := prometheus.NewRegistry()
	l := start(t, func(c *listener.Config) {
		c.Public.TLS, c.Limits.SourceConns, c.Registerer = server, 1, reg
		c.Public.FirstByteTimeout, c.Public.HandshakeTimeout = time.Hour, time.Hour
	})
	srv := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }()
	addr := open(t, l)
	silent, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	waitFor(t, "the silent client to be pending", func() bool { return l.Status().Public.Pending == 1 })

	const clients, each = 8, 1250
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for range each {
				if _, err := ask(addr); err == nil {
					t.Error("a connection beyond the limit was served")
					return
				}
			}
		})
	}
	wg.Wait()
	transport := &http.Transport{}
	wantWithin(t, "the next good client", 50*time.Millisecond, func() { get(t, transport, "http://"+l.Addr().String()) })
	if got := metric(t, reg, "headgate_listener_refused_total", "public", "source_conns"); got != clients*each {
		t.Errorf("%v refusals counted, want %d", got, clients*each)
	}
	select {
	case err := <-ended:
		t.Fatalf("Serve ended: %v", err)
	default:
	}
	srv.Close()
	<-ended
}

// Acceptance 25. TestCloseWithWaitingConnections is not parallel, so that the goroutines it
// counts are its own. The time is the best of some tries: each waits for more
// than a thousand goroutines to have had their turn on a machine that may have
// other work, and a Close that waits for a client takes an hour in all of them.
func TestCloseWithWaitingConnections(t *testing.T) {
	best := time.Hour
	for try := 0; try < 8 && best > time.Second; try++ {
		best = min(best, closeWithWaitingConnections(t))
	}
	if best > time.Second {
		t.Errorf("Close took %v", best)
	}
}

// closeWithWaitingConnections gives the time Close takes with 1,000
// connections that wait for Accept and 200 that are in their handshake.
func closeWithWaitingConnections(t *testing.T) time.Duration {
	t.Helper()
	ignore := goleak.IgnoreCurrent()
	server, _ := certificate(t)
	const queued, shaking = 1000, 200
	l := start(t, func(c *listener.Config) {
		c.Controller.MaxPending, c.Controller.MaxConns = queued, queued
		c.Public.TLS, c.Public.FirstByteTimeout, c.Public.HandshakeTimeout = server, time.Hour, time.Hour
		c.Controller.AcceptTimeout = time.Hour
	})
	public := open(t, l)
	var conns []net.Conn
	dial := func(addr, say string) {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, say); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	for range queued {
		dial(l.Addr().String(), "")
	}
	for i := range shaking {
		dial(public, []string{"", "\x16"}[i%2]) // half of them have begun
	}
	waitFor(t, "all to be pending", func() bool {
		s := l.Status()
		return s.Controller.Pending == queued && s.Public.Handshaking == shaking
	})
	began := time.Now()
	l.Close()
	took := time.Since(began)
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a waiting connection outlives Close: %v", err)
		}
		c.Close()
	}
	if s := l.Status(); s.Controller.Conns != 0 || s.Public.Conns != 0 {
		t.Errorf("still counted: %+v", s)
	}
	goleak.VerifyNone(t, ignore)
	return took
}

func TestConnectionThatAcceptIsNotCalledForIsReset(t *testing.T) {
	t.Parallel()
	l := start(t, func(c *listener.Config) { c.Controller.AcceptTimeout = 20 * time.Millisecond })
	if _, err := ask(l.Addr().String()); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("client sees %v, want a reset", err)
	}
	if s := l.Status(); s.Controller.Conns != 0 {
		t.Fatalf("%d connections still counted", s.Controller.Conns)
	}
}

func TestControllerConnectionsAreAcceptedFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen = mem.Listen })
		public := open(t, l)
		for range 4 {
			for _, addr := range []string{public, l.Addr().String()} {
				c, err := mem.dial(addr)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
			}
		}
		synctest.Wait() // all eight wait for Accept
		for i := range 8 {
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			want := listener.PortController
			if i >= 4 {
				want = listener.PortPublic
			}
			if info, ok := listener.InfoFrom(listener.ConnContext(t.Context(), c)); !ok || info.Port != want {
				t.Errorf("connection %d is of port %s, want %s", i, info.Port, want)
			}
		}
		l.Close()
	})
}

// Acceptance 23.
func TestAcceptErrorsStayInside(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem, reg := newNetwork(), prometheus.NewRegistry()
		l := start(t, func(c *listener.Config) { c.Listen, c.Registerer = mem.Listen, reg })
		ended := answer(t, l)
		public, controller := open(t, l), l.Addr().String()
		began := time.Now()
		for _, errno := range []error{syscall.ECONNABORTED, syscall.EMFILE, syscall.EMFILE, syscall.EMFILE} {
			mem.at(public).errs <- errno
		}
		// 5 and 10 ms have passed to come here, and 20 are to come.
		if took := time.Since(began); took != 15*time.Millisecond {
			t.Errorf("the pauses took %v", took)
		}
		c, err := mem.dial(controller)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(c); string(b) != "controller" || time.Since(began) != 15*time.Millisecond {
			t.Errorf("controller answered %q after %v", b, time.Since(began))
		}
		if c, err = mem.dial(public); err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(c); string(b) != "public" || time.Since(began) != 35*time.Millisecond {
			t.Errorf("public answered %q after %v", b, time.Since(began))
		}
		if got := metric(t, reg, "headgate_listener_accept_errors_total", "public", "emfile"); got != 3 {
			t.Errorf("%v EMFILE counted", got)
		}
		l.Close()
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept gave %v", err)
		}
	})
}

func TestLostPublicSocketIsMadeAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newNetwork()
		l := start(t, func(c *listener.Config) { c.Listen = mem.Listen })
		answer(t, l)
		public := open(t, l)
		mem.at(public).errs <- syscall.EBADF
		synctest.Wait()
		if r := l.Ports(); r.State != listener.StatePublicFailed || !errors.Is(r.Err, syscall.EBADF) {
			t.Fatalf("report is %+v", r)
		}
		if got, err := l.WaitPublic(t.Context()); err != nil || got.String() != public {
			t.Fatalf("WaitPublic: %v, %v", got, err)
		}
		l.Close()
	})
}

func TestLostControllerSocket(t *testing.T) {
	t.Parallel()
	t.Run("is made again", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			mem := newNetwork()
			l := start(t, func(c *listener.Config) { c.Listen = mem.Listen })
			answer(t, l)
			addr := l.Addr().String()
			mem.breakAt(addr, syscall.EADDRNOTAVAIL)
			mem.at(addr).errs <- syscall.EBADF
			<-time.After(10 * time.Second)
			mem.breakAt(addr, nil)
			<-time.After(2 * time.Second)
			c, err := mem.dial(addr)
			if err != nil {
				t.Fatal(err)
			}
			if b, _ := io.ReadAll(c); string(b) != "controller" {
				t.Errorf("controller answered %q", b)
			}
			l.Close()
		})
	})
	t.Run("is fatal once when lost for good", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			mem := newNetwork()
			l := start(t, func(c *listener.Config) { c.Listen = mem.Listen })
			ended := answer(t, l)
			addr := l.Addr().String()
			began := time.Now()
			mem.breakAt(addr, syscall.EADDRNOTAVAIL)
			mem.at(addr).errs <- syscall.EBADF
			var fatal *listener.FatalError
			if err := <-ended; !errors.As(err, &fatal) || !errors.Is(err, syscall.EADDRNOTAVAIL) {
				t.Errorf("Accept gave %v, want a *FatalError", err)
			}
			if took := time.Since(began); took < 30*time.Second || took > 32*time.Second {
				t.Errorf("given up after %v", took)
			}
			if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) || errors.As(err, &fatal) {
				t.Errorf("second Accept gave %v", err)
			}
			l.Close()
		})
	})
}

func TestPlainConnectionKeepsWhatServersUse(t *testing.T) {
	t.Parallel()
	l := start(t)
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, ok := c.(interface{ NetConn() net.Conn }).NetConn().(*net.TCPConn); !ok {
		t.Error("NetConn gives no *net.TCPConn")
	}
	if raw, err := c.(syscall.Conn).SyscallConn(); err != nil || raw == nil {
		t.Errorf("SyscallConn: %v", err)
	}
	if _, err := io.WriteString(c, "last words"); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(client); err != nil || string(b) != "last words" {
		t.Errorf("client read %q, %v", b, err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("first Close: %v", err)
	}
	if err := c.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second Close: %v", err)
	}
	if s := l.Status(); s.Controller.Conns != 0 || s.Controller.Accepted != 1 {
		t.Errorf("status is %+v", s.Controller)
	}
}

func TestInfoFromForeignConnection(t *testing.T) {
	t.Parallel()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if info, ok := listener.InfoFrom(listener.ConnContext(t.Context(), a)); ok {
		t.Fatalf("got %+v for a connection that is not ours", info)
	}
}

func TestStatusAsJSON(t *testing.T) {
	t.Parallel()
	l := start(t)
	open(t, l)
	b, err := json.Marshal(l.Status())
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		State       string
		Reason      string
		OpensAt     string `json:"opens_at"`
		Public      struct{ Addresses []string }
		Transitions []struct{ From, To string }
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	want := []struct{ From, To string }{{"starting", "controller-only"}, {"controller-only", "settling"}, {"settling", "open"}}
	if d := cmp.Diff(want, got.Transitions); d != "" {
		t.Errorf("transitions (-want +got):\n%s", d)
	}
	if got.State != "open" || got.Reason != "test" || got.OpensAt != "" || got.Public.Addresses[0] != publicAddr(l) {
		t.Errorf("status is %s", b)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	l := start(t, func(c *listener.Config) { c.Registerer = reg })
	if got := metric(t, reg, "headgate_listener_public_open"); got != 0 {
		t.Errorf("public_open is %v before", got)
	}
	public := open(t, l)
	client, err := net.Dial("tcp", public)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		labels []string
		want   float64
	}{
		"headgate_listener_public_open":    {nil, 1},
		"headgate_listener_state":          {[]string{"open"}, 1},
		"headgate_listener_accepted_total": {[]string{"public"}, 1},
		"headgate_listener_conns":          {[]string{"unknown", "public"}, 1},
	} {
		if got := metric(t, reg, name, tc.labels...); got != tc.want {
			t.Errorf("%s%v is %v, want %v", name, tc.labels, got, tc.want)
		}
	}
	if got := metric(t, reg, "headgate_listener_state", "controller-only"); got != 0 {
		t.Errorf("the state left is still %v", got)
	}
	if got := metric(t, reg, "headgate_listener_seconds_to_public_open"); got <= 0 {
		t.Errorf("seconds_to_public_open is %v", got)
	}
	c.Close()
	if got := metric(t, reg, "headgate_listener_conns", "unknown", "public"); got != 0 {
		t.Errorf("conns is %v after close", got)
	}
	if _, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Registerer = reg })); err == nil {
		t.Error("two listeners share a registry")
	}
}

// metric gives the value of the series with these label values, in order of
// their names; it fails when there is none.
func metric(t *testing.T, reg prometheus.Gatherer, name string, labels ...string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var have []string
			for _, pair := range m.GetLabel() {
				have = append(have, pair.GetValue())
			}
			sorted := cmp.Equal(labels, have) || (len(have) == 2 && len(labels) == 2 && have[0] == labels[1] && have[1] == labels[0])
			if sorted || len(labels)+len(have) == 0 {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s%v", name, labels)
	return 0
}
