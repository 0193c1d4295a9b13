package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"headgate/tasks"
)

// Retention says how much history is kept. Zero values set no limit. Only
// whole partitions are dropped, so a little more than that is kept.
type Retention struct {
	Age   time.Duration // tasks whose submission and end are older may go
	Tasks int64         // the newest tasks, which stay
	Bytes int64         // above which the oldest tasks go; tables, indexes and output together
}

// limited says whether there is any limit.
func (r Retention) limited() bool { return r.Age > 0 || r.Tasks > 0 || r.Bytes > 0 }

const (
	// MinRetention is for how long every task stays whatever the limits say: as
	// long as its idempotency key is remembered, which must find it.
	MinRetention = 24 * time.Hour
	// settledAfter is how long a partition must have had a successor in use
	// until it is dropped. Controllers give up ids taken beforehand much
	// earlier, so nobody can write into it any more.
	settledAfter = time.Hour
	// A partition that holds more than this part of a limit is closed, so that
	// what is dropped at once is small beside what is kept.
	shareOfLimit = 8
	// minClosing and maxClosing bound how often partitions are closed early.
	minClosing = 3 * time.Hour
	maxClosing = 30 * 24 * time.Hour
)

// Partition is one range of task ids, its four tables together.
type Partition struct {
	Number  int64
	FirstID int64
	LastID  int64
	Tasks   int64 // about
	Bytes   int64
	Open    int64     // tasks that are not completed
	Oldest  time.Time // submission of the first task; zero = it is empty
	Newest  time.Time // submission of the last one
	Ended   time.Time // when the last one ended; only looked up before a drop
	Drop    bool
	Why     string // it is dropped or stays

	byAge bool // it would go for its age
}

type partitionRow struct {
	Part     int64        `db:"part"`
	Bytes    int64        `db:"bytes"`
	Estimate float64      `db:"estimate"`
	First    sql.NullTime `db:"first_at"`
	Last     sql.NullTime `db:"last_at"`
	Open     int64        `db:"open"`
}

// The numbers come from the names that headgate_make_partitions gives. The
// queue is read once for all of them.
const sqlPartitions = `
WITH child AS (
    SELECT c.oid, c.reltuples, i.inhparent = 'agent_task'::regclass AS intake,
           substring(c.relname FROM '_p([0-9]+)$')::bigint AS part
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent IN ('agent_task'::regclass, 'agent_result'::regclass, 'task_output'::regclass, 'late_result'::regclass)
), p AS MATERIALIZED (
    SELECT part, coalesce(sum(pg_total_relation_size(oid)), 0)::bigint AS bytes, max(reltuples) FILTER (WHERE intake) AS estimate
    FROM child WHERE part IS NOT NULL GROUP BY part HAVING bool_or(intake)
), open AS MATERIALIZED (
    SELECT task_id / $1::bigint AS part, count(*) AS n
    FROM (SELECT task_id FROM agent_queue UNION ALL SELECT task_id FROM agent_later) q GROUP BY 1
)
SELECT p.part, p.bytes, p.estimate, coalesce(open.n, 0) AS open,
       (SELECT t.created_at FROM agent_task t WHERE t.id >= p.part * $1::bigint AND t.id < (p.part + 1) * $1::bigint
        ORDER BY t.id LIMIT 1) AS first_at,
       (SELECT t.created_at FROM agent_task t WHERE t.id >= p.part * $1::bigint AND t.id < (p.part + 1) * $1::bigint
        ORDER BY t.id DESC LIMIT 1) AS last_at
FROM p LEFT JOIN open ON open.part = p.part
ORDER BY p.part`

// A table that was never analysed has no estimate.
const sqlPartitionCount = `SELECT count(*) FROM agent_task WHERE id >= $1 AND id < $2`

const sqlPartitionEnded = `SELECT max(completed_at) FROM agent_result WHERE task_id >= $1 AND task_id < $2`

// PlanRetention says of each partition whether the limits let it go, and why.
// It changes nothing. The oldest comes first.
func (d *DB) PlanRetention(ctx context.Context, r Retention) ([]Partition, error) {
	parts, now, err := d.partitionList(ctx)
	if err != nil {
		return nil, err
	}
	judge(parts, r, now)
	for i := range parts {
		if p := &parts[i]; p.Drop {
			if err := d.checkEnded(ctx, p, r, now); err != nil {
				return nil, err
			}
		}
	}
	return parts, nil
}

const sqlNow = `SELECT clock_timestamp()`

func (d *DB) partitionList(ctx context.Context) ([]Partition, time.Time, error) {
	const what = "look at the partitions"
	var now time.Time
	var rows []partitionRow
	err := d.upkeep.GetContext(ctx, &now, sqlNow)
	if err == nil {
		err = d.upkeep.SelectContext(ctx, &rows, sqlPartitions, partitionSpan)
	}
	if err != nil {
		return nil, now, asFault(ctx, err, what)
	}
	out := make([]Partition, len(rows))
	for i, r := range rows {
		first := r.Part * partitionSpan
		out[i] = Partition{
			Number: r.Part, FirstID: first, LastID: first + partitionSpan - 1, Tasks: int64(r.Estimate), Bytes: r.Bytes,
			Open: r.Open, Oldest: instant(r.First), Newest: instant(r.Last),
		}
		if r.Estimate < 0 {
			if err := d.upkeep.GetContext(ctx, &out[i].Tasks, sqlPartitionCount, first, first+partitionSpan); err != nil {
				return nil, now, asFault(ctx, err, what)
			}
		}
	}
	return out, now, nil
}

// judge decides about each partition, all of which are given, oldest first.
func judge(parts []Partition, r Retention, now time.Time) {
	var count, bytes int64 // of the partitions behind the one looked at
	var since time.Time    // when the one behind it that is in use came into use
	for i := len(parts) - 1; i >= 0; i-- {
		p := &parts[i]
		newerTasks := count
		count += p.Tasks
		bytes += p.Bytes
		p.Drop, p.Why = verdict(p, r, now, newerTasks, bytes)
		if p.Drop {
			p.Drop, p.Why = unhurt(p, now, since, p.Why)
		}
		if !p.Oldest.IsZero() {
			since = p.Oldest
		}
	}
}

// verdict says whether a limit lets a partition go; bytes are those of it and
// all newer ones.
func verdict(p *Partition, r Retention, now time.Time, newerTasks, bytes int64) (bool, string) {
	switch {
	case !r.limited():
		return false, "no limit is set"
	case p.Oldest.IsZero():
		return true, "it is empty"
	case r.Age > 0 && now.Sub(p.Newest) > r.Age:
		p.byAge = true
		return true, "all of its tasks are older than retention-age"
	case r.Tasks > 0 && newerTasks >= r.Tasks:
		return true, "there are retention-tasks newer tasks"
	case r.Bytes > 0 && bytes > r.Bytes:
		return true, "it and the newer ones take more than retention-bytes"
	}
	return false, "within the limits"
}

// unhurt holds a drop back that would break a promise; since is when the
// partition behind it came into use.
func unhurt(p *Partition, now, since time.Time, why string) (bool, string) {
	switch {
	case since.IsZero() || now.Sub(since) < settledAfter:
		return false, "new tasks may still get its ids"
	case p.Open > 0:
		return false, fmt.Sprintf("%d of its tasks are not completed", p.Open)
	case !p.Newest.IsZero() && now.Sub(p.Newest) < MinRetention:
		return false, "its newest task is younger than a day, for which idempotency keys are remembered"
	}
	return true, why
}

// checkEnded looks at when the last task of a partition ended, which takes a
// look at all of its results.
func (d *DB) checkEnded(ctx context.Context, p *Partition, r Retention, now time.Time) error {
	var ended sql.NullTime
	if err := d.upkeep.GetContext(ctx, &ended, sqlPartitionEnded, p.FirstID, p.LastID+1); err != nil {
		return asFault(ctx, err, "look for the last result of a partition")
	}
	p.Ended = instant(ended)
	least := MinRetention
	if p.byAge {
		least = max(least, r.Age)
	}
	if now.Sub(p.Ended) < least {
		p.Drop, p.Why = false, "its last result came in at "+p.Ended.Format(time.RFC3339)
	}
	return nil
}

// RetentionReport is what one run of the retention did.
type RetentionReport struct {
	Dropped []Partition
	Closed  bool // the partition in use was closed early
}

// ApplyRetention drops what PlanRetention says and finishes what an earlier run
// has begun. It never waits for long, and no turn waits for it: an error only
// means that the next run goes on. Two that run at the same time do no harm.
func (d *DB) ApplyRetention(ctx context.Context, r Retention) (RetentionReport, error) {
	report, err := d.applyRetention(ctx, r)
	d.metrics.upkeep.dropped.Add(float64(len(report.Dropped)))
	if err != nil {
		d.metrics.upkeep.retentionFails.Set(1)
		return report, err
	}
	d.metrics.upkeep.retentionFails.Set(0)
	d.metrics.upkeep.retentionRun.SetToCurrentTime()
	return report, nil
}

// LeaveRetention says that another controller removes old tasks.
func (d *DB) LeaveRetention() {
	d.metrics.upkeep.retentionFails.Set(0)
	d.metrics.upkeep.retentionRun.Set(0)
}

func (d *DB) applyRetention(ctx context.Context, r Retention) (RetentionReport, error) {
	var report RetentionReport
	if err := d.finishDrops(ctx); err != nil {
		return report, err
	}
	parts, err := d.PlanRetention(ctx, r)
	if err != nil {
		return report, err
	}
	for _, p := range parts {
		if !p.Drop {
			continue
		}
		if err := d.dropPartition(ctx, p); err != nil {
			return report, err
		}
		d.cfg.Log.Info("dropped old tasks", "first_id", p.FirstID, "last_id", p.LastID, "tasks", p.Tasks, "bytes", p.Bytes, "why", p.Why)
		report.Dropped = append(report.Dropped, p)
	}
	report.Closed, err = d.closePartition(ctx, parts, r)
	return report, err
}

// closePartition lets the ids go on in the next partition when the one in use
// holds a good part of what is kept: an installation with few tasks would
// otherwise need years to fill one, and nothing of it could ever go.
func (d *DB) closePartition(ctx context.Context, parts []Partition, r Retention) (bool, error) {
	var inUse *Partition
	for i := range parts {
		if !parts[i].Oldest.IsZero() {
			inUse = &parts[i]
		}
	}
	if inUse == nil {
		return false, nil
	}
	var now time.Time
	if err := d.upkeep.GetContext(ctx, &now, sqlNow); err != nil {
		return false, asFault(ctx, err, "read the time")
	}
	if !mayClose(inUse, r, now) {
		return false, nil
	}
	return d.skipTo(ctx, inUse.LastID+1)
}

// mayClose says whether the partition in use holds more than an eighth of what
// a limit allows.
func mayClose(p *Partition, r Retention, now time.Time) bool {
	used := now.Sub(p.Oldest)
	if used < minClosing {
		return false
	}
	return r.Age > 0 && used > min(r.Age/shareOfLimit, maxClosing) ||
		r.Tasks > 0 && p.Tasks > r.Tasks/shareOfLimit ||
		r.Bytes > 0 && p.Bytes > r.Bytes/shareOfLimit
}

const sqlLastID = `SELECT last_value FROM agent_task_id_seq`

// Taking ids and throwing them away is the one way to move the sequence on
// that cannot move it back when somebody else takes ids at the same time.
const sqlSkipIDs = `SELECT count(nextval('agent_task_id_seq')) FROM generate_series(1, $1::bigint)`

// skipTo throws away the ids below first.
func (d *DB) skipTo(ctx context.Context, first int64) (bool, error) {
	if err := d.ensurePartitions(ctx, first); err != nil {
		return false, err
	}
	var last, skipped int64
	if err := d.upkeep.GetContext(ctx, &last, sqlLastID); err != nil {
		return false, asFault(ctx, err, "read the last task id")
	}
	blocks := (first - last) / tasks.IDBlock
	if blocks <= 0 {
		return false, nil
	}
	// In a transaction only so that the driver never repeats it by itself: ids
	// are not given back, and twice as many would skip a whole partition.
	err := d.writeOn(ctx, d.upkeep, "begin a new partition", func(tx *Tx) error {
		return tx.get(&skipped, sqlSkipIDs, blocks)
	})
	if err != nil {
		return false, err
	}
	d.cfg.Log.Info("the next tasks go into a new partition, so that the old ones can be dropped in time", "first_id", first)
	return true, nil
}
