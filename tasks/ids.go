package tasks

import (
	"context"
	"sync"
	"time"
)

// idSource hands out the ids of this controller's tasks. All write loops share
// it, so that ids rise in the order in which tasks are taken in: with a block
// for each loop a new task could stand hundreds of places below older ones in
// lists.
//
// Ids are taken from the store beforehand, so that a commit with an unknown
// outcome can be asked after.
type idSource struct {
	filling sync.Mutex // held while the store is asked, by one loop

	mu    sync.Mutex
	next  ID
	end   ID
	taken time.Time
	drops int // how often drop was called
}

// give hands out the next id; false when none is left that may still be used.
func (s *idSource) give() (ID, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.fresh() {
		return 0, false
	}
	s.next++
	return s.next - 1, true
}

// drop lets go of what is left, because somebody may have used higher ids. A
// block that is being taken was begun before and goes too.
func (s *idSource) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next, s.drops = s.end, s.drops+1
}

// good says that there are ids that may still be used.
func (s *idSource) good() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fresh()
}

// fresh is good for those who hold mu.
func (s *idSource) fresh() bool { return s.next != s.end && time.Since(s.taken) <= IDLife }

// fill takes ids from the store when there are none, and says whether it did.
// Without ids and an error another loop is taking some just now, and nobody
// waits for it: a loop has more to do than to take in submissions.
func (s *idSource) fill(ctx context.Context, take func(context.Context) (ID, error)) (took bool, err error) {
	if s.good() || !s.filling.TryLock() {
		return false, nil
	}
	defer s.filling.Unlock()
	if s.good() {
		return false, nil
	}
	s.mu.Lock()
	drops := s.drops
	s.mu.Unlock()
	asked := time.Now()
	first, err := take(ctx)
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drops == drops {
		s.next, s.end, s.taken = first, first+IDBlock, asked
	}
	return true, nil
}
