package handlers_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
)

// TestASlowBodyEnds sends the beginning of a body and then nothing more, with
// a credential and without: both get an answer and lose their connection.
func TestASlowBodyEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(c *handlers.Config) { c.BodyTimeout = 50 * time.Millisecond })
	srv := httptest.NewServer(r.handler)
	t.Cleanup(srv.Close)
	for _, c := range []struct {
		header string
		status int
	}{
		{"Authorization: Bearer " + r.tokens[auth.Operator] + "\r\n", http.StatusBadRequest},
		{"", http.StatusUnauthorized},
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(srv.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST /api/v1/tasks HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 2000\r\n%s\r\n{", conn.RemoteAddr(), c.header)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%q: no answer: %v", c.header, err)
		}
		if resp.StatusCode != c.status {
			t.Errorf("%q: status %d, want %d", c.header, resp.StatusCode, c.status)
		}
		resp.Body.Close()
	}
}
