package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/lib/pq"

	"headgate/tasks"
)

// turnStatements keeps the prepared statement of each shape. database/sql
// prepares it again on each connection that has not seen it.
type turnStatements struct {
	mu   sync.Mutex // guards by
	by   map[turnShape]*sql.Stmt
	free sync.Pool // of *turnArgs
}

// args gives room for the parameters of a turn.
func (s *turnStatements) args() *turnArgs {
	if a, ok := s.free.Get().(*turnArgs); ok {
		return a
	}
	return &turnArgs{}
}

func (s *turnStatements) reuse(a *turnArgs) {
	if a.reset() {
		s.free.Put(a)
	}
}

func (s *turnStatements) get(ctx context.Context, db *sql.DB, shape turnShape) (*sql.Stmt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st, ok := s.by[shape]; ok {
		return st, nil
	}
	st, err := db.PrepareContext(ctx, shape.sql()) //nolint:sqlclosecheck // kept; close ends it
	if err != nil {
		return nil, err
	}
	if s.by == nil {
		s.by = map[turnShape]*sql.Stmt{}
	}
	s.by[shape] = st
	return st, nil
}

// close ends the statements on the server; the pool is about to be closed.
func (s *turnStatements) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.by {
		_ = st.Close() // the connections end next
	}
	s.by = nil
}

// turnAnswer is the one row that a turn's statement gives.
type turnAnswer struct {
	ok           sql.NullBool
	at           time.Time
	inserted     pq.Int64Array
	ops          pq.Int64Array
	opIDs        pq.Int64Array
	touched      int
	moved        pq.Int64Array
	ended        pq.Int64Array
	laterTouched int
}

// dest lists where the columns of a shape go.
func (a *turnAnswer) dest(s turnShape) []any {
	d := []any{&a.ok, &a.at}
	if s.has(withInserts) {
		d = append(d, &a.inserted)
	}
	if s.has(withOps) {
		d = append(d, &a.ops, &a.opIDs, &a.touched)
	}
	if s.has(withRare) {
		d = append(d, &a.moved, &a.ended, &a.laterTouched)
	}
	return d
}

// result sorts the answer into a TurnResult.
func (a *turnAnswer) result() *tasks.TurnResult {
	r := &tasks.TurnResult{At: a.at.UTC(), Inserted: ids(a.inserted), Moved: ids(a.moved)}
	for i, op := range a.ops {
		id := tasks.ID(a.opIDs[i])
		switch op {
		case opFinish:
			r.Finished = append(r.Finished, id)
		case opRequeue, opRequeueLater:
			r.Requeued = append(r.Requeued, id)
		case opClaim:
			r.Claimed = append(r.Claimed, id)
		case opCancel:
			r.Marked = append(r.Marked, id)
		}
	}
	r.Finished = append(r.Finished, ids(a.ended)...)
	return r
}

func ids(a pq.Int64Array) []tasks.ID {
	if len(a) == 0 {
		return nil
	}
	out := make([]tasks.ID, len(a))
	for i, v := range a {
		out[i] = tasks.ID(v)
	}
	return out
}

var errNoLeases = errors.New("a turn must name the leases it writes under")

// Turn implements tasks.Queue. A caller's ctx that has ended stops it before it
// begins, never in the middle; time limits are the statement timeout and the
// deadline of the socket.
func (d *DB) Turn(ctx context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if len(t.Leases) == 0 {
		return nil, errNoLeases
	}
	start := time.Now()
	r, err := d.turn(context.WithoutCancel(ctx), t)
	d.metrics.turnSeconds.Observe(time.Since(start).Seconds())
	d.metrics.countTurn(t, r, err)
	return r, err
}

func (d *DB) turn(ctx context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	args := d.turns.args()
	defer d.turns.reuse(args)
	if err := args.fill(t); err != nil {
		return nil, err
	}
	var st *sql.Stmt // nil behind a pooler, where the next turn would not find it
	if !d.nowhere {
		var err error
		if st, err = d.turns.get(ctx, d.loops.DB, args.shape); err != nil {
			return nil, fmt.Errorf("prepare a turn: %w", err)
		}
	}
	tx, err := d.loops.BeginTxx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("begin a turn: %w", err)
	}
	var a turnAnswer
	if st != nil {
		//nolint:sqlclosecheck // ends with the transaction
		err = tx.Tx.StmtContext(ctx, st).QueryRowContext(ctx, args.args...).Scan(a.dest(args.shape)...)
	} else {
		err = tx.Tx.QueryRowContext(ctx, args.shape.sql(), args.args...).Scan(a.dest(args.shape)...)
	}
	if err == nil {
		err = a.check()
	}
	if err != nil {
		if poison(err) {
			err = &tasks.PoisonError{Err: err}
		}
		if back := rollback(tx); back != nil {
			err = errors.Join(err, back)
		}
		return nil, err
	}
	r := a.result()
	if err := tx.Commit(); err != nil {
		if lostConnection(err) {
			return nil, &tasks.UnknownError{Result: r, Err: err}
		}
		if poison(err) {
			return nil, &tasks.PoisonError{Err: err}
		}
		return nil, fmt.Errorf("commit a turn: %w", err)
	}
	return r, nil
}

// check compares what was written with what was found.
func (a *turnAnswer) check() error {
	if !a.ok.Bool {
		return tasks.ErrFenced
	}
	if a.touched != len(a.ops) || a.laterTouched != len(a.moved)+len(a.ended) {
		return fmt.Errorf("a turn changed %d queue rows and %d later rows, but had locked %d and %d",
			a.touched, a.laterTouched, len(a.ops), len(a.moved)+len(a.ended))
	}
	return nil
}

// countTurn keeps the metrics of turns.
func (m *metrics) countTurn(t *tasks.Turn, r *tasks.TurnResult, err error) {
	if r != nil {
		m.turnRows.WithLabelValues("insert").Add(float64(len(r.Inserted)))
		m.turnRows.WithLabelValues("finish").Add(float64(len(r.Finished)))
		m.turnRows.WithLabelValues("claim").Add(float64(len(r.Claimed)))
		m.turnRows.WithLabelValues("requeue").Add(float64(len(r.Requeued)))
		m.turnRows.WithLabelValues("due").Add(float64(len(r.Moved)))
		m.turnRows.WithLabelValues("output").Add(float64(len(t.Output)))
	}
	if err == nil {
		return
	}
	class := "other"
	if _, ok := errors.AsType[*tasks.UnknownError](err); ok {
		class = "unknown"
		m.unknown.Inc()
	} else if _, ok := errors.AsType[*tasks.PoisonError](err); ok {
		class = "poison"
	} else if errors.Is(err, tasks.ErrFenced) {
		class = "fenced"
	}
	m.turnErrors.WithLabelValues(class).Inc()
}
