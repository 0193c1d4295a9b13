package migrations_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"headgate/internal/testkit"
	"headgate/migrations"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func connect(tb testing.TB, dsn string) *sql.DB {
	tb.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = db.Close() })
	return db
}

// released are the SHA-256 sums of the files as they were released. A file in
// this list is never edited again; a change of the schema is a new file.
func released() map[string]string {
	return map[string]string{
		"00001_schema.sql":              "f81d7e4f7a34f30cbcf557e17b61a645bfde56bb691cd9c851237a5d254931df",
		"00002_controller_stable.sql":   "035ec174571740535bd225f3899a8159235ea823da2913e0b96900f14ddc5dab",
		"00003_cancel_and_removal.sql":  "e06275e7ab8c614d65b34653dd85e5cc290c29cb29f04593607bca7d3c5f8cf7",
		"00004_retention.sql":           "f172c17e3d98fbc5bab8c9edb047fed409066f49e71ad14ae0e7c821993d0b54",
		"00005_controller_identity.sql": "ab09bfffd23a667df6c0be919c1b7a28e1dda4dc3ecd71640ddaa312e74ce4de",
	}
}

func TestReleasedFilesAreUnchanged(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob("*.sql")
	if err != nil {
		t.Fatal(err)
	}
	if len(names) != len(released()) {
		t.Errorf("%d files, but %d in the list of sums", len(names), len(released()))
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(b)
		if got, want := hex.EncodeToString(sum[:]), released()[name]; got != want {
			t.Errorf("%s has the sum %s, released was %s", name, got, want)
		}
		if !strings.Contains(string(b), "lock_timeout") {
			t.Errorf("%s sets no lock_timeout", name)
		}
	}
}

func TestThreeStartsAtOnceMigrateOnce(t *testing.T) {
	t.Parallel()
	dsn := testkit.EmptyDatabase(t)
	const starts = 3
	errs := make(chan error, starts)
	for range starts {
		db := connect(t, dsn)
		go func() {
			err := migrations.Up(t.Context(), db)
			if err == nil {
				err = migrations.Check(t.Context(), db)
			}
			errs <- err
		}()
	}
	for range starts {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	list, err := migrations.Status(t.Context(), connect(t, dsn))
	if err != nil || len(list) == 0 {
		t.Fatalf("status: %v, %v", list, err)
	}
	for _, m := range list {
		if m.AppliedAt.IsZero() || time.Since(m.AppliedAt) > time.Hour {
			t.Errorf("%s was applied at %v", m.Name, m.AppliedAt)
		}
	}
}

func TestCheckAndStatusWriteNothing(t *testing.T) {
	t.Parallel()
	db := connect(t, testkit.EmptyDatabase(t))
	err := migrations.Check(t.Context(), db)
	v, ok := errors.AsType[*migrations.VersionError](err)
	if !ok || v.TooNew() || v.Have != 0 {
		t.Errorf("check of an empty database: %v", err)
	}
	list, err := migrations.Status(t.Context(), db)
	if err != nil || !slices.ContainsFunc(list, func(m migrations.Migration) bool { return m.AppliedAt.IsZero() }) {
		t.Errorf("status of an empty database: %v, %v", list, err)
	}
	var tables int
	if err := db.QueryRowContext(t.Context(), `SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace`).Scan(&tables); err != nil || tables != 0 {
		t.Errorf("%d relations were made (%v)", tables, err)
	}
}

func TestNewerDatabaseIsRefused(t *testing.T) {
	t.Parallel()
	db := connect(t, testkit.NewDatabase(t))
	if _, err := db.Exec(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, true)`); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(context.Context, *sql.DB) error{"check": migrations.Check, "up": migrations.Up} {
		err := call(t.Context(), db)
		v, ok := errors.AsType[*migrations.VersionError](err)
		if !ok || !v.TooNew() || !regexp.MustCompile(`9999`).MatchString(err.Error()) {
			t.Errorf("%s of a newer database: %v", name, err)
		}
	}
}
