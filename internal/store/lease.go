package store

import (
	"context"
	"fmt"
	"time"
	"uuid"

	"headgate/tasks"
)

type leaseRow struct {
	Shard int16     `db:"shard"`
	Epoch int64     `db:"epoch"`
	Owner uid       `db:"owner"`
	Addr  string    `db:"addr"`
	Until time.Time `db:"expires_at"`
	Left  float64   `db:"left_s"`
	Name  string    `db:"name"`
	Peer  uid       `db:"identity"`
}

func leases(rows []leaseRow) []tasks.Lease {
	var out []tasks.Lease
	for _, r := range rows {
		out = append(out, tasks.Lease{
			Shard: tasks.Shard(r.Shard), Epoch: r.Epoch,
			Owner: uuid.UUID(r.Owner), Addr: r.Addr, Until: r.Until.UTC(),
			Left: time.Duration(r.Left * float64(time.Second)), Name: r.Name, Peer: uuid.UUID(r.Peer),
		})
	}
	return out
}

// Locking in the order of shards first keeps two controllers that take or
// renew several at once from a deadlock.
const sqlLeaseLock = `
SELECT shard FROM shard_lease WHERE shard = ANY ($1::smallint[]) ORDER BY shard FOR NO KEY UPDATE`

// The update waits for a running turn of the old owner, which holds the row
// FOR SHARE; every later turn of that owner finds another epoch and writes
// nothing.
const sqlLeaseAcquire = `
UPDATE shard_lease
SET owner = $2::uuid, addr = $3, epoch = epoch + 1, expires_at = clock_timestamp() + $4 * interval '1 millisecond'
WHERE shard = ANY ($1::smallint[])
  AND (owner IS NULL OR owner = $2::uuid OR owner = ANY ($5::uuid[]) OR expires_at < clock_timestamp())
RETURNING shard, epoch, owner, addr, expires_at`

const sqlLeaseRenew = `
UPDATE shard_lease l
SET expires_at = clock_timestamp() + $4 * interval '1 millisecond', addr = $5
FROM unnest($1::smallint[], $2::bigint[]) v (shard, epoch)
WHERE l.shard = v.shard AND l.epoch = v.epoch AND l.owner = $3::uuid
RETURNING l.shard, l.epoch, l.owner, l.addr, l.expires_at`

const sqlLeaseRelease = `
UPDATE shard_lease l
SET owner = NULL, addr = '', expires_at = '-infinity'
FROM unnest($1::smallint[], $2::bigint[]) v (shard, epoch)
WHERE l.shard = v.shard AND l.epoch = v.epoch AND l.owner = $3::uuid`

const sqlLeaseOwners = `
SELECT l.shard, l.epoch, l.owner, l.addr, l.expires_at, coalesce(c.name, '') AS name, c.identity,
       extract(epoch FROM l.expires_at - clock_timestamp())::float8 AS left_s
FROM shard_lease l LEFT JOIN controller c ON c.id = l.owner
WHERE l.owner IS NOT NULL
ORDER BY l.shard`

const sqlControllersAlive = `SELECT count(*) FROM controller WHERE seen_at > now() - $1 * interval '1 millisecond'`

// Acquire implements tasks.Leases. It waits, within the lock timeout, for the
// turns that run under the leases it takes.
func (d *DB) Acquire(ctx context.Context, me tasks.Owner, former []uuid.UUID, shards []tasks.Shard) ([]tasks.Lease, error) {
	numbers := ints(shards, func(s tasks.Shard) int64 { return int64(s) })
	old := texts(former, func(id uuid.UUID) string { return id.String() })
	var rows []leaseRow
	err := d.writeOn(ctx, d.loops, "take shards", func(tx *Tx) error {
		rows = nil
		if err := lockLeases(tx, numbers); err != nil {
			return err
		}
		return tx.list(&rows, sqlLeaseAcquire, numbers, me.ID.String(), me.Addr, tasks.LeaseTerm.Milliseconds(), old)
	})
	if err != nil {
		return nil, err
	}
	return leases(rows), nil
}

// Renew implements tasks.Leases.
func (d *DB) Renew(ctx context.Context, me tasks.Owner, held []tasks.Lease) ([]tasks.Lease, error) {
	numbers, epochs := leaseArrays(held)
	var rows []leaseRow
	err := d.writeOn(ctx, d.loops, "renew leases", func(tx *Tx) error {
		rows = nil
		if err := lockLeases(tx, numbers); err != nil {
			return err
		}
		return tx.list(&rows, sqlLeaseRenew, numbers, epochs, me.ID.String(), tasks.LeaseTerm.Milliseconds(), me.Addr)
	})
	if err != nil {
		return nil, err
	}
	return leases(rows), nil
}

// Release implements tasks.Leases.
func (d *DB) Release(ctx context.Context, me tasks.Owner, held []tasks.Lease) error {
	numbers, epochs := leaseArrays(held)
	return d.writeOn(ctx, d.loops, "give shards back", func(tx *Tx) error {
		if err := lockLeases(tx, numbers); err != nil {
			return err
		}
		_, err := tx.exec(sqlLeaseRelease, numbers, epochs, me.ID.String())
		return err
	})
}

// Owners implements tasks.Leases.
func (d *DB) Owners(ctx context.Context) (tasks.Owners, error) {
	var rows []leaseRow
	var alive int
	err := d.general.SelectContext(ctx, &rows, sqlLeaseOwners)
	if err == nil {
		err = d.general.GetContext(ctx, &alive, sqlControllersAlive, ControllerSilence.Milliseconds())
	}
	if err != nil {
		return tasks.Owners{}, asFault(ctx, err, "read who owns the shards")
	}
	return tasks.Owners{Leases: leases(rows), Alive: alive}, nil
}

func leaseArrays(held []tasks.Lease) (shards, epochs any) {
	return ints(held, func(l tasks.Lease) int64 { return int64(l.Shard) }),
		ints(held, func(l tasks.Lease) int64 { return l.Epoch })
}

func lockLeases(tx *Tx, shards any) error {
	var locked []int
	if err := tx.list(&locked, sqlLeaseLock, shards); err != nil {
		return fmt.Errorf("lock the lease rows: %w", err)
	}
	return nil
}
