package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed *.sql
var files embed.FS

// LockWait is how long a start waits for another controller that migrates,
// looking once a second: longer than any migration of ours may take.
const LockWait = 5 * time.Minute

// A migration gives up on a table lock after lock_timeout, so that it never
// holds up a working queue behind it; it is then tried again this often.
const (
	lockAttempts = 10
	lockPause    = 500 * time.Millisecond
)

// sqlstateLockTimeout is what the server says when lock_timeout has passed.
const sqlstateLockTimeout = "55P03"

// Migration is one file and whether the database has it.
type Migration struct {
	Version   int64
	Name      string
	AppliedAt time.Time // zero = pending
}

// VersionError says that the database's schema is not the one this program
// was built for.
type VersionError struct{ Have, Want int64 }

// Error tells which side is older and what to do.
func (e *VersionError) Error() string {
	if e.Have > e.Want {
		return fmt.Sprintf("the database has schema version %d, but this program knows only up to %d: "+
			"start the newer program that made it, or restore a backup from before the upgrade", e.Have, e.Want)
	}
	return fmt.Sprintf("the database has schema version %d, but this program needs %d: run `headgate migrate up`", e.Have, e.Want)
}

// TooNew says whether the database was made by a newer program.
func (e *VersionError) TooNew() bool { return e.Have > e.Want }

// Up brings the database to the newest version. It may be called by several
// controllers at once, and refuses a database that is newer than this program.
func Up(ctx context.Context, db *sql.DB) error {
	p, err := provider(db, true)
	if err != nil {
		return err
	}
	if err := refuseNewer(ctx, db); err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		_, err = p.Up(ctx)
		if !isLockTimeout(err) || attempt == lockAttempts {
			break
		}
		pause := lockPause + rand.N(lockPause)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
	if err != nil {
		return fmt.Errorf("migrate the database: %w", err)
	}
	return nil
}

// Status lists all migrations of this program, oldest first. It writes
// nothing, also in an empty database.
func Status(ctx context.Context, db *sql.DB) ([]Migration, error) {
	p, err := provider(db, false)
	if err != nil {
		return nil, err
	}
	applied, err := appliedVersions(ctx, db)
	if err != nil {
		return nil, err
	}
	var list []Migration
	for _, s := range p.ListSources() {
		list = append(list, Migration{Version: s.Version, Name: s.Path, AppliedAt: applied[s.Version]})
	}
	return list, nil
}

// Check tells whether the database is at exactly this program's version: nil,
// or a *VersionError that says which side is older. It writes nothing.
func Check(ctx context.Context, db *sql.DB) error {
	applied, err := appliedVersions(ctx, db)
	if err != nil {
		return err
	}
	var have int64
	for v := range applied {
		have = max(have, v)
	}
	want, err := newest()
	if err != nil {
		return err
	}
	if have != want {
		return &VersionError{Have: have, Want: want}
	}
	return nil
}

func newest() (int64, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return 0, fmt.Errorf("list migrations: %w", err)
	}
	var v int64
	for _, n := range names {
		nv, err := goose.NumericComponent(n)
		if err != nil {
			return 0, fmt.Errorf("read the number of migration %s: %w", n, err)
		}
		v = max(v, nv)
	}
	return v, nil
}

func provider(db *sql.DB, locked bool) (*goose.Provider, error) {
	var opts []goose.ProviderOption
	if locked {
		l, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, uint64(LockWait/time.Second)))
		if err != nil {
			return nil, fmt.Errorf("prepare the migration lock: %w", err)
		}
		opts = append(opts, goose.WithSessionLocker(l))
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, files, opts...)
	if err != nil {
		return nil, fmt.Errorf("read the migrations: %w", err)
	}
	return p, nil
}

// refuseNewer keeps an old program from running on a schema it does not know;
// goose itself would find nothing to do and succeed.
func refuseNewer(ctx context.Context, db *sql.DB) error {
	err := Check(ctx, db)
	if v, ok := errors.AsType[*VersionError](err); ok && !v.TooNew() {
		return nil
	}
	return err
}

const sqlTableExists = `SELECT to_regclass('goose_db_version') IS NOT NULL`

const sqlApplied = `SELECT version_id, tstamp FROM goose_db_version WHERE is_applied AND version_id > 0 ORDER BY id`

// appliedVersions reads goose's table without making it.
func appliedVersions(ctx context.Context, db *sql.DB) (map[int64]time.Time, error) {
	var exists bool
	if err := db.QueryRowContext(ctx, sqlTableExists).Scan(&exists); err != nil {
		return nil, fmt.Errorf("read the schema version: %w", err)
	}
	applied := map[int64]time.Time{}
	if !exists {
		return applied, nil
	}
	rows, err := db.QueryContext(ctx, sqlApplied)
	if err != nil {
		return nil, fmt.Errorf("read the applied migrations: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var v int64
		var at time.Time
		if err := rows.Scan(&v, &at); err != nil {
			return nil, fmt.Errorf("read an applied migration: %w", err)
		}
		applied[v] = at
	}
	return applied, rows.Err()
}

func isLockTimeout(err error) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && state.SQLState() == sqlstateLockTimeout
}
