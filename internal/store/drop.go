package store

import (
	"context"
	"fmt"
	"time"

	"github.com/lib/pq"
)

// Dropping a partition takes three steps for each of its tables, of which none
// locks the table that readers and turns use:
//
//   - A comment on all four notes that they are to go; it survives a crash.
//   - DETACH ... CONCURRENTLY takes the table out of its parent. It waits for
//     transactions that use the parent, but nobody waits for it. When it is cut
//     short, FINALIZE ends it.
//   - DROP TABLE then locks a table that nobody knows any more.
//
// The tasks go first: results without a task are invisible, tasks without a
// result would count as new.

// dropMark is the comment on a table that retention drops. A table that an
// operator has detached to keep it has none.
const dropMark = "headgate: retention drops this table"

// dropLimit bounds the steps of one table also where lock_timeout has no place,
// behind a pooler: the making of partitions waits for a table that is detached.
const dropLimit = 10 * time.Second

// doomed is a table with that comment.
type doomed struct {
	Name    string `db:"name"`
	Parent  string `db:"parent"` // "" = it is detached
	Pending bool   `db:"pending"`
}

const sqlDoomed = `
SELECT c.relname AS name, coalesce(p.relname, '') AS parent, coalesce(i.inhdetachpending, false) AS pending
FROM pg_class c
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class p ON p.oid = i.inhparent
WHERE c.relkind = 'r' AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'agent_task'::regclass)
  AND obj_description(c.oid, 'pg_class') = $1
ORDER BY substring(c.relname FROM '_p([0-9]+)$')::bigint,
         CASE substring(c.relname FROM '^(.*)_p[0-9]+$') WHEN 'agent_task' THEN 0 ELSE 1 END, c.relname`

// dropPartition drops the four tables of a partition.
func (d *DB) dropPartition(ctx context.Context, p Partition) error {
	err := d.writeOn(ctx, d.upkeep, "mark old tasks for retention", func(tx *Tx) error {
		for _, parent := range partitioned() {
			table := pq.QuoteIdentifier(fmt.Sprintf("%s_p%d", parent, p.Number))
			if _, err := tx.exec("COMMENT ON TABLE " + table + " IS " + pq.QuoteLiteral(dropMark)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return d.finishDrops(ctx)
}

// partitioned lists the tables whose partitions go together.
func partitioned() []string {
	return []string{"agent_task", "agent_result", "task_output", "late_result"}
}

// finishDrops drops every table that is marked.
func (d *DB) finishDrops(ctx context.Context) error {
	var all []doomed
	if err := d.upkeep.SelectContext(ctx, &all, sqlDoomed, dropMark); err != nil {
		return asFault(ctx, err, "look for tables to drop")
	}
	for _, t := range all {
		if err := d.drop(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

func (d *DB) drop(ctx context.Context, t doomed) error {
	limited, cancel := context.WithTimeout(ctx, dropLimit)
	defer cancel()
	var steps []string
	name := pq.QuoteIdentifier(t.Name)
	detach := "ALTER TABLE " + pq.QuoteIdentifier(t.Parent) + " DETACH PARTITION " + name
	switch {
	case t.Pending:
		steps = append(steps, detach+" FINALIZE")
	case t.Parent != "":
		steps = append(steps, detach+" CONCURRENTLY")
	}
	for _, step := range append(steps, "DROP TABLE IF EXISTS "+name) {
		_, err := d.upkeep.ExecContext(limited, step)
		if sqlState(err) == stateNoTable { // another run has dropped it
			return nil
		}
		if err != nil {
			return asFault(limited, err, "drop table "+t.Name)
		}
	}
	return nil
}

// A partition that is missing below the newest one was dropped.
const sqlIsDropped = `
SELECT NOT coalesce(bool_or(part = $1 / $2::bigint), false) AND coalesce(max(part) >= $1 / $2::bigint, false)
FROM (SELECT substring(c.relname FROM '_p([0-9]+)$')::bigint AS part
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'agent_task'::regclass AND NOT i.inhdetachpending) p`

// isDropped says whether the partition of an id was dropped.
func (d *DB) isDropped(ctx context.Context, id int64) (bool, error) {
	var gone bool
	if err := d.pages.GetContext(ctx, &gone, sqlIsDropped, id, partitionSpan); err != nil {
		return false, asFault(ctx, err, "look for the task")
	}
	return gone, nil
}
