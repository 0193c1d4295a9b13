package main

import (
	"context"
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"headgate/internal/testkit"
)

// copyDatabase makes a copy of a database that nobody is connected to, as a
// backup that is restored would be, and gives its connection string.
func copyDatabase(t *testing.T, dsn string) string {
	t.Helper()
	db, err := sql.Open("postgres", testkit.Postgres(t).DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	name := cfg.Database + "_backup"
	// Connections that were closed a moment ago are still there for the server.
	for end := time.Now().Add(30 * time.Second); ; {
		if _, err = db.ExecContext(t.Context(), "CREATE DATABASE "+pq.QuoteIdentifier(name)+" TEMPLATE "+pq.QuoteIdentifier(cfg.Database)); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		db, err := sql.Open("postgres", testkit.Postgres(t).DSN("postgres"))
		if err == nil {
			_, err = db.Exec("DROP DATABASE IF EXISTS " + pq.QuoteIdentifier(name) + " WITH (FORCE)")
			db.Close()
		}
		if err != nil {
			t.Error(err)
		}
	})
	return testkit.Postgres(t).DSN(name)
}

// setPaused pauses or resumes the first agent.
func (i *instance) setPaused(paused bool) {
	i.Helper()
	if err := i.client().call(context.Background(), "PATCH", "/api/v1/agents/"+i.run.Agents[0].ID, map[string]any{"paused": paused}, nil); err != nil {
		i.Fatal(err)
	}
}

// waitFor asks for a task until it has ended.
func (i *instance) waitFor(id string) resultTask {
	i.Helper()
	var task resultTask
	for end := time.Now().Add(readyWithin); task.State != "completed"; {
		if err := i.client().call(i.Context(), "GET", "/api/v1/tasks/"+id+"?wait=10s", nil, &task); err != nil {
			i.Fatal(err)
		}
		if time.Now().After(end) {
			i.Fatalf("task %s did not end: %+v", id, task)
		}
	}
	return task
}

// TestARestoredDatabaseIsRecognisedAndRunsNothingTwice takes a copy of the
// database while a task waits, lets the task run, and goes on with the copy.
func TestARestoredDatabaseIsRecognisedAndRunsNothingTwice(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	dsn := testkit.NewDatabase(t)
	i.up("--database-url", dsn)
	agent := i.run.Agents[0]
	i.setPaused(true)
	var task resultTask
	body := map[string]any{"agent": agent.ID, "kind": "cmd.run", "args": map[string]any{"program": "append-id"}}
	if err := i.client().call(t.Context(), "POST", "/api/v1/tasks", body, &task); err != nil {
		t.Fatal(err)
	}
	i.interrupt()
	backup := copyDatabase(t, dsn)

	for range 2 { // each start is a new epoch
		i.up("--database-url", dsn)
		i.setPaused(false)
		if got := i.waitFor(task.ID); outcome(got) != "succeeded" {
			t.Fatalf("the task: %+v", got)
		}
		if got := i.submit("core.echo", map[string]any{"n": 0}); outcome(got) != "succeeded" { // the agent obeys this epoch
			t.Fatalf("an echo: %+v", got)
		}
		i.interrupt()
	}

	i.up("--database-url", backup)
	i.untilStatusSays("the database is older than the fleet")
	if out, err := runCommand(t, "raise-epoch", "--database-url", backup, "--data", i.dir); err != nil || !strings.Contains(out, "epochs are 10000") {
		t.Fatalf("raise-epoch: %v: %s", err, out)
	}
	i.setPaused(false)
	if got := i.waitFor(task.ID); outcome(got) != "succeeded" {
		t.Errorf("the task of the backup: %+v", got)
	}
	next := i.submit("core.echo", map[string]any{"n": 1})
	if n, err := strconv.ParseInt(next.ID, 10, 64); err != nil || n < 1<<24 || outcome(next) != "succeeded" {
		t.Errorf("afterwards: %+v", next)
	}
	ids, err := os.ReadFile(filepath.Join(filepath.Dir(agent.DataDir), "appended-ids"))
	if err != nil {
		t.Fatal(err)
	}
	if ran := strings.Fields(string(ids)); !slices.Equal(ran, []string{task.ID}) {
		t.Errorf("ran: %v, want task %s once", ran, task.ID)
	}
}

// untilStatusSays waits until `headgate status` says something of the database.
func (i *instance) untilStatusSays(text string) {
	i.Helper()
	var last []byte
	for end := time.Now().Add(readyWithin); time.Now().Before(end); {
		out, err := exec.Command(filepath.Join(programs, "headgate"), "status", "--data", i.dir).CombinedOutput()
		if err != nil {
			i.Fatalf("status: %v: %s", err, out)
		}
		if strings.Contains(string(out), text) {
			return
		}
		last = out
	}
	i.Fatalf("status never said %q; last:\n%s", text, last)
}
