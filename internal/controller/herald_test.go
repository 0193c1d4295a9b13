package controller

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"headgate/handlers"
	"headgate/internal/testkit"
	"headgate/listener"
)

// manager is a service manager that writes down what it is told.
type manager struct {
	*testing.T
	conn *net.UnixConn
	path string
}

func newManager(t *testing.T) *manager {
	t.Helper()
	dir, err := os.MkdirTemp("", "hg") // short: the path of a socket has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		os.RemoveAll(dir)
	})
	return &manager{T: t, conn: conn, path: path}
}

// heardWithin is generous: the machine may be busy with other tests.
const heardWithin = time.Minute

// hear gives the next message; ok is false when there is none until then.
func (m *manager) hear(until time.Time) (message string, ok bool) {
	m.Helper()
	if err := m.conn.SetReadDeadline(until); err != nil {
		m.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	n, err := m.conn.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return "", false
	}
	if err != nil {
		m.Fatal(err)
	}
	return string(buf[:n]), true
}

// await reads on until a message holds all of the texts, and gives everything
// heard on the way with that message as the last one.
func (m *manager) await(texts ...string) []string {
	m.Helper()
	var heard []string
	until := time.Now().Add(heardWithin)
next:
	for {
		message, ok := m.hear(until)
		if !ok {
			m.Fatalf("not heard: %q; but %q", texts, heard)
		}
		heard = append(heard, message)
		for _, text := range texts {
			if !strings.Contains(message, text) {
				continue next
			}
		}
		return heard
	}
}

// pending gives what was sent until now: all that comes before a mark of ours.
func (m *manager) pending() []string {
	m.Helper()
	const mark = "MARK"
	go func() {
		if err := sendDatagram(m.path, mark); err != nil {
			m.Errorf("send the mark: %v", err)
		}
	}()
	return m.await(mark)
}

func TestTheServiceManagerHearsOfEachStep(t *testing.T) {
	t.Parallel()
	proxy := testkit.NewProxy(t, testkit.EmptyDatabase(t))
	proxy.Block()
	m := newManager(t)
	s := startWith(t, proxy.DSN(), t.TempDir(), Options{ServiceManager: ServiceManager{Socket: m.path, Watchdog: 200 * time.Millisecond}})

	// The controller port answers, so the unit has started, although the
	// database does not answer.
	m.await("READY=1")
	m.await("STATUS=controller-only", "; not ready, database: ")
	m.await("WATCHDOG=1")
	m.await("EXTEND_TIMEOUT_USEC=30000000")
	proxy.Heal()
	m.await("STATUS=settling")
	m.await("STATUS=open", "public port "+s.c.listener.Ports().Public[0].String())
	m.await("WATCHDOG=1")

	var before, after unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &before)
	done := s.c.herald.reloading()
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &after)
	heard := m.await("RELOADING=1\nMONOTONIC_USEC=")
	_, text, _ := strings.Cut(heard[len(heard)-1], "MONOTONIC_USEC=")
	if at, err := strconv.ParseInt(text, 10, 64); err != nil || at < before.Nano()/1000 || at > after.Nano()/1000 {
		t.Errorf("the reload began at %q, want between %d and %d", text, before.Nano()/1000, after.Nano()/1000)
	}
	done()
	m.await("READY=1")

	if err := s.stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	m.await("STOPPING=1\nEXTEND_TIMEOUT_USEC=")
	m.await("STATUS=draining")
}

func TestTheWatchdogIsNotFedWhileLivezFails(t *testing.T) {
	t.Parallel()
	m := newManager(t)
	starved := make(chan struct{}, 100)
	log := slog.New(logSpy{message: "the watchdog", seen: starved})
	s := startWith(t, testkit.NewDatabase(t), t.TempDir(), Options{Logger: log, ServiceManager: ServiceManager{Socket: m.path, Watchdog: 100 * time.Millisecond}})
	s.await("the opening of the public port", s.c.Opened())
	m.await("WATCHDOG=1")
	for len(starved) > 0 { // a busy machine may have failed during the start
		<-starved
	}
	good := s.c.handler.Load()
	var sick http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	s.c.handler.Store(&sick)
	s.await("the first failure of the watchdog", starved)
	m.pending() // what was sent before
	for range 3 {
		s.await("another failure of the watchdog", starved)
	}
	if heard := m.pending(); strings.Contains(strings.Join(heard, "\n"), "WATCHDOG=1") {
		t.Errorf("the watchdog was fed although /livez fails: %q", heard)
	}
	s.c.handler.Store(good)
	m.await("WATCHDOG=1")
}

// logSpy tells of each line of the log that holds a text.
type logSpy struct {
	message string
	seen    chan<- struct{}
}

func (l logSpy) Enabled(context.Context, slog.Level) bool { return true }
func (l logSpy) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l logSpy) WithGroup(string) slog.Handler            { return l }
func (l logSpy) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, l.message) {
		select {
		case l.seen <- struct{}{}:
		default:
		}
	}
	return nil
}

func TestAnAbsentOrDeafServiceManagerStopsNobody(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	newHerald(ServiceManager{}, log).tell("READY=1")
	newHerald(ServiceManager{Socket: filepath.Join(t.TempDir(), "none")}, log).tell("READY=1")
	deaf := newHerald(ServiceManager{Socket: newManager(t).path}, log)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 15 { // the system holds about 10 for one who does not read
			deaf.tell("READY=1")
		}
	}()
	select {
	case <-done:
	case <-time.After(heardWithin):
		t.Fatal("the controller waits for a service manager that does not read")
	}
}

func TestServiceManagerFromTheEnvironment(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		env  map[string]string
		want ServiceManager
	}{
		"none":           {nil, ServiceManager{}},
		"no watchdog":    {map[string]string{"NOTIFY_SOCKET": "/run/n"}, ServiceManager{Socket: "/run/n"}},
		"abstract":       {map[string]string{"NOTIFY_SOCKET": "@n"}, ServiceManager{Socket: "@n"}},
		"watchdog":       {map[string]string{"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, ServiceManager{Socket: "/run/n", Watchdog: 30 * time.Second}},
		"no pid":         {map[string]string{"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "5"}, ServiceManager{Socket: "/run/n", Watchdog: 5 * time.Microsecond}},
		"for another":    {map[string]string{"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "8"}, ServiceManager{Socket: "/run/n"}},
		"not a number":   {map[string]string{"WATCHDOG_USEC": "soon"}, ServiceManager{}},
		"not positive":   {map[string]string{"WATCHDOG_USEC": "-1"}, ServiceManager{}},
		"all but socket": {map[string]string{"WATCHDOG_USEC": "5"}, ServiceManager{Watchdog: 5 * time.Microsecond}},
	} {
		lookup := func(key string) (string, bool) { v, ok := c.env[key]; return v, ok }
		if diff := cmp.Diff(c.want, ServiceManagerFrom(lookup, 7)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestStatusLine(t *testing.T) {
	t.Parallel()
	at := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:7441")}
	for _, c := range []struct {
		ports listener.PortReport
		unmet []handlers.UnmetCondition
		want  string
	}{
		{listener.PortReport{State: listener.StateStarting}, nil, "starting"},
		{
			listener.PortReport{State: listener.StateControllerOnly, Controller: at, Public: at},
			[]handlers.UnmetCondition{{Condition: "database", Detail: "not\nyet connected"}},
			"controller-only; controller port 127.0.0.1:7441; not ready, database: not yet connected",
		},
		{listener.PortReport{State: listener.StateOpen, PublicOpen: true, Controller: at, Public: at, Reason: "stable"}, nil, "open (stable); controller port 127.0.0.1:7441; public port 127.0.0.1:7441"},
		{listener.PortReport{State: listener.StatePublicFailed, Err: errors.New("in use")}, nil, "public-failed; in use"},
		{listener.PortReport{State: listener.StateOpen, Reason: strings.Repeat("é", 200)}, nil, "open (" + strings.Repeat("é", 147) + "..."},
	} {
		if diff := cmp.Diff(c.want, statusLine(c.ports, handlers.Readiness{Unmet: c.unmet})); diff != "" {
			t.Error(diff)
		}
	}
}

func TestAReloadIsToldBetweenStartAndStopOnly(t *testing.T) {
	t.Parallel()
	m := newManager(t)
	h := newHerald(ServiceManager{Socket: m.path}, slog.New(slog.DiscardHandler))
	h.reloading()() // the start goes on: READY=1 would end it
	if heard := m.pending(); len(heard) != 1 {
		t.Errorf("before the start was over: %q", heard)
	}
	h.ready()
	h.reloading()()
	if heard := m.pending(); len(heard) != 4 || !strings.HasPrefix(heard[1], "RELOADING=1\nMONOTONIC_USEC=") || heard[2] != "READY=1" {
		t.Errorf("in between: %q", heard)
	}
	done := h.reloading()
	h.stopping(time.Second)
	done()
	if heard := m.pending(); len(heard) != 3 || !strings.HasPrefix(heard[1], "STOPPING=1") {
		t.Errorf("in the stop: %q", heard)
	}
}
