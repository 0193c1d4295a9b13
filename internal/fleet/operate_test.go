package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"uuid"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/pki"
)

func bare(t *testing.T, store fleet.Store, dir *pki.Dir) *fleet.Fleet {
	t.Helper()
	f, err := fleet.New(fleet.Config{Store: store, Dir: dir, ControllerID: uuid.NewV4(), FleetName: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func stateDir(t *testing.T) *pki.Dir {
	t.Helper()
	dir, err := pki.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	return dir
}

func TestTheFirstStartMakesTheCA(t *testing.T) {
	t.Parallel()
	store, dir := fleettest.NewStore(), stateDir(t)
	first, err := bare(t, store, dir).EnsureCA(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	again := bare(t, store, dir)
	second, err := again.EnsureCA(t.Context())
	if err != nil || second.ID() != first.ID() {
		t.Fatalf("the next start has another CA: %v", err)
	}
	if life := time.Until(again.Identity().Leaf().NotAfter); life < 6*24*time.Hour || life > 7*24*time.Hour {
		t.Errorf("the controller's certificate lives for %s", life)
	}
	other := stateDir(t)
	_, err = bare(t, store, other).EnsureCA(t.Context())
	if e, ok := errors.AsType[*fault.Error](err); !ok || e.Code != "ca_key_missing" || !strings.Contains(e.Message+e.Hint, first.KeyFile()) {
		t.Errorf("a controller without the key: %v", err)
	}
}

// TestTwoFirstStartsMakeOneCA: the loser of the race keeps no key.
func TestTwoFirstStartsMakeOneCA(t *testing.T) {
	t.Parallel()
	store, dir, other := fleettest.NewStore(), stateDir(t), stateDir(t)
	store.Before = func(ctx context.Context, method string) error {
		if method == "InsertCA" {
			store.Before = nil
			_, err := bare(t, store, other).EnsureCA(ctx)
			return err
		}
		return nil
	}
	_, err := bare(t, store, dir).EnsureCA(t.Context())
	if fault.CodeOf(err) != "ca_key_missing" {
		t.Errorf("got %v", err)
	}
	if keys, err := os.ReadDir(dir.Path() + "/keys"); err != nil || len(keys) != 0 {
		t.Errorf("keys left behind: %v, %v", keys, err)
	}
}

func TestLookupFindsByIDAndUniqueName(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	add := func(name string) fleet.Agent {
		return h.store.Add(fleettest.NewAgent(t, h.authority, name).Row("192.0.2.1:7442"))
	}
	dns, one, two := add("dns-north-1"), add("twin"), add("twin")
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"dns-north-1", dns.ID.String()} {
		if a, err := h.Lookup(ref); err != nil || a.Num != dns.Num {
			t.Errorf("%s: %+v, %v", ref, a, err)
		}
	}
	_, err := h.Lookup("twin")
	if e, _ := errors.AsType[*fault.Error](err); e == nil || e.Kind != fault.Conflict || e.Code != "ambiguous_agent" ||
		!strings.Contains(e.Message, one.ID.String()) || !strings.Contains(e.Message, two.ID.String()) {
		t.Errorf("ambiguous: %v", err)
	}
	for ref, hint := range map[string]string{"dns-nort-1": "dns-north-1", "DNS-NORTH-1": "dns-north-1", "qqqqqqqqqqq": "", uuid.NewV4().String(): ""} {
		_, err := h.Lookup(ref)
		e, _ := errors.AsType[*fault.Error](err)
		if e == nil || e.Kind != fault.Invalid || e.Code != "unknown_agent" || hint != "" && !strings.Contains(e.Hint, hint) || hint == "" && strings.Contains(e.Hint, "mean") {
			t.Errorf("%s: %v", ref, err)
		}
	}
	if changed := h.queue.Calls(func(c fleettest.Call) bool { return c.Method == "changed" }); len(changed) != 3 {
		t.Errorf("the queue was told of %d agents", len(changed))
	}
}

func TestListsArePagedAndFiltered(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	for i := range 25 {
		row := fleettest.NewAgent(t, h.authority, fmt.Sprintf("agent-%02d", i/2)).Row(fmt.Sprintf("192.0.2.%d:7442", i))
		row.Labels = map[string]string{"half": fmt.Sprint(i % 2)}
		h.store.Add(row)
	}
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen := map[uuid.UUID]bool{}
	last, after, pages := "", "", 0
	for {
		page, err := h.List(fleet.Filter{Limit: 7, After: after})
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		pages++
		for _, v := range page {
			if seen[v.ID] || v.Name < last {
				t.Errorf("%s %s is out of order or doubled", v.Name, v.ID)
			}
			seen[v.ID], last = true, v.Name
		}
		after = fleet.Cursor(page[len(page)-1])
	}
	if len(seen) != 25 || pages != 4 {
		t.Errorf("%d agents on %d pages", len(seen), pages)
	}
	for name, c := range map[string]struct {
		filter fleet.Filter
		want   int
	}{
		"label":   {fleet.Filter{Labels: map[string]string{"half": "1"}}, 12},
		"name":    {fleet.Filter{Query: "AGENT-0"}, 20},
		"address": {fleet.Filter{Query: "192.0.2.1"}, 11},
		"health":  {fleet.Filter{Health: []fleet.Health{fleet.HealthElsewhere}}, 25},
		"nothing": {fleet.Filter{Health: []fleet.Health{fleet.HealthConnected}}, 0},
	} {
		if page, err := h.List(c.filter); err != nil || len(page) != c.want {
			t.Errorf("%s: %d agents, %v", name, len(page), err)
		}
	}
	for _, bad := range []string{"x", "!!", "AAAA"} {
		if _, err := h.List(fleet.Filter{After: bad}); fault.CodeOf(err) != "invalid_cursor" {
			t.Errorf("cursor %q: %v", bad, err)
		}
	}
}

func TestChangesReachQueueAndEvents(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("old", nil)
	h.run()
	h.up(row.Num, 1)
	name, pause := "new", true
	v, err := h.Update(t.Context(), row.ID, fleet.Change{Name: &name, Paused: &pause, Revision: row.Revision}, "user:a")
	if err != nil || v.Name != "new" || v.PausedBy != "user:a" {
		t.Fatalf("%+v, %v", v.Agent, err)
	}
	// The queue has been told before Update returns.
	calls := h.queue.Calls(fleettest.Is("changed", row.Num))
	if c := calls[len(calls)-1].Changed; !c.Paused || c.Name != "new" {
		t.Errorf("the queue was told %+v", c)
	}
	if _, err := h.Lookup("old"); fault.CodeOf(err) != fleet.CodeUnknownAgent {
		t.Errorf("the old name: %v", err)
	}
	if _, err := h.Update(t.Context(), row.ID, fleet.Change{Name: &name, Revision: row.Revision}, "user:a"); fault.CodeOf(err) != "revision_changed" {
		t.Errorf("an old revision: %v", err)
	}
	if n := len(h.queue.Calls(fleettest.Is("down", row.Num))); n != 0 {
		t.Error("pausing ended the session")
	}
	for what, c := range map[string]fleet.Change{
		"an empty name":   {Name: new("")},
		"an id as name":   {Name: new(uuid.NewV4().String())},
		"a control":       {Name: new("a\nb")},
		"no address":      {Addresses: &[]string{}},
		"a bad label":     {Labels: &map[string]string{"a b": "c"}},
		"a long label":    {Labels: &map[string]string{"a": strings.Repeat("x", 300)}},
		"a bad address":   {Addresses: &[]string{"a:0"}},
		"zone in address": {Addresses: &[]string{"[fe80::1%eth0]:1"}},
	} {
		if _, err := h.Update(t.Context(), row.ID, c, "a"); fault.KindOf(err) != fault.Invalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := h.Remove(t.Context(), row.ID, "user:a"); err != nil {
		t.Fatal(err)
	}
	calls = h.queue.Calls(fleettest.Is("changed", row.Num))
	if c := calls[len(calls)-1].Changed; !c.Removed {
		t.Errorf("the queue was told %+v", c)
	}
	h.down(row.Num, 1)
	if _, err := h.Get(row.ID); fault.CodeOf(err) != fleet.CodeUnknownAgent {
		t.Errorf("a removed agent: %v", err)
	}
}

func TestChangesByOthersAreNoticed(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", nil)
	h.run()
	h.up(row.Num, 1)
	other := bare(t, h.store, h.dir)
	other.Attach(fleettest.NewQueue())
	if err := other.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	name := "renamed elsewhere"
	if _, err := other.Update(t.Context(), row.ID, fleet.Change{Name: &name}, "user:b"); err != nil {
		t.Fatal(err)
	}
	_, second := h.agent("b", nil)
	h.Reload()
	h.event("renamed", func(e fleet.Event) bool { return e.What == fleet.EventChanged && e.View.Name == name })
	h.up(second.Num, 1)
	if err := other.Remove(t.Context(), row.ID, "user:b"); err != nil {
		t.Fatal(err)
	}
	h.Reload()
	h.down(row.Num, 1)
	h.event("removed", func(e fleet.Event) bool { return e.What == fleet.EventRemoved && e.View.ID == row.ID })
}

// TestTwoProcessesWithOneIdentityAreQuarantined: a copied machine.
func TestTwoProcessesWithOneIdentityAreQuarantined(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	original, twin := uuid.NewV4().String(), uuid.NewV4().String()
	var n atomic.Int64
	_, row := h.agent("a", func(a *fleettest.Agent) {
		a.Welcome = func(_ *agentpb.Hello, w *agentpb.Welcome) error {
			w.InstanceId = original
			if n.Add(1)%2 == 0 {
				w.InstanceId = twin
			}
			return nil
		}
	})
	h.run()
	for i := range 2 {
		h.up(row.Num, i+1)
		h.Reconnect(row.Num, "test")
	}
	h.event("quarantined", func(e fleet.Event) bool {
		return e.View.Status == fleet.Quarantined && strings.Contains(e.View.StatusWhy, "two processes")
	})
}

func TestPingBelievesOnlyTheRightAnswer(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", nil)
	away := h.store.Add(fleettest.NewAgent(t, h.authority, "away").Row("127.0.0.1:1"))
	h.run()
	h.up(row.Num, 1)
	h.trouble(away.ID, fleet.CauseRefused)
	_, err := h.Ping(t.Context(), away.ID)
	if e, _ := errors.AsType[*fault.Error](err); e == nil || e.Code != fleet.CodeAgentOffline || !strings.Contains(e.Message, "connection refused by 127.0.0.1:1") {
		t.Errorf("ping: %v", err)
	}
	if _, err := h.Ping(t.Context(), uuid.NewV4()); fault.KindOf(err) != fault.NotFound {
		t.Errorf("ping of nobody: %v", err)
	}
}

func TestMetricsCountAgentsByHealth(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	h := newHarness(t, quick(), func(c *fleet.Config) { c.Registerer = reg })
	_, row := h.agent("a", nil)
	h.run()
	h.up(row.Num, 1)
	h.event("connected", func(e fleet.Event) bool { return e.View.Live.Health == fleet.HealthConnected })
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := map[string]float64{}
	for _, f := range families {
		if f.GetName() == "headgate_fleet_agents" {
			for _, m := range f.GetMetric() {
				sum[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if strings.Contains(l.GetValue(), "127.0.0.1") {
					t.Errorf("%s has an address as a label", f.GetName())
				}
			}
		}
	}
	if sum["connected"] != 1 || sum["elsewhere"] != 0 || sum["connecting"] != 0 {
		t.Errorf("agents by health: %v", sum)
	}
}

func TestAWaitingDatabaseEndsNoSession(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	_, row := h.agent("a", nil)
	var broken atomic.Bool
	h.store.Before = func(context.Context, string) error {
		if broken.Load() {
			return errors.New("the database is away")
		}
		return nil
	}
	h.run()
	h.up(row.Num, 1)
	broken.Store(true)
	h.Reload()
	h.give(row.Num, 1, "1")
	h.final(row.Num, 1)
	if _, err := h.Update(t.Context(), row.ID, fleet.Change{Paused: new(true)}, "a"); err == nil {
		t.Error("a change was accepted that could not be stored")
	}
	if v, err := h.Get(row.ID); err != nil || !v.PausedAt.IsZero() {
		t.Errorf("memory says %+v, %v", v.PausedAt, err)
	}
	h.give(row.Num, 2, "2")
	h.final(row.Num, 2)
	if n := len(h.queue.Calls(fleettest.Is("down", row.Num))); n != 0 {
		t.Error("the session ended")
	}
}
