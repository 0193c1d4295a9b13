package controller

import (
	"context"
	"strings"
	"testing"
	"time"

	"headgate/internal/fault"
	"headgate/internal/testkit"
)

// pooledConfig is the configuration of a controller whose database-url leads
// through a pooler in transaction mode.
func pooledConfig(t *testing.T, dsn string) Config {
	t.Helper()
	cfg := DefaultConfig()
	cfg.Data, cfg.PublicAddr, cfg.ControllerAddr, cfg.OpenDelay = t.TempDir(), "127.0.0.1:0", "127.0.0.1:0", 0
	cfg.DatabaseURL = testkit.NewPooler(t, dsn, "ignore_startup_parameters = extra_float_digits")
	return cfg
}

func TestAControllerServesThroughAPooler(t *testing.T) {
	t.Parallel()
	c, err := New(pooledConfig(t, testkit.NewDatabase(t)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	select {
	case <-c.Opened():
	case err := <-done:
		t.Fatalf("it ended: %v", err)
	}
	noted := func() bool {
		return strings.Contains(strings.Join(c.status().Database.Notes, "\n"), "database-direct-url")
	}
	for end := time.Now().Add(30 * time.Second); !noted() && time.Now().Before(end); {
		pause(ctx, 10*time.Millisecond)
	}
	if !noted() {
		t.Errorf("the status says nothing of it: %v", c.status().Database.Notes)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestMigrationsThroughAPoolerAreRefused(t *testing.T) {
	t.Parallel()
	cfg := pooledConfig(t, testkit.EmptyDatabase(t))
	c, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Run(t.Context()); fault.CodeOf(err) != "database_pooled" {
		t.Errorf("the start: %v", err)
	}
	if _, err := MigrateUp(t.Context(), cfg.DatabaseURL); fault.CodeOf(err) != "database_pooled" {
		t.Errorf("headgate migrate up: %v", err)
	}
}

func TestADirectWayMigrates(t *testing.T) {
	t.Parallel()
	dsn := testkit.EmptyDatabase(t)
	cfg := pooledConfig(t, dsn)
	cfg.DatabaseDirectURL = dsn
	c, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	select {
	case <-c.Opened():
	case err := <-done:
		t.Fatalf("it ended: %v", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
