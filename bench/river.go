package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

const (
	// riverCooldown is the pause between fetches. River's own is 100 ms, which
	// bounds the rate to workers per cooldown.
	riverCooldown = 2 * time.Millisecond
	riverPoll     = 50 * time.Millisecond
	riverConns    = 16
	// riverLoad is how many jobs a bulk insert of the preparation takes at once.
	riverLoad = 5000
	// riverStop is until the client has stopped.
	riverStop = 20 * time.Second
)

// riverWorkers are the tuned numbers of workers, of which the best counts.
func riverWorkers() []int { return []int{1000, 2000, 5000} }

// noopArgs has the width of the args of every task here.
type noopArgs struct {
	Text string `json:"text"`
}

// Kind implements river.JobArgs.
func (noopArgs) Kind() string { return "noop" }

// noopWorker counts.
type noopWorker struct {
	river.WorkerDefaults[noopArgs]
	worked *atomic.Int64
}

// Work implements river.Worker.
func (w *noopWorker) Work(context.Context, *river.Job[noopArgs]) error {
	w.worked.Add(1)
	return nil
}

// riverQueue is River on a database of its own in the same cluster.
type riverQueue struct {
	cluster *cluster
	pool    *pgxpool.Pool
	worked  atomic.Int64
	best    int // workers
}

func (c *cluster) newRiver(ctx context.Context) (*riverQueue, error) {
	dsn, err := c.newDatabase(ctx, "river")
	if err != nil {
		return nil, err
	}
	r := &riverQueue{cluster: c}
	r.pool, err = pgxpool.New(ctx, fmt.Sprintf("host='%s' port=%s user=%s dbname=river sslmode=disable pool_max_conns=%d",
		param(dsn, "host"), param(dsn, "port"), param(dsn, "user"), riverConns))
	if err != nil {
		return nil, err
	}
	migrator, err := rivermigrate.New(riverpgxv5.New(r.pool), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	if err != nil {
		r.pool.Close()
		return nil, err
	}
	return r, nil
}

// client makes one that works with so many workers; 0 = it only inserts.
func (r *riverQueue) client(workers int) (*river.Client[pgx.Tx], error) {
	known := river.NewWorkers()
	river.AddWorker(known, &noopWorker{worked: &r.worked})
	config := &river.Config{
		Workers: known, FetchCooldown: riverCooldown, FetchPollInterval: riverPoll, Logger: slog.New(slog.DiscardHandler),
	}
	if workers > 0 {
		config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}}
	}
	return river.NewClient(riverpgxv5.New(r.pool), config)
}

// batch gives jobs to insert.
func riverBatch(n int) []river.InsertManyParams {
	jobs := make([]river.InsertManyParams, n)
	for i := range jobs {
		jobs[i].Args = noopArgs{Text: echoText}
	}
	return jobs
}

// fill leaves nothing in the table but n jobs that wait.
func (r *riverQueue) fill(ctx context.Context, n int) error {
	c, err := r.client(0)
	if err != nil {
		return err
	}
	if _, err := r.pool.Exec(ctx, "TRUNCATE river_job"); err != nil {
		return err
	}
	jobs := riverBatch(riverLoad)
	err = inParallel(2, (n+riverLoad-1)/riverLoad, func(int) error {
		_, err := c.InsertManyFast(ctx, jobs)
		return err
	})
	if err != nil {
		return err
	}
	_, err = r.pool.Exec(ctx, "ANALYZE river_job")
	return err
}

// work gives the rate at which waiting jobs are worked while d passes, or
// until there are no more. The work counts, not its record on disk, which is
// written a moment later.
func (r *riverQueue) work(ctx context.Context, workers, jobs int, d time.Duration) (rate float64, err error) {
	if err := r.fill(ctx, jobs); err != nil {
		return 0, err
	}
	c, err := r.client(workers)
	if err != nil {
		return 0, err
	}
	begin := r.worked.Load()
	if err := c.Start(ctx); err != nil {
		return 0, err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), riverStop)
		defer cancel()
		if stopErr := c.StopAndCancel(stop); err == nil {
			err = stopErr
		}
	}()
	err = waitUntil(ctx, queueWarmWait, "River to begin", func() (bool, error) { return r.worked.Load() > begin, nil })
	if err != nil {
		return 0, err
	}
	if err := wait(ctx, queueWarmUp); err != nil {
		return 0, err
	}
	before, began := r.worked.Load(), time.Now()
	then := r.cluster.spent(ctx)
	for time.Since(began) < d && r.worked.Load()-begin < int64(jobs) {
		if err := wait(ctx, lookEvery); err != nil {
			return 0, err
		}
	}
	n, took := r.worked.Load()-before, time.Since(began)
	r.cluster.noteSpent(ctx, fmt.Sprintf("River, %d workers", workers), then, n)
	return float64(n) / took.Seconds(), nil
}

// insert gives the rate of inserts in batches, from several connections, by
// InsertMany or by its variant that copies and gives nothing back.
func (r *riverQueue) insert(ctx context.Context, d time.Duration, fast bool) (float64, error) {
	c, err := r.client(0)
	if err != nil {
		return 0, err
	}
	jobs := riverBatch(insertBatch)
	name := "River InsertMany"
	put := func() error { _, err := c.InsertMany(ctx, jobs); return err }
	if fast {
		name = "River InsertManyFast"
		put = func() error { _, err := c.InsertManyFast(ctx, jobs); return err }
	}
	return r.cluster.insertRate(ctx, name, d, put)
}
