package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"headgate/internal/localpg"
)

// cluster is a private PostgreSQL cluster as `headgate up` starts it, for what
// is measured without the programs around it.
type cluster struct {
	bench *bench
	dir   string
	pg    *localpg.Cluster
}

func (b *bench) newCluster(ctx context.Context) (*cluster, error) {
	dir, err := b.newDir()
	if err != nil {
		return nil, err
	}
	c := &cluster{bench: b, dir: dir}
	c.pg, err = localpg.Start(ctx, localpg.Config{Dir: filepath.Join(dir, "pg"), FallbackDir: filepath.Join(dir, "fallback")})
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// close ends the cluster and removes its data.
func (c *cluster) close() error {
	var err error
	if c.pg != nil {
		ctx, cancel := context.WithTimeout(context.Background(), localpg.DefaultStopTimeout)
		defer cancel()
		err = c.pg.Stop(ctx)
	}
	return errors.Join(err, c.bench.removeDir(c.dir))
}

// newDatabase makes a database and gives its connection string.
func (c *cluster) newDatabase(ctx context.Context, name string) (string, error) {
	db, err := openDB(c.pg.DSN())
	if err != nil {
		return "", err
	}
	defer release(db)
	if _, err := db.ExecContext(ctx, "CREATE DATABASE "+name); err != nil {
		return "", err
	}
	return c.pg.DSNFor(name), nil
}

// spent is what this process and PostgreSQL have used up to a moment.
type spent struct {
	at               time.Time
	client, postgres time.Duration
	wal              float64
}

// spent reads the counters; what cannot be read counts as nothing, since it
// is only a note.
func (c *cluster) spent(ctx context.Context) spent {
	s := spent{at: time.Now()}
	s.client, _ = cpuOf(os.Getpid())
	s.postgres, _ = cpuOfTree(c.pg.PID())
	if db, err := openDB(c.pg.DSN()); err == nil {
		defer release(db)
		_ = db.QueryRowContext(ctx, "SELECT pg_current_wal_lsn() - '0/0'").Scan(&s.wal)
	}
	return s
}

// noteSpent prints what each of the items has cost since then.
func (c *cluster) noteSpent(ctx context.Context, what string, then spent, items int64) {
	now, n := c.spent(ctx), float64(max(items, 1))
	micro := func(d time.Duration) float64 { return float64(d.Microseconds()) / n }
	c.bench.note("%s: %d in %.1f s; processor time of each: client %.1f us, PostgreSQL %.1f us; %.2f processors busy; %.0f bytes of WAL each",
		what, items, now.at.Sub(then.at).Seconds(), micro(now.client-then.client), micro(now.postgres-then.postgres),
		(now.client+now.postgres-then.client-then.postgres).Seconds()/now.at.Sub(then.at).Seconds(), (now.wal-then.wal)/n)
}
