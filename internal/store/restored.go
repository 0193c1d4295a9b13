package store

import (
	"context"
	"fmt"

	"headgate/tasks"
)

// epochLeap is how far epochs are raised when a database was restored: further
// than ownership has changed hands since any backup, since each change is one.
const epochLeap = 1_000_000

// idLeap is how many ids are left out then: those that may have been given
// after the backup, so that nobody takes two tasks for one.
const idLeap = 4 * partitionSpan

// The owners stay: they find another epoch than theirs, lose the shards, and
// take them again under the next one. The order is that of all who lock these
// rows, and running turns are waited for.
const sqlEpochsRaise = `
WITH locked AS MATERIALIZED (SELECT shard, epoch FROM shard_lease ORDER BY shard FOR UPDATE)
UPDATE shard_lease SET epoch = (SELECT max(epoch) FROM locked) + $1::bigint
WHERE shard IN (SELECT shard FROM locked)
RETURNING epoch`

// RaiseEpochs makes a database that was restored from a backup usable again:
// agents, which know newer epochs, take its word. It gives the new epoch of all
// shards. What ran after the backup does not run again: the agents' ledgers know
// it. It is for the one database that goes on; a newer copy that still has
// controllers would lose its agents to this one.
func (d *DB) RaiseEpochs(ctx context.Context) (int64, error) {
	var last int64
	if err := d.upkeep.GetContext(ctx, &last, sqlLastID); err != nil {
		return 0, asFault(ctx, err, "read the last task id")
	}
	if err := d.ensurePartitions(ctx, last+idLeap); err != nil {
		return 0, err
	}
	var epochs []int64
	err := d.writeOn(ctx, d.upkeep, "raise the epochs", func(tx *Tx) error {
		epochs = nil
		if err := tx.list(&epochs, sqlEpochsRaise, epochLeap); err != nil {
			return err
		}
		if len(epochs) != tasks.NumShards {
			return fmt.Errorf("raised the epochs of %d shards, there are %d", len(epochs), tasks.NumShards)
		}
		var skipped int64
		return tx.get(&skipped, sqlSkipIDs, idLeap/tasks.IDBlock)
	})
	if err != nil {
		return 0, err
	}
	return epochs[0], nil
}
