package fleet

import (
	"encoding/json"
	"time"
	"uuid"

	"headgate/tasks"
)

// Status is how an agent's row stands in the database.
type Status string

// The statuses of an agent.
const (
	Enrolling   Status = "enrolling"   // certificate issued, not yet confirmed
	Active      Status = "active"      // may be given tasks
	Quarantined Status = "quarantined" // an operator must decide
	Removed     Status = "removed"     // kept for the history of its tasks
)

// Agent is one enrolled agent as the database keeps it.
type Agent struct {
	Num         tasks.AgentNum
	ID          uuid.UUID
	Name        string            // for people; need not be unique
	Addresses   []string          // host:port, tried in order; a hint, never identity
	Labels      map[string]string // for selection
	Status      Status
	StatusWhy   string // of quarantine, as a sentence; of an active agent, the ledger that was approved
	PausedAt    time.Time
	PausedBy    string
	SPKI        [32]byte // SHA-256 of the pinned public key
	CertSerial  string
	CertExpires time.Time
	LedgerID    uuid.UUID
	Hostname    string
	OS          string
	Version     string
	Facts       json.RawMessage // last result of core.inventory, or nil
	FactsAt     time.Time
	PairedAt    time.Time
	PairedBy    string
	Revision    int64 // rises with each change; ETag
}

// Health is what the live connection says.
type Health string

// The healths; the strings are used in REST and pages.
const (
	HealthConnecting  Health = "connecting"  // the first dial is on its way
	HealthConnected   Health = "connected"   // a session is up
	HealthUnreachable Health = "unreachable" // dials fail, or the session fell silent
	HealthQuarantined Health = "quarantined"
	HealthElsewhere   Health = "elsewhere" // another controller owns its shard
)

// Live is the state of an agent's connection now; memory only.
type Live struct {
	Health    Health
	Since     time.Time
	Address   string        // the one in use or tried last
	Cause     string        // stable code when not connected: refused, timeout, not_an_agent, other_agent, key_changed, certificate_expired, unknown_ca, stale_epoch, silent
	Sentence  string        // the cause in plain words with its numbers
	Failures  int           // dials failed since the last success
	NextTry   time.Time     // zero while connected
	RTT       time.Duration // of the last ping, 0 = none yet
	LastHeard time.Time
	ClockSkew *time.Duration // how far its clock is before ours, nil = not known
	Kinds     []KindOffer    // what the agent's policy allows
}

// KindOffer is a kind that an agent's policy allows.
type KindOffer struct {
	Name     string
	Programs []Program // cmd.run only
}

// Program is a program that an agent's policy allows cmd.run to start.
type Program struct {
	Name         string
	Description  string
	ParamsSchema json.RawMessage
}

// View is an agent with its connection, for lists and pages.
type View struct {
	Agent
	Live Live
}

// Change is a partial update by an operator; nil fields stay.
type Change struct {
	Name      *string
	Addresses *[]string
	Labels    *map[string]string
	Paused    *bool
	Revision  int64 // 0 = whatever it is now; otherwise must match
}

// Filter selects agents of a list.
type Filter struct {
	Health []Health
	Query  string // prefix of name, id or address
	Labels map[string]string
	After  string // keyset cursor over (name, id)
	Limit  int
}

// EnrolmentToken is a one-time secret that an agent was given to prove itself
// with. Only its id and limits are kept; the secret travels in the pair call.
type EnrolmentToken struct {
	ID         [8]byte
	SecretHash [32]byte // SHA-256 of the secret
	CreatedAt  time.Time
	CreatedBy  string
	ExpiresAt  time.Time
	MaxUses    int
	Uses       int
}

// Pairing is one run of the pairing protocol, for the history.
type Pairing struct {
	ID        uuid.UUID
	Address   string
	TokenID   [8]byte
	AgentID   uuid.UUID // Nil until the agent has proved itself
	Actor     string
	StartedAt time.Time
	State     string // running, paired, failed
	Detail    string // the cause as a sentence
}

// CA is a certificate authority of the fleet; its key is a file, never a row.
type CA struct {
	ID        uuid.UUID
	Fleet     string
	CertPEM   string
	State     string // active (staged, retired: CA rotation)
	CreatedAt time.Time
}
