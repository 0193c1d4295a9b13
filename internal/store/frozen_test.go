package store

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/auth"
	"headgate/internal/localpg"
	"headgate/internal/testkit"
	"headgate/migrations"
)

// ownCluster is a server of this test alone with Headgate's schema, whose
// processes it may freeze.
func ownCluster(t *testing.T) string {
	t.Helper()
	c, err := localpg.Start(t.Context(), testkit.ClusterConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(context.Background()); err != nil {
			t.Errorf("stop PostgreSQL: %v", err)
		}
	})
	d := openDSN(t, c.DSN())
	if err := migrations.Up(t.Context(), d.SQL()); err != nil {
		t.Fatal(err)
	}
	return c.DSN()
}

// bounded fails the test when fn takes longer than any deadline allows.
func bounded(t *testing.T, what string, fn func()) {
	t.Helper()
	select {
	case <-aside(fn):
	case <-time.After(time.Minute):
		t.Fatalf("%s hangs", what)
	}
}

// TestAFrozenSessionEndsEveryCallInTime freezes the server's process of each
// kind of connection: it accepts what is sent, acknowledges it and never
// answers. Every call ends, and so does the store.
//
// Cases Q8.
func TestAFrozenSessionEndsEveryCallInTime(t *testing.T) {
	t.Parallel()
	dsn := ownCluster(t)
	watch := openDSN(t, dsn)
	const limit = 300 * time.Millisecond
	d, err := Open(t.Context(), Config{DSN: dsn, StatementTimeout: limit, PageTimeout: limit, UpkeepTimeout: limit, SocketSlack: limit})
	if err != nil {
		t.Fatal(err)
	}
	n := d.NewNotifier("wake")
	n.ping, n.limit = limit, limit
	resyncs := make(chan struct{}, 100)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx, func(string) {}, func() { resyncs <- struct{}{} }) }()
	<-resyncs

	calls := map[string]func() error{
		"headgate loops":  func() error { _, err := d.TakeIDs(ctx); return err },
		"headgate":        func() error { _, err := d.EnsureUser(ctx, "x", auth.Viewer); return err },
		"headgate pages":  func() error { _, err := d.Points(ctx, "x", time.Now()); return err },
		"headgate probe":  func() error { return d.Probe(ctx) },
		"headgate upkeep": func() error { _, err := d.PlanRetention(ctx, Retention{}); return err },
	}
	freeze := func(where string) {
		t.Helper()
		var pids []int
		if err := watch.general.Select(&pids, `SELECT pid FROM pg_stat_activity WHERE datname = current_database()
			AND pid <> pg_backend_pid() AND state = 'idle' AND `+where); err != nil {
			t.Fatal(err)
		}
		if len(pids) == 0 {
			t.Fatalf("no session where %s", where)
		}
		for _, pid := range pids {
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // it may have ended
		}
	}
	for name, call := range calls {
		if err := call(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		freeze(fmt.Sprintf("application_name = '%s'", name))
		bounded(t, "a call of "+name, func() { _ = call() }) // it may succeed on a new connection
		for end := time.Now().Add(30 * time.Second); call() != nil; {
			if time.Now().After(end) {
				t.Fatalf("%s does not recover on new connections: %v", name, call())
			}
		}
	}
	freeze(`application_name NOT LIKE 'headgate%'`)
	select {
	case <-resyncs: // on a new connection
	case <-time.After(30 * time.Second):
		t.Error("nobody noticed that wake-ups no longer come")
	}
	freeze("true")
	stop()
	bounded(t, "the end of the notifier", func() {
		if err := <-ended; err != nil {
			t.Errorf("notifier: %v", err)
		}
	})
	bounded(t, "the end of the store", func() { _ = d.Close() })
}

// TestASilentPathOfWakeUpsIsNoticed holds up everything on the way to the
// server without ending a connection, as a firewall does that drops packets.
//
// Cases Q7.
func TestASilentPathOfWakeUpsIsNoticed(t *testing.T) {
	t.Parallel()
	lost := make(chan struct{}, 1)
	d, direct, p := behindProxy(t, func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(writerFunc(func(b []byte) {
			if strings.Contains(string(b), "lost the connection for wake-ups") {
				select {
				case lost <- struct{}{}:
				default:
				}
			}
		}), nil))
	})
	n := d.NewNotifier("wake")
	if n.ping > 5*time.Second || n.limit > 5*time.Second {
		t.Errorf("the path is asked each %s and may be silent for %s, want 5 s each", n.ping, n.limit)
	}
	n.ping, n.limit = 100*time.Millisecond, 100*time.Millisecond
	ctx, stop := context.WithCancel(t.Context())
	heard, resyncs := make(chan string, 100), make(chan struct{}, 100)
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx, func(s string) { heard <- s }, func() { resyncs <- struct{}{} }) }()
	<-resyncs
	p.Stall()
	select {
	case <-lost:
	case <-time.After(30 * time.Second):
		t.Error("the silence was not noticed")
	}
	p.Heal()
	<-resyncs // what came meanwhile is looked for
	if err := direct.Notify(ctx, "wake", "42"); err != nil {
		t.Fatal(err)
	}
	if s := <-heard; s != "42" {
		t.Errorf("heard %q", s)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("run ended with %v", err)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

var _ io.Writer = writerFunc(nil)
