package store

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/lib/pq"
)

// When the queue is tended. Autovacuum does it by itself from 20,000 dead rows,
// but looks only once a minute, and not at all where it is off or busy.
const (
	// vacuumDead is half of what the queue leaves behind in 10 s at full load.
	vacuumDead = 100_000
	// A vacuum that frees less than half is held up by a snapshot. The next one
	// comes after twice the time.
	firstVacuumPause = 20 * time.Second
	maxVacuumPause   = 10 * time.Minute

	// An index is built anew when it is many times as large as its rows need,
	// while there are few rows: it takes a moment then, and so do its locks.
	rebuildFrom   = 32 << 20 // bytes
	rebuildTimes  = 8
	rebuildRows   = 50_000 // at most
	indexRowBytes = 64     // of pages that are half full
	rebuildPause  = time.Hour
	rebuildLimit  = time.Minute
)

// tendLimits are those, for tests to lower.
type tendLimits struct {
	dead, rebuildFrom int64
	rebuildPause      time.Duration
}

func usualTending() tendLimits {
	return tendLimits{dead: vacuumDead, rebuildFrom: rebuildFrom, rebuildPause: rebuildPause}
}

// tending remembers what was done to the queue.
type tending struct {
	mu         sync.Mutex // held while the queue is tended
	nextVacuum time.Time
	pause      time.Duration // after a vacuum that did not help
	rebuilt    map[string]time.Time
}

const sqlQueueRows = `
SELECT coalesce(n_dead_tup, 0) AS dead, coalesce(n_live_tup, 0) AS live
FROM pg_stat_user_tables WHERE relid = 'agent_queue'::regclass`

type queueRows struct {
	Dead int64 `db:"dead"`
	Live int64 `db:"live"`
}

// A rebuild that was cut short leaves an index behind that is kept up to date
// and never used.
const sqlQueueIndexes = `
SELECT c.relname AS name, pg_relation_size(c.oid) AS bytes, NOT x.indisvalid AND c.relname ~ '_cc(new|old)[0-9]*$' AS remnant
FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid
WHERE x.indrelid = 'agent_queue'::regclass
ORDER BY c.relname`

// Somebody who vacuums it already does as well.
const vacuumQueue = `VACUUM (SKIP_LOCKED) agent_queue`

// TendQueue vacuums the queue and builds its indexes anew when they ask for
// it. One controller calls it, every few seconds. No turn waits for it.
func (d *DB) TendQueue(ctx context.Context) error { return d.tendQueue(ctx, usualTending()) }

func (d *DB) tendQueue(ctx context.Context, lim tendLimits) error {
	t := &d.tending
	t.mu.Lock()
	defer t.mu.Unlock()
	var rows queueRows
	if err := d.upkeep.GetContext(ctx, &rows, sqlQueueRows); err != nil {
		return asFault(ctx, err, "look at the queue's rows")
	}
	if rows.Dead > lim.dead && time.Now().After(t.nextVacuum) {
		return d.vacuum(ctx, rows)
	}
	if rows.Live > rebuildRows || rows.Dead > lim.dead {
		return nil // there is work to do
	}
	return d.tendIndexes(ctx, rows, lim)
}

func (d *DB) vacuum(ctx context.Context, before queueRows) error {
	began := time.Now()
	if _, err := d.upkeep.ExecContext(ctx, vacuumQueue); err != nil {
		return asFault(ctx, err, "vacuum the queue")
	}
	var after queueRows
	if err := d.upkeep.GetContext(ctx, &after, sqlQueueRows); err != nil {
		return asFault(ctx, err, "look at the queue's rows")
	}
	d.metrics.upkeep.vacuums.Inc()
	d.cfg.Log.Debug("vacuumed the queue", "dead_before", before.Dead, "dead_after", after.Dead, "took", time.Since(began))
	t := &d.tending
	if after.Dead < before.Dead/2 {
		t.pause = 0
	} else {
		t.pause = min(max(2*t.pause, firstVacuumPause), maxVacuumPause)
	}
	t.nextVacuum = time.Now().Add(t.pause)
	return nil
}

func (d *DB) tendIndexes(ctx context.Context, rows queueRows, lim tendLimits) error {
	var indexes []struct {
		Name    string `db:"name"`
		Bytes   int64  `db:"bytes"`
		Remnant bool   `db:"remnant"`
	}
	if err := d.upkeep.SelectContext(ctx, &indexes, sqlQueueIndexes); err != nil {
		return asFault(ctx, err, "look at the queue's indexes")
	}
	t := &d.tending
	for _, x := range indexes {
		switch {
		case x.Remnant:
			if err := d.dropIndex(ctx, x.Name); err != nil {
				return err
			}
		case x.Bytes > lim.rebuildFrom && x.Bytes > rebuildTimes*rows.Live*indexRowBytes && time.Since(t.rebuilt[x.Name]) > lim.rebuildPause:
			if t.rebuilt == nil {
				t.rebuilt = map[string]time.Time{}
			}
			t.rebuilt[x.Name] = time.Now()
			return d.rebuildIndex(ctx, x.Name, x.Bytes)
		}
	}
	return nil
}

// rebuildIndex leaves nothing behind when it does not come through in time.
func (d *DB) rebuildIndex(ctx context.Context, name string, bytes int64) error {
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, rebuildLimit)
	defer cancel()
	if _, err := d.upkeep.ExecContext(limited, "REINDEX INDEX CONCURRENTLY "+pq.QuoteIdentifier(name)); err != nil {
		err = asFault(limited, err, "build index "+name+" anew")
		return errors.Join(err, d.dropIndex(ctx, name+"_ccnew"))
	}
	d.metrics.upkeep.rebuilds.Inc()
	d.cfg.Log.Info("built an index of the queue anew", "name", name, "bytes", bytes, "took", time.Since(began))
	return nil
}

func (d *DB) dropIndex(ctx context.Context, name string) error {
	limited, cancel := context.WithTimeout(ctx, dropLimit)
	defer cancel()
	_, err := d.upkeep.ExecContext(limited, "DROP INDEX CONCURRENTLY IF EXISTS "+pq.QuoteIdentifier(name))
	return asFault(limited, err, "drop index "+name)
}
