package controller

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"headgate/internal/fleet"
	"headgate/listener"
)

// written is a log that several goroutines write.
type written struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (w *written) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.Write(b)
}

func (w *written) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

func TestAReloadAppliesLimitsAndNamesTheRest(t *testing.T) {
	t.Parallel()
	var log written
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL = t.TempDir(), "host=/nowhere password=secret"
	cfg.PublicAddr, cfg.ControllerAddr = "127.0.0.1:0", "127.0.0.1:0"
	c, err := New(cfg, Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.state.close() }()
	defer c.listener.Close()
	if got := c.listener.Status().Admission.Limits; got.MaxConns == 123 || got.Mode != listener.ModeEnforce {
		t.Fatalf("at first: %+v", got)
	}
	next := cfg
	next.Listening.Limits.MaxConns, next.Listening.Limits.Mode = 123, listener.ModeObserve
	next.OpenDelay, next.DatabaseURL = time.Minute, "host=/elsewhere password=secret"
	if err := c.Reload(next); err != nil {
		t.Fatal(err)
	}
	if got := c.listener.Status().Admission.Limits; got.MaxConns != 123 || got.Mode != listener.ModeObserve {
		t.Errorf("afterwards: %+v", got)
	}
	for _, want := range []string{"max-conns: 0 -> 123", "limit-mode: enforce -> observe", "open-delay: 2s -> 1m0s", "database-url"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("%q is missing in the log:\n%s", want, &log)
		}
	}
	if strings.Contains(log.String(), "secret") {
		t.Error("the log tells the database's password")
	}
	bad := next
	bad.Listening.Limits.MaxConns, bad.Listening.Limits.Queue = 5, -1
	if err := c.Reload(bad); err == nil || !strings.Contains(err.Error(), "nothing has changed") {
		t.Errorf("a bad limit: %v", err)
	}
	if got := c.listener.Status().Admission.Limits; got.MaxConns != 123 {
		t.Errorf("after a bad reload: %+v", got)
	}
}

func TestKnownSourcesAreTheAddressesOfAgents(t *testing.T) {
	t.Parallel()
	view := func(status fleet.Status, live string, addresses ...string) fleet.View {
		return fleet.View{Agent: fleet.Agent{Status: status, Addresses: addresses}, Live: fleet.Live{Address: live}}
	}
	got, err := agentSources(func(f fleet.Filter) ([]fleet.View, error) {
		if f.After == "" {
			page := make([]fleet.View, fleet.MaxPage)
			for i := range page {
				page[i] = view(fleet.Active, "", "192.0.2.1:7442", "[::ffff:192.0.2.1]:7442")
			}
			return page, nil
		}
		return []fleet.View{
			view(fleet.Active, "198.51.100.7:7442", "dns1.example.org:7442"),
			view(fleet.Active, "", "[2001:db8::5]:7442"),
			view(fleet.Quarantined, "", "203.0.113.9:7442"),
			view(fleet.Active, "dns2.example.org:7442", "dns2.example.org:7442"),
		}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("198.51.100.7/32"), netip.MustParsePrefix("2001:db8::5/128")}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Error(diff)
	}
}
