package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
)

const (
	// queueWindow is one side of a round; queueWarmUp is load before it.
	queueWindow = 6 * time.Second
	queueWarmUp = time.Second
	// queueWarmWait is until the first job is worked.
	queueWarmWait = 30 * time.Second
	// riverTrial is the time in which each number of workers is tried.
	riverTrial = 3 * time.Second
	// riverTrialJobs and riverSpare: enough that none runs out of work.
	riverTrialJobs = 150_000
	riverSpare     = 1.5
	// insertBatch tasks at once, from insertCallers connections.
	insertBatch   = 1000
	insertCallers = 2
	insertWindow  = 4 * time.Second
	// heldFor is how long an old snapshot is held for, in windows, and
	// besideHeld the time before and after in which none is.
	heldFor    = 8
	besideHeld = 2
)

// benchQueue measures the full cycle of single submissions (insert, start,
// finish) in the queue alone, in turn with River working off jobs that were
// inserted before, and with single inserts by pgbench.
func benchQueue(ctx context.Context, b *bench) error {
	defer likeController()()
	c, err := b.newCluster(ctx)
	if err != nil {
		return err
	}
	return errors.Join(c.queueRounds(ctx), c.close())
}

func (c *cluster) queueRounds(ctx context.Context) (err error) {
	b := c.bench
	inserts, err := b.newComparison(ctx, c.dir, c.pg.DSN())
	if err != nil {
		return err
	}
	q, err := c.newQueue(ctx, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.close()) }()
	river, err := c.newRiver(ctx)
	if err != nil {
		return err
	}
	defer river.pool.Close()
	jobs, err := river.tune(ctx)
	if err != nil {
		return err
	}
	b.note("compared with: River v0.51.2 (riverpgxv5), work alone of jobs inserted before, no-op, FetchCooldown %s, MaxWorkers %d; and %s",
		riverCooldown, river.best, inserts.command(compareClients, queueWindow))
	var ours, theirs, single []float64
	for range b.rounds {
		rate, err := c.queueRound(ctx, q)
		if err != nil {
			return err
		}
		ours = append(ours, rate)
		if rate, err = river.work(ctx, river.best, jobs, queueWindow); err != nil {
			return err
		}
		theirs = append(theirs, rate)
		if rate, err = inserts.inserts(ctx, compareClients, queueWindow); err != nil {
			return err
		}
		single = append(single, rate)
	}
	b.note("full cycles/s of single submissions, %d clients: %s; River works %s jobs/s; pgbench -c %d: %s commits/s",
		queueClients, list(ours), list(theirs), compareClients, list(single))
	b.figure("queue_cycles_per_s", median(ours), "tasks/s")
	b.figure("river_work_per_s", median(theirs), "jobs/s")
	b.ratio("queue_vs_river", median(ours)/median(theirs))
	b.ratio("queue_vs_pgbench", median(ours)/median(single))
	return q.check(ctx, 0, q.completed())
}

// queueRound gives completed tasks per second.
func (c *cluster) queueRound(ctx context.Context, q *queue) (float64, error) {
	l := q.load(ctx)
	var n int64
	var took time.Duration
	err := wait(ctx, queueWarmUp)
	then := c.spent(ctx)
	if err == nil {
		n, took, err = l.during(ctx, queueWindow)
	}
	c.noteSpent(ctx, "queue alone", then, n)
	if err := errors.Join(err, l.end(ctx)); err != nil {
		return 0, err
	}
	return float64(n) / took.Seconds(), nil
}

// tune finds the number of workers with which River is fastest here, and how
// many jobs it needs for one side of a round.
func (r *riverQueue) tune(ctx context.Context) (jobs int, err error) {
	var most float64
	for _, workers := range riverWorkers() {
		rate, err := r.work(ctx, workers, riverTrialJobs, riverTrial)
		if err != nil {
			return 0, err
		}
		r.cluster.bench.note("River with %d workers: %.0f jobs/s", workers, rate)
		if rate > most {
			most, r.best = rate, workers
		}
	}
	return int(most * riverSpare * (queueWindow + queueWarmUp).Seconds()), nil
}

// benchInsert measures batch inserts through the queue against River's.
func benchInsert(ctx context.Context, b *bench) error {
	defer likeController()()
	c, err := b.newCluster(ctx)
	if err != nil {
		return err
	}
	return errors.Join(c.insertRounds(ctx), c.close())
}

func (c *cluster) insertRounds(ctx context.Context) (err error) {
	b := c.bench
	q, err := c.newQueue(ctx, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.close()) }()
	river, err := c.newRiver(ctx)
	if err != nil {
		return err
	}
	defer river.pool.Close()
	b.note("batches of %d from %d callers, each acknowledged when on disk; nobody takes them. Compared with River v0.51.2 (riverpgxv5)", insertBatch, insertCallers)
	var ours, theirs, copied []float64
	for range b.rounds {
		rate, err := c.insertRate(ctx, "batch insert", insertWindow, q.putBatch(ctx))
		if err != nil {
			return err
		}
		ours = append(ours, rate)
		if rate, err = river.insert(ctx, insertWindow, false); err != nil {
			return err
		}
		theirs = append(theirs, rate)
		if rate, err = river.insert(ctx, insertWindow, true); err != nil {
			return err
		}
		copied = append(copied, rate)
	}
	b.note("batch inserts/s: %s; River InsertMany %s, InsertManyFast (COPY) %s", list(ours), list(theirs), list(copied))
	b.figure("batch_inserts_per_s", median(ours), "tasks/s")
	b.ratio("insert_vs_river", median(ours)/median(theirs))
	b.ratio("insert_vs_river_copy", median(ours)/median(copied))
	return q.check(ctx, q.manager.Stats().Submitted, 0)
}

// putBatch submits a batch that gives each of many agents a task.
func (q *queue) putBatch(ctx context.Context) func() error {
	batch := make([]tasks.Submission, insertBatch)
	for i := range batch {
		agent := q.agents.list[i%len(q.agents.list)].Name
		batch[i] = tasks.Submission{Agent: agent, Kind: kinds.Echo, Args: json.RawMessage(echoArgs)}
	}
	return func() error {
		_, err := q.service.SubmitBatch(ctx, batch, "token:bench", tasks.Idempotency{})
		return err
	}
}

// insertRate calls put, which stores a batch, from several callers while d
// passes and gives the tasks per second.
func (c *cluster) insertRate(ctx context.Context, what string, d time.Duration, put func() error) (float64, error) {
	then, began := c.spent(ctx), time.Now()
	var n atomic.Int64
	err := inParallel(insertCallers, insertCallers, func(int) error {
		for time.Since(began) < d && ctx.Err() == nil {
			if err := put(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			n.Add(insertBatch)
		}
		return ctx.Err()
	})
	took := time.Since(began)
	c.noteSpent(ctx, what, then, n.Load())
	return float64(n.Load()) / took.Seconds(), err
}

// benchSnapshot measures the full cycle while a transaction holds a snapshot,
// so that no dead row can be removed, against the time before and after.
func benchSnapshot(ctx context.Context, b *bench) error {
	defer likeController()()
	c, err := b.newCluster(ctx)
	if err != nil {
		return err
	}
	return errors.Join(c.snapshotRounds(ctx), c.close())
}

func (c *cluster) snapshotRounds(ctx context.Context) (err error) {
	b := c.bench
	q, err := c.newQueue(ctx, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.close()) }()
	l := q.load(ctx)
	err = c.besideSnapshot(ctx, q, l)
	if err := errors.Join(err, l.end(ctx)); err != nil {
		return err
	}
	b.note("%d tasks were completed in all", q.completed())
	return q.check(ctx, 0, q.completed())
}

// besideSnapshot measures before, with and after an old snapshot. The better
// of before and after counts, so that a slow moment does no good.
func (c *cluster) besideSnapshot(ctx context.Context, q *queue, l *queueLoad) error {
	b := c.bench
	if err := wait(ctx, queueWarmUp); err != nil {
		return err
	}
	before, err := c.ratesOf(ctx, l, "no old snapshot", besideHeld)
	if err != nil {
		return err
	}
	release, err := q.hold(ctx)
	if err != nil {
		return err
	}
	held, err := c.ratesOf(ctx, l, "an old snapshot is held", heldFor)
	if err := errors.Join(err, release()); err != nil {
		return err
	}
	after, err := c.ratesOf(ctx, l, "released", besideHeld)
	if err != nil {
		return err
	}
	b.note("cycles/s in windows of %s: %s; with a REPEATABLE READ snapshot held: %s; released: %s", b.window, list(before), list(held), list(after))
	b.ratio("rate_with_held_snapshot", mean(held)/max(mean(before), mean(after)))
	return nil
}

// ratesOf gives the rates of the next windows.
func (c *cluster) ratesOf(ctx context.Context, l *queueLoad, what string, windows int) ([]float64, error) {
	then, all := c.spent(ctx), int64(0)
	var rates []float64
	for range windows {
		n, took, err := l.during(ctx, c.bench.window)
		if err != nil {
			return nil, err
		}
		all += n
		rates = append(rates, float64(n)/took.Seconds())
	}
	c.noteSpent(ctx, what, then, all)
	return rates, nil
}

// hold takes a snapshot of the database and keeps it until release is called.
func (q *queue) hold(ctx context.Context) (release func() error, err error) {
	db, err := openDB(q.dsn)
	if err != nil {
		return nil, err
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	release = func() error { return errors.Join(tx.Rollback(), db.Close()) }
	var n int
	if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM agent").Scan(&n); err != nil {
		return nil, errors.Join(err, release())
	}
	return release, nil
}
