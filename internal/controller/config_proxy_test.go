package controller

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestProxySettings(t *testing.T) {
	t.Parallel()
	c, err := LoadConfig(Sources{
		File: writeFile(t, "database_url: x\npublic_addr: 127.0.0.1:0\nbase_path: /ops/headgate/\ntrusted_proxies: [10.1.2.3/8, 192.0.2.7, \"2001:db8::1\"]\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range c.TrustedProxies {
		got = append(got, n.String())
	}
	if diff := cmp.Diff([]string{"10.0.0.0/8", "192.0.2.7/32", "2001:db8::1/128"}, got); diff != "" {
		t.Error(diff)
	}
	if c.BasePath != "/ops/headgate" {
		t.Errorf("base path %q", c.BasePath)
	}
	if !c.TrustedProxies[1].Contains(netip.MustParseAddr("192.0.2.7")) {
		t.Error("a single address does not stand for itself")
	}
}

func TestWrongProxySettingsAreRefused(t *testing.T) {
	t.Parallel()
	for key, values := range map[string]map[string]string{
		"trusted-proxies": {
			"proxy.example": "not an address", "10.0.0.0/33": "not an address", "0.0.0.0/0": "everybody", "::/0": "everybody",
			"::ffff:10.0.0.1": "plain address", "10.0.0.1,nonsense": "not an address",
		},
		"base-path": {"headgate": "looks like", "/a b": "looks like", "/a/../b": "dots for parts", "/tasks": "a page of ours", "/api/x": "path of the API", "/healthz": "path of the API"},
	} {
		for value, want := range values {
			_, err := LoadConfig(Sources{Flags: map[string]string{"database-url": "x", "public-addr": "127.0.0.1:0", key: value}})
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--"+key) {
				t.Errorf("%s %q: %v", key, value, err)
			}
		}
	}
}
