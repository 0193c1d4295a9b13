package handlers

import (
	"context"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"headgate/internal/auth"
)

// The headers by which a proxy says for whom it speaks. Anybody can send them;
// they are read only when the connection comes from a trusted proxy.
const (
	headerForwardedFor   = "X-Forwarded-For"
	headerForwardedProto = "X-Forwarded-Proto"
	headerForwardedHost  = "X-Forwarded-Host"
)

// maxProxyChain is how many proxies one request may pass; a longer list is
// somebody's attempt to keep us busy.
const maxProxyChain = 32

// proxies are the networks of the proxies that are trusted.
type proxies []netip.Prefix

func (p proxies) trust(a netip.Addr) bool {
	return slices.ContainsFunc(p, func(n netip.Prefix) bool { return n.Contains(a) })
}

// client says where a request comes from: the peer of the connection or, when
// that is a trusted proxy, the last address in X-Forwarded-For that is none.
// What stands before that address was written by the client or by somebody
// unknown, and is not read.
func (p proxies) client(r *http.Request) auth.Client {
	c := auth.Client{Addr: peerOf(r), Secure: r.TLS != nil}
	if len(p) == 0 || !p.trust(c.Addr) {
		return c
	}
	c.Via = c.Addr
	c.Addr = p.forwardedFor(r.Header, c.Addr)
	c.Secure = c.Secure || strings.EqualFold(lastOf(r.Header, headerForwardedProto), "https")
	return c
}

// forwardedFor walks the chain of proxies back from the nearest one. It stops
// at what is no address: whoever passed that on is the last one known.
func (p proxies) forwardedFor(h http.Header, nearest netip.Addr) netip.Addr {
	known, rest := nearest, strings.Join(h[headerForwardedFor], ",")
	for range maxProxyChain {
		comma := strings.LastIndexByte(rest, ',')
		addr, ok := forwardedAddr(rest[comma+1:])
		if !ok {
			break
		}
		known = addr
		if comma < 0 || !p.trust(addr) {
			break
		}
		rest = rest[:comma]
	}
	return known
}

// forwardedAddr reads one element of X-Forwarded-For; some proxies add the
// port, and then brackets.
func forwardedAddr(text string) (netip.Addr, bool) {
	text = strings.TrimSpace(text)
	a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil {
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			return netip.Addr{}, false
		}
		a = ap.Addr()
	}
	return a.Unmap().WithZone(""), true
}

// lastOf gives what the nearest proxy said: the last element of the last line.
func lastOf(h http.Header, name string) string {
	lines := h[name]
	if len(lines) == 0 {
		return ""
	}
	last := lines[len(lines)-1]
	return strings.TrimSpace(last[strings.LastIndexByte(last, ',')+1:])
}

// peerOf gives the address at the other end of the connection.
func peerOf(r *http.Request) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{} // a unix socket has none
	}
	return ap.Addr().Unmap().WithZone("")
}

// located gives the request as its client meant it: its context says where it
// comes from, its host is the one in the client's address line, and its path
// has no base path. The host is still checked against the names allowed. No
// proxy stands before the controller port, so nobody speaks for others there.
func (s *server) located(r *http.Request, c *call) *http.Request {
	trusted := proxies(s.cfg.TrustedProxies)
	if len(trusted) > 0 && s.cfg.OnControllerPort(r) {
		trusted = nil
	}
	c.client = trusted.client(r)
	r = r.WithContext(auth.WithClient(context.WithValue(r.Context(), callKey{}, c), c.client))
	if c.client.Via.IsValid() {
		if host := lastOf(r.Header, headerForwardedHost); host != "" {
			r.Host = host
		}
	}
	s.stripBase(r)
	return r
}
