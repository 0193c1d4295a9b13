package controller

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"headgate/internal/pki"
	"headgate/internal/testkit"
	"headgate/listener"
)

// proxyIsKnown connects as the trusted proxy: the listener gives it the place
// of a known source.
func (s *started) proxyIsKnown() {
	s.Helper()
	conn, err := net.Dial("tcp", s.c.listener.Ports().Public[0].String())
	if err != nil {
		s.Fatal(err)
	}
	defer conn.Close()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(5 * time.Millisecond) {
		for _, source := range s.c.listener.Status().Admission.Top {
			if source.Source == "127.0.0.1" && source.Class == listener.ClassKnown {
				return
			}
		}
	}
	s.Errorf("the trusted proxy is no known source of the listener: %+v", s.c.listener.Status().Admission.Top)
}

// A controller with a base path gives it out everywhere and needs it nowhere:
// scripts at the controller port do not know of it.
func TestControllerWithABasePath(t *testing.T) {
	t.Parallel()
	s := start(t, testkit.EmptyDatabase(t), t.TempDir(), func(cfg *Config) {
		cfg.BasePath = "/headgate"
		cfg.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
	})
	s.await("the opening of the public port", s.c.Opened())
	s.proxyIsKnown()
	transport := &http.Transport{TLSClientConfig: pki.Client(s.c.state.roots), ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	read := func(address string) string {
		t.Helper()
		res, err := client.Get(address)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s %v", address, res.StatusCode, body, err)
		}
		return string(body)
	}
	public, controller := s.c.Endpoints().PublicURL, s.c.Endpoints().ControllerURL
	root, ok := strings.CutSuffix(public, "/headgate")
	if !ok {
		t.Fatalf("the public address is %s", public)
	}
	for _, address := range []string{public, root, controller, controller + "/headgate"} {
		read(address + "/readyz")
		if text := read(address + "/sign-in"); !strings.Contains(text, `action="/headgate/sign-in"`) || strings.Contains(text, `href="/static`) {
			t.Errorf("%s/sign-in: %s", address, text)
		}
		if text := read(address + "/api/v1/openapi.json"); !strings.Contains(text, `"url": "/headgate"`) {
			t.Errorf("%s: the contract names another server", address)
		}
		if text := read(address + "/docs/api"); !strings.Contains(text, `href="/headgate/swagger/"`) {
			t.Errorf("%s: the reference names another explorer", address)
		}
	}
	token, err := os.ReadFile(s.c.cfg.AdminTokenFile)
	if err != nil {
		t.Fatal(err)
	}
	body, err := json.Marshal(map[string]string{"token": strings.TrimSpace(string(token))})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, public+"/api/v1/session", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Forwarded-Proto", "https")
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if cookies := res.Cookies(); len(cookies) != 1 || cookies[0].Path != "/headgate/" || !cookies[0].Secure {
		t.Errorf("cookies of a session: %d %v", res.StatusCode, cookies)
	}
}
