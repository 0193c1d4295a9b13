package tasks

import (
	"context"
	"errors"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/kinds"
)

// Peers reaches the controllers that own what this one does not.
// internal/controller implements it over the controller port.
//
// An error is one of three: a fault.Error is the owner's own word; an
// *UnsentError says that nothing has reached it, so that nothing was done; any
// other means that the answer was lost, so that it may have been done. A peer
// never passes on what was passed on to it.
type Peers interface {
	// Store has the owner of a lease store tasks. The answer has one item for
	// each, in the order given; what is not stored carries an error.
	Store(ctx context.Context, to Lease, list []PeerInsert) ([]PeerStored, error)
	// Cancel has the owner end a task that is not completed.
	Cancel(ctx context.Context, to Lease, id ID, actor string) error
	// Explain asks the owner why tasks are not completed. The answer has one
	// item for each, in the order given; nil = the owner cannot say.
	Explain(ctx context.Context, to Lease, list []PeerTask) ([]*Waiting, error)
}

// UnsentError says that a call has not reached the other controller.
type UnsentError struct{ Err error }

// Error says so.
func (e *UnsentError) Error() string { return "tasks: the peer was not reached: " + e.Err.Error() }

// Unwrap gives the cause.
func (e *UnsentError) Unwrap() error { return e.Err }

// PeerInsert is a task that another controller has checked.
type PeerInsert struct {
	Agent     AgentNum       `json:"agent"`
	AgentID   uuid.UUID      `json:"agent_id"`
	Kind      string         `json:"kind"`
	Args      string         `json:"args"` // JSON text, kept to the byte
	Delivery  kinds.Delivery `json:"delivery"`
	Priority  int            `json:"priority"`
	Timeout   time.Duration  `json:"timeout_ns"`
	CreatedAt time.Time      `json:"created_at"`
	NotBefore time.Time      `json:"not_before,omitzero"`
	ExpiresAt time.Time      `json:"expires_at"`
	Actor     string         `json:"actor"`
	RetryOf   ID             `json:"retry_of,omitzero"`
	RunID     uuid.UUID      `json:"run_id,omitzero"`
	Replaces  bool           `json:"replaces,omitzero"`
	Key       *PeerKey       `json:"key,omitempty"`
}

// PeerKey is the idempotency key under which the task is stored, with its
// place in the request.
type PeerKey struct {
	Principal string `json:"principal"`
	Route     string `json:"route"`
	Key       string `json:"key"`
	Hash      []byte `json:"hash"`
	Lasting   bool   `json:"lasting,omitzero"`
	Index     int    `json:"index"`
}

// PeerStored is what became of a PeerInsert. The zero Err means that it is on
// disk, or was there before (Replay).
type PeerStored struct {
	ID        ID         `json:"id,omitzero"`
	Replay    bool       `json:"replay,omitzero"`
	StartedAt time.Time  `json:"started_at,omitzero"`
	Waiting   *Waiting   `json:"waiting,omitempty"`
	Err       *PeerFault `json:"err,omitempty"`
}

// PeerFault is a fault.Error on its way between controllers.
type PeerFault struct {
	Kind    fault.Kind `json:"kind"`
	Code    string     `json:"code"`
	Message string     `json:"message"`
	Hint    string     `json:"hint,omitempty"`
}

func faultOf(err error) *PeerFault {
	f, ok := errors.AsType[*fault.Error](err)
	if !ok {
		f = fault.Wrap(err, fault.Internal, "internal", "The controller that owns the agent met an error that it did not expect.")
	}
	return &PeerFault{Kind: f.Kind, Code: f.Code, Message: f.Message, Hint: f.Hint}
}

func (f *PeerFault) fault() *fault.Error {
	return &fault.Error{Kind: f.Kind, Code: f.Code, Message: f.Message, Hint: f.Hint}
}

// PeerTask is what an owner must know of a task to explain why it waits.
type PeerTask struct {
	ID        ID            `json:"id"`
	Agent     AgentNum      `json:"agent"`
	State     State         `json:"state"`
	Attempt   int           `json:"attempt"`
	Timeout   time.Duration `json:"timeout_ns"`
	CreatedAt time.Time     `json:"created_at"`
	NotBefore time.Time     `json:"not_before,omitzero"`
	StartedAt time.Time     `json:"started_at,omitzero"`
}

func peerInsert(s *submission) PeerInsert {
	x := &s.ins
	p := PeerInsert{
		Agent: x.Agent, AgentID: s.agent.ID, Kind: x.Kind, Args: x.Args, Delivery: x.Delivery, Priority: x.Priority, Timeout: x.Timeout,
		CreatedAt: x.CreatedAt, NotBefore: x.NotBefore, ExpiresAt: x.ExpiresAt, Actor: x.Actor, RetryOf: x.RetryOf, RunID: x.RunID,
		Replaces: s.replaces,
	}
	if k := x.Key; k != nil {
		p.Key = &PeerKey{Principal: k.Principal, Route: k.Route, Key: k.Key, Hash: k.Hash[:], Lasting: k.Lasting, Index: x.KeyIndex}
	}
	return p
}

// submissionOf is the way back. A peer has checked what it sends; here it only
// must be about an agent that we know under both of its names.
func (m *Manager) submissionOf(p *PeerInsert) (*submission, error) {
	a, ok := m.known(p.Agent)
	if !ok || a.ID != p.AgentID {
		return nil, fault.New(fault.Unavailable, codeNotOwner, "The controller that owns this agent has not read its row yet.").
			WithHint("Send the request again in a few seconds.")
	}
	s := &submission{agent: a, shard: a.Shard(), replaces: p.Replaces, ins: Insert{
		Agent: p.Agent, Kind: p.Kind, Args: p.Args, Delivery: p.Delivery, Priority: p.Priority, Timeout: p.Timeout,
		CreatedAt: p.CreatedAt, NotBefore: p.NotBefore, ExpiresAt: p.ExpiresAt, Actor: p.Actor, RetryOf: p.RetryOf, RunID: p.RunID,
	}}
	if k := p.Key; k != nil {
		if len(k.Hash) != len(Idempotency{}.Hash) {
			return nil, fault.New(fault.Invalid, "invalid_idempotency_key", "The key of a task from another controller has no hash.")
		}
		s.ins.Key = &Idempotency{Principal: k.Principal, Route: k.Route, Key: k.Key, Hash: [32]byte(k.Hash), Lasting: k.Lasting}
		s.ins.KeyIndex = k.Index
	}
	return s, nil
}

// StoreForPeer stores tasks that another controller has checked and passed on
// because this one owns their agents. What this one does not own is refused
// (owner_unreachable), never passed on.
func (s *Service) StoreForPeer(ctx context.Context, list []PeerInsert) ([]PeerStored, error) {
	out := make([]PeerStored, len(list))
	var subs []*submission
	var places []int
	for i := range list {
		sub, err := s.m.submissionOf(&list[i])
		if err != nil {
			out[i].Err = faultOf(err)
			continue
		}
		subs, places = append(subs, sub), append(places, i)
	}
	if len(subs) == 0 {
		return out, nil
	}
	var size int64
	for _, sub := range subs {
		size += sub.size()
	}
	if err := s.m.admit(len(subs), size); err != nil {
		return nil, err
	}
	defer s.m.discharge(len(subs), size)
	for n, end := range s.m.storeHere(ctx, subs) {
		o := &out[places[n]]
		if end.err != nil {
			o.Err = faultOf(end.err)
			continue
		}
		o.ID, o.Replay, o.StartedAt = end.id, end.replay, end.startedAt
	}
	if len(list) == 1 && out[0].Err == nil && out[0].StartedAt.IsZero() && !out[0].Replay {
		x := &subs[0].ins
		out[0].Waiting = s.m.Explain(&Task{
			ID: x.ID, Agent: AgentRef{Num: x.Agent}, State: StateNew, CreatedAt: x.CreatedAt, NotBefore: x.NotBefore, Timeout: x.Timeout,
		})
	}
	return out, nil
}

// CancelForPeer is Cancel for another controller: what this one does not own
// is refused, never passed on.
func (s *Service) CancelForPeer(ctx context.Context, id ID, actor string) error {
	ctx, cancel := context.WithTimeout(ctx, cancelWait)
	defer cancel()
	return s.cancelHere(ctx, id, actor)
}

// ExplainForPeer says why tasks of this controller's agents are not completed.
func (s *Service) ExplainForPeer(list []PeerTask) []*Waiting {
	out := make([]*Waiting, len(list))
	for i, p := range list {
		w := s.m.Explain(&Task{
			ID: p.ID, Agent: AgentRef{Num: p.Agent}, State: p.State, Attempt: p.Attempt, Timeout: p.Timeout,
			CreatedAt: p.CreatedAt, NotBefore: p.NotBefore, StartedAt: p.StartedAt,
		})
		if w != nil && w.Cause != CauseElsewhere {
			out[i] = w
		}
	}
	return out
}
