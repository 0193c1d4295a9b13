package listener_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"headgate/listener"
)

// Acceptance 13.
func TestBusyControllerPortFailsNew(t *testing.T) {
	t.Parallel()
	busy := listen(t)
	_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Controller.Addr = busy.Addr().String() }))
	wantPortError(t, err, listener.PortController, "listen")
}

// Acceptance 14.
func TestBusyPublicPortFailsNewAndFreesTheController(t *testing.T) {
	t.Parallel()
	busy := listen(t)
	free := listen(t)
	addr := free.Addr().String()
	free.Close()
	_, err := listener.New(t.Context(), config(func(c *listener.Config) {
		c.Controller.Addr, c.Public.Addr = addr, busy.Addr().String()
	}))
	wantPortError(t, err, listener.PortPublic, "reserve")
	again, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatalf("controller port is still held: %v", err)
	}
	again.Close()
}

// Acceptance 20.
func TestSecondInstanceFailsAtStart(t *testing.T) {
	t.Parallel()
	first := start(t)
	for _, phase := range []string{"reserved", "open"} {
		_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Public.Addr = publicAddr(first) }))
		wantPortError(t, err, listener.PortPublic, "reserve")
		_, err = listener.New(t.Context(), config(func(c *listener.Config) { c.Controller.Addr = first.Addr().String() }))
		wantPortError(t, err, listener.PortController, "listen")
		if phase == "reserved" {
			open(t, first)
		}
	}
}

// TestPublicPortTakenWhileClosed covers systems without reservation: the
// number is taken between New and the opening. Acceptance 15.
func TestPublicPortTakenWhileClosed(t *testing.T) {
	t.Parallel()
	failed := make(chan struct{}, 1)
	l := start(t, func(c *listener.Config) {
		c.Listen = new(net.ListenConfig).Listen
		c.OnPorts = func(r listener.PortReport) {
			if r.State == listener.StatePublicFailed {
				failed <- struct{}{}
			}
		}
	})
	answer(t, l)
	thief, err := net.Listen("tcp", publicAddr(l))
	if err != nil {
		t.Fatal(err)
	}
	defer thief.Close()
	l.MarkStable("test")
	<-failed
	if r := l.Ports(); !errors.Is(r.Err, syscall.EADDRINUSE) || r.PublicOpen {
		t.Errorf("report is %+v", r)
	}
	wantAnswer(t, l.Addr().String(), listener.PortController)
	thief.Close()
	wantAnswer(t, open(t, l), listener.PortPublic)
}

// Acceptance 26.
func TestShutdownBeforeServeFreesThePorts(t *testing.T) {
	t.Parallel()
	l := start(t)
	srv := &http.Server{}
	if err := srv.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		t.Fatalf("Serve: %v", err)
	}
	for _, addr := range []string{l.Addr().String(), publicAddr(l)} {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatalf("still held: %v", err)
		}
		ln.Close()
	}
}

func TestConfigProblemsAreReportedTogether(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(*listener.Config)
		want   []string
	}{
		"no addresses":  {func(c *listener.Config) { *c = listener.Config{} }, []string{"controller: address", "public: address"}},
		"same port":     {func(c *listener.Config) { c.Controller.Addr, c.Public.Addr = "127.0.0.1:7441", ":7441" }, []string{"both use port 7441"}},
		"port too high": {func(c *listener.Config) { c.Public.Addr = ":70000" }, []string{"no usable port number"}},
		"negative": {func(c *listener.Config) {
			c.OpenDelay, c.Retry.Min, c.Public.AcceptTimeout, c.Controller.MaxPending = -1, -1, -1, -1
		}, []string{"open delay", "retry min", "timeouts", "limits"}},
		"first byte after handshake": {func(c *listener.Config) { c.Public.FirstByteTimeout, c.Public.HandshakeTimeout = 3, 2 }, []string{"first byte"}},
		"max below min":              {func(c *listener.Config) { c.Retry.Min, c.Retry.Max = 2, 1 }, []string{"retry max"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := listener.New(context.Background(), config(tc.change))
			var ce *listener.ConfigError
			if !errors.As(err, &ce) {
				t.Fatalf("New: %v, want a *ConfigError", err)
			}
			if len(ce.Problems) != len(tc.want) {
				t.Errorf("problems are %q", ce.Problems)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

func TestAddressOfAnotherMachineHasAHint(t *testing.T) {
	t.Parallel()
	_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Public.Addr = "203.0.113.77:0" }))
	wantPortError(t, err, listener.PortPublic, "reserve")
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

func wantPortError(t *testing.T, err error, port listener.Port, op string) {
	t.Helper()
	var pe *listener.PortError
	if !errors.As(err, &pe) || pe.Port != port || pe.Op != op || pe.Hint == "" {
		t.Fatalf("got %v (%T), want a *PortError of %s %s with a hint", err, err, op, port)
	}
}
