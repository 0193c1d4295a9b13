package store

import (
	"context"
	"fmt"
	"slices"

	"github.com/lib/pq"

	"headgate/tasks"
)

// The rows are locked against the old transaction, not against other owners:
// whoever holds the lease now, what we ask for is what is on disk.
const sqlSettleLock = `
SELECT shard FROM shard_lease WHERE shard = ANY ($1::smallint[]) ORDER BY shard FOR UPDATE`

const (
	sqlSettleInserted = `SELECT count(*) FROM agent_task WHERE id = ANY ($1::bigint[])`

	sqlSettleFinished = `
SELECT count(*) FROM unnest($1::bigint[], $2::smallint[], $3::bigint[]) v (id, attempt, epoch)
JOIN agent_result r ON r.task_id = v.id AND r.attempt = v.attempt AND r.epoch = v.epoch`

	// A claim is on disk if the row carries it, or a result came of it.
	sqlSettleClaimed = `
SELECT count(*) FROM unnest($1::integer[], $2::smallint[], $3::bigint[], $4::smallint[], $5::bigint[])
     v (agent_num, priority, id, attempt, epoch)
WHERE EXISTS (SELECT 1 FROM agent_queue q
              WHERE q.agent_num = v.agent_num AND q.priority = v.priority AND q.task_id = v.id
                AND q.started_at IS NOT NULL AND q.attempt = v.attempt AND q.epoch = v.epoch)
   OR EXISTS (SELECT 1 FROM agent_result r WHERE r.task_id = v.id AND r.attempt = v.attempt AND r.epoch = v.epoch)`

	// A requeue is on disk if the old start is no longer in the queue.
	sqlSettleRequeued = `
SELECT count(*) FROM unnest($1::integer[], $2::smallint[], $3::bigint[], $4::smallint[], $5::bigint[])
     v (agent_num, priority, id, attempt, epoch)
WHERE NOT EXISTS (SELECT 1 FROM agent_queue q
                  WHERE q.agent_num = v.agent_num AND q.priority = v.priority AND q.task_id = v.id
                    AND q.started_at IS NOT NULL AND q.attempt = v.attempt AND q.epoch = v.epoch)`

	sqlSettleMoved = `
SELECT count(*) FROM unnest($1::bigint[]) v (id)
WHERE NOT EXISTS (SELECT 1 FROM agent_later l WHERE l.task_id = v.id)`

	sqlSettleMarked = `
SELECT count(*) FROM unnest($1::integer[], $2::smallint[], $3::bigint[]) v (agent_num, priority, id)
WHERE NOT EXISTS (SELECT 1 FROM agent_queue q
                  WHERE q.agent_num = v.agent_num AND q.priority = v.priority AND q.task_id = v.id
                    AND q.cancel_requested_at IS NULL)`

	sqlSettlePrinted = `
SELECT count(*) FROM unnest($1::bigint[], $2::smallint[], $3::integer[]) v (id, attempt, seq)
JOIN task_output o ON o.task_id = v.id AND o.attempt = v.attempt AND o.seq = v.seq`
)

// Settle implements tasks.Queue. It looks for the first kind of row that the
// turn would have written; since a turn is one transaction, one kind is enough.
func (d *DB) Settle(ctx context.Context, t *tasks.Turn, r *tasks.TurnResult) (bool, error) {
	var took bool
	shards := ints(t.Leases, func(l tasks.Lease) int64 { return int64(l.Shard) })
	err := d.write(ctx, "settle a turn whose commit was not answered", func(tx *Tx) error {
		var locked []int
		if err := tx.list(&locked, sqlSettleLock, shards); err != nil {
			return fmt.Errorf("wait for the old transaction: %w", err)
		}
		if len(locked) != len(t.Leases) {
			return fmt.Errorf("found %d of %d lease rows", len(locked), len(t.Leases))
		}
		query, args, want := settleQuestion(t, r)
		if query == "" {
			took = true // it had nothing to write
			return nil
		}
		var n int
		if err := tx.get(&n, query, args...); err != nil {
			return fmt.Errorf("read back what the turn wrote: %w", err)
		}
		took = n == want
		if n != 0 && !took {
			return fmt.Errorf("found %d of %d rows of one transaction", n, want)
		}
		return nil
	})
	return took, err
}

// settleQuestion chooses what to count and how many rows a turn that took
// place has left.
func settleQuestion(t *tasks.Turn, r *tasks.TurnResult) (query string, args []any, want int) {
	switch {
	case len(r.Inserted) > 0:
		return sqlSettleInserted, []any{idArray(r.Inserted)}, len(r.Inserted)
	case len(r.Finished) > 0:
		f := pick(t.Finishes, r.Finished, func(f tasks.Finish) tasks.ID { return f.ID })
		return sqlSettleFinished, []any{
			ints(f, func(f tasks.Finish) int64 { return int64(f.ID) }),
			ints(f, func(f tasks.Finish) int64 { return int64(f.Attempt) }),
			ints(f, func(f tasks.Finish) int64 { return f.Epoch }),
		}, len(f)
	case len(r.Claimed) > 0:
		c := pick(t.Claims, r.Claimed, func(c tasks.Claim) tasks.ID { return c.ID })
		return sqlSettleClaimed, []any{
			ints(c, func(c tasks.Claim) int64 { return int64(c.Agent) }),
			ints(c, func(c tasks.Claim) int64 { return int64(c.Priority) }),
			ints(c, func(c tasks.Claim) int64 { return int64(c.ID) }),
			ints(c, func(c tasks.Claim) int64 { return int64(c.Attempt) }),
			ints(c, func(c tasks.Claim) int64 { return c.Epoch }),
		}, len(c)
	case len(r.Requeued) > 0:
		q := pick(t.Requeues, r.Requeued, func(q tasks.Requeue) tasks.ID { return q.ID })
		return sqlSettleRequeued, []any{
			ints(q, func(q tasks.Requeue) int64 { return int64(q.Agent) }),
			ints(q, func(q tasks.Requeue) int64 { return int64(q.Priority) }),
			ints(q, func(q tasks.Requeue) int64 { return int64(q.ID) }),
			ints(q, func(q tasks.Requeue) int64 { return int64(q.Attempt) }),
			ints(q, func(q tasks.Requeue) int64 { return q.Epoch }),
		}, len(q)
	case len(r.Moved) > 0:
		return sqlSettleMoved, []any{idArray(r.Moved)}, len(r.Moved)
	case len(r.Marked) > 0:
		m := pick(t.Cancels, r.Marked[:1], func(c tasks.CancelMark) tasks.ID { return c.ID })[:1]
		return sqlSettleMarked, []any{
			ints(m, func(c tasks.CancelMark) int64 { return int64(c.Agent) }),
			ints(m, func(c tasks.CancelMark) int64 { return int64(c.Priority) }),
			ints(m, func(c tasks.CancelMark) int64 { return int64(c.ID) }),
		}, len(m)
	case len(t.Output) > 0:
		o := t.Output[len(t.Output)-1:]
		return sqlSettlePrinted, []any{
			ints(o, func(o tasks.OutputRow) int64 { return int64(o.ID) }),
			ints(o, func(o tasks.OutputRow) int64 { return int64(o.Attempt) }),
			ints(o, func(o tasks.OutputRow) int64 { return int64(o.Seq) }),
		}, len(o)
	}
	return "", nil, 0
}

func idArray(list []tasks.ID) pq.Int64Array {
	return ints(list, func(id tasks.ID) int64 { return int64(id) })
}

// pick gives the items of a turn whose ids are in its result.
func pick[T any](items []T, wanted []tasks.ID, id func(T) tasks.ID) []T {
	set := make(map[tasks.ID]bool, len(wanted))
	for _, w := range wanted {
		set[w] = true
	}
	return slices.DeleteFunc(slices.Clone(items), func(x T) bool { return !set[id(x)] })
}
