package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/pki"
	"headgate/internal/testkit"
)

// caller is a client of the controller port, like an operator's or Prometheus.
type caller struct {
	t     *testing.T
	base  string
	token string // "" = none is sent
	http  *http.Client
}

func (s *started) caller(token string) *caller {
	s.Helper()
	roots := pki.NewRoots(append(s.c.state.roots.Certificates(), s.c.state.port.Leaf())...)
	tr := &http.Transport{TLSClientConfig: pki.Client(roots), ForceAttemptHTTP2: true}
	s.Cleanup(tr.CloseIdleConnections)
	return &caller{s.T, s.c.Endpoints().ControllerURL, token, &http.Client{Transport: tr, Timeout: time.Minute}}
}

// fileToken gives the token of the controller's own file.
func (s *started) fileToken() string {
	s.Helper()
	b, err := os.ReadFile(s.c.cfg.AdminTokenFile)
	if err != nil {
		s.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// get gives status, body, and how long both took.
func (c *caller) get(path string) (status int, body []byte, took time.Duration) {
	c.t.Helper()
	began := time.Now()
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.base+path, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		c.t.Errorf("%s: %v", path, err)
		return 0, nil, time.Since(began)
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	if err != nil {
		c.t.Errorf("%s: %v", path, err)
	}
	return resp.StatusCode, body, time.Since(began)
}

// until asks until the answer is as wanted.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(time.Minute)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("%s did not come", what)
		}
		<-tick.C
	}
}

// makeToken gives a new token of the API, which no file holds.
func (c *caller) makeToken(name string) string {
	c.t.Helper()
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, c.base+"/api/v1/tokens", strings.NewReader(`{"name":"`+name+`","role":"admin"}`))
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	var made struct{ Secret string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil || made.Secret == "" {
		c.t.Fatalf("%s: %v", resp.Status, err)
	}
	return made.Secret
}

// openPaths need no database for anything but the caller's token.
func openPaths() []string {
	return []string{"/healthz", "/livez", "/readyz", "/version", "/status/listener", "/metrics", "/api/v1/status"}
}

func TestTheControllerPortAnswersWhileTheDatabaseIsSilent(t *testing.T) {
	t.Parallel()
	proxy := testkit.NewProxy(t, testkit.NewDatabase(t))
	s := start(t, proxy.DSN(), t.TempDir())
	s.await("the opening of the public port", s.c.Opened())
	owner := s.caller(s.fileToken())
	seen := s.caller(owner.makeToken("seen"))
	unseen := s.caller(owner.makeToken("unseen"))
	if status, _, _ := seen.get("/api/v1/status"); status != http.StatusOK {
		t.Fatalf("status answered %d", status)
	}
	proxy.Stall()
	defer proxy.Heal()

	const rounds, bound = 10, 3 * time.Second
	var mu sync.Mutex
	var all []time.Duration
	var wg sync.WaitGroup
	for _, c := range []*caller{owner, seen} {
		for _, path := range openPaths() {
			wg.Go(func() {
				for range rounds {
					status, body, took := c.get(path)
					if status != http.StatusOK && (path != "/readyz" || status != http.StatusServiceUnavailable) {
						t.Errorf("%s: %d %s", path, status, body)
					}
					mu.Lock()
					all = append(all, took)
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	slices.Sort(all)
	t.Logf("median %v, p95 %v, worst %v of %d", all[len(all)/2], all[len(all)*95/100], all[len(all)-1], len(all))
	if got := all[len(all)*95/100]; got > bound {
		t.Errorf("p95 of the answers is %v", got)
	}
	if status, body, took := unseen.get("/metrics"); status != http.StatusServiceUnavailable || !strings.Contains(string(body), "credentials_unavailable") || took > 10*time.Second {
		t.Errorf("a token never seen: %d %s after %v", status, body, took)
	}

	until(t, "a failed check of the database", func() bool {
		var st handlers.Status
		_, body, _ := owner.get("/api/v1/status")
		return json.Unmarshal(body, &st) == nil && !st.Database.Reachable && st.Database.Detail != nil &&
			slices.ContainsFunc(st.Checks, func(c handlers.Check) bool { return c.Name == checkDatabase && !c.OK })
	})
	if status, r := s.readyz(); status != http.StatusServiceUnavailable || len(r.Unmet) == 0 || r.Unmet[0].Condition != checkDatabase {
		t.Errorf("readyz: %d %+v", status, r)
	}
	proxy.Heal()
	until(t, "readiness after the database came back", func() bool {
		status, r := s.readyz()
		return status == http.StatusOK && r.Ready
	})
}

func TestOperatorsSeeMetricsBeforeTheDatabaseAnswers(t *testing.T) {
	t.Parallel()
	proxy := testkit.NewProxy(t, testkit.EmptyDatabase(t))
	proxy.Block()
	s := start(t, proxy.DSN(), t.TempDir())
	for _, path := range openPaths()[:6] {
		if status, body, _ := s.caller(s.fileToken()).get(path); status != http.StatusOK && path != "/readyz" {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if status, _, _ := s.caller("hgt_" + strings.Repeat("x", 49)).get("/metrics"); status == http.StatusOK {
		t.Error("another token was taken")
	}
	_, body, _ := s.caller(s.fileToken()).get("/status/listener")
	var st handlers.ListenerStatus
	if err := json.Unmarshal(body, &st); err != nil || st.State != "controller-only" {
		t.Errorf("listener: %s (%v)", fmt.Sprintf("%.200s", body), err)
	}
}
