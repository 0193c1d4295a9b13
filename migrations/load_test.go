package migrations_test

import (
	"context"
	"database/sql"
	"os"
	"testing"
	"time"

	"github.com/pressly/goose/v3"

	"headgate/internal/testkit"
	"headgate/migrations"
)

// bigQueue fills a database of the first schema version with tasks that wait
// and tasks that are completed.
func bigQueue(t *testing.T, db *sql.DB, n int) {
	t.Helper()
	p, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.UpTo(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{
		`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
		 SELECT g, now(), now() + interval '1 day', 1000, 1 + g % 500, 5, false, 'core.echo', 'x', '{}' FROM generate_series(1, $1::int) g`,
		`INSERT INTO agent_queue (task_id, expires_at, agent_num, priority)
		 SELECT g, now() + interval '1 day', 1 + g % 500, 5 FROM generate_series(1, $1::int / 2) g`,
		`INSERT INTO agent_result (task_id, completed_at, agent_num, outcome)
		 SELECT g, now(), 1 + g % 500, 'succeeded' FROM generate_series($1::int / 2 + 1, $1::int) g`,
	} {
		if _, err := db.ExecContext(t.Context(), q, n); err != nil {
			t.Fatal(err)
		}
	}
}

// passOne is what a program of the first version does with a task, as one
// transaction.
func passOne(ctx context.Context, db *sql.DB, id int) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	for _, q := range []string{
		`INSERT INTO agent_task (id, created_at, expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
		 VALUES ($1, now(), now() + interval '1 day', 1000, 501, 5, false, 'core.echo', 'x', '{}')`,
		`INSERT INTO agent_queue (task_id, expires_at, agent_num, priority) VALUES ($1, now() + interval '1 day', 501, 5)`,
		`UPDATE agent_queue SET started_at = now(), attempt = 1, epoch = 1 WHERE agent_num = 501 AND priority = 5 AND task_id = $1`,
		`DELETE FROM agent_queue WHERE agent_num = 501 AND priority = 5 AND task_id = $1`,
		`INSERT INTO agent_result (task_id, completed_at, agent_num, outcome) VALUES ($1, now(), 501, 'succeeded')`,
	} {
		if _, err := tx.ExecContext(ctx, q, id); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// TestALargeQueueIsMigratedUnderLoad runs the newer migrations while a dump
// reads the results and a program of the first version goes on working: the
// migration gives way, waits for the end of the dump, and holds nobody up for
// longer than it may wait for its locks.
//
// Cases Q37.
func TestALargeQueueIsMigratedUnderLoad(t *testing.T) {
	t.Parallel()
	dsn := testkit.EmptyDatabase(t)
	db := connect(t, dsn)
	const rows = 200_000
	bigQueue(t, db, rows)

	dump, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dump.Rollback() }()
	if _, err := dump.Exec(`LOCK TABLE agent_result IN ACCESS SHARE MODE`); err != nil {
		t.Fatal(err)
	}
	stop, written := make(chan struct{}), make(chan int, 1)
	var longest time.Duration
	go func() {
		n := 0
		defer func() { written <- n }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			began := time.Now()
			if err := passOne(t.Context(), db, rows+1+n); err != nil {
				t.Errorf("a program of the first version: %v", err)
				return
			}
			n++
			longest = max(longest, time.Since(began))
		}
	}()

	migrated := make(chan error, 1)
	go func() { migrated <- migrations.Up(t.Context(), connect(t, dsn)) }()
	waits := map[time.Time]bool{} // for a lock that the dump holds, by when they began
	for end := time.Now().Add(time.Minute); len(waits) < 2; {
		if time.Now().After(end) {
			t.Fatalf("the migration tried %d times, want another try", len(waits))
		}
		var began sql.NullTime
		if err := db.QueryRow(`SELECT min(query_start) FROM pg_stat_activity, pg_sleep(0.01)
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%ALTER TABLE%'`).Scan(&began); err != nil {
			t.Fatal(err)
		}
		if began.Valid {
			waits[began.Time] = true
		}
	}
	if err := dump.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-migrated; err != nil {
		t.Errorf("migrate: %v", err)
	}
	close(stop)
	n := <-written
	if err := migrations.Check(t.Context(), db); err != nil {
		t.Error(err)
	}
	// 2 s for the lock, and what a loaded machine adds.
	if n == 0 || longest > 15*time.Second {
		t.Errorf("%d tasks were written, the slowest in %s", n, longest)
	}
	var done int
	if err := db.QueryRow(`SELECT count(*) FROM agent_task_view WHERE state = 'completed'`).Scan(&done); err != nil || done != rows/2+n {
		t.Errorf("%d tasks are completed (%v), want %d", done, err, rows/2+n)
	}
	t.Logf("%d tasks beside the migration, the slowest in %s", n, longest)
}
