package web_test

import (
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"headgate/internal/auth"
)

// TestServeDemo serves the demo for whoever works on the pages, at the address
// in HEADGATE_WEB_DEV and until the test's time is over:
//
//	HEADGATE_WEB_DEV=127.0.0.1:8080 go test -run TestServeDemo -v -timeout 1h ./web
func TestServeDemo(t *testing.T) {
	addr := os.Getenv("HEADGATE_WEB_DEV")
	if addr == "" {
		t.Skip("HEADGATE_WEB_DEV names no address")
	}
	r := newRig(t, withDay())
	r.demo()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("http://%s/sign-in?code=%s", l.Addr(), r.link("mira", auth.Admin))
	s := &http.Server{Handler: r.handler, ReadHeaderTimeout: 10 * time.Second}
	if err := s.Serve(l); err != nil {
		t.Log(err)
	}
}
