package controller

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestPartsStopInReverseOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSupervisor(t.Context(), slog.New(slog.DiscardHandler))
		var mu sync.Mutex
		var ended []string
		for _, name := range []string{"database", "manager", "http"} {
			s.run(name, func(ctx context.Context) error {
				<-ctx.Done()
				mu.Lock()
				defer mu.Unlock()
				ended = append(ended, name)
				return ctx.Err()
			})
		}
		if err := s.stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if want := []string{"http", "manager", "database"}; !slices.Equal(ended, want) {
			t.Fatalf("ended %v, want %v", ended, want)
		}
		if err := s.stop(t.Context()); err != nil {
			t.Fatalf("second stop: %v", err)
		}
	})
}

func TestAHungPartDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSupervisor(t.Context(), slog.New(slog.DiscardHandler))
		release := make(chan struct{})
		stopped := false
		s.onStop("database", func(context.Context) error { stopped = true; return nil })
		s.run("hung", func(context.Context) error { <-release; return nil })
		began := time.Now()
		err := s.stop(t.Context())
		if err == nil || !strings.Contains(err.Error(), "hung") {
			t.Fatalf("err = %v, want the hung part named", err)
		}
		if took := time.Since(began); took != stopTimeout || !stopped {
			t.Fatalf("took %v, database stopped %v", took, stopped)
		}
		close(release)
	})
}

func TestAPartThatEndsByItselfIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSupervisor(t.Context(), slog.New(slog.DiscardHandler))
		boom := errors.New("boom")
		s.run("manager", func(context.Context) error { return boom })
		if err := <-s.failed; !errors.Is(err, boom) || !strings.Contains(err.Error(), "manager") {
			t.Fatalf("err = %v", err)
		}
		if err := s.stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}
