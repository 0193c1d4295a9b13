package fleet

import (
	"context"
	"encoding/json"
	"time"
	"uuid"

	"headgate/tasks"
)

// Store is fleet's port to the database; internal/store implements it.
// Errors that users may see are fault.Error.
type Store interface {
	// Agents gives every agent that is not removed.
	Agents(ctx context.Context) ([]Agent, error)
	// InsertAgent stores a new agent with status Enrolling and gives its
	// number. A known id with another key, or a known key, is a Conflict
	// (agent_exists).
	InsertAgent(ctx context.Context, a Agent) (Agent, error)
	// ConfirmAgent makes an enrolling agent active.
	ConfirmAgent(ctx context.Context, id uuid.UUID) (Agent, error)
	// DropEnrolling removes agents that stayed enrolling since before.
	DropEnrolling(ctx context.Context, before time.Time) error
	// ChangeAgent applies an operator's change; NotFound (unknown_agent) or
	// Precondition (revision_changed).
	ChangeAgent(ctx context.Context, id uuid.UUID, c Change, actor string) (Agent, error)
	// SetStatus quarantines, re-activates or removes an agent.
	SetStatus(ctx context.Context, id uuid.UUID, status Status, why, actor string) (Agent, error)
	// SetSeen stores what an agent said of itself in Welcome, in a session under
	// that lease. Unavailable (lease_lost) when it is not held any more: what
	// was heard under it may be old.
	SetSeen(ctx context.Context, num tasks.AgentNum, under tasks.Lease, ledger uuid.UUID, version, hostname, os string) error
	// SetFacts stores the result of core.inventory.
	SetFacts(ctx context.Context, num tasks.AgentNum, facts json.RawMessage, at time.Time) error

	// ActiveCA gives the fleet's CA, or nil when there is none yet.
	ActiveCA(ctx context.Context) (*CA, error)
	// InsertCA stores the first CA; false when another one was there first.
	InsertCA(ctx context.Context, ca CA) (bool, error)

	// InsertEnrolmentToken stores a token's id, hash and limits.
	InsertEnrolmentToken(ctx context.Context, t EnrolmentToken) error
	// UseEnrolmentToken counts one use before the token is tried; NotFound
	// (unknown_token), Forbidden (token_expired, token_used_up).
	UseEnrolmentToken(ctx context.Context, id [8]byte, secretHash [32]byte) error
	// ReturnEnrolmentToken takes a use back when no proof was attempted.
	ReturnEnrolmentToken(ctx context.Context, id [8]byte) error
	// RecordPairing inserts or updates a row of the pairing history.
	RecordPairing(ctx context.Context, p Pairing) error
	// Pairings gives the newest rows of the pairing history.
	Pairings(ctx context.Context, limit int) ([]Pairing, error)
}
