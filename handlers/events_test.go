package handlers_test

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/tasks"
)

// event is one server-sent event.
type event struct{ id, name, data, retry string }

// stream is an open event stream.
type stream struct {
	t      testing.TB
	res    *http.Response
	cancel context.CancelFunc
	events chan event // closed at the end of the stream
}

func openStream(t testing.TB, server *httptest.Server, path, token string, header map[string]string) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	for k, v := range header {
		req.Header.Set(k, v)
	}
	res, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	s := &stream{t: t, res: res, cancel: cancel, events: make(chan event, 10_000)}
	done := make(chan struct{})
	go func() { defer close(done); s.read() }()
	t.Cleanup(func() { cancel(); <-done })
	return s
}

func (s *stream) read() {
	defer close(s.events)
	defer s.res.Body.Close()
	var e event
	lines := bufio.NewScanner(s.res.Body)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch name {
		case "id":
			e.id = value
		case "event":
			e.name = value
		case "data":
			e.data = value
		case "retry":
			e.retry = value
		case "": // a comment, or the end of an event
			if lines.Text() != "" {
				e.name = "comment"
			} else if e != (event{}) {
				s.events <- e
				e = event{}
			}
		}
	}
}

// next gives the next event; ok is false at the end of the stream.
func (s *stream) next() (e event, ok bool) {
	s.t.Helper()
	select {
	case e, ok = <-s.events:
		return e, ok
	case <-time.After(20 * time.Second):
		s.t.Fatal("no event within 20 s")
		return event{}, false
	}
}

func (s *stream) want(name string) event {
	s.t.Helper()
	e, ok := s.next()
	if !ok || e.name != name {
		s.t.Fatalf("got %+v (open %v), want the event %s", e, ok, name)
	}
	return e
}

func serve(t testing.TB, rig *rig) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(rig.handler)
	t.Cleanup(server.Close)
	t.Cleanup(server.Client().CloseIdleConnections)
	return server
}

func TestEventsResumeWithoutAGap(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	server := serve(t, rig)
	first := openStream(t, server, "/api/v1/events?topics=tasks", rig.tokens[auth.Viewer], nil)
	if ct := first.res.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Fatalf("content type %q", ct)
	}
	hello := first.want("hello")
	if hello.id == "" || hello.retry == "" {
		t.Errorf("hello %+v", hello)
	}
	id := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID
	var all []event
	for len(all) == 0 || all[len(all)-1].name != tasks.EventCompleted {
		e, ok := first.next()
		if !ok {
			t.Fatal("the stream ended")
		}
		if !strings.Contains(e.data, `"id":"`+id+`"`) || e.id == "" {
			t.Errorf("event %+v of task %s", e, id)
		}
		all = append(all, e)
	}
	first.cancel()
	for name, again := range map[string]*stream{
		"header":    openStream(t, server, "/api/v1/events?topics=tasks", rig.tokens[auth.Viewer], map[string]string{"Last-Event-ID": hello.id}),
		"parameter": openStream(t, server, "/api/v1/events?topics=tasks&last_event_id="+hello.id, rig.tokens[auth.Viewer], nil),
	} {
		again.want("hello")
		for _, want := range all {
			if got, ok := again.next(); !ok || got != want {
				t.Errorf("%s: got %+v, want %+v", name, got, want)
			}
		}
	}
}

func TestEventsSayResetWhenTheyCannotResume(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	s := openStream(t, serve(t, rig), "/api/v1/events", rig.tokens[auth.Viewer], map[string]string{"Last-Event-ID": "another-7"})
	s.want("hello")
	s.want(tasks.EventReset)
}

func TestEventsBeatAndEndWithARetryTime(t *testing.T) {
	t.Parallel()
	rig := newRig(t, func(c *handlers.Config) { c.Heartbeat = 20 * time.Millisecond })
	s := openStream(t, serve(t, rig), "/api/v1/events", rig.tokens[auth.Viewer], nil)
	s.want("hello")
	s.want("comment")
	s.want("comment")
	rig.leave.Begin(0)
	for {
		e, ok := s.next()
		if !ok {
			t.Fatal("the stream ended without the event restart")
		}
		if e.name == "restart" {
			if e.retry == "" {
				t.Errorf("%+v has no retry time", e)
			}
			break
		}
	}
	if _, ok := s.next(); ok {
		t.Error("the stream goes on after restart")
	}
}

func TestARevokedTokenLosesItsStream(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	s := openStream(t, serve(t, rig), "/api/v1/events", rig.tokens[auth.Viewer], nil)
	s.want("hello")
	all, err := rig.auth.Tokens(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, tok := range all {
		if tok.Role == auth.Viewer {
			if err := rig.auth.RevokeToken(t.Context(), auth.Principal{Role: auth.Admin}, tok.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	began := time.Now()
	if e, ok := s.next(); ok {
		t.Errorf("got %+v after the revocation", e)
	}
	if took := time.Since(began); took > 10*time.Second { // promised are 5; the machine may be busy
		t.Errorf("the stream lived on for %v", took)
	}
}

func TestStreamsAreCapped(t *testing.T) {
	t.Parallel()
	rig := newRig(t, func(c *handlers.Config) { c.MaxStreams, c.MaxStreamsPrincipal = 3, 2 })
	server := serve(t, rig)
	token := rig.tokens[auth.Viewer]
	one := openStream(t, server, "/api/v1/events", token, nil)
	one.want("hello")
	openStream(t, server, "/api/v1/events", token, nil).want("hello")
	if s := openStream(t, server, "/api/v1/events", token, nil); s.res.StatusCode != http.StatusTooManyRequests {
		t.Errorf("third of one token: %d", s.res.StatusCode)
	}
	openStream(t, server, "/api/v1/events", rig.tokens[auth.Admin], nil).want("hello")
	if s := openStream(t, server, "/api/v1/events", rig.tokens[auth.Operator], nil); s.res.StatusCode != http.StatusTooManyRequests {
		t.Errorf("fourth in all: %d", s.res.StatusCode)
	}
	one.cancel()
	for range one.events { //nolint:revive // until the client has closed it
	}
	deadline := time.Now().Add(20 * time.Second)
	for openStream(t, server, "/api/v1/events", rig.tokens[auth.Operator], nil).res.StatusCode != http.StatusOK {
		if time.Now().After(deadline) {
			t.Fatal("the place of a closed stream is not given back")
		}
	}
}

func TestBadTopicsAndRoles(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	if p := readProblem(t, rig.do(t, "GET", "/api/v1/events?topics=weather", "", auth.Viewer, nil)); p.Code != "unknown_topic" || p.Status != 400 {
		t.Errorf("%+v", p)
	}
	if p := readProblem(t, rig.do(t, "GET", "/api/v1/events", "", auth.Metrics, nil)); p.Status != 403 {
		t.Errorf("%+v", p)
	}
	if p := readProblem(t, rig.do(t, "GET", "/api/v1/events", "", "", nil)); p.Status != 401 {
		t.Errorf("%+v", p)
	}
}

// TestLongWaitsOutliveTheServersLimits proves that a wait is not cut by the
// read and write limits that ordinary requests have.
func TestLongWaitsOutliveTheServersLimits(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	server := httptest.NewUnstartedServer(rig.handler)
	server.Config.ReadTimeout, server.Config.WriteTimeout = 200*time.Millisecond, 200*time.Millisecond
	server.Start()
	t.Cleanup(server.Close)
	t.Cleanup(server.Client().CloseIdleConnections)
	release := rig.agents.hold()
	defer release()
	id := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/api/v1/tasks/"+id+"?wait=1s", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rig.tokens[auth.Viewer])
	began := time.Now()
	res, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if took := time.Since(began); res.StatusCode != http.StatusOK || took < time.Second {
		t.Errorf("%d after %v", res.StatusCode, took)
	}
}
