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
	mu    sync.Mutex
	next  ID
	end   ID
	taken time.Time
}

// give hands out the next id; false when none is left.
func (s *idSource) give() (ID, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == s.end {
		return 0, false
	}
	s.next++
	return s.next - 1, true
}

// drop lets go of what is left, because somebody may have used higher ids.
func (s *idSource) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next = s.end
}

// fill makes sure that there are ids, unless a call of take fails. The lock is
// held meanwhile: a loop that finds none has nothing better to do than wait.
func (s *idSource) fill(ctx context.Context, take func(context.Context) (ID, error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != s.end && time.Since(s.taken) <= IDLife {
		return nil
	}
	asked := time.Now()
	first, err := take(ctx)
	if err != nil {
		return err
	}
	s.next, s.end, s.taken = first, first+IDBlock, asked
	return nil
}
