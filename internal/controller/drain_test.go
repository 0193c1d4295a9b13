package controller

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/auth"
	"headgate/internal/pki"
	"headgate/internal/testkit"
)

// farewell is how one event stream ended.
type farewell struct {
	retry int // ms, of the event restart; 0 = it did not come
	at    time.Time
	err   error
}

// streams opens n event streams at one of the addresses, as different
// principals since each may have only some.
func (s *started) streams(client *http.Client, url string, n int, ended chan<- farewell) {
	s.Helper()
	const perToken = 15
	token := ""
	for i := range n {
		if i%perToken == 0 {
			var err error
			_, token, err = s.c.parts.auth.NewToken(s.Context(), auth.Principal{Kind: auth.KindUser, Name: "test", Role: auth.Admin}, fmt.Sprint(url, i), auth.Viewer, time.Time{})
			if err != nil {
				s.Fatal(err)
			}
		}
		req, err := http.NewRequestWithContext(s.Context(), http.MethodGet, url+"/api/v1/events", nil)
		if err != nil {
			s.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := client.Do(req)
		if err != nil {
			s.Fatal(err)
		}
		if resp.StatusCode != http.StatusOK {
			s.Fatalf("stream %d: %d", i, resp.StatusCode)
		}
		go func() { ended <- readFarewell(resp.Body) }()
	}
}

// readFarewell follows a stream to its end.
func readFarewell(body io.ReadCloser) (f farewell) {
	defer body.Close()
	retry := 0
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), "retry: "); ok {
			retry, _ = strconv.Atoi(v)
		}
		if lines.Text() == "event: restart" {
			f.retry = retry
		}
	}
	f.at, f.err = time.Now(), lines.Err()
	return f
}

// toController gives a client of the controller port.
func (s *started) toController() *http.Client {
	tr := &http.Transport{TLSClientConfig: pki.Client(s.c.state.roots), ForceAttemptHTTP2: true}
	s.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// toPublic gives a client of the public port.
func (s *started) toPublic() *http.Client {
	tr := &http.Transport{}
	s.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// slowRequest begins a request at the public port whose body is still to
// come; finish sends the rest and gives the answer's status line.
func (s *started) slowRequest() (conn net.Conn, finish func() (string, error)) {
	s.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.c.Endpoints().PublicURL, "http://"))
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { conn.Close() })
	_, err = io.WriteString(conn, "POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{")
	if err != nil {
		s.Fatal(err)
	}
	return conn, func() (string, error) {
		if _, err := io.WriteString(conn, "}"); err != nil {
			return "", err
		}
		answer, err := io.ReadAll(conn)
		return string(answer), err
	}
}

// drainBegins ends the controller's run and waits until /readyz says so.
func (s *started) drainBegins() (ended <-chan error) {
	s.Helper()
	done := make(chan error, 1)
	go func() { done <- s.stop() }()
	for deadline := time.Now().Add(time.Minute); ; {
		status, r := s.readyz()
		if status == http.StatusServiceUnavailable {
			if len(r.Unmet) == 0 || r.Unmet[0].Condition != "draining" {
				s.Errorf("/readyz at the stop: %+v", r)
			}
			return done
		}
		if time.Now().After(deadline) {
			s.Fatal("/readyz goes on answering 200")
		}
	}
}

// Acceptance 51.
func TestADrainTakesItsSteps(t *testing.T) {
	t.Parallel()
	const lead, spread, timeout = 4 * time.Second, 2 * time.Second, 40 * time.Second
	s := start(t, testkit.NewDatabase(t), t.TempDir(), func(c *Config) {
		c.DrainLead, c.DrainSpread, c.DrainTimeout = lead, spread, timeout
	})
	s.await("the opening of the public port", s.c.Opened())
	e := s.c.Endpoints()
	const public, private = 45, 15
	ended := make(chan farewell, public+private)
	s.streams(s.toPublic(), e.PublicURL, public, ended)
	s.streams(s.toController(), e.ControllerURL, private, ended)
	_, finish := s.slowRequest()

	began := time.Now()
	done := s.drainBegins()
	// readyz fails first, while the public port still serves.
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(e.PublicURL + "/livez")
	if err != nil {
		t.Fatalf("the public port does not answer during the lead: %v", err)
	}
	resp.Body.Close()
	if len(ended) != 0 {
		t.Errorf("%d streams ended during the lead", len(ended))
	}
	retries, first, last := map[int]bool{}, time.Time{}, time.Time{}
	for range public + private {
		var f farewell
		select {
		case f = <-ended:
		case <-time.After(time.Minute):
			t.Fatal("a stream goes on")
		}
		if f.err != nil || f.retry < 1000 || f.retry > 10_000 {
			t.Errorf("a stream ended with retry %d, %v", f.retry, f.err)
		}
		retries[f.retry] = true
		if first.IsZero() || f.at.Before(first) {
			first = f.at
		}
		if f.at.After(last) {
			last = f.at
		}
	}
	if len(retries) < 50 {
		t.Errorf("%d retry times for %d streams", len(retries), public+private)
	}
	if over := last.Sub(first); over < spread/2 {
		t.Errorf("the streams ended within %v, want them spread over %v", over, spread)
	}
	// All streams are gone, one request at the public port is still open: that
	// port refuses, the controller port answers.
	if !s.publicRefuses() {
		t.Error("the public port does not refuse")
	}
	if status, _ := s.readyz(); status != http.StatusServiceUnavailable {
		t.Errorf("the controller port's /readyz: %d", status)
	}
	select {
	case err := <-done:
		t.Fatalf("the stop did not wait for a request: %v", err)
	default:
	}
	if answer, err := finish(); err != nil || !strings.HasPrefix(answer, "HTTP/1.1 ") || !strings.Contains(answer, "Connection: close") {
		t.Errorf("the request that was open got %q, %v", answer, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > lead+timeout {
		t.Errorf("the stop took %v", took)
	}
	if _, err := net.Dial("tcp", strings.TrimPrefix(e.ControllerURL, "https://")); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the controller port after the end: %v", err)
	}
}

// Acceptance 51.
func TestADrainEndsByItsDeadline(t *testing.T) {
	t.Parallel()
	s := start(t, testkit.NewDatabase(t), t.TempDir(), func(c *Config) { c.DrainTimeout = time.Second })
	s.await("the opening of the public port", s.c.Opened())
	conn, _ := s.slowRequest()
	ended := make(chan farewell, 1)
	s.streams(s.toController(), s.c.Endpoints().ControllerURL, 1, ended)
	began := time.Now()
	if err := s.stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < time.Second || took > 20*time.Second {
		t.Errorf("the stop took %v, want about its deadline", took)
	}
	if f := <-ended; f.retry == 0 || f.at.Sub(began) > 15*time.Second {
		t.Errorf("the stream: %+v", f)
	}
	if _, err := io.ReadAll(conn); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the request that did not end: %v, want a reset", err)
	}
}

// TestADrainIsAnsweredInEveryProtocol proves that the controller port answers
// to the last over HTTP/1.1 too, which monitors speak, and tells each client
// that the connection ends.
//
// Acceptance 51.
func TestADrainIsAnsweredInEveryProtocol(t *testing.T) {
	t.Parallel()
	s := start(t, testkit.NewDatabase(t), t.TempDir(), func(c *Config) { c.DrainTimeout = time.Minute })
	s.await("the opening of the public port", s.c.Opened())
	url := s.c.Endpoints().ControllerURL + "/readyz"
	conn, finish := s.slowRequest() // keeps the drain from ending
	done := s.drainBegins()
	for deadline := time.Now().Add(time.Minute); !s.publicRefuses(); {
		if time.Now().After(deadline) {
			t.Fatal("the public port does not refuse")
		}
	}
	old := pki.Client(s.c.state.roots)
	old.NextProtos = []string{"http/1.1"}
	for major, client := range map[int]*http.Client{
		1: {Transport: &http.Transport{TLSClientConfig: old}},
		2: s.toController(),
	} {
		for i := range 10 { // also long after everybody was told
			resp, err := client.Get(url)
			if err != nil {
				t.Fatalf("HTTP/%d, request %d: %v", major, i, err)
			}
			resp.Body.Close()
			if resp.ProtoMajor != major || resp.StatusCode != http.StatusServiceUnavailable {
				t.Errorf("HTTP/%d: answered %d over %s", major, resp.StatusCode, resp.Proto)
			}
			if major == 1 && !resp.Close {
				t.Error("HTTP/1: the answer does not say that the connection ends")
			}
		}
		client.CloseIdleConnections()
	}
	if answer, err := finish(); err != nil || !strings.Contains(answer, "Connection: close") {
		t.Errorf("the request that was open got %q, %v", answer, err)
	}
	conn.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestADrainSaysGoAway proves that HTTP/2 clients hear of the stop while a
// stream of theirs is still open.
func TestADrainSaysGoAway(t *testing.T) {
	t.Parallel()
	s := start(t, testkit.NewDatabase(t), t.TempDir(), func(c *Config) { c.DrainSpread, c.DrainTimeout = time.Hour, 8*time.Second })
	s.await("the opening of the public port", s.c.Opened())
	client := s.toController()
	ended := make(chan farewell, 20)
	s.streams(client, s.c.Endpoints().ControllerURL, 12, ended)
	done := s.drainBegins()
	// After GOAWAY the client must open another connection for a request.
	for deadline := time.Now().Add(time.Minute); s.reuses(client); {
		if time.Now().After(deadline) {
			t.Fatal("requests go on over the connection that is to end")
		}
	}
	if len(ended) == 12 {
		t.Error("all streams ended before the client was told")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// reuses makes a request and says whether it went over a connection that was
// there before.
func (s *started) reuses(client *http.Client) (reused bool) {
	s.Helper()
	ctx := httptrace.WithClientTrace(s.Context(), &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.c.Endpoints().ControllerURL+"/livez", nil)
	if err != nil {
		s.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		s.Fatal(err)
	}
	resp.Body.Close()
	return reused
}
