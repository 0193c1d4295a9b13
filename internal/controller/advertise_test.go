package controller

import (
	"context"
	"strings"
	"testing"
	"time"
	"uuid"

	"headgate/internal/store"
	"headgate/internal/testkit"
)

func TestControllersThatCannotCallEachOtherAreNamed(t *testing.T) {
	t.Parallel()
	other := func(addr, host string) store.Controller { return store.Controller{Name: "b", Addr: addr, Host: host} }
	for name, c := range map[string]struct {
		here    string
		hasPort bool
		other   store.Controller
		want    string // "" = they can
	}{
		"on one host by loopback":         {"127.0.0.1:7441", true, other("127.0.0.1:7451", "me"), ""},
		"on two hosts":                    {"10.0.0.1:7441", true, other("10.0.0.2:7441", "b"), ""},
		"names":                           {"one.example:7441", true, other("two.example:7441", "b"), ""},
		"this one by loopback":            {"127.0.0.1:7441", true, other("10.0.0.2:7441", "b"), "controller-advertise: the controller b at 10.0.0.2:7441, on another host, cannot reach this one at 127.0.0.1:7441"},
		"this one by localhost":           {"localhost:7441", true, other("10.0.0.2:7441", "b"), "cannot reach this one"},
		"this one by IPv6 loopback":       {"[::1]:7441", true, other("10.0.0.2:7441", "b"), "cannot reach this one"},
		"the other one by loopback":       {"10.0.0.1:7441", true, other("127.0.0.1:7441", "b"), "says that it is reached at 127.0.0.1:7441"},
		"this one without a port":         {"", false, other("10.0.0.2:7441", "me"), "two-phase"},
		"the other one without such port": {"10.0.0.1:7441", true, other("", "me"), "has no controller port"},
	} {
		err := unreachableBetween(c.here, "me", c.hasPort, c.other)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// A controller elsewhere lives, and this one is given no address that leads to
// it: the start ends, and says what to do.
func TestALoopbackAddressBesideAnotherHostEndsTheStart(t *testing.T) {
	t.Parallel()
	dsn := testkit.NewDatabase(t)
	db, err := store.Open(t.Context(), store.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	far := store.Controller{ID: uuid.NewV4(), Identity: uuid.NewV4(), Name: "far", Addr: "192.0.2.7:7441", Host: "another machine"}
	if err := db.RegisterController(t.Context(), far, nil); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL, cfg.PublicAddr, cfg.ControllerAddr = t.TempDir(), dsn, "127.0.0.1:0", "0.0.0.0:0"
	c, err := New(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := c.Run(ctx); err == nil || !strings.Contains(err.Error(), "controller-advertise") {
		t.Errorf("the start: %v", err)
	}
	if list, err := db.Controllers(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("the one that did not start is registered: %+v, %v", list, err)
	}
}

func TestAnAdvertisedAddressMustBeOneToCall(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{"0.0.0.0:7441": "names no host", ":7441": "names no host", "10.0.0.1:0": "port 0", "10.0.0.1:7441": "", "a.example:1": ""} {
		cfg := DefaultConfig()
		cfg.DatabaseURL, cfg.PublicAddr, cfg.ControllerAdvertise = "host=/x", "127.0.0.1:7440", addr
		var texts []string
		for _, p := range cfg.validate() {
			texts = append(texts, p.Error())
		}
		if got := strings.Join(texts, "\n"); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", addr, got, want)
		}
	}
}
