package auth

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"headgate/internal/fault"
)

// Refuse writes an error answer; the API and the pages each have their own.
type Refuse func(w http.ResponseWriter, r *http.Request, err error)

type principalKey struct{}

// PrincipalFrom gives the caller that Middleware found, or the zero Principal.
func PrincipalFrom(ctx context.Context) Principal {
	p, _ := ctx.Value(principalKey{}).(Principal)
	return p
}

// WithPrincipal puts a caller into a context.
func WithPrincipal(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// Middleware checks the Host header, refuses cross-site writes by browsers,
// and puts the caller into the context. It demands no permission; Require does.
func (s *Service) Middleware(refuse Refuse) func(http.Handler) http.Handler {
	crossOrigin := http.NewCrossOriginProtection()
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !s.hostAllowed(r) {
				refuse(w, r, wrongHost())
				return
			}
			// A bearer token is never sent by a browser on its own; all else
			// may be a page of another site that uses the visitor's cookie.
			if r.Header.Get("Authorization") == "" && crossOrigin.Check(r) != nil {
				refuse(w, r, crossSite())
				return
			}
			p, err := s.Authenticate(r)
			if err != nil {
				refuse(w, r, err)
				return
			}
			if p.Kind != "" {
				r = r.WithContext(WithPrincipal(r.Context(), p))
			}
			next.ServeHTTP(w, r)
		})
	}
}

// Require refuses callers without the permission.
func (s *Service) Require(perm Permission, refuse Refuse) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := s.Check(r.Context(), perm); err != nil {
				refuse(w, r, err)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

// hostAllowed accepts loopback names, names of controllers, the configured
// names, and the very address that the connection came in at: a foreign name
// that points here (DNS rebinding) is none of them.
func (s *Service) hostAllowed(r *http.Request) bool {
	host := hostname(r.Host)
	if host == "localhost" || strings.HasSuffix(host, ".localhost") || strings.HasSuffix(host, controllerSuffix) {
		return true // no public name server can give these out
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip.Unmap().IsLoopback() || ip.Unmap() == localIP(r.Context()) {
			return true
		}
	}
	for _, allowed := range s.cfg.AllowedHosts {
		allowed = strings.ToLower(allowed)
		if host == hostname(allowed) || strings.HasPrefix(allowed, ".") && strings.HasSuffix(host, allowed) {
			return true
		}
	}
	return false
}

// hostname gives a Host header without its port, in lower case.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

func localIP(ctx context.Context) netip.Addr {
	addr, ok := ctx.Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return netip.Addr{}
	}
	ap, err := netip.ParseAddrPort(addr.String())
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr().Unmap()
}

// CodeWrongHost is the code of a refused Host header; it has its own HTTP
// status, 421.
const CodeWrongHost = "wrong_host"

func wrongHost() error {
	return fault.New(fault.Forbidden, CodeWrongHost, "The Host header of the request names none of this controller's names.").
		WithHint("Use the address that headgate printed, or add the name to allowed_hosts in the configuration.")
}

func crossSite() error {
	return fault.New(fault.Forbidden, "cross_site", "The request comes from a page of another site and was refused.").
		WithHint("Send it from the dashboard itself, or use an API token.")
}
