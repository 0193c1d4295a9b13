package auth

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"uuid"

	"headgate/internal/fault"
)

// The kinds of principals.
const (
	KindUser       = "user"
	KindToken      = "token"
	KindController = "controller"
)

// Defaults of Config.
const (
	DefaultCacheTerm   = 900 * time.Millisecond // a revocation elsewhere holds within 1 s
	DefaultCacheSize   = 8192                   // about 2 MiB; more callers at once are lookups
	DefaultSessionTerm = 12 * time.Hour         // a working day
	DefaultLinkTerm    = 10 * time.Minute       // long enough to copy it to another window
	DefaultTouchEvery  = time.Minute            // last use is shown to the minute
	DefaultLookupTerm  = 2 * time.Second        // a caller who waits longer is better told to come back
	DefaultStaleTerm   = 5 * time.Minute        // an operator looks and Prometheus scrapes more often

	maxTokenName = 100 // characters
	maxTokenTerm = 365 * 24 * time.Hour
	touchTimeout = 5 * time.Second
)

// Config is what a Service needs. Only Store is required.
type Config struct {
	Store        Store
	Logger       *slog.Logger
	AllowedHosts []string // beside loopback; ".example.org" allows all names below
	SecureCookie bool     // a proxy ends TLS; over our own TLS it is always secure
	CookiePath   string   // where browsers send the session; "" = everywhere
	CacheTerm    time.Duration
	CacheSize    int
	SessionTerm  time.Duration
	LinkTerm     time.Duration
	TouchEvery   time.Duration

	// LookupTerm is how long a caller waits for the database to say who they
	// are. One whom it has named within StaleTerm waits a quarter of that, and
	// then is taken for the same, so that operators are not locked out of a
	// controller whose database is silent. While it answers in time, a
	// revocation holds within CacheTerm.
	LookupTerm time.Duration
	StaleTerm  time.Duration
}

// Service answers who is calling and what they may do. Safe for use by many
// goroutines.
type Service struct {
	cfg       Config
	log       *slog.Logger
	cache     *cache
	permitted permitted
	silence   silence
	now       func() time.Time
}

// New makes a Service.
func New(cfg Config) (*Service, error) {
	if cfg.Store == nil {
		return nil, fmt.Errorf("auth: Config.Store is missing")
	}
	if cfg.CookiePath == "" {
		cfg.CookiePath = "/"
	}
	cfg.CacheTerm = orDefault(cfg.CacheTerm, DefaultCacheTerm)
	cfg.CacheSize = orDefault(cfg.CacheSize, DefaultCacheSize)
	cfg.SessionTerm = orDefault(cfg.SessionTerm, DefaultSessionTerm)
	cfg.LinkTerm = orDefault(cfg.LinkTerm, DefaultLinkTerm)
	cfg.TouchEvery = orDefault(cfg.TouchEvery, DefaultTouchEvery)
	cfg.LookupTerm = orDefault(cfg.LookupTerm, DefaultLookupTerm)
	cfg.StaleTerm = orDefault(cfg.StaleTerm, DefaultStaleTerm)
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Service{
		cfg: cfg, log: log, cache: newCache(cfg), permitted: newPermitted(),
		now: func() time.Time { return time.Now().UTC() },
	}, nil
}

func orDefault[T int | time.Duration](v, def T) T {
	if v <= 0 {
		return def
	}
	return v
}

// Run stores now and then when tokens were last used, until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	tick := time.NewTicker(s.cfg.TouchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.touch(ctx)
		}
	}
}

func (s *Service) touch(ctx context.Context) {
	used := s.cache.takeUsed()
	if len(used) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, touchTimeout)
	defer cancel()
	if err := s.cfg.Store.TouchTokens(ctx, used); err != nil {
		s.log.Warn("last use of tokens not stored", "err", err)
	}
}

// Allowed says whether a principal holds a permission.
func (s *Service) Allowed(p Principal, perm Permission) bool {
	return perm == Public || s.permitted[p.Role][perm]
}

// Check refuses a caller without the permission, as a fault.Error that says
// what is missing.
func (s *Service) Check(ctx context.Context, perm Permission) error {
	if perm == Public {
		return nil
	}
	p := PrincipalFrom(ctx)
	if p.Kind == "" {
		return fault.New(fault.Unauthenticated, "no_credential", "This call needs a credential and the request carries none that is valid now.").
			WithHint("Send the header Authorization: Bearer with an API token, or sign in on the dashboard.")
	}
	if !s.Allowed(p, perm) {
		return forbidden(p, perm)
	}
	return nil
}

// NewToken makes an API token and gives its secret, which is shown once.
func (s *Service) NewToken(ctx context.Context, by Principal, name string, role Role, expires time.Time) (Token, string, error) {
	name = strings.TrimSpace(name)
	if name == "" || len(name) > maxTokenName || strings.ContainsFunc(name, isControl) {
		return Token{}, "", fault.Newf(fault.Invalid, "bad_name", "A token needs a name of 1 to %d characters without control characters.", maxTokenName).
			WithField("/name", "1 to 100 characters without control characters")
	}
	if err := checkTokenRole(by, role); err != nil {
		return Token{}, "", err
	}
	now := s.now()
	if !expires.IsZero() && (!expires.After(now) || expires.After(now.Add(maxTokenTerm))) {
		return Token{}, "", fault.New(fault.Invalid, "bad_expiry", "A token's expiry must lie in the future and at most 365 days ahead.").
			WithField("/expires_at", "must lie within the next 365 days")
	}
	secret := newTokenSecret()
	t, err := s.cfg.Store.EnsureToken(ctx, Token{
		ID: uuid.NewV7(), Name: name, Role: role, Hash: hashOf(secret), CreatedAt: now, CreatedBy: by.Actor(), ExpiresAt: expires.UTC(),
	})
	if err != nil {
		return Token{}, "", fmt.Errorf("store token: %w", err)
	}
	s.log.Info("token made", "token", t.ID.String(), "name", t.Name, "role", string(t.Role), "actor", by.Actor())
	return t, secret, nil
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f || r == '\uFFFD' }

// Tokens lists all tokens, newest first.
func (s *Service) Tokens(ctx context.Context) ([]Token, error) {
	all, err := s.cfg.Store.Tokens(ctx)
	if err != nil {
		return nil, fmt.Errorf("list tokens: %w", err)
	}
	return all, nil
}

// RevokeToken ends a token and the sessions that were opened with it: here at
// once, on other controllers within the cache's term.
func (s *Service) RevokeToken(ctx context.Context, by Principal, id uuid.UUID) error {
	if err := s.cfg.Store.RevokeToken(ctx, id); err != nil {
		return err
	}
	s.cache.drop(id)
	s.log.Info("token revoked", "token", id.String(), "actor", by.Actor())
	return nil
}

// EnsureUser gives the user of that name, made with the role if missing.
func (s *Service) EnsureUser(ctx context.Context, name string, role Role) (User, error) {
	return s.cfg.Store.EnsureUser(ctx, name, role)
}

func principalOf(t Token) Principal {
	return Principal{Kind: KindToken, ID: t.ID, Name: t.Name, Role: t.Role}
}

// usable refuses revoked and expired tokens.
func usable(t Token, now time.Time) error {
	if !t.RevokedAt.IsZero() {
		return fault.New(fault.Unauthenticated, "token_revoked", "This API token has been revoked.").
			WithHint("Ask an administrator for a new one.")
	}
	if !t.ExpiresAt.IsZero() && !now.Before(t.ExpiresAt) {
		return fault.New(fault.Unauthenticated, "token_expired", "This API token has expired.").
			WithHint("Ask an administrator for a new one.")
	}
	return nil
}

func wrongToken() error {
	return fault.New(fault.Unauthenticated, "invalid_token", "The API token in the Authorization header is not known here.").
		WithHint("Check that it was copied as a whole (it begins with hgt_ and has 53 characters) and belongs to this fleet.")
}
