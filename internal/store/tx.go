package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jmoiron/sqlx"

	"headgate/internal/fault"
)

// A write that lost against another transaction is run again this often, after
// a random pause that doubles each time.
const (
	writeAttempts  = 6
	firstPause     = 5 * time.Millisecond
	commitAskPause = 100 * time.Millisecond // between questions after a lost commit
)

// Tx is one transaction of a general write. It is valid only inside the
// function that DB.write calls, which may be called more than once.
type Tx struct {
	tx  *sqlx.Tx
	ctx context.Context // without cancel: a caller that hangs up never breaks a write in two
}

func (t *Tx) exec(query string, args ...any) (int64, error) {
	r, err := t.tx.ExecContext(t.ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

func (t *Tx) get(dest any, query string, args ...any) error {
	return t.tx.GetContext(t.ctx, dest, query, args...)
}

func (t *Tx) list(dest any, query string, args ...any) error {
	return t.tx.SelectContext(t.ctx, dest, query, args...)
}

// write runs fn in a transaction and commits. fn is run again when the server
// rolled back because of other transactions. When the answer to the commit is
// lost, the server is asked what became of it; if it cannot say, the error is
// Unavailable with code commit_unknown. what names the write for people.
//
// A ctx that has ended stops it before it begins, never in the middle.
func (d *DB) write(ctx context.Context, what string, fn func(*Tx) error) error {
	return d.writeOn(ctx, d.general, what, fn)
}

func (d *DB) writeOn(ctx context.Context, pool *sqlx.DB, what string, fn func(*Tx) error) error {
	if err := context.Cause(ctx); err != nil {
		return asFault(ctx, err, what)
	}
	inner := context.WithoutCancel(ctx)
	pause := firstPause
	for attempt := 1; ; attempt++ {
		err := d.writeOnce(inner, pool, fn)
		if err == nil {
			return nil
		}
		if !retryable(err) || attempt == writeAttempts {
			return asFault(inner, err, what)
		}
		d.metrics.retries.Inc()
		<-time.After(pause + rand.N(pause)) // bounded, and not the caller's to end
		pause *= 2
	}
}

func (d *DB) writeOnce(ctx context.Context, pool *sqlx.DB, fn func(*Tx) error) error {
	tx, err := pool.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	id, err := identify(ctx, tx)
	if err == nil {
		err = fn(&Tx{tx: tx, ctx: ctx})
	}
	if err != nil {
		if back := rollback(tx); back != nil {
			err = errors.Join(err, back)
		}
		return err
	}
	err = tx.Commit()
	if err == nil || !lostConnection(err) {
		return err
	}
	d.metrics.unknown.Inc()
	return d.settleCommit(ctx, id, err)
}

// rollback ends a transaction that failed; a connection that has ended took it
// with it.
func rollback(tx *sqlx.Tx) error {
	if err := tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) && !isNetwork(err) {
		return fmt.Errorf("roll back: %w", err)
	}
	return nil
}

// txIdentity is what a commit can be asked after by: the transaction's number,
// and the timeline on which that number means anything.
type txIdentity struct {
	XID      string `db:"xid"`
	Timeline string `db:"timeline"`
}

const sqlTxIdentity = `
SELECT pg_current_xact_id()::text AS xid,
       substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) AS timeline`

func identify(ctx context.Context, tx *sqlx.Tx) (txIdentity, error) {
	var id txIdentity
	err := tx.GetContext(ctx, &id, sqlTxIdentity)
	return id, err
}

const sqlTxStatus = `
SELECT coalesce(pg_xact_status($1::xid8), 'too old') AS status,
       substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) AS timeline`

// errAborted says that a commit without an answer turned out not to have
// taken place, so that the write may be run again by the caller.
var errAborted = errors.New("the transaction was rolled back")

// settleCommit asks the server, on another connection, what became of a commit.
func (d *DB) settleCommit(ctx context.Context, id txIdentity, cause error) error {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.CommitWait)
	defer cancel()
	for {
		var now struct {
			Status   string `db:"status"`
			Timeline string `db:"timeline"`
		}
		err := d.general.GetContext(ctx, &now, sqlTxStatus, id.XID)
		switch {
		case err != nil || now.Status == "in progress":
		case now.Timeline != id.Timeline:
			return commitUnknown(errors.Join(cause, fmt.Errorf("the database moved from timeline %s to %s", id.Timeline, now.Timeline)))
		case now.Status == "committed":
			return nil
		case now.Status == "aborted":
			return unavailable(errors.Join(errAborted, cause), "commit_lost", "the database ended the transaction before it was stored")
		default:
			return commitUnknown(errors.Join(cause, fmt.Errorf("transaction status %q", now.Status)))
		}
		select {
		case <-ctx.Done():
			return commitUnknown(errors.Join(cause, err))
		case <-time.After(commitAskPause):
		}
	}
}

func commitUnknown(cause error) error {
	return fault.Wrap(cause, fault.Unavailable, "commit_unknown",
		"the connection to the database was lost while the change was being stored, so it is not known whether it was").
		WithHint("look whether the change is there before trying again")
}
