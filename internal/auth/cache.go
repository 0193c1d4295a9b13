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
// The mutex guards the maps; entries never change but for their counters.
type cache struct {
	term  time.Duration
	stale time.Duration
	max   int

	mu      sync.RWMutex
	entries map[[32]byte]*entry
	local   map[[32]byte]Principal // tokens of this controller's own files
	flights map[[32]byte]*flight   // lookups under way
	gen     uint64                 // rises with every drop; an answer of an older one is not kept
}

// known is what a lookup found: who it is, and when the credential ends by
// itself (zero = never).
type known struct {
	who     Principal
	expires time.Time
}

type entry struct {
	known
	err   error // a refusal is remembered too
	asked time.Time
	until time.Time
	used  atomic.Int64 // unix nanoseconds, 0 = not since the last flush
}

// answer gives what the entry says, and notes that it was used.
func (e *entry) answer(now time.Time) (Principal, error) {
	e.used.Store(now.UnixNano())
	return e.who, e.err
}

// expired says whether the credential has ended by itself meanwhile.
func (e *entry) expired(now time.Time) bool { return !e.expires.IsZero() && !now.Before(e.expires) }

func newCache(cfg Config) *cache {
	return &cache{
		term: cfg.CacheTerm, stale: cfg.StaleTerm, max: cfg.CacheSize,
		entries: map[[32]byte]*entry{}, local: map[[32]byte]Principal{}, flights: map[[32]byte]*flight{},
	}
}

// get gives the entry of a hash, if any, and whether it is still fresh.
func (c *cache) get(hash [32]byte, now time.Time) (e *entry, fresh bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	e = c.entries[hash]
	return e, e != nil && now.Before(e.until) && !e.expired(now)
}

// put keeps the answer of a lookup that was asked at the given time, unless
// something was revoked meanwhile.
func (c *cache) put(hash [32]byte, found known, refusal error, asked time.Time, gen uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if gen != c.gen {
		return
	}
	if len(c.entries) >= c.max {
		clear(c.entries)
	}
	e := &entry{known: found, err: refusal, asked: asked, until: asked.Add(c.term)}
	if old := c.entries[hash]; old != nil {
		if old.asked.After(asked) {
			return // a late answer says nothing new
		}
		e.used.Store(old.used.Load())
	}
	c.entries[hash] = e
}

// last gives what was known of a credential when the database last answered,
// if that is not too long ago, and what never needs it: the tokens of this
// controller's own files.
func (c *cache) last(hash [32]byte, now time.Time) (who Principal, refusal error, ok bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if who, ok := c.local[hash]; ok {
		return who, nil, true
	}
	e := c.entries[hash]
	if e == nil || e.expired(now) || now.Sub(e.asked) > c.stale {
		return Principal{}, nil, false
	}
	who, refusal = e.answer(now)
	return who, refusal, true
}

// drop forgets everything: a revocation is rare and must hold at once.
func (c *cache) drop(token uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gen++
	clear(c.entries)
	clear(c.flights) // nobody joins a lookup that may have read what was before
	for hash, who := range c.local {
		if who.ID == token {
			delete(c.local, hash)
		}
	}
}

// keep adds a token that works while the database is away.
func (c *cache) keep(hash [32]byte, who Principal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.local[hash] = who
}

// unkeep ends that: the database says that the token has ended.
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
