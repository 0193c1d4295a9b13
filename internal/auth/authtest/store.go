// Package authtest provides an auth.Store in memory for tests of the packages
// that use auth.
package authtest

import (
	"context"
	"slices"
	"sync"
	"time"
	"uuid"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// Store keeps users, tokens and sessions in memory. Its zero value is not
// ready; use NewStore.
type Store struct {
	mu       sync.Mutex
	users    map[string]auth.User
	tokens   []auth.Token
	sessions map[[32]byte]auth.Session
	links    map[[32]byte]link
	down     error
	lookups  int
	touched  map[uuid.UUID]time.Time
	silent   chan struct{} // not nil: lookups wait until it is closed
}

type link struct {
	user    uuid.UUID
	expires time.Time
}

var _ auth.Store = (*Store)(nil)

// NewStore gives an empty Store.
func NewStore() *Store {
	return &Store{
		users: map[string]auth.User{}, sessions: map[[32]byte]auth.Session{},
		links: map[[32]byte]link{}, touched: map[uuid.UUID]time.Time{},
	}
}

// Break makes every later call fail with err; nil repairs it.
func (s *Store) Break(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = err
}

// Silence makes later lookups wait, whatever their context says, as a driver
// does at a server that has fallen silent, until the function given is called.
func (s *Store) Silence() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	silent := make(chan struct{})
	s.silent = silent
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.silent = nil
		close(silent)
	}
}

// await ends when the store is not silent.
func (s *Store) await() {
	s.mu.Lock()
	silent := s.silent
	s.mu.Unlock()
	if silent != nil {
		<-silent
	}
}

// Lookups counts the calls of TokenByHash and SessionByHash.
func (s *Store) Lookups() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lookups
}

// Touched gives what TouchTokens was told last of a token.
func (s *Store) Touched(id uuid.UUID) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.touched[id]
}

// lock begins a call; the error of a broken store is to be returned.
func (s *Store) lock() (func(), error) {
	s.mu.Lock()
	return s.mu.Unlock, s.down
}

// EnsureUser implements auth.Store.
func (s *Store) EnsureUser(_ context.Context, name string, role auth.Role) (auth.User, error) {
	unlock, err := s.lock()
	defer unlock()
	if err != nil {
		return auth.User{}, err
	}
	u, ok := s.users[name]
	if !ok {
		u = auth.User{ID: uuid.NewV7(), Name: name, Role: role, CreatedAt: time.Now().UTC()}
		s.users[name] = u
	}
	return u, nil
}

// EnsureToken implements auth.Store.
func (s *Store) EnsureToken(_ context.Context, t auth.Token) (auth.Token, error) {
	unlock, err := s.lock()
	defer unlock()
	if err != nil {
		return auth.Token{}, err
	}
	for _, have := range s.tokens {
		if have.Hash == t.Hash {
			return have, nil
		}
	}
	s.tokens = slices.Insert(s.tokens, 0, t)
	return t, nil
}

// Tokens implements auth.Store.
func (s *Store) Tokens(context.Context) ([]auth.Token, error) {
	unlock, err := s.lock()
	defer unlock()
	return slices.Clone(s.tokens), err
}

// TokenByHash implements auth.Store.
func (s *Store) TokenByHash(_ context.Context, hash [32]byte) (auth.Token, error) {
	s.await()
	unlock, err := s.lock()
	defer unlock()
	s.lookups++
	if err != nil {
		return auth.Token{}, err
	}
	for _, t := range s.tokens {
		if t.Hash == hash {
			return t, nil
		}
	}
	return auth.Token{}, fault.New(fault.NotFound, "unknown_token", "There is no such token.")
}

// RevokeToken implements auth.Store.
func (s *Store) RevokeToken(_ context.Context, id uuid.UUID) error {
	unlock, err := s.lock()
	defer unlock()
	if err != nil {
		return err
	}
	for i := range s.tokens {
		if s.tokens[i].ID == id {
			s.tokens[i].RevokedAt = time.Now().UTC()
			return nil
		}
	}
	return fault.New(fault.NotFound, "unknown_token", "There is no such token.")
}

// TouchTokens implements auth.Store.
func (s *Store) TouchTokens(_ context.Context, used map[uuid.UUID]time.Time) error {
	unlock, err := s.lock()
	defer unlock()
	if err != nil {
		return err
	}
	for id, at := range used {
		s.touched[id] = at
	}
	return nil
}

// InsertSession implements auth.Store.
func (s *Store) InsertSession(_ context.Context, sess auth.Session) error {
	unlock, err := s.lock()
	defer unlock()
	if err == nil {
		s.sessions[sess.Hash] = sess
	}
	return err
}

// SessionByHash implements auth.Store.
func (s *Store) SessionByHash(_ context.Context, hash [32]byte) (auth.Session, error) {
	s.await()
	unlock, err := s.lock()
	defer unlock()
	s.lookups++
	if err != nil {
		return auth.Session{}, err
	}
	sess, ok := s.sessions[hash]
	if !ok || !time.Now().Before(sess.ExpiresAt) {
		return auth.Session{}, fault.New(fault.NotFound, "unknown_session", "There is no such session.")
	}
	return sess, nil
}

// DeleteSession implements auth.Store.
func (s *Store) DeleteSession(_ context.Context, hash [32]byte) error {
	unlock, err := s.lock()
	defer unlock()
	delete(s.sessions, hash)
	return err
}

// InsertSignInLink implements auth.Store.
func (s *Store) InsertSignInLink(_ context.Context, hash [32]byte, user uuid.UUID, expires time.Time) error {
	unlock, err := s.lock()
	defer unlock()
	if err == nil {
		s.links[hash] = link{user, expires}
	}
	return err
}

// UseSignInLink implements auth.Store.
func (s *Store) UseSignInLink(_ context.Context, hash [32]byte) (auth.User, error) {
	unlock, err := s.lock()
	defer unlock()
	if err != nil {
		return auth.User{}, err
	}
	l, ok := s.links[hash]
	delete(s.links, hash)
	for _, u := range s.users {
		if ok && u.ID == l.user && time.Now().Before(l.expires) {
			return u, nil
		}
	}
	return auth.User{}, fault.New(fault.NotFound, "unknown_link", "There is no such sign-in link.")
}
