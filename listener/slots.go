package listener

import (
	"context"
	"net"
	"slices"
	"sync"
	"time"
)

// slots is a number of places, changed at will, that are waited for in the
// order of asking.
type slots struct {
	onFree func() // if set, called without the lock when a place is free and nobody waits

	mu      sync.Mutex
	limit   int
	used    int
	waiting []chan struct{} // each closed when its place has been given
}

// set changes the number of places. Places in use above it are given back by
// their users alone.
func (s *slots) set(limit int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = limit
	s.hand()
}

// free reports whether a place could be had at once.
func (s *slots) free() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used < s.limit && len(s.waiting) == 0
}

// take waits for a place until end.
func (s *slots) take(life context.Context, end time.Time) error {
	s.mu.Lock()
	if s.used < s.limit && len(s.waiting) == 0 {
		s.used++
		s.mu.Unlock()
		return nil
	}
	mine := make(chan struct{})
	s.waiting = append(s.waiting, mine)
	s.mu.Unlock()
	timer := time.NewTimer(time.Until(end))
	defer timer.Stop()
	err := net.ErrClosed
	select {
	case <-mine:
		return nil
	case <-timer.C:
		err = errNoSlot
	case <-life.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := slices.Index(s.waiting, mine); at >= 0 {
		s.waiting = slices.Delete(s.waiting, at, at+1)
	} else { // given at the same moment
		s.used--
		s.hand()
	}
	return err
}

// give gives a place back.
func (s *slots) give() {
	s.mu.Lock()
	s.used--
	s.hand()
	spare := s.used < s.limit
	s.mu.Unlock()
	if spare && s.onFree != nil {
		s.onFree()
	}
}

// hand gives free places to those who wait; the caller holds mu.
func (s *slots) hand() {
	for s.used < s.limit && len(s.waiting) > 0 {
		close(s.waiting[0])
		s.waiting = s.waiting[1:]
		s.used++
	}
}
