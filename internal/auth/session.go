package auth

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"
	"uuid"

	"headgate/internal/fault"
)

// CookieName is the name of the session cookie.
const CookieName = "headgate_session"

// tokenUser begins the name of the user behind a session that was opened with
// an API token; the token's id follows. Such a session lives and dies with its
// token and has exactly the token's role.
const tokenUser = "token:"

// NewSignInLink makes a one-time code that signs a user in. It is spent by a
// POST, never by opening an address, so that a mail scanner or a preview
// cannot use it up.
func (s *Service) NewSignInLink(ctx context.Context, user User) (code string, expires time.Time, err error) {
	code = newRandomText()
	expires = s.now().Add(s.cfg.LinkTerm)
	if err := s.cfg.Store.InsertSignInLink(ctx, hashOf(code), user.ID, expires); err != nil {
		return "", time.Time{}, fmt.Errorf("store sign-in link: %w", err)
	}
	return code, expires, nil
}

// SignInWithCode spends a one-time code and opens a session; value belongs
// into the cookie.
func (s *Service) SignInWithCode(ctx context.Context, code string) (value string, sess Session, err error) {
	user, err := s.cfg.Store.UseSignInLink(ctx, hashOf(strings.TrimSpace(code)))
	if fault.Is(err, fault.NotFound) {
		return "", Session{}, fault.New(fault.Unauthenticated, "link_spent", "This sign-in link has been used already, has expired, or is not complete.").
			WithHint("Ask for a new link (headgate prints one at its start), or paste an API token.")
	}
	if err != nil {
		return "", Session{}, fmt.Errorf("use sign-in link: %w", err)
	}
	if user.Disabled {
		return "", Session{}, userDisabled()
	}
	return s.open(ctx, user, s.now().Add(s.cfg.SessionTerm))
}

// SignInWithToken opens a session for the holder of an API token.
func (s *Service) SignInWithToken(ctx context.Context, secret string) (value string, sess Session, err error) {
	secret = strings.TrimSpace(secret)
	who, err := s.token(ctx, secret)
	if err != nil {
		return "", Session{}, err
	}
	e, _ := s.cache.get(hashOf(secret), s.now())
	if e == nil || e.err != nil {
		return "", Session{}, cannotCheck(errSilent) // known from its file alone
	}
	user, err := s.cfg.Store.EnsureUser(ctx, tokenUser+who.ID.String(), who.Role)
	if err != nil {
		return "", Session{}, fmt.Errorf("make user of token: %w", err)
	}
	expires := s.now().Add(s.cfg.SessionTerm)
	if !e.expires.IsZero() && e.expires.Before(expires) {
		expires = e.expires
	}
	return s.open(ctx, user, expires)
}

func (s *Service) open(ctx context.Context, user User, expires time.Time) (string, Session, error) {
	value := newRandomText()
	sess := Session{Hash: hashOf(value), User: user, CreatedAt: s.now(), ExpiresAt: expires}
	if err := s.cfg.Store.InsertSession(ctx, sess); err != nil {
		return "", Session{}, fmt.Errorf("store session: %w", err)
	}
	s.log.Info("signed in", "user", user.Name, "role", string(user.Role), "remote", ClientFrom(ctx).Addr)
	return value, sess, nil
}

// SignOut ends the session of a cookie value; an unknown one is no error.
func (s *Service) SignOut(ctx context.Context, value string) error {
	err := s.cfg.Store.DeleteSession(ctx, hashOf(value))
	if err != nil && !fault.Is(err, fault.NotFound) {
		return fmt.Errorf("delete session: %w", err)
	}
	s.cache.drop(uuid.Nil())
	return nil
}

func (s *Service) loadSession(ctx context.Context, hash [32]byte) (known, error) {
	sess, err := s.cfg.Store.SessionByHash(ctx, hash)
	if fault.Is(err, fault.NotFound) || err == nil && !s.now().Before(sess.ExpiresAt) {
		return known{}, fault.New(fault.Unauthenticated, "session_ended", "The session has ended.").WithHint("Sign in again.")
	}
	if err != nil {
		return known{}, fmt.Errorf("look up session: %w", err)
	}
	if sess.User.Disabled {
		return known{}, userDisabled()
	}
	if id, ok := strings.CutPrefix(sess.User.Name, tokenUser); ok {
		who, err := s.tokenSession(ctx, id)
		return known{who, sess.ExpiresAt}, err
	}
	return known{Principal{Kind: KindUser, ID: sess.User.ID, Name: sess.User.Name, Role: sess.User.Role}, sess.ExpiresAt}, nil
}

// tokenSession gives the principal of the token that a session was opened
// with, as long as the token itself is usable. The session ends no later than
// its token.
func (s *Service) tokenSession(ctx context.Context, id string) (Principal, error) {
	all, err := s.cfg.Store.Tokens(ctx)
	if err != nil {
		return Principal{}, fmt.Errorf("look up token of session: %w", err)
	}
	for _, t := range all {
		if t.ID.String() == id {
			if err := usable(t, s.now()); err != nil {
				return Principal{}, err
			}
			return principalOf(t), nil
		}
	}
	return Principal{}, wrongToken()
}

func userDisabled() error {
	return fault.New(fault.Unauthenticated, "user_disabled", "This user has been disabled.").WithHint("Ask an administrator.")
}

// SetCookie puts a session into the browser. Secure is set whenever the
// request came over TLS, or a proxy in front ends it.
func (s *Service) SetCookie(w http.ResponseWriter, r *http.Request, value string, sess Session) {
	http.SetCookie(w, s.cookie(r, value, int(sess.ExpiresAt.Sub(s.now()).Seconds())))
}

// ClearCookie removes the session from the browser.
func (s *Service) ClearCookie(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, s.cookie(r, "", -1))
}

func (s *Service) cookie(r *http.Request, value string, maxAge int) *http.Cookie {
	return &http.Cookie{
		Name: CookieName, Value: value, Path: s.cfg.CookiePath, MaxAge: maxAge,
		HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: s.Secure(r),
	}
}

// SessionPrincipal gives whom a cookie value stands for.
func (s *Service) SessionPrincipal(ctx context.Context, value string) (Principal, error) {
	return s.session(ctx, value)
}
