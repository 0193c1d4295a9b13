package handlers

import (
	"sync"

	"headgate/internal/fault"
)

// Caps on event streams. Each holds a connection, a goroutine and a buffer.
const (
	DefaultMaxStreams          = 500 // in all
	DefaultMaxStreamsPrincipal = 20  // of one user or token: some tabs and a few programs
)

// streamLimit counts open event streams.
type streamLimit struct {
	all, each int

	mu   sync.Mutex // guards both below
	open int
	by   map[string]int
}

func newStreamLimit(all, each int) *streamLimit {
	return &streamLimit{all: all, each: each, by: map[string]int{}}
}

// enter takes a place, which leave gives back.
func (l *streamLimit) enter(who string) (leave func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= l.all || l.by[who] >= l.each {
		return nil, fault.New(fault.Exhausted, "too_many_streams", "Too many event streams are open.").
			WithHint("Close some; one stream carries all topics.")
	}
	l.open++
	l.by[who]++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.open--
		if l.by[who]--; l.by[who] == 0 {
			delete(l.by, who)
		}
	}, nil
}
