package controller

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"
	"uuid"

	"headgate/internal/store"
	"headgate/internal/testkit"
)

// barrierRig is one controller of several on one database, its gate alone.
type barrierRig struct {
	barrier
	done chan error
}

func newBarrierRig(t *testing.T, db *store.DB) *barrierRig {
	t.Helper()
	r := &barrierRig{
		barrier: barrier{peers: db, id: uuid.NewV4(), log: slog.New(slog.DiscardHandler)},
		done:    make(chan error, 1),
	}
	if err := db.RegisterController(t.Context(), store.Controller{ID: r.id, Name: "c"}, nil); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *barrierRig) start(ctx context.Context) { go func() { r.done <- r.wait(ctx) }() }

func openStore(t *testing.T) *store.DB {
	t.Helper()
	db, err := store.Open(t.Context(), store.Config{DSN: testkit.NewDatabase(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func (r *barrierRig) mustPass(t *testing.T, what string) {
	t.Helper()
	select {
	case err := <-r.done:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("%s still waits", what)
	}
}

func TestASingleControllerDoesNotWait(t *testing.T) {
	t.Parallel()
	db := openStore(t)
	r := newBarrierRig(t, db)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r.start(ctx)
	r.mustPass(t, "the only controller")
}

func TestThreeControllersOpenWhenTwoAreFit(t *testing.T) {
	t.Parallel()
	db := openStore(t)
	a, b, c := newBarrierRig(t, db), newBarrierRig(t, db), newBarrierRig(t, db)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	// Alone among three, the first one waits as long as it may.
	short, stop := context.WithTimeout(t.Context(), 4*barrierPause)
	defer stop()
	if err := a.wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the first of three: %v", err)
	}
	// The third one was fit, but has been killed since: it does not count.
	if _, err := db.Heartbeat(ctx, c.id, true); err != nil {
		t.Fatal(err)
	}
	short, stop = context.WithTimeout(t.Context(), 4*barrierPause)
	defer stop()
	if err := a.wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("beside one that was fit before: %v", err)
	}
	a.start(ctx)
	b.start(ctx)
	a.mustPass(t, "the first of three when the second is fit")
	b.mustPass(t, "the second of three")
	// The last one waits for the next words of the others.
	c.start(ctx)
	for _, r := range []*barrierRig{a, b} {
		if _, err := db.Heartbeat(ctx, r.id, true); err != nil {
			t.Fatal(err)
		}
	}
	c.mustPass(t, "the third of three")
}

func TestABarrierEndsInTimeOnASilentDatabase(t *testing.T) {
	t.Parallel()
	proxy := testkit.NewProxy(t, testkit.NewDatabase(t))
	db, err := store.Open(t.Context(), store.Config{DSN: proxy.DSN()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	r := newBarrierRig(t, db)
	proxy.Stall()
	defer proxy.Heal()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	r.start(ctx)
	select {
	case err := <-r.done:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it hangs")
	}
}
