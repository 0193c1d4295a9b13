package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	_ "github.com/lib/pq" // the driver "postgres"

	"headgate/internal/localpg"
)

// openDB opens the database of a connection string with one connection.
func openDB(dsn string) (*sql.DB, error) {
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	return db, nil
}

// compareTable has the width of the product's intake of tasks and the one
// index that a table of its own would have at least.
const compareTable = `CREATE TABLE bench_task (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	created_at timestamptz NOT NULL DEFAULT now(),
	expires_at timestamptz NOT NULL,
	timeout_ms bigint NOT NULL,
	agent_num integer NOT NULL,
	priority smallint NOT NULL,
	repeatable boolean NOT NULL,
	kind text NOT NULL,
	actor text NOT NULL,
	args json NOT NULL)`

// compareInsert is what pgbench runs; %s are the args.
const compareInsert = `\set agent random(1, 1000)
INSERT INTO bench_task (expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
VALUES (now() + interval '24 hours', 10000, :agent, 5, true, 'core.echo', 'bench', '%s');
`

// comparison is a database of its own on the cluster of a rig.
type comparison struct {
	bench  *bench
	dsn    string
	script string
	tool   string
}

const compareDatabase = "headgate_bench"

// newComparison makes the database of comparison on the cluster of a rig.
func (r *rig) newComparison(ctx context.Context) (*comparison, error) {
	return r.bench.newComparison(ctx, r.dir, r.run.DatabaseURL)
}

// newComparison makes the database beside that of a connection string, and
// prints what decides on durability.
func (b *bench) newComparison(ctx context.Context, dir, dsn string) (*comparison, error) {
	db, err := openDB(dsn)
	if err != nil {
		return nil, err
	}
	defer release(db)
	if err := b.noteDurability(ctx, db); err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, "CREATE DATABASE "+compareDatabase); err != nil {
		return nil, err
	}
	c := &comparison{bench: b, script: filepath.Join(dir, "insert.sql")}
	c.dsn = strings.Replace(dsn, "dbname='headgate'", "dbname="+compareDatabase, 1)
	if c.dsn == dsn {
		return nil, fmt.Errorf("the connection string %q has no dbname='headgate' to replace", c.dsn)
	}
	own, err := openDB(c.dsn)
	if err != nil {
		return nil, err
	}
	defer release(own)
	if _, err := own.ExecContext(ctx, compareTable); err != nil {
		return nil, err
	}
	bin, err := localpg.FindBinaries("")
	if err != nil {
		return nil, err
	}
	c.tool = filepath.Join(bin.Dir, "pgbench")
	return c, os.WriteFile(c.script, fmt.Appendf(nil, compareInsert, echoArgs), 0o600)
}

var errUnsafe = errors.New("the cluster runs with a durability setting off; figures would be worth nothing")

// noteDurability prints the settings and refuses unsafe ones.
func (b *bench) noteDurability(ctx context.Context, db *sql.DB) error {
	var version, text string
	if err := db.QueryRowContext(ctx, "SHOW server_version").Scan(&version); err != nil {
		return err
	}
	for _, name := range []string{"fsync", "full_page_writes", "synchronous_commit", "wal_sync_method", "shared_buffers", "max_wal_size"} {
		var value string
		if err := db.QueryRowContext(ctx, "SELECT current_setting($1)", name).Scan(&value); err != nil {
			return err
		}
		text += ", " + name + "=" + value
		if value == "off" {
			return errUnsafe
		}
	}
	b.note("PostgreSQL %s%s", version, text)
	return nil
}

// param takes a value out of a connection string of keywords.
func param(dsn, name string) string {
	for field := range strings.FieldsSeq(dsn) {
		if value, ok := strings.CutPrefix(field, name+"="); ok {
			return strings.Trim(value, "'")
		}
	}
	return ""
}

// inserts runs pgbench and gives commits per second.
func (c *comparison) inserts(ctx context.Context, clients int, d time.Duration) (float64, error) {
	args := []string{
		"-n", "-M", "prepared", "-c", strconv.Itoa(clients), "-j", "2", "-T", strconv.Itoa(int(d.Seconds())), "-f", c.script,
		"-h", param(c.dsn, "host"), "-p", param(c.dsn, "port"), "-U", param(c.dsn, "user"), compareDatabase,
	}
	out, err := exec.CommandContext(ctx, c.tool, args...).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("pgbench %s: %w: %s", strings.Join(args, " "), err, lastLines(string(out), 5))
	}
	found := regexp.MustCompile(`(?m)^tps = ([0-9.]+)`).FindSubmatch(out)
	if found == nil {
		return 0, fmt.Errorf("pgbench printed no rate: %s", out)
	}
	return strconv.ParseFloat(string(found[1]), 64)
}

// command gives the pgbench call for the report.
func (c *comparison) command(clients int, d time.Duration) string {
	return fmt.Sprintf("pgbench -n -M prepared -c %d -j 2 -T %d -f insert.sql, where insert.sql is\n%s", clients, int(d.Seconds()),
		fmt.Sprintf(compareInsert, echoArgs))
}

// commits measures single durable inserts, one at a time with pauses, as on
// an idle machine.
func (c *comparison) commits(ctx context.Context, n int, gap time.Duration) ([]time.Duration, error) {
	db, err := openDB(c.dsn)
	if err != nil {
		return nil, err
	}
	defer release(db)
	//nolint:sqlclosecheck // release closes it
	insert, err := db.PrepareContext(ctx, `INSERT INTO bench_task (expires_at, timeout_ms, agent_num, priority, repeatable, kind, actor, args)
		VALUES (now() + interval '24 hours', 10000, 1, 5, true, 'core.echo', 'bench', $1)`)
	if err != nil {
		return nil, err
	}
	defer release(insert)
	var all []time.Duration
	for range n {
		if err := wait(ctx, gap); err != nil {
			return nil, err
		}
		began := time.Now()
		if _, err := insert.ExecContext(ctx, echoArgs); err != nil {
			return nil, err
		}
		all = append(all, time.Since(began))
	}
	return all, nil
}
