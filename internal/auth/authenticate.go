package auth

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"uuid"

	"headgate/internal/fault"
)

// controllerSuffix ends the server name in every controller's certificate;
// agents have another one, so that an agent is never taken for a controller.
const controllerSuffix = ".controller.headgate.internal"

// Authenticate says who sent a request: a controller by its certificate, a
// bearer token, or a session cookie. No credential, or a cookie that is no
// longer valid, gives the zero Principal; a bearer token that is not valid is
// an error, so that nobody takes a public answer for a success.
func (s *Service) Authenticate(r *http.Request) (Principal, error) {
	if header := r.Header.Get("Authorization"); header != "" {
		return s.bearer(r.Context(), header)
	}
	if p, ok := controllerOf(r.TLS); ok {
		return p, nil
	}
	c, err := r.Cookie(CookieName)
	if err != nil || c.Value == "" {
		return Principal{}, nil
	}
	p, err := s.session(r.Context(), c.Value)
	if fault.Is(err, fault.Unauthenticated) {
		return Principal{}, nil
	}
	return p, err
}

func (s *Service) bearer(ctx context.Context, header string) (Principal, error) {
	scheme, secret, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return Principal{}, fault.New(fault.Unauthenticated, "wrong_scheme", "The Authorization header must use the scheme Bearer.").
			WithHint("Send Authorization: Bearer followed by an API token.")
	}
	return s.token(ctx, strings.TrimSpace(secret))
}

// token gives the principal of an API token.
func (s *Service) token(ctx context.Context, secret string) (Principal, error) {
	if !wellFormed(secret) {
		return Principal{}, wrongToken()
	}
	return s.lookup(ctx, hashOf(secret), s.loadToken)
}

// session gives the principal of a session cookie.
func (s *Service) session(ctx context.Context, value string) (Principal, error) {
	return s.lookup(ctx, hashOf(value), s.loadSession)
}

func (s *Service) loadToken(ctx context.Context, hash [32]byte) (known, error) {
	t, err := s.cfg.Store.TokenByHash(ctx, hash)
	if fault.Is(err, fault.NotFound) {
		s.cache.unkeep(hash)
		return known{}, wrongToken()
	}
	if err != nil {
		return known{}, fmt.Errorf("look up token: %w", err)
	}
	if err := usable(t, s.now()); err != nil {
		s.cache.unkeep(hash)
		return known{}, err
	}
	return known{principalOf(t), t.ExpiresAt}, nil
}

// controllerOf gives the controller whose verified certificate the connection
// carries.
func controllerOf(state *tls.ConnectionState) (Principal, bool) {
	if state == nil || len(state.VerifiedChains) == 0 || len(state.PeerCertificates) == 0 {
		return Principal{}, false
	}
	for _, name := range state.PeerCertificates[0].DNSNames {
		label, ok := strings.CutSuffix(name, controllerSuffix)
		if !ok {
			continue
		}
		if id, err := uuid.Parse(label); err == nil {
			return Principal{Kind: KindController, ID: id, Name: label, Role: Peer}, true
		}
	}
	return Principal{}, false
}
