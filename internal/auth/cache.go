package auth

import (
	"sync"
	"sync/atomic"
	"time"
	"uuid"
)

// cache remembers for a moment who a credential belongs to. It is bounded:
// when full, it is emptied, which costs one lookup for each caller.
//
// The mutex guards both maps; entries never change but for their counters.
type cache struct {
	term time.Duration
	max  int

	mu      sync.RWMutex
	entries map[[32]byte]*entry
	local   map[[32]byte]Principal // tokens of this controller's own files
	gen     uint64                 // rises with every drop; an answer of an older one is not kept
}

type entry struct {
	who   Principal
	err   error // a refusal is remembered too
	until time.Time
	used  atomic.Int64 // unix nanoseconds, 0 = not since the last flush
	busy  atomic.Bool  // one caller is renewing it
}

func newCache(term time.Duration, max int) *cache {
	return &cache{term: term, max: max, entries: map[[32]byte]*entry{}, local: map[[32]byte]Principal{}}
}

// get gives the entry of a hash, if any, whether it is still fresh, and the
// generation to hand to put.
func (c *cache) get(hash [32]byte, now time.Time) (e *entry, fresh bool, gen uint64) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	e = c.entries[hash]
	return e, e != nil && now.Before(e.until), c.gen
}

func (c *cache) put(hash [32]byte, who Principal, refusal error, now time.Time, gen uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if gen != c.gen {
		return // something was revoked while we asked
	}
	if len(c.entries) >= c.max {
		clear(c.entries)
	}
	e := &entry{who: who, err: refusal, until: now.Add(c.term)}
	if old := c.entries[hash]; old != nil {
		e.used.Store(old.used.Load())
	}
	c.entries[hash] = e
}

// drop forgets everything: a revocation is rare and must hold at once.
func (c *cache) drop(token uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gen++
	clear(c.entries)
	for hash, who := range c.local {
		if who.ID == token {
			delete(c.local, hash)
		}
	}
}

// keep and kept serve the tokens that work while the database is away.
func (c *cache) keep(hash [32]byte, who Principal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.local[hash] = who
}

func (c *cache) kept(hash [32]byte) (Principal, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	who, ok := c.local[hash]
	return who, ok
}

func (c *cache) unkeep(hash [32]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.local, hash)
}

// takeUsed gives the tokens used since the last call.
func (c *cache) takeUsed() map[uuid.UUID]time.Time {
	c.mu.RLock()
	defer c.mu.RUnlock()
	used := map[uuid.UUID]time.Time{}
	for _, e := range c.entries {
		if at := e.used.Swap(0); at != 0 && e.err == nil && e.who.Kind == KindToken {
			if t := time.Unix(0, at); t.After(used[e.who.ID]) {
				used[e.who.ID] = t
			}
		}
	}
	return used
}
