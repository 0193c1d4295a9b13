package controller

import (
	"context"
	"errors"

	"headgate/internal/fault"
	"headgate/internal/store"
	"headgate/migrations"
)

// MigrateUp applies the migrations that are missing and says how many.
func MigrateUp(ctx context.Context, dsn string) (int, error) {
	db, err := store.Open(ctx, store.Config{DSN: dsn})
	if err != nil {
		return 0, err
	}
	defer func() { _ = db.Close() }()
	before, err := missing(ctx, db)
	if err != nil {
		return 0, err
	}
	if err := migrate(ctx, db); err != nil {
		return 0, err
	}
	after, err := missing(ctx, db)
	if err == nil && after != 0 {
		err = errors.New("some migrations are still missing")
	}
	return before - after, err
}

// migrate applies what is missing. Behind a pooler in transaction mode the lock
// against others that migrate at the same time would stay behind for ever, so
// there it only looks.
func migrate(ctx context.Context, db *store.DB) error {
	if db.Pooled() == "" {
		return migrations.Up(ctx, db.SQL())
	}
	err := migrations.Check(ctx, db.SQL())
	if v, ok := errors.AsType[*migrations.VersionError](err); ok && !v.TooNew() {
		return fault.Wrap(err, fault.Precondition, "database_pooled", "the schema must be brought up to date, which cannot be done through a pooler in transaction mode").
			WithHint("run `headgate migrate up` with the URL of the server itself, or name it in database-direct-url")
	}
	return err
}

func missing(ctx context.Context, db *store.DB) (int, error) {
	all, err := migrations.Status(ctx, db.SQL())
	n := 0
	for _, m := range all {
		if m.AppliedAt.IsZero() {
			n++
		}
	}
	return n, err
}

// MigrateStatus lists the migrations and when they were applied.
func MigrateStatus(ctx context.Context, dsn string) ([]migrations.Migration, error) {
	db, err := store.Open(ctx, store.Config{DSN: dsn})
	if err != nil {
		return nil, err
	}
	defer func() { _ = db.Close() }()
	return migrations.Status(ctx, db.SQL())
}
