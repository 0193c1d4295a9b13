package store

import (
	"context"
	"fmt"
	"sync"

	"headgate/tasks"
)

// partitionSpan is how many ids one partition holds, as the schema's function
// has it; partitionsAhead how many are made before they are needed, so that no
// submission ever waits for a table to be made.
const (
	partitionSpan   = 1 << 22
	partitionsAhead = 2
)

// partitions remembers up to which id this process has seen partitions made.
type partitions struct {
	mu   sync.Mutex // guards made; also held while partitions are made
	made int64      // ids below it have partitions
}

const sqlNextIDs = `SELECT nextval('agent_task_id_seq')`

// The function makes what is missing, whoever asks first.
const sqlMakePartitions = `SELECT headgate_make_partitions($1)`

// TakeIDs implements tasks.Queue. A block whose answer was lost is skipped.
func (d *DB) TakeIDs(ctx context.Context) (tasks.ID, error) {
	var first int64
	if err := d.loops.QueryRowxContext(ctx, sqlNextIDs).Scan(&first); err != nil {
		return 0, asFault(ctx, err, "reserve task ids")
	}
	if err := d.ensurePartitions(ctx, first+tasks.IDBlock); err != nil {
		return 0, err
	}
	return tasks.ID(first), nil
}

func (d *DB) ensurePartitions(ctx context.Context, next int64) error {
	d.parts.mu.Lock()
	defer d.parts.mu.Unlock()
	if next+(partitionsAhead-1)*partitionSpan < d.parts.made {
		return nil
	}
	last := (next/partitionSpan+partitionsAhead)*partitionSpan - 1
	err := d.makePartitions(ctx, last)
	if err == nil {
		d.parts.made = last + 1
		return nil
	}
	if next < d.parts.made {
		d.cfg.Log.Warn("no partitions could be made ahead; there is still room, and the next ids try again", "last_id", last, "err", err)
		return nil
	}
	return err
}

func (d *DB) makePartitions(ctx context.Context, last int64) error {
	return d.write(ctx, "make room for more tasks", func(tx *Tx) error {
		var made int
		if err := tx.get(&made, sqlMakePartitions, last); err != nil {
			return fmt.Errorf("make partitions up to id %d: %w", last, err)
		}
		if made > 0 {
			d.cfg.Log.Info("made partitions", "tables", made, "last_id", last)
		}
		return nil
	})
}
