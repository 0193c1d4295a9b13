package store

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lib/pq"

	"headgate/internal/fault"
	"headgate/internal/localpg"
	"headgate/internal/testkit"
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
