package store

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"time"
)

// Health is what upkeep goes by and operators want to know of the database.
type Health struct {
	Snapshot        Snapshot // the oldest; zero = none
	Partitions      int
	PartitionsAhead int64 // that hold no task yet
	TaskBytes       int64 // of tasks, results and output with their indexes
	QueueBytes      int64 // of the queue alone, without its indexes
	QueueIndexBytes int64
	QueueDead       int64 // rows that a vacuum would free, if no snapshot needs them
	QueueLive       int64
}

// Snapshot is what keeps the server from freeing rows that died since.
type Snapshot struct {
	Who string
	Age time.Duration
}

// snapshots remembers since when those that do not tell it were seen.
type snapshots struct {
	mu   sync.Mutex // guards seen
	seen map[string]seenSnapshot
}

type seenSnapshot struct {
	xmin  string
	since time.Time
}

// Sessions of other databases do not matter, those of replication do. What a
// slot or a standby holds has no time, only a transaction that stays the same.
const sqlSnapshots = `
SELECT s.who, s.xmin::text AS xmin, extract(epoch FROM clock_timestamp() - s.since)::float8 AS age
FROM (
    SELECT format('process %s of %s (%s)', pid, usename, coalesce(nullif(application_name, ''), 'without a name')) AS who,
           coalesce(backend_xmin, backend_xid) AS xmin, xact_start AS since
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND backend_type IN ('client backend', 'walsender')
      AND (datname = current_database() OR datname IS NULL)
    UNION ALL
    SELECT format('prepared transaction %s of %s', gid, owner), transaction, prepared
    FROM pg_prepared_xacts WHERE database = current_database()
    UNION ALL
    SELECT format('replication slot %s', slot_name), xmin, NULL FROM pg_replication_slots
) s
WHERE s.xmin IS NOT NULL
ORDER BY age(s.xmin) DESC
LIMIT 20`

const sqlHealth = `
WITH child AS (
    SELECT c.oid, i.inhparent = 'agent_task'::regclass AS intake, substring(c.relname FROM '_p([0-9]+)$')::bigint AS part
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent IN ('agent_task'::regclass, 'agent_result'::regclass, 'task_output'::regclass, 'late_result'::regclass)
), p AS (
    SELECT count(*) FILTER (WHERE intake) AS n, max(part) AS last, coalesce(sum(pg_total_relation_size(oid)), 0)::bigint AS bytes FROM child
)
SELECT p.n AS partitions, p.last - (SELECT last_value FROM agent_task_id_seq) / $1::bigint AS ahead, p.bytes AS task_bytes,
       pg_relation_size('agent_queue') AS queue_bytes, pg_indexes_size('agent_queue') AS index_bytes,
       coalesce(q.n_dead_tup, 0) AS dead, coalesce(q.n_live_tup, 0) AS live
FROM p LEFT JOIN pg_stat_user_tables q ON q.relid = 'agent_queue'::regclass`

// Health looks at the database; call it once a minute. It also sets the metrics.
func (d *DB) Health(ctx context.Context) (Health, error) {
	var row struct {
		Partitions int   `db:"partitions"`
		Ahead      int64 `db:"ahead"`
		TaskBytes  int64 `db:"task_bytes"`
		QueueBytes int64 `db:"queue_bytes"`
		IndexBytes int64 `db:"index_bytes"`
		Dead       int64 `db:"dead"`
		Live       int64 `db:"live"`
	}
	if err := d.pages.GetContext(ctx, &row, sqlHealth, partitionSpan); err != nil {
		return Health{}, asFault(ctx, err, "look at the state of the tables")
	}
	h := Health{
		Partitions: row.Partitions, PartitionsAhead: row.Ahead, TaskBytes: row.TaskBytes,
		QueueBytes: row.QueueBytes, QueueIndexBytes: row.IndexBytes, QueueDead: row.Dead, QueueLive: row.Live,
	}
	var err error
	if h.Snapshot, err = d.oldestSnapshot(ctx); err != nil {
		return h, err
	}
	d.metrics.health(h)
	return h, nil
}

func (d *DB) oldestSnapshot(ctx context.Context) (Snapshot, error) {
	var rows []struct {
		Who  string          `db:"who"`
		Xmin string          `db:"xmin"`
		Age  sql.NullFloat64 `db:"age"`
	}
	if err := d.pages.SelectContext(ctx, &rows, sqlSnapshots); err != nil {
		return Snapshot{}, asFault(ctx, err, "look for old snapshots")
	}
	s := &d.snapshots
	s.mu.Lock()
	defer s.mu.Unlock()
	var oldest Snapshot
	seen := map[string]seenSnapshot{}
	for _, r := range rows {
		age := time.Duration(r.Age.Float64 * float64(time.Second))
		if !r.Age.Valid {
			known := s.seen[r.Who]
			if known.xmin != r.Xmin {
				known = seenSnapshot{xmin: r.Xmin, since: time.Now()}
			}
			seen[r.Who] = known
			age = time.Since(known.since)
		}
		if age > oldest.Age {
			oldest = Snapshot{Who: r.Who, Age: age}
		}
	}
	s.seen = seen
	return oldest, nil
}

// noteFrom is the age of a snapshot that is worth a word to operators: every
// dump has one, few others live that long.
const noteFrom = time.Minute

// Notes says in sentences what an operator should look at; often nothing.
func (h Health) Notes() []string {
	var notes []string
	if h.Snapshot.Age > noteFrom {
		notes = append(notes, fmt.Sprintf("%s has held a snapshot for %s: rows that died since then cannot be freed",
			h.Snapshot.Who, h.Snapshot.Age.Round(time.Second)))
	}
	if h.PartitionsAhead < 1 {
		notes = append(notes, "no unused partition is left for new tasks; the log says why none could be made")
	}
	return notes
}
