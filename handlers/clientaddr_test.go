package handlers_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"headgate/handlers"
	"headgate/internal/auth"
)

// seen is what a handler learns about the client of a request.
type seen struct {
	Addr, Via netip.Addr
	Secure    bool
	Host      string
}

// behind makes a handler that tells what it sees, behind the proxies named.
func behind(t *testing.T, trusted ...string) func(remote string, header http.Header) seen {
	t.Helper()
	var networks []netip.Prefix
	for _, n := range trusted {
		networks = append(networks, netip.MustParsePrefix(n))
	}
	r := newRig(t, func(cfg *handlers.Config) {
		cfg.TrustedProxies = networks
		cfg.Web = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c := auth.ClientFrom(r.Context())
			_ = json.NewEncoder(w).Encode(seen{c.Addr, c.Via, c.Secure, r.Host})
		})
	})
	r.public.Store(true)
	return func(remote string, header http.Header) seen {
		t.Helper()
		req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/", nil)
		req.RemoteAddr = remote
		for name, values := range header {
			req.Header[name] = values
		}
		w := httptest.NewRecorder()
		r.handler.ServeHTTP(w, req)
		var s seen
		if err := json.Unmarshal(w.Body.Bytes(), &s); err != nil {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		return s
	}
}

func forwarded(lines ...string) http.Header { return http.Header{"X-Forwarded-For": lines} }

func TestOnlyTrustedProxiesNameTheClient(t *testing.T) {
	t.Parallel()
	ask := behind(t, "10.0.0.0/8", "fd00::/8", "192.0.2.7/32")
	for name, c := range map[string]struct {
		remote string
		lines  []string
		want   string
	}{
		"no header":                        {"198.51.100.9:1", nil, "198.51.100.9"},
		"header of a stranger":             {"198.51.100.9:1", []string{"203.0.113.5"}, "198.51.100.9"},
		"header of a neighbour of a proxy": {"192.0.2.8:1", []string{"203.0.113.5"}, "192.0.2.8"},
		"proxy":                            {"10.1.2.3:1", []string{"203.0.113.5"}, "203.0.113.5"},
		"proxy that says nothing":          {"10.1.2.3:1", nil, "10.1.2.3"},
		"proxy over mapped IPv4":           {"[::ffff:10.1.2.3]:1", []string{"203.0.113.5"}, "203.0.113.5"},
		"mapped client":                    {"10.1.2.3:1", []string{"::ffff:203.0.113.5"}, "203.0.113.5"},
		"proxy over IPv6":                  {"[fd00::1]:1", []string{"2001:db8::5"}, "2001:db8::5"},
		"client with port":                 {"10.1.2.3:1", []string{"203.0.113.5:4711"}, "203.0.113.5"},
		"IPv6 client with port":            {"10.1.2.3:1", []string{"[2001:db8::5]:4711"}, "2001:db8::5"},
		"IPv6 client in brackets":          {"10.1.2.3:1", []string{"[2001:db8::5]"}, "2001:db8::5"},
		"client with a zone":               {"10.1.2.3:1", []string{"fe80::1%eth0"}, "fe80::1"},
		"client that wrote one itself":     {"10.1.2.3:1", []string{"127.0.0.1, 203.0.113.5"}, "203.0.113.5"},
		"client that poses as a proxy":     {"10.1.2.3:1", []string{"1.2.3.4, 10.9.9.9, 203.0.113.5"}, "203.0.113.5"},
		"two proxies":                      {"10.1.2.3:1", []string{"1.2.3.4, 203.0.113.5, 192.0.2.7"}, "203.0.113.5"},
		"two proxies, two lines":           {"10.1.2.3:1", []string{"1.2.3.4, 203.0.113.5", "192.0.2.7"}, "203.0.113.5"},
		"spoofed line before the proxy's":  {"10.1.2.3:1", []string{"1.2.3.4", "203.0.113.5"}, "203.0.113.5"},
		"only proxies":                     {"10.1.2.3:1", []string{"10.4.4.4, 192.0.2.7"}, "10.4.4.4"},
		"garbage":                          {"10.1.2.3:1", []string{"unknown"}, "10.1.2.3"},
		"garbage before the client":        {"10.1.2.3:1", []string{"<script>, 203.0.113.5"}, "203.0.113.5"},
		"garbage behind the client":        {"10.1.2.3:1", []string{"203.0.113.5, unknown"}, "10.1.2.3"},
		"garbage between proxies":          {"10.1.2.3:1", []string{"203.0.113.5, unknown, 192.0.2.7"}, "192.0.2.7"},
		"empty":                            {"10.1.2.3:1", []string{""}, "10.1.2.3"},
		"empty element":                    {"10.1.2.3:1", []string{"203.0.113.5,"}, "10.1.2.3"},
		"a long chain":                     {"10.1.2.3:1", []string{"203.0.113.5" + strings.Repeat(", 10.0.0.1", 5000)}, "10.0.0.1"},
	} {
		got := ask(c.remote, forwarded(c.lines...))
		if got.Addr.String() != c.want {
			t.Errorf("%s: client %v, want %s", name, got.Addr, c.want)
		}
		peer := netip.MustParseAddrPort(c.remote).Addr().Unmap()
		if trusted := strings.HasPrefix(peer.String(), "10.") || peer.Is6(); trusted != (got.Via == peer) {
			t.Errorf("%s: via %v", name, got.Via)
		}
	}
	if got := behind(t)("10.1.2.3:1", forwarded("203.0.113.5")); got.Addr.String() != "10.1.2.3" {
		t.Errorf("without trusted proxies: %v", got.Addr)
	}
}

func TestSchemeAndHostOfTrustedProxies(t *testing.T) {
	t.Parallel()
	ask := behind(t, "10.0.0.0/8")
	header := http.Header{"X-Forwarded-Proto": {"https"}, "X-Forwarded-Host": {"ops.localhost:8443"}}
	if got := ask("10.1.2.3:1", header); !got.Secure || got.Host != "ops.localhost:8443" {
		t.Errorf("from a proxy: %+v", got)
	}
	if got := ask("198.51.100.9:1", header); got.Secure || got.Host != "localhost" {
		t.Errorf("from a stranger: %+v", got)
	}
	// Only what the nearest proxy added counts.
	header = http.Header{"X-Forwarded-Proto": {"https", "http"}, "X-Forwarded-Host": {"evil.localhost, ops.localhost"}}
	if got := ask("10.1.2.3:1", header); got.Secure || got.Host != "ops.localhost" {
		t.Errorf("with a line of the client's own: %+v", got)
	}
	for _, proto := range []string{"", "http", "httpsx", "wss"} {
		if got := ask("10.1.2.3:1", http.Header{"X-Forwarded-Proto": {proto}}); got.Secure {
			t.Errorf("%q is taken for https", proto)
		}
	}
}

// The host that a proxy names is checked like any other.
func TestForwardedHostMustBeAllowed(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *handlers.Config) { cfg.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} })
	r.public.Store(true)
	status := func(remote string) int {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/healthz", nil)
		req.RemoteAddr = remote
		req.Header.Set("X-Forwarded-Host", "evil.example")
		w := httptest.NewRecorder()
		r.handler.ServeHTTP(w, req)
		return w.Code
	}
	if got := status("10.1.2.3:1"); got != http.StatusMisdirectedRequest {
		t.Errorf("a foreign name from a proxy: %d", got)
	}
	if got := status("198.51.100.9:1"); got != http.StatusOK {
		t.Errorf("a stranger's header: %d", got)
	}
	r.public.Store(false)
	if got := status("10.1.2.3:1"); got != http.StatusOK {
		t.Errorf("at the controller port, where no proxy stands: %d", got)
	}
}

// Over a proxy that ends TLS, the cookie is for TLS only.
func TestCookieIsSecureBehindAProxyWithTLS(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(cfg *handlers.Config) { cfg.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} })
	r.public.Store(true)
	for remote, secure := range map[string]bool{"10.1.2.3:1": true, "198.51.100.9:1": false} {
		req := r.request(t, "POST", "/api/v1/session", `{"token":"`+r.tokens[auth.Admin]+`"}`, "", map[string]string{"X-Forwarded-Proto": "https"})
		req.RemoteAddr = remote
		w := httptest.NewRecorder()
		r.handler.ServeHTTP(w, req)
		cookies := w.Result().Cookies()
		if len(cookies) != 1 || cookies[0].Secure != secure {
			t.Errorf("from %s: %d %v", remote, w.Code, cookies)
		}
	}
}
