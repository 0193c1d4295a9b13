package store

import (
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/lib/pq"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/localpg"
	"headgate/internal/testkit"
	"headgate/migrations"
)

// standby starts a server of its own that only reads, as a standby does.
func standby(t *testing.T) *localpg.Cluster {
	t.Helper()
	cfg := testkit.ClusterConfig(t)
	c, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(c.Dir(), "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if c, err = localpg.Start(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop(t.Context()) }) // the context has ended: at once
	return c
}

func TestAStandbyIsExplainedAndPassedOver(t *testing.T) {
	t.Parallel()
	s := standby(t)
	_, err := Open(t.Context(), Config{DSN: s.DSN()})
	wantCode(t, err, fault.Unavailable, "database_read_only")

	primary := testkit.NewDatabase(t)
	p, err := pq.NewConfig(primary)
	if err != nil {
		t.Fatal(err)
	}
	q, err := pq.NewConfig(s.DSN())
	if err != nil {
		t.Fatal(err)
	}
	both := fmt.Sprintf("host=%s,%s port=%d,%d user=%s dbname=%s sslmode=disable", q.Host, p.Host, q.Port, p.Port, p.User, p.Database)
	// The standby does not even have the database; the primary does.
	d := openDSN(t, both+" target_session_attrs=read-write")
	if n := countOn(t, d, `SELECT count(*) FROM shard_lease`); n != 16 {
		t.Errorf("%d lease rows", n)
	}
	ctx := t.Context()
	heard := make(chan struct{}, 1)
	done := make(chan error, 1)
	n := d.NewNotifier("any")
	go func() { done <- n.Run(ctx, func(string) {}, func() { heard <- struct{}{} }) }()
	select {
	case <-heard:
	case err := <-done:
		t.Errorf("the wake-ups: %v", err)
	case <-time.After(30 * time.Second):
		t.Error("the wake-ups did not find the primary")
	}
}

// copyOf makes a standby of a cluster that is stopped, in a folder of its own.
func copyOf(t *testing.T, from *localpg.Cluster) *localpg.Cluster {
	t.Helper()
	cfg := testkit.ClusterConfig(t)
	c, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(c.Dir()); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", from.Dir(), c.Dir()).CombinedOutput(); err != nil {
		t.Fatalf("copy the cluster: %v: %s", err, out)
	}
	if err := os.WriteFile(filepath.Join(c.Dir(), "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if c, err = localpg.Start(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop(t.Context()) })
	return c
}

// TestAPromotedStandbyIsFound ends the primary and promotes its standby: the
// store goes on there by itself when its connection string names both.
func TestAPromotedStandbyIsFound(t *testing.T) {
	t.Parallel()
	cfg := testkit.ClusterConfig(t)
	first, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	made := openDSN(t, first.DSN())
	if err := migrations.Up(t.Context(), made.SQL()); err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := copyOf(t, first)
	if first, err = localpg.Start(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = first.Stop(t.Context()) })
	p, err := pq.NewConfig(first.DSN())
	if err != nil {
		t.Fatal(err)
	}
	q, err := pq.NewConfig(second.DSN())
	if err != nil {
		t.Fatal(err)
	}
	both := fmt.Sprintf("host=%s,%s port=%d,%d user=%s dbname=%s sslmode=disable target_session_attrs=read-write",
		q.Host, p.Host, q.Port, p.Port, p.User, p.Database)
	d := openDSN(t, both)
	if _, err := d.EnsureUser(t.Context(), "before", auth.Viewer); err != nil {
		t.Fatal(err)
	}
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.EnsureUser(t.Context(), "meanwhile", auth.Viewer); fault.KindOf(err) != fault.Unavailable {
		t.Errorf("a write while there is only a standby: %v", err)
	}
	direct, err := sql.Open("postgres", second.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	if _, err := direct.ExecContext(t.Context(), `SELECT pg_promote()`); err != nil {
		t.Fatal(err)
	}
	waitForWrite(t, d)
	if n := countOn(t, d, `SELECT count(*) FROM app_user WHERE name = 'after'`); n != 1 {
		t.Errorf("%d rows at the new primary", n)
	}
}
