package controller

import (
	"path/filepath"
	"strings"
	"testing"

	"headgate/listener"
)

// TestSocketsThatWerePassedAreLookedAt gives the ports addresses that settings
// could not have.
func TestSocketsThatWerePassedAreLookedAt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, controller, public, want string
		proxyTLS                       bool
	}{
		{"sound", "127.0.0.1:0", "127.0.0.1:0", "", false},
		{"public port beyond this machine", "127.0.0.1:0", ":0", "without TLS", false},
		{"the same with a proxy that ends TLS", "127.0.0.1:0", ":0", "", true},
		{"public unix socket", "127.0.0.1:0", "unix:" + filepath.Join(t.TempDir(), "s"), "", false},
		{"controller port without an address", "unix:" + filepath.Join(t.TempDir(), "s"), "127.0.0.1:0", "must be one of TCP", false},
	} {
		l, err := listener.New(t.Context(), listener.Config{
			Controller: listener.PortConfig{Addr: tt.controller}, Public: listener.PortConfig{Addr: tt.public},
		})
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		c := &Controller{cfg: Config{ProxyTLS: tt.proxyTLS, TwoPhase: true}, listener: l}
		switch err := c.checkPassed(); {
		case tt.want == "" && err != nil:
			t.Errorf("%s: %v", tt.name, err)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		_ = l.Close()
	}
}
