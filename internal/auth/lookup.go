package auth

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"headgate/internal/fault"
)

// maxFlights bounds the lookups that wait for a silent database at one moment;
// callers beyond it are answered at once.
const maxFlights = 1024

// silenceTerm is how long after a lookup without an answer known callers are
// served without asking first. It is short, because a revocation that the
// database could tell again must hold within a second.
const silenceTerm = time.Second

// silence notes that the database gave no answer in time.
type silence struct{ until atomic.Int64 } // unix nanoseconds

func (s *silence) begin(now time.Time)      { s.until.Store(now.Add(silenceTerm).UnixNano()) }
func (s *silence) end()                     { s.until.Store(0) }
func (s *silence) lasts(now time.Time) bool { return now.UnixNano() < s.until.Load() }

// flight is one lookup under way; all callers with that credential wait for it.
type flight struct {
	done  chan struct{} // closed when found and err are there
	found known
	err   error

	asked time.Time
	gen   uint64
}

// join gives the lookup of a credential that is under way, or a new one that
// the caller must begin. It gives nil when too many are under way.
func (c *cache) join(hash [32]byte, now time.Time) (f *flight, isNew bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.flights[hash]; f != nil {
		return f, false
	}
	if len(c.flights) >= maxFlights {
		return nil, false
	}
	f = &flight{done: make(chan struct{}), asked: now, gen: c.gen}
	c.flights[hash] = f
	return f, true
}

// leave keeps others from joining a lookup that has ended or takes too long.
func (c *cache) leave(hash [32]byte, f *flight) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flights[hash] == f {
		delete(c.flights, hash)
	}
}

var (
	errSilent  = errors.New("no answer in time")
	errTooMany = errors.New("too many lookups wait already")
)

// lookup answers from the cache, or asks the database, which nobody waits for
// longer than LookupTerm.
func (s *Service) lookup(ctx context.Context, hash [32]byte, load func(context.Context, [32]byte) (known, error)) (Principal, error) {
	now := s.now()
	e, fresh := s.cache.get(hash, now)
	if fresh {
		return e.answer(now)
	}
	f, isNew := s.cache.join(hash, now)
	switch {
	case f == nil:
		return s.fallBack(hash, errTooMany)
	case isNew:
		go s.fly(context.WithoutCancel(ctx), f, hash, load)
	case e != nil && !e.expired(now) && now.Sub(e.until) < s.cfg.CacheTerm/10:
		// A stale entry serves the few callers that arrive while one renews it;
		// together with its term that stays below the promised second.
		return e.answer(now)
	}
	wait := s.cfg.LookupTerm
	if _, _, ok := s.cache.last(hash, now); ok {
		if s.silence.lasts(now) {
			return s.fallBack(hash, errSilent)
		}
		wait /= 4
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-f.done:
	case <-timer.C:
		s.silence.begin(s.now())
		return s.fallBack(hash, errSilent)
	case <-ctx.Done():
		return s.fallBack(hash, context.Cause(ctx))
	}
	if f.err != nil && !fault.Is(f.err, fault.Unauthenticated) {
		return s.fallBack(hash, f.err)
	}
	if e, _ := s.cache.get(hash, now); e != nil {
		e.used.Store(now.UnixNano())
	}
	return f.found.who, f.err
}

// fly asks the database and keeps its answer, also when nobody waits for it
// any more. The driver may forget ctx while the server is silent, so that a
// lookup that overruns it is left behind and the next caller begins another.
func (s *Service) fly(ctx context.Context, f *flight, hash [32]byte, load func(context.Context, [32]byte) (known, error)) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.LookupTerm)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { s.cache.leave(hash, f) })
	defer stop()
	f.found, f.err = load(ctx, hash)
	if f.err == nil || fault.Is(f.err, fault.Unauthenticated) {
		s.silence.end()
		s.cache.put(hash, f.found, f.err, f.asked, f.gen)
	}
	s.cache.leave(hash, f)
	close(f.done)
}

// fallBack answers without the database: by what it said last, or by a refusal
// that asks to come back.
func (s *Service) fallBack(hash [32]byte, cause error) (Principal, error) {
	if who, refusal, ok := s.cache.last(hash, s.now()); ok {
		return who, refusal
	}
	return Principal{}, cannotCheck(cause)
}

func cannotCheck(cause error) error {
	return fault.Wrap(cause, fault.Unavailable, "credentials_unavailable", "The credential cannot be checked now because the database does not answer.").
		WithHint("Try again in a few seconds.")
}
