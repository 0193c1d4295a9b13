package listener

import (
	"context"
	"net"
	"slices"
	"sync"
	"time"
)

// Of the places for handshakes neither known nor unknown clients get more than
// three quarters, so that handshakes which stall on purpose, from however many
// addresses, never take the last place of the others.
const (
	sharePart  = 3
	shareWhole = 4
)

// slots is a number of places, changed at will, that two sorts of users wait
// for, each in the order of asking.
type slots struct {
	onFree func() // if set, called without the lock when a place is free and nobody waits
	shared bool   // neither sort gets all of them

	mu    sync.Mutex
	limit int
	sorts [2]slotUsers
}

// slotUsers are those of one sort.
type slotUsers struct {
	used    int
	waiting []chan struct{} // each closed when its place has been given
}

// slotSort gives the sort of a connection.
func slotSort(known bool) int {
	if known {
		return 0
	}
	return 1
}

// set changes the number of places. Places in use above it are given back by
// their users alone.
func (s *slots) set(limit int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = limit
	s.hand()
}

// share gives how many places one sort may have; the caller holds mu.
func (s *slots) share() int {
	if !s.shared {
		return s.limit
	}
	return max(1, s.limit*sharePart/shareWhole)
}

// has reports whether a place is there for that sort; the caller holds mu.
func (s *slots) has(sort int) bool {
	return s.sorts[0].used+s.sorts[1].used < s.limit && s.sorts[sort].used < s.share()
}

// free reports whether a known or unknown client could have a place at once.
func (s *slots) free(known bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	sort := slotSort(known)
	return s.has(sort) && len(s.sorts[sort].waiting) == 0
}

// scarce reports whether a sort uses half of its places or more, where there
// are sorts.
func (s *slots) scarce(known bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shared && 2*s.sorts[slotSort(known)].used >= s.share()
}

// take waits for a place until end.
func (s *slots) take(life context.Context, end time.Time, known bool) error {
	s.mu.Lock()
	sort := slotSort(known)
	users := &s.sorts[sort]
	if s.has(sort) && len(users.waiting) == 0 {
		users.used++
		s.mu.Unlock()
		return nil
	}
	mine := make(chan struct{})
	users.waiting = append(users.waiting, mine)
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
	if !s.withdraw(users, mine) { // given at the same moment
		s.give(known)
	}
	return err
}

// withdraw takes one who waits out of the line; false means that its place has
// been given already.
func (s *slots) withdraw(users *slotUsers, mine chan struct{}) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.Index(users.waiting, mine)
	if at < 0 {
		return false
	}
	users.waiting = slices.Delete(users.waiting, at, at+1)
	return true
}

// give gives a place back.
func (s *slots) give(known bool) {
	s.mu.Lock()
	s.sorts[slotSort(known)].used--
	s.hand()
	spare := s.has(0) || s.has(1)
	s.mu.Unlock()
	if spare && s.onFree != nil {
		s.onFree()
	}
}

// hand gives free places to those who wait, the known first; the caller holds
// mu.
func (s *slots) hand() {
	for sort := range s.sorts {
		users := &s.sorts[sort]
		for s.has(sort) && len(users.waiting) > 0 {
			close(users.waiting[0])
			users.waiting = users.waiting[1:]
			users.used++
		}
	}
}
