package handlers_test

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/listener"
)

// Acceptance 42.
func TestAShedConnectionIsToldWhenToComeBack(t *testing.T) {
	t.Parallel()
	rig := newRig(t, func(c *handlers.Config) {
		c.Shed = func(*http.Request) (time.Duration, bool) { return 6300 * time.Millisecond, true }
		c.Overloaded = func(w http.ResponseWriter, _ *http.Request, _ int) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(http.StatusTooManyRequests)
		}
	})
	for _, path := range []string{"/api/v1/tasks", "/api/v1/events", "/readyz", "/nothing-here", "/tasks/static/x", "/sign-in/static/"} {
		res := rig.do(t, "GET", path, "", auth.Viewer, nil)
		if res.StatusCode != http.StatusTooManyRequests || res.Header.Get("Retry-After") != "7" || res.Header.Get("Connection") != "close" {
			t.Errorf("%s: %d %v", path, res.StatusCode, res.Header)
		}
		if p := readProblem(t, res); p.Code != "overloaded" || !strings.Contains(p.Hint, "7 s") || p.RequestID == "" {
			t.Errorf("%s: %+v", path, p)
		}
	}
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		rig.handler.ServeHTTP(w, rig.request(t, "GET", path, "", auth.Viewer, map[string]string{"Accept": "text/html,*/*;q=0.8"}))
		if w.Header().Get("Connection") != "close" {
			t.Errorf("%s: Connection %q", path, w.Header().Get("Connection"))
		}
		return w
	}
	if w := get("/tasks"); w.Code != http.StatusTooManyRequests || w.Header().Get("Content-Type") != "text/html" || w.Header().Get("Retry-After") != "7" {
		t.Errorf("a page: %d %v", w.Code, w.Header())
	}
	if w := get("/api/v1/tasks"); w.Header().Get("Content-Type") != "application/problem+json" {
		t.Errorf("the API: %v", w.Header())
	}
	if w := get("/static/style.css"); w.Code != http.StatusOK {
		t.Errorf("what the page is made of: %d", w.Code)
	}
}

// listening serves the rig over a real listener whose public port is open.
func listening(t *testing.T, rig *rig, limits listener.Limits) *listener.Listener {
	t.Helper()
	l, err := listener.New(t.Context(), listener.Config{
		Controller: listener.PortConfig{Addr: "127.0.0.1:0"}, Public: listener.PortConfig{Addr: "127.0.0.1:0"}, Limits: limits,
	})
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: rig.handler, ConnContext: listener.ConnContext, ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		_ = server.Close()
		_ = l.Close()
		<-done
	})
	l.MarkStable("test")
	if _, err := l.WaitPublic(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l
}

// speak makes a request over a connection of its own, which stays open.
func speak(t *testing.T, addr, token string) (*http.Response, error) {
	t.Helper()
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/api/v1/session", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	res, err := (&http.Client{Transport: tr, Timeout: time.Minute}).Do(req)
	if err == nil {
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	return res, err
}

// Acceptance 42.
func TestAFullPortAnswersAndAFullerOneResets(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	const soft = 10
	l := listening(t, rig, listener.Limits{MaxConns: soft})
	public, private := l.Ports().Public[0].String(), l.Addr().String()
	for i := range soft {
		if res, err := speak(t, public, rig.tokens[auth.Viewer]); err != nil || res.StatusCode != http.StatusOK {
			t.Fatalf("connection %d: %v %v", i, res, err)
		}
	}
	// Each has signed in: none counts against the address any more.
	if n := l.Status().Public.Classes[listener.ClassUser]; n != soft {
		t.Errorf("%d connections of users, want %d", n, soft)
	}
	for i := range 5 {
		res, err := speak(t, public, rig.tokens[auth.Viewer])
		if err != nil {
			t.Fatalf("above the soft cap: %v", err)
		}
		pause, err := strconv.Atoi(res.Header.Get("Retry-After"))
		if res.StatusCode != http.StatusTooManyRequests || err != nil || pause < 1 || pause > 48 || !res.Close {
			t.Errorf("above the soft cap, %d: %d, Retry-After %q, close %v", i, res.StatusCode, res.Header.Get("Retry-After"), res.Close)
		}
		waitUntil(t, func() bool { return l.Status().Public.Conns == soft }) // it is closed before the next comes
	}
	// Silent ones fill the rest, up to the hard cap.
	hard := l.Status().Admission.HardCap
	for range hard - soft {
		c, err := net.Dial("tcp", public)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	waitUntil(t, func() bool { return l.Status().Public.Conns == hard })
	if res, err := speak(t, public, rig.tokens[auth.Viewer]); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
		t.Errorf("above the hard cap: %v %v", res, err)
	}
	if res, err := speak(t, private, rig.tokens[auth.Viewer]); err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("the controller port: %v %v", res, err)
	}
}

func waitUntil(t *testing.T, is func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !is(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("it did not come to that in time")
		}
	}
}
