package store

import (
	"testing"
	"time"
	"uuid"

	"headgate/tasks"
)

func newOwner() uuid.UUID { return uuid.New() }

func idsOf(o tasks.Owner) []uuid.UUID { return []uuid.UUID{o.ID} }

// waitFor asks a query until it gives at least n; the server's pg_sleep is the
// pause, so that it costs nothing here.
func waitFor(tb testing.TB, d *DB, query string, n int) {
	tb.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for countOn(tb, d, query) < n {
		if time.Now().After(deadline) {
			tb.Fatalf("%s never gave %d", query, n)
		}
		if _, err := d.general.Exec(`SELECT pg_sleep(0.005)`); err != nil {
			tb.Fatal(err)
		}
	}
}
