package auth

import (
	"context"
	"net/http"
	"net/netip"
)

// Client is where a request comes from, as far as proxies may say. Whose word
// is taken is decided where the context is made.
type Client struct {
	Addr   netip.Addr // of the client, unmapped; invalid when nobody says
	Via    netip.Addr // of the trusted proxy between; invalid = there is none
	Secure bool       // it speaks TLS, to us or to that proxy
}

type clientKey struct{}

// WithClient puts where a request comes from into its context.
func WithClient(ctx context.Context, c Client) context.Context {
	return context.WithValue(ctx, clientKey{}, c)
}

// ClientFrom gives where the request of a context comes from, or the zero
// Client.
func ClientFrom(ctx context.Context) Client {
	c, _ := ctx.Value(clientKey{}).(Client)
	return c
}

// Secure says whether the browser of a request speaks TLS, be it to a proxy:
// cookies then carry Secure, and addresses begin with https.
func (s *Service) Secure(r *http.Request) bool {
	return r.TLS != nil || s.cfg.SecureCookie || ClientFrom(r.Context()).Secure
}
