package controller

import (
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
	s := startConfig(t, pooledConfig(t, testkit.NewDatabase(t)), Options{})
	s.await("the opening of the public port", s.c.Opened())
	noted := func() bool {
		return strings.Contains(strings.Join(s.c.status().Database.Notes, "\n"), "database-direct-url")
	}
	for end := time.Now().Add(30 * time.Second); !noted() && time.Now().Before(end); {
		pause(t.Context(), 10*time.Millisecond)
	}
	if !noted() {
		t.Errorf("the status says nothing of it: %v", s.c.status().Database.Notes)
	}
	if err := s.stop(); err != nil {
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
	s := startConfig(t, cfg, Options{})
	s.await("the opening of the public port", s.c.Opened())
	if err := s.stop(); err != nil {
		t.Error(err)
	}
}
