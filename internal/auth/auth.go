package auth

import (
	"context"
	"time"
	"uuid"
)

// Permission is what a route demands. Every route is registered with one.
type Permission string

// The permissions. Public needs no credential at all.
const (
	Public       Permission = "public"
	ReadTasks    Permission = "tasks:read"
	SubmitTasks  Permission = "tasks:submit"
	CancelTasks  Permission = "tasks:cancel"
	ReadAgents   Permission = "agents:read"
	ManageAgents Permission = "agents:manage"
	PairAgents   Permission = "agents:pair"
	PingAgents   Permission = "agents:ping"
	ReadStatus   Permission = "status:read"
	ReadMetrics  Permission = "metrics:read"
	ManageTokens Permission = "tokens:manage"
	OwnSession   Permission = "session:own" // any signed-in principal
	CallPeer     Permission = "controller:peer"
)

// Role is a named set of permissions.
type Role string

// The roles. The trust work adds fleet-admin and auditor and label scopes.
const (
	Viewer   Role = "viewer"
	Operator Role = "operator"
	Admin    Role = "admin"
	Metrics  Role = "metrics" // tokens for Prometheus
	Peer     Role = "peer"    // controller certificates
)

// Principal is who is calling.
type Principal struct {
	Kind string    // "user", "token", "controller"
	ID   uuid.UUID // of the user, token or controller
	Name string    // for people and the actor column
	Role Role
}

// Actor gives the text stored with tasks and changes, for example "token:up".
func (p Principal) Actor() string { return p.Kind + ":" + p.Name }

// User is a person.
type User struct {
	ID        uuid.UUID
	Name      string
	Role      Role
	CreatedAt time.Time
	Disabled  bool
}

// Token is an API token as lists show it; its secret is shown once.
type Token struct {
	ID         uuid.UUID
	Name       string
	Role       Role
	Hash       [32]byte
	CreatedAt  time.Time
	CreatedBy  string
	ExpiresAt  time.Time // zero = never
	LastUsedAt time.Time
	RevokedAt  time.Time
}

// Session is a signed-in browser.
type Session struct {
	Hash      [32]byte // SHA-256 of the cookie's value
	User      User
	CreatedAt time.Time
	ExpiresAt time.Time
}

// Store is auth's port to the database; internal/store implements it.
type Store interface {
	// EnsureUser gives the user of that name, made with the role if missing.
	EnsureUser(ctx context.Context, name string, role Role) (User, error)
	// EnsureToken stores a token unless one with that hash exists already.
	EnsureToken(ctx context.Context, t Token) (Token, error)
	// Tokens gives all tokens, newest first.
	Tokens(ctx context.Context) ([]Token, error)
	// TokenByHash gives a token; NotFound when there is none.
	TokenByHash(ctx context.Context, hash [32]byte) (Token, error)
	// RevokeToken ends a token at once.
	RevokeToken(ctx context.Context, id uuid.UUID) error
	// TouchTokens stores when tokens were last used, at most once a minute.
	TouchTokens(ctx context.Context, used map[uuid.UUID]time.Time) error

	// InsertSession stores a session.
	InsertSession(ctx context.Context, s Session) error
	// SessionByHash gives a session with its user; NotFound when there is none
	// or it has expired.
	SessionByHash(ctx context.Context, hash [32]byte) (Session, error)
	// DeleteSession signs out.
	DeleteSession(ctx context.Context, hash [32]byte) error

	// InsertSignInLink stores a one-time link for a user.
	InsertSignInLink(ctx context.Context, hash [32]byte, user uuid.UUID, expires time.Time) error
	// UseSignInLink spends a link and gives its user; NotFound when it is
	// unknown, spent or expired. Two callers never both succeed.
	UseSignInLink(ctx context.Context, hash [32]byte) (User, error)
}
