package auth_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"go.uber.org/goleak"

	"headgate/internal/auth"
	"headgate/internal/auth/authtest"
	"headgate/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func admin() auth.Principal {
	return auth.Principal{Kind: auth.KindUser, Name: "admin", Role: auth.Admin}
}

func newService(t *testing.T, cfg auth.Config) (*auth.Service, *authtest.Store) {
	t.Helper()
	st := authtest.NewStore()
	cfg.Store = st
	s, err := auth.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, st
}

func newToken(t *testing.T, s *auth.Service, role auth.Role) (auth.Token, string) {
	t.Helper()
	tok, secret, err := s.NewToken(t.Context(), admin(), "t-"+string(role), role, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return tok, secret
}

func bearer(t *testing.T, secret string) *http.Request {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/", nil)
	r.Header.Set("Authorization", "Bearer "+secret)
	return r
}

func withCookie(t *testing.T, value string) *http.Request {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/", nil)
	r.AddCookie(&http.Cookie{Name: auth.CookieName, Value: value})
	return r
}

func TestBearerTokens(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	tok, secret := newToken(t, s, auth.Operator)
	p, err := s.Authenticate(bearer(t, secret))
	if err != nil || p.ID != tok.ID || p.Role != auth.Operator || p.Actor() != "token:t-operator" {
		t.Fatalf("got %+v, %v", p, err)
	}
	_, other := newToken(t, s, auth.Viewer)
	mixed := secret[:20] + other[20:]
	for name, header := range map[string]string{
		"mixed": "Bearer " + mixed, "short": "Bearer hgt_x", "empty": "Bearer ", "basic": "Basic YTpi", "bare": secret,
	} {
		r := bearer(t, "")
		r.Header.Set("Authorization", header)
		if _, err := s.Authenticate(r); !fault.Is(err, fault.Unauthenticated) {
			t.Errorf("%s: got %v, want unauthenticated", name, err)
		}
	}
}

func TestTheCacheSparesTheDatabaseAndRevocationHoldsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		tok, secret := newToken(t, s, auth.Admin)
		for range 1000 {
			if _, err := s.Authenticate(bearer(t, secret)); err != nil {
				t.Fatal(err)
			}
		}
		if n := st.Lookups(); n != 1 {
			t.Errorf("%d lookups for 1000 requests, want 1", n)
		}
		if err := s.RevokeToken(t.Context(), admin(), tok.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Authenticate(bearer(t, secret)); fault.CodeOf(err) != "token_revoked" {
			t.Errorf("after the revocation: %v", err)
		}
	})
}

func TestARevocationElsewhereHoldsWithinASecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		tok, secret := newToken(t, s, auth.Admin)
		if _, err := s.Authenticate(bearer(t, secret)); err != nil {
			t.Fatal(err)
		}
		if err := st.RevokeToken(t.Context(), tok.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if _, err := s.Authenticate(bearer(t, secret)); fault.CodeOf(err) != "token_revoked" {
			t.Errorf("a second after the revocation: %v", err)
		}
	})
}

func TestExpiredTokensAreRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, _ := newService(t, auth.Config{})
		_, secret, err := s.NewToken(t.Context(), admin(), "short", auth.Viewer, time.Now().Add(time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour + time.Second)
		if _, err := s.Authenticate(bearer(t, secret)); fault.CodeOf(err) != "token_expired" {
			t.Errorf("got %v", err)
		}
	})
}

func TestUnknownTokensAreToldToComeBackWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	s, st := newService(t, auth.Config{})
	path := filepath.Join(t.TempDir(), "admin.token")
	if _, err := s.EnsureTokenFile(t.Context(), path, "up", auth.Admin); err != nil {
		t.Fatal(err)
	}
	secret, err := auth.ReadTokenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, other := newToken(t, s, auth.Admin)
	st.Break(errors.New("connection refused"))
	if p, err := s.Authenticate(bearer(t, secret)); err != nil || p.Role != auth.Admin {
		t.Errorf("token of the file: %+v, %v", p, err)
	}
	if _, err := s.Authenticate(bearer(t, other)); !fault.Is(err, fault.Unavailable) {
		t.Errorf("another token: %v, want unavailable", err)
	}
}

func TestTheTokenOfAFileWorksBeforeTheDatabaseAnswered(t *testing.T) {
	t.Parallel()
	s, st := newService(t, auth.Config{})
	st.Break(errors.New("connection refused"))
	path := filepath.Join(t.TempDir(), "admin.token")
	if err := s.KeepTokenFile(path, "up", auth.Admin); err != nil {
		t.Fatal(err)
	}
	secret, err := auth.ReadTokenFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := s.Authenticate(bearer(t, secret)); err != nil || p.Actor() != "token:up" {
		t.Errorf("got %+v, %v", p, err)
	}
	if _, _, err := s.SignInWithToken(t.Context(), secret); fault.CodeOf(err) != "credentials_unavailable" {
		t.Errorf("sign in: %v", err)
	}
}

func TestTokenFiles(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	path := filepath.Join(t.TempDir(), "admin.token")
	first, err := s.EnsureTokenFile(t.Context(), path, "up", auth.Admin)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	again, err := s.EnsureTokenFile(t.Context(), path, "up", auth.Admin)
	if err != nil || again.ID != first.ID {
		t.Fatalf("second call: %v, %v", again.ID, err)
	}
	if err := s.RevokeToken(t.Context(), admin(), first.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.EnsureTokenFile(t.Context(), path, "up", auth.Admin); fault.CodeOf(err) != "token_file_revoked" {
		t.Errorf("revoked: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.ReadTokenFile(path); fault.CodeOf(err) != "token_file_mode" {
		t.Errorf("readable by others: %v", err)
	}
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.ReadTokenFile(bad); fault.CodeOf(err) != "token_file_content" {
		t.Errorf("no token inside: %v", err)
	}
}

func TestStartsThatRaceShareOneTokenFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "admin.token")
	var wg sync.WaitGroup
	got := make([]string, 8)
	for i := range got {
		wg.Go(func() { got[i], _ = auth.ReadTokenFile(path) })
	}
	wg.Wait()
	for _, s := range got {
		if s == "" || s != got[0] {
			t.Fatal("two starts read different tokens")
		}
	}
}

func TestASignInLinkIsSpentOnce(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	user, err := s.EnsureUser(t.Context(), "admin", auth.Admin)
	if err != nil {
		t.Fatal(err)
	}
	code, _, err := s.NewSignInLink(t.Context(), user)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	values := make([]string, 8)
	for i := range values {
		wg.Go(func() { values[i], _, _ = s.SignInWithCode(t.Context(), code) })
	}
	wg.Wait()
	opened := 0
	for _, v := range values {
		if v == "" {
			continue
		}
		opened++
		if p, err := s.Authenticate(withCookie(t, v)); err != nil || p.Name != "admin" || p.Kind != auth.KindUser {
			t.Errorf("session: %+v, %v", p, err)
		}
	}
	if opened != 1 {
		t.Errorf("%d sessions from one link", opened)
	}
}

func TestASignInLinkExpires(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, _ := newService(t, auth.Config{})
		user, _ := s.EnsureUser(t.Context(), "admin", auth.Admin)
		code, _, _ := s.NewSignInLink(t.Context(), user)
		time.Sleep(auth.DefaultLinkTerm + time.Second)
		if _, _, err := s.SignInWithCode(t.Context(), code); fault.CodeOf(err) != "link_spent" {
			t.Errorf("got %v", err)
		}
	})
}

func TestASessionOfATokenHasItsRoleAndEndsWithIt(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	// A user of the same name with more rights must not be taken over.
	if _, err := s.EnsureUser(t.Context(), "t-viewer", auth.Admin); err != nil {
		t.Fatal(err)
	}
	tok, secret := newToken(t, s, auth.Viewer)
	value, _, err := s.SignInWithToken(t.Context(), " "+secret+"\n")
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.Authenticate(withCookie(t, value))
	if err != nil || p.Role != auth.Viewer || p.Actor() != "token:t-viewer" {
		t.Fatalf("got %+v, %v", p, err)
	}
	if err := s.RevokeToken(t.Context(), admin(), tok.ID); err != nil {
		t.Fatal(err)
	}
	if p, err := s.Authenticate(withCookie(t, value)); err != nil || p.Kind != "" {
		t.Errorf("after the revocation: %+v, %v", p, err)
	}
}

func TestSignOutEndsTheSession(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	_, secret := newToken(t, s, auth.Viewer)
	value, _, err := s.SignInWithToken(t.Context(), secret)
	if err != nil {
		t.Fatal(err)
	}
	if p, _ := s.Authenticate(withCookie(t, value)); p.Kind == "" {
		t.Fatal("not signed in")
	}
	if err := s.SignOut(t.Context(), value); err != nil {
		t.Fatal(err)
	}
	if p, err := s.Authenticate(withCookie(t, value)); err != nil || p.Kind != "" {
		t.Errorf("still signed in: %+v, %v", p, err)
	}
}

func TestCookieAttributes(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	sess := auth.Session{ExpiresAt: time.Now().Add(time.Hour)}
	for name, state := range map[string]*tls.ConnectionState{"plain": nil, "tls": {}} {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/", nil)
		r.TLS = state
		s.SetCookie(w, r, "v", sess)
		c := w.Result().Cookies()[0]
		if c.Name != "headgate_session" || !c.HttpOnly || c.SameSite != http.SameSiteLaxMode || c.Path != "/" || c.Secure != (state != nil) {
			t.Errorf("%s: %v", name, c)
		}
	}
}

func TestNobodyGrantsMoreThanTheyHold(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	op := auth.Principal{Kind: auth.KindToken, Name: "op", Role: auth.Operator}
	if _, _, err := s.NewToken(t.Context(), op, "x", auth.Admin, time.Time{}); !fault.Is(err, fault.Forbidden) {
		t.Errorf("operator made an admin token: %v", err)
	}
	for _, role := range []auth.Role{"", "root", auth.Peer} {
		if _, _, err := s.NewToken(t.Context(), admin(), "x", role, time.Time{}); !fault.Is(err, fault.Invalid) {
			t.Errorf("role %q: %v", role, err)
		}
	}
	if _, _, err := s.NewToken(t.Context(), admin(), "a\x00b", auth.Viewer, time.Time{}); !fault.Is(err, fault.Invalid) {
		t.Errorf("NUL in a name: %v", err)
	}
	if _, _, err := s.NewToken(t.Context(), admin(), "x", auth.Viewer, time.Now().Add(400*24*time.Hour)); !fault.Is(err, fault.Invalid) {
		t.Errorf("too long a term: %v", err)
	}
}

func TestControllersAreKnownByVerifiedCertificateOnly(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	id := uuid.NewV7()
	cert := func(name string) *x509.Certificate { return &x509.Certificate{DNSNames: []string{name}} }
	good := cert(id.String() + ".controller.headgate.internal")
	cases := map[string]struct {
		state *tls.ConnectionState
		role  auth.Role
	}{
		"verified":   {&tls.ConnectionState{PeerCertificates: []*x509.Certificate{good}, VerifiedChains: [][]*x509.Certificate{{good}}}, auth.Peer},
		"unverified": {&tls.ConnectionState{PeerCertificates: []*x509.Certificate{good}}, ""},
		"agent": {&tls.ConnectionState{
			PeerCertificates: []*x509.Certificate{cert(id.String() + ".agent.headgate.internal")},
			VerifiedChains:   [][]*x509.Certificate{{good}},
		}, ""},
		"no id": {&tls.ConnectionState{
			PeerCertificates: []*x509.Certificate{cert("x.controller.headgate.internal")},
			VerifiedChains:   [][]*x509.Certificate{{good}},
		}, ""},
	}
	for name, c := range cases {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "https://localhost/", nil)
		r.TLS = c.state
		if p, err := s.Authenticate(r); err != nil || p.Role != c.role {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
	}
}

// call sends a request through the middleware and gives the refusal's code,
// "" when it passed.
func call(s *auth.Service, r *http.Request) (code string, p auth.Principal) {
	refuse := func(_ http.ResponseWriter, _ *http.Request, err error) { code = fault.CodeOf(err) }
	h := s.Middleware(refuse)(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { p = auth.PrincipalFrom(r.Context()) }))
	h.ServeHTTP(httptest.NewRecorder(), r)
	return code, p
}

func TestHostHeader(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{AllowedHosts: []string{"Gate.example.org", ".fleet.internal"}})
	for host, want := range map[string]string{
		"localhost:7440": "", "127.0.0.1:7440": "", "127.9.9.9": "", "[::1]:7440": "", "::1": "", "gate.example.org": "", "GATE.example.org.:443": "",
		"a.fleet.internal": "", "10.1.2.3:7440": "", "evil.example": "wrong_host", "10.1.2.4": "wrong_host", "fleet.internal": "wrong_host",
		"localhost.evil.example": "wrong_host", "": "wrong_host", "gate.example.org.evil.example": "wrong_host",
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/", nil)
		r.Host = host
		local := &net.TCPAddr{IP: net.IPv4(10, 1, 2, 3), Port: 7440}
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(local)))
		if got, _ := call(s, r); got != want {
			t.Errorf("%q: got %q, want %q", host, got, want)
		}
	}
}

func TestCrossSiteWritesAreRefused(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	_, secret := newToken(t, s, auth.Admin)
	value, _, err := s.SignInWithToken(t.Context(), secret)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, method, header, value, want string
		bearer                            bool
	}{
		{"cross-site", "POST", "Sec-Fetch-Site", "cross-site", "cross_site", false},
		{"same-site", "POST", "Sec-Fetch-Site", "same-site", "cross_site", false},
		{"same-origin", "POST", "Sec-Fetch-Site", "same-origin", "", false},
		{"foreign origin", "DELETE", "Origin", "http://evil.example", "cross_site", false},
		{"own origin", "POST", "Origin", "http://localhost", "", false},
		{"read", "GET", "Sec-Fetch-Site", "cross-site", "", false},
		{"script", "POST", "User-Agent", "curl", "", false},
		{"bearer", "POST", "Sec-Fetch-Site", "cross-site", "", true},
	} {
		r := withCookie(t, value)
		r.Method = c.method
		r.Header.Set(c.header, c.value)
		if c.bearer {
			r.Header.Del("Cookie")
			r.Header.Set("Authorization", "Bearer "+secret)
		}
		got, p := call(s, r)
		if got != c.want || (got == "" && p.Role != auth.Admin) {
			t.Errorf("%s: got %q %+v, want %q", c.name, got, p, c.want)
		}
	}
}

func TestRequire(t *testing.T) {
	t.Parallel()
	s, _ := newService(t, auth.Config{})
	for _, c := range []struct {
		role auth.Role
		perm auth.Permission
		want string
	}{
		{"", auth.Public, ""},
		{"", auth.ReadTasks, "no_credential"},
		{auth.Viewer, auth.ReadTasks, ""},
		{auth.Viewer, auth.SubmitTasks, "permission_missing"},
		{auth.Operator, auth.SubmitTasks, ""},
		{auth.Operator, auth.ManageTokens, "permission_missing"},
		{auth.Admin, auth.ManageTokens, ""},
		{auth.Metrics, auth.ReadMetrics, ""},
		{auth.Metrics, auth.ReadTasks, "permission_missing"},
		{auth.Admin, auth.CallPeer, "permission_missing"},
		{auth.Peer, auth.CallPeer, ""},
		{auth.Peer, auth.SubmitTasks, "permission_missing"},
	} {
		got := ""
		h := s.Require(c.perm, func(_ http.ResponseWriter, _ *http.Request, err error) { got = fault.CodeOf(err) })(
			http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/", nil)
		if c.role != "" {
			r = r.WithContext(auth.WithPrincipal(r.Context(), auth.Principal{Kind: auth.KindToken, Role: c.role}))
		}
		h.ServeHTTP(httptest.NewRecorder(), r)
		if got != c.want {
			t.Errorf("%s %s: got %q, want %q", c.role, c.perm, got, c.want)
		}
	}
}

func TestRunStoresLastUse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, st := newService(t, auth.Config{})
		tok, secret := newToken(t, s, auth.Viewer)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		if _, err := s.Authenticate(bearer(t, secret)); err != nil {
			t.Fatal(err)
		}
		used := time.Now()
		time.Sleep(auth.DefaultTouchEvery + time.Second)
		if got := st.Touched(tok.ID); !got.Equal(used) {
			t.Errorf("last use %v, want %v", got, used)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func BenchmarkAuthenticate(b *testing.B) {
	st := authtest.NewStore()
	s, err := auth.New(auth.Config{Store: st})
	if err != nil {
		b.Fatal(err)
	}
	_, secret, err := s.NewToken(b.Context(), admin(), "bench", auth.Admin, time.Time{})
	if err != nil {
		b.Fatal(err)
	}
	r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "http://localhost/", nil)
	r.Header.Set("Authorization", "Bearer "+secret)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Authenticate(r); err != nil {
			b.Fatal(err)
		}
	}
	if !strings.HasPrefix(secret, "hgt_") {
		b.Fatal("prefix")
	}
}
