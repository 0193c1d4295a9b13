package store

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"time"

	"github.com/lib/pq"

	"headgate/tasks"
)

const (
	sqlOutput = `
SELECT task_id, attempt, seq, stream, off, at, bytes
FROM task_output
WHERE task_id = $1 AND seq >= $2
  AND attempt = (SELECT max(attempt) FROM task_output WHERE task_id = $1)
ORDER BY seq
LIMIT $3`

	sqlOutputPart = `
SELECT task_id, attempt, seq, stream, off, at, bytes
FROM task_output
WHERE task_id = $1 AND attempt = $2 AND seq >= $4 AND ($3 = '' OR stream = $3)
ORDER BY seq
LIMIT $5`

	// The length of a value that lies outside of its row is told by its
	// pointer, so this reads rows of some hundred bytes for each chunk of 64 KiB.
	sqlOutputAt = `
SELECT seq, start FROM (
    SELECT seq, len, sum(len) OVER (ORDER BY seq) - len AS start FROM (
        SELECT seq, octet_length(bytes)::bigint AS len FROM task_output
        WHERE task_id = $1 AND attempt = $2 AND ($3 = '' OR stream = $3)) o) p
WHERE start + len > $4
ORDER BY seq
LIMIT 1`

	sqlOutputFacts = `
WITH newest AS (
    SELECT max(attempt) AS attempt FROM task_output WHERE task_id = $1
), chunk AS (
    SELECT stream, seq, off, octet_length(bytes)::bigint AS len,
        coalesce(lag(off + octet_length(bytes)) OVER (PARTITION BY stream ORDER BY seq), 0) AS due
    FROM task_output
    WHERE task_id = $1 AND attempt = (SELECT attempt FROM newest)
)
SELECT stream, (SELECT attempt FROM newest) AS attempt, max(seq) AS last, sum(len) AS stored, max(off + len) AS bytes,
    coalesce((array_agg(due ORDER BY seq) FILTER (WHERE off > due))[1:$2], '{}') AS gap_at,
    coalesce((array_agg(off - due ORDER BY seq) FILTER (WHERE off > due))[1:$2], '{}') AS gap_bytes
FROM chunk
GROUP BY stream
ORDER BY stream DESC`
)

// Output implements tasks.Reader.
func (d *DB) Output(ctx context.Context, id tasks.ID, fromSeq, limit int) ([]tasks.OutputChunk, error) {
	return d.chunks(ctx, sqlOutput, int64(id), fromSeq, limit)
}

// OutputPart implements tasks.Reader.
func (d *DB) OutputPart(ctx context.Context, id tasks.ID, attempt int, stream string, fromSeq, limit int) ([]tasks.OutputChunk, error) {
	return d.chunks(ctx, sqlOutputPart, int64(id), attempt, stream, fromSeq, limit)
}

func (d *DB) chunks(ctx context.Context, query string, args ...any) ([]tasks.OutputChunk, error) {
	var rows []struct {
		ID      int64     `db:"task_id"`
		Attempt int       `db:"attempt"`
		Seq     int       `db:"seq"`
		Stream  string    `db:"stream"`
		Offset  int64     `db:"off"`
		At      time.Time `db:"at"`
		Data    []byte    `db:"bytes"`
	}
	if err := d.pages.SelectContext(ctx, &rows, query, args...); err != nil {
		return nil, asFault(ctx, err, "read a task's output")
	}
	var out []tasks.OutputChunk
	for _, r := range rows {
		out = append(out, tasks.OutputChunk{
			Ref: tasks.Ref{ID: tasks.ID(r.ID), Attempt: r.Attempt}, Seq: r.Seq,
			Stream: r.Stream, Offset: r.Offset, At: r.At.UTC(), Data: r.Data,
		})
	}
	return out, nil
}

// OutputAt implements tasks.Reader.
func (d *DB) OutputAt(ctx context.Context, id tasks.ID, attempt int, stream string, pos int64) (seq int, start int64, err error) {
	err = d.pages.QueryRowContext(ctx, sqlOutputAt, int64(id), attempt, stream, pos).Scan(&seq, &start)
	if errors.Is(err, sql.ErrNoRows) {
		return math.MaxInt32, pos, nil
	}
	return seq, start, asFault(ctx, err, "find a place in a task's output")
}

// OutputFacts implements tasks.Reader.
func (d *DB) OutputFacts(ctx context.Context, id tasks.ID) (tasks.OutputFacts, error) {
	var rows []struct {
		Stream  string        `db:"stream"`
		Attempt int           `db:"attempt"`
		Last    int           `db:"last"`
		Stored  int64         `db:"stored"`
		Bytes   int64         `db:"bytes"`
		At      pq.Int64Array `db:"gap_at"`
		Missing pq.Int64Array `db:"gap_bytes"`
	}
	var f tasks.OutputFacts
	if err := d.pages.SelectContext(ctx, &rows, sqlOutputFacts, int64(id), tasks.MaxGaps); err != nil {
		return f, asFault(ctx, err, "sum up a task's output")
	}
	for _, r := range rows {
		f.Attempt, f.LastSeq = r.Attempt, max(f.LastSeq, r.Last)
		of := &f.Stdout
		if r.Stream == tasks.Stderr {
			of = &f.Stderr
		}
		of.Bytes, of.Stored = r.Bytes, r.Stored
		for i, at := range r.At {
			if len(f.Gaps) < tasks.MaxGaps {
				f.Gaps = append(f.Gaps, tasks.OutputGap{Stream: r.Stream, Offset: at, Bytes: r.Missing[i]})
			}
		}
	}
	return f, nil
}
