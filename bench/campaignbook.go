package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
)

// book is what the clients of a campaign know: what they have sent, what was
// acknowledged, and what they were told of its end. A token, the place in the
// book, is in the arguments of each task.
type book struct {
	mu      sync.Mutex
	entries []entry
	odd     []string // answers that no promise allows
	acked   atomic.Int64
}

// entry is one task as its clients know it. Times are nanoseconds of the
// monotonic clock.
type entry struct {
	Agent   int    `json:"agent"`
	Once    bool   `json:"once,omitempty"`
	Sent    int64  `json:"sent"`
	Acked   int64  `json:"acked,omitempty"` // 0 = never; it may be stored or not
	ID      int64  `json:"id,omitempty"`
	Outcome string `json:"outcome,omitempty"` // what a waiter was told first
}

// oddKept bounds how many of them are told.
const oddKept = 20

// reserve writes tasks into the book before they are sent.
func (b *book) reserve(entries []entry) (first int) {
	now := monotonic()
	b.mu.Lock()
	defer b.mu.Unlock()
	first = len(b.entries)
	for _, e := range entries {
		e.Sent = now
		b.entries = append(b.entries, e)
	}
	return first
}

// acknowledge notes the ids that were given.
func (b *book) acknowledge(first int, ids []int64) {
	now := monotonic()
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, id := range ids {
		e := &b.entries[first+i]
		e.Acked, e.ID = now, id
	}
	b.acked.Add(int64(len(ids)))
}

func (b *book) acknowledged() int { return int(b.acked.Load()) }

// told notes what a waiter was told; a second word that differs is odd.
func (b *book) told(token int, outcome string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := &b.entries[token]
	if e.Outcome != "" && e.Outcome != outcome {
		b.strangeLocked(fmt.Sprintf("task %d had the outcome %s and then %s", e.ID, e.Outcome, outcome))
	}
	e.Outcome = outcome
}

func (b *book) strange(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.strangeLocked(what)
}

func (b *book) strangeLocked(what string) {
	if len(b.odd) < oddKept {
		b.odd = append(b.odd, what)
	}
}

// save writes the book as JSON lines, for a look at what went wrong.
func (b *book) save(file string) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriter(f)
	out := json.NewEncoder(w)
	for i := range b.entries {
		if err := out.Encode(&b.entries[i]); err != nil {
			return err
		}
	}
	return w.Flush()
}
