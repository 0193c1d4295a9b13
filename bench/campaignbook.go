package main

import (
	"fmt"
	"sync"
	"sync/atomic"

	"headgate/internal/testkit/history"
)

// book is what the clients of a campaign write down: what they send, what is
// acknowledged, and what they are told of its end.
type book struct {
	*history.Writer

	acked   atomic.Int64
	waiters atomic.Int64 // numbers those who wait

	mu  sync.Mutex
	odd []string // answers that no promise allows
}

// oddKept bounds how many of them are kept.
const oddKept = 20

// await notes a question for the end of a task, and who has it.
func (b *book) await(id int64) (waiter string) {
	waiter = fmt.Sprintf("waiter-%d", b.waiters.Add(1))
	b.Wait(waiter, id)
	return waiter
}

func (b *book) acknowledged() int { return int(b.acked.Load()) }

func (b *book) strange(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.odd) < oddKept {
		b.odd = append(b.odd, fmt.Sprintf(format, args...))
	}
}
