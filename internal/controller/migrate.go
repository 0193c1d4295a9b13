package controller

import (
	"context"
	"errors"

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
	if err := migrations.Up(ctx, db.SQL()); err != nil {
		return 0, err
	}
	after, err := missing(ctx, db)
	if err == nil && after != 0 {
		err = errors.New("some migrations are still missing")
	}
	return before - after, err
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
