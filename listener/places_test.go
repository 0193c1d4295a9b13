package listener

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"
)

// TestPlaceGivenToOneWhoLeavesIsOfferedAgain gives a place to a waiter in the
// moment in which it leaves: the door must hear that the place is free.
func TestPlaceGivenToOneWhoLeavesIsOfferedAgain(t *testing.T) {
	t.Parallel()
	for range 200 {
		woken := make(chan struct{}, 2)
		s := &slots{onFree: func() { woken <- struct{}{} }}
		s.set(1)
		if err := s.take(t.Context(), time.Now().Add(time.Minute), false); err != nil {
			t.Fatal(err)
		}
		life, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() { left <- s.take(life, time.Now().Add(time.Minute), false) }()
		for !s.awaited() {
			<-time.After(time.Microsecond)
		}
		s.mu.Lock()
		leave()
		s.sorts[slotSort(false)].used--
		s.hand()
		s.mu.Unlock()
		err := <-left
		if err == nil {
			continue // it saw its place first
		}
		if !errors.Is(err, net.ErrClosed) || !s.free(false) {
			t.Fatalf("left with %v; a place is free: %t", err, s.free(false))
		}
		select {
		case <-woken:
		default:
			t.Fatal("a place is free and nobody heard of it")
		}
	}
}

// awaited reports whether somebody waits for a place.
func (s *slots) awaited() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sorts[0].waiting)+len(s.sorts[1].waiting) > 0
}
