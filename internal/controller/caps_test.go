package controller

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/testkit"
)

// Acceptance 42.
func TestTheControllerAnswersItselfWhileThePublicPortIsFull(t *testing.T) {
	t.Parallel()
	s := start(t, testkit.NewDatabase(t), t.TempDir(), func(c *Config) { c.Listening.Limits.MaxConns = 2 })
	s.await("the opening of the public port", s.c.Opened())
	public := strings.TrimPrefix(s.c.Endpoints().PublicURL, "http://")
	dial := func() net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", public)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	held := func(n int) {
		t.Helper()
		until(t, strconv.Itoa(n)+" connections", func() bool { return s.c.listener.Status().Public.Conns == n })
	}
	itself := func(when string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := s.c.selfCall(ctx); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if status, r := s.readyz(); status != http.StatusOK {
			t.Errorf("%s: readyz %d %+v", when, status, r)
		}
	}
	dial()
	dial()
	held(2)
	over := dial()
	held(3)
	itself("above the soft cap")
	// The reset comes while the client still connects, or when it reads.
	conn, err := net.Dial("tcp", public)
	if err == nil {
		defer conn.Close()
		_, err = conn.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("above the hard cap: %v, want a reset", err)
	}
	itself("above the hard cap")
	if _, err := over.Write([]byte("GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(over), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	wait, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if resp.StatusCode != http.StatusTooManyRequests || err != nil || wait < 1 || !resp.Close {
		t.Errorf("above the soft cap: %s, Retry-After %q, close %v", resp.Status, resp.Header.Get("Retry-After"), resp.Close)
	}
}
