package fleettest

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

// Store is a fleet.Store in memory. Before, if set, is called with the name of
// each method first; an error that it gives is the method's.
type Store struct {
	Before func(ctx context.Context, method string) error

	mu       sync.Mutex
	agents   []fleet.Agent // removed ones included, by number
	ca       *fleet.CA
	tokens   map[[8]byte]fleet.EnrolmentToken
	pairings []fleet.Pairing
	now      func() time.Time
}

var _ fleet.Store = (*Store)(nil)

// NewStore makes an empty one.
func NewStore() *Store {
	return &Store{tokens: map[[8]byte]fleet.EnrolmentToken{}, now: time.Now}
}

func (s *Store) enter(ctx context.Context, method string) (func(), error) {
	if s.Before != nil {
		if err := s.Before(ctx, method); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	return s.mu.Unlock, nil
}

func copyOf(a fleet.Agent) fleet.Agent {
	a.Addresses = slices.Clone(a.Addresses)
	a.Labels = maps.Clone(a.Labels)
	return a
}

// live gives the row of an agent that is not removed.
func (s *Store) live(id uuid.UUID) (*fleet.Agent, error) {
	for i := range s.agents {
		if s.agents[i].ID == id && s.agents[i].Status != fleet.Removed {
			return &s.agents[i], nil
		}
	}
	return nil, fault.New(fault.NotFound, "unknown_agent", "There is no such agent.")
}

// Agents implements fleet.Store.
func (s *Store) Agents(ctx context.Context) ([]fleet.Agent, error) {
	leave, err := s.enter(ctx, "Agents")
	if err != nil {
		return nil, err
	}
	defer leave()
	var all []fleet.Agent
	for _, a := range s.agents {
		if a.Status != fleet.Removed {
			all = append(all, copyOf(a))
		}
	}
	return all, nil
}

// InsertAgent implements fleet.Store.
func (s *Store) InsertAgent(ctx context.Context, a fleet.Agent) (fleet.Agent, error) {
	leave, err := s.enter(ctx, "InsertAgent")
	if err != nil {
		return fleet.Agent{}, err
	}
	defer leave()
	for _, other := range s.agents {
		if other.Status != fleet.Removed && (other.ID == a.ID || other.SPKI == a.SPKI) {
			return fleet.Agent{}, fault.New(fault.Conflict, "agent_exists", "The agent is enrolled already.").WithHint("Remove the old agent first.")
		}
	}
	a = copyOf(a)
	a.Num, a.Status, a.Revision = tasks.AgentNum(len(s.agents)+1), fleet.Enrolling, 1
	s.agents = append(s.agents, a)
	return copyOf(a), nil
}

// Add stores an agent as it is, for tests that need no pairing.
func (s *Store) Add(a fleet.Agent) fleet.Agent {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.Num, a.Revision = tasks.AgentNum(len(s.agents)+1), 1
	s.agents = append(s.agents, copyOf(a))
	return a
}

// Row gives a row as it is stored, removed ones included.
func (s *Store) Row(num tasks.AgentNum) fleet.Agent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return copyOf(s.agents[num-1])
}

// ConfirmAgent implements fleet.Store.
func (s *Store) ConfirmAgent(ctx context.Context, id uuid.UUID) (fleet.Agent, error) {
	return s.change(ctx, "ConfirmAgent", id, func(a *fleet.Agent) error {
		if a.Status == fleet.Enrolling {
			a.Status = fleet.Active
		}
		return nil
	})
}

func (s *Store) change(ctx context.Context, method string, id uuid.UUID, edit func(*fleet.Agent) error) (fleet.Agent, error) {
	leave, err := s.enter(ctx, method)
	if err != nil {
		return fleet.Agent{}, err
	}
	defer leave()
	a, err := s.live(id)
	if err != nil {
		return fleet.Agent{}, err
	}
	if err := edit(a); err != nil {
		return fleet.Agent{}, err
	}
	a.Revision++
	return copyOf(*a), nil
}

// DropEnrolling implements fleet.Store.
func (s *Store) DropEnrolling(ctx context.Context, before time.Time) error {
	leave, err := s.enter(ctx, "DropEnrolling")
	if err != nil {
		return err
	}
	defer leave()
	for i := range s.agents {
		if a := &s.agents[i]; a.Status == fleet.Enrolling && a.PairedAt.Before(before) {
			a.Status = fleet.Removed
		}
	}
	return nil
}

// ChangeAgent implements fleet.Store.
func (s *Store) ChangeAgent(ctx context.Context, id uuid.UUID, c fleet.Change, actor string) (fleet.Agent, error) {
	return s.change(ctx, "ChangeAgent", id, func(a *fleet.Agent) error {
		if c.Revision != 0 && c.Revision != a.Revision {
			return fault.New(fault.Precondition, "revision_changed", "The agent has changed.")
		}
		if c.Name != nil {
			a.Name = *c.Name
		}
		if c.Addresses != nil {
			a.Addresses = slices.Clone(*c.Addresses)
		}
		if c.Labels != nil {
			a.Labels = maps.Clone(*c.Labels)
		}
		if c.Paused != nil {
			a.PausedAt, a.PausedBy = time.Time{}, ""
			if *c.Paused {
				a.PausedAt, a.PausedBy = s.now(), actor
			}
		}
		return nil
	})
}

// SetStatus implements fleet.Store.
func (s *Store) SetStatus(ctx context.Context, id uuid.UUID, status fleet.Status, why, _ string) (fleet.Agent, error) {
	return s.change(ctx, "SetStatus", id, func(a *fleet.Agent) error {
		a.Status, a.StatusWhy = status, why
		return nil
	})
}

// SetSeen implements fleet.Store.
func (s *Store) SetSeen(ctx context.Context, num tasks.AgentNum, _ tasks.Lease, ledger uuid.UUID, version, hostname, os string) error {
	leave, err := s.enter(ctx, "SetSeen")
	if err != nil {
		return err
	}
	defer leave()
	a := &s.agents[num-1]
	a.LedgerID, a.Version, a.Hostname, a.OS = ledger, version, hostname, os
	return nil
}

// SetFacts implements fleet.Store.
func (s *Store) SetFacts(ctx context.Context, num tasks.AgentNum, facts json.RawMessage, at time.Time) error {
	leave, err := s.enter(ctx, "SetFacts")
	if err != nil {
		return err
	}
	defer leave()
	s.agents[num-1].Facts, s.agents[num-1].FactsAt = facts, at
	return nil
}

// ActiveCA implements fleet.Store.
func (s *Store) ActiveCA(ctx context.Context) (*fleet.CA, error) {
	leave, err := s.enter(ctx, "ActiveCA")
	if err != nil {
		return nil, err
	}
	defer leave()
	if s.ca == nil {
		return nil, nil
	}
	c := *s.ca
	return &c, nil
}

// InsertCA implements fleet.Store.
func (s *Store) InsertCA(ctx context.Context, ca fleet.CA) (bool, error) {
	leave, err := s.enter(ctx, "InsertCA")
	if err != nil {
		return false, err
	}
	defer leave()
	if s.ca != nil {
		return false, nil
	}
	s.ca = &ca
	return true, nil
}

// InsertEnrolmentToken implements fleet.Store.
func (s *Store) InsertEnrolmentToken(ctx context.Context, t fleet.EnrolmentToken) error {
	leave, err := s.enter(ctx, "InsertEnrolmentToken")
	if err != nil {
		return err
	}
	defer leave()
	s.tokens[t.ID] = t
	return nil
}

// UseEnrolmentToken implements fleet.Store.
func (s *Store) UseEnrolmentToken(ctx context.Context, id [8]byte, secretHash [32]byte) error {
	leave, err := s.enter(ctx, "UseEnrolmentToken")
	if err != nil {
		return err
	}
	defer leave()
	t, ok := s.tokens[id]
	switch {
	case !ok || t.SecretHash != secretHash:
		return fault.New(fault.NotFound, "unknown_token", "There is no such token.")
	case !s.now().Before(t.ExpiresAt):
		return fault.New(fault.Forbidden, "token_expired", "The token has expired.")
	case t.Uses >= t.MaxUses:
		return fault.New(fault.Forbidden, "token_used_up", "The token has been used up.")
	}
	t.Uses++
	s.tokens[id] = t
	return nil
}

// ReturnEnrolmentToken implements fleet.Store.
func (s *Store) ReturnEnrolmentToken(ctx context.Context, id [8]byte) error {
	leave, err := s.enter(ctx, "ReturnEnrolmentToken")
	if err != nil {
		return err
	}
	defer leave()
	t := s.tokens[id]
	t.Uses = max(0, t.Uses-1)
	s.tokens[id] = t
	return nil
}

// TokenUses gives how often the tokens were used in all.
func (s *Store) TokenUses() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, t := range s.tokens {
		n += t.Uses
	}
	return n
}

// RecordPairing implements fleet.Store.
func (s *Store) RecordPairing(ctx context.Context, p fleet.Pairing) error {
	leave, err := s.enter(ctx, "RecordPairing")
	if err != nil {
		return err
	}
	defer leave()
	s.pairings = slices.DeleteFunc(s.pairings, func(o fleet.Pairing) bool { return o.ID == p.ID })
	s.pairings = append(s.pairings, p)
	return nil
}

// Pairings implements fleet.Store.
func (s *Store) Pairings(ctx context.Context, limit int) ([]fleet.Pairing, error) {
	leave, err := s.enter(ctx, "Pairings")
	if err != nil {
		return nil, err
	}
	defer leave()
	all := slices.Clone(s.pairings)
	slices.SortStableFunc(all, func(a, b fleet.Pairing) int { return cmp.Compare(b.StartedAt.UnixNano(), a.StartedAt.UnixNano()) })
	return all[:min(limit, len(all))], nil
}
