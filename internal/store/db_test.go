package store

import (
	"context"
	"testing"
	"time"
	"uuid"

	"github.com/lib/pq"
	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/fault"
	"headgate/internal/testkit"
	"headgate/tasks"
)

func TestOpenExplainsWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		dsn  string
		kind fault.Kind
		code string
	}{
		"unreadable": {"host='", fault.Invalid, "database_dsn"},
		"no sslmode": {"postgres://u@127.0.0.1:1/x", fault.Invalid, "database_sslmode"},
		"nobody":     {"postgres://u@127.0.0.1:1/x?sslmode=disable", fault.Unavailable, "database_unavailable"},
	} {
		d, err := Open(t.Context(), Config{DSN: c.dsn})
		if err == nil {
			t.Errorf("%s: opened", name)
			_ = d.Close()
			continue
		}
		if fault.KindOf(err) != c.kind || fault.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want code %s", name, err, c.code)
		}
	}
}

// Cases Q23.
func TestPoolsHaveTheirSettings(t *testing.T) {
	t.Parallel()
	d := open(t)
	show := func(pool interface {
		GetContext(context.Context, any, string, ...any) error
	}, name string,
	) string {
		var v string
		if err := pool.GetContext(t.Context(), &v, "SELECT current_setting($1)", name); err != nil {
			t.Fatal(err)
		}
		return v
	}
	for name, want := range loopSettings() {
		if got := show(d.loops, name); got != want {
			t.Errorf("loops: %s is %q, want %q", name, got, want)
		}
	}
	if got := show(d.pages, "statement_timeout"); got != "3s" {
		t.Errorf("pages: statement_timeout is %s", got)
	}
	if _, err := d.pages.Exec(`INSERT INTO setting (name, value) VALUES ('x', '1')`); sqlState(err) != stateReadOnly {
		t.Errorf("a page wrote: %v", err)
	}
}

// Cases R28.
func TestDurabilityIsDemanded(t *testing.T) {
	t.Parallel()
	dsn := testkit.NewDatabase(t)
	d := openDSN(t, dsn)
	if err := d.CheckDurability(t.Context()); err != nil {
		if fault.CodeOf(err) != "database_not_durable" {
			t.Error(err)
		}
		t.Log("the test cluster itself is not durable:", err)
	}
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.general.Exec("ALTER DATABASE " + pq.QuoteIdentifier(cfg.Database) + " SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	fresh := openDSN(t, dsn)
	wantCode(t, fresh.CheckDurability(t.Context()), fault.Precondition, "database_not_durable")
}

func TestIDsOutliveAPartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	if _, err := r.general.Exec(`SELECT setval('agent_task_id_seq', $1)`, 5*partitionSpan-tasks.IDBlock-tasks.IDBlock/2); err != nil {
		t.Fatal(err)
	}
	var ins []tasks.Insert
	for range tasks.IDBlock {
		ins = append(ins, r.insert(r.agents[0], false))
	}
	if first, last := ins[0].ID/partitionSpan, ins[len(ins)-1].ID/partitionSpan; first == last {
		t.Fatalf("the block %d..%d lies in one partition", ins[0].ID, ins[len(ins)-1].ID)
	}
	if res := r.turn(&tasks.Turn{Inserts: ins}); len(res.Inserted) != len(ins) {
		t.Errorf("inserted %d of %d", len(res.Inserted), len(ins))
	}
	if n := r.count(`SELECT count(*) FROM pg_inherits WHERE inhparent = 'agent_task'::regclass`); n < 7 {
		t.Errorf("%d partitions, want two ahead of the fifth", n)
	}
}

func TestControllersSeeEachOther(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	a := Controller{ID: uuid.New(), Name: "a", Addr: "10.0.0.1:7441", Version: "1"}
	b := Controller{ID: uuid.New(), Name: "b", Addr: "10.0.0.2:7441", Version: "1"}
	for _, c := range []Controller{a, b} {
		if err := d.RegisterController(ctx, c, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.general.Exec(`UPDATE controller SET seen_at = now() - interval '1 hour'`); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Heartbeat(ctx, a.ID, false); err != nil {
		t.Fatal(err)
	}
	alive, err := d.Controllers(ctx)
	if err != nil || len(alive) != 1 || alive[0].ID != a.ID || alive[0].Addr != a.Addr {
		t.Errorf("alive: %+v, %v", alive, err)
	}
	if err := d.Unregister(ctx, a.ID); err != nil {
		t.Fatal(err)
	}
	if alive, err = d.Controllers(ctx); err != nil || len(alive) != 0 {
		t.Errorf("alive after sign-off: %+v, %v", alive, err)
	}
}

func TestStableControllersAreCountedOnlyWhileTheySaySo(t *testing.T) {
	t.Parallel()
	d := open(t)
	ctx := t.Context()
	ids := []uuid.UUID{uuid.New(), uuid.New(), uuid.New()}
	for _, id := range ids {
		if err := d.RegisterController(ctx, Controller{ID: id, Name: "c"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	beat := func(id uuid.UUID, stable bool) time.Time {
		at, err := d.Heartbeat(ctx, id, stable)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	expect := func(since time.Time, stable, alive int) {
		t.Helper()
		if s, a, err := d.StableControllers(ctx, since); err != nil || s != stable || a != alive {
			t.Errorf("%d of %d are stable (%v), want %d of %d", s, a, err, stable, alive)
		}
	}
	first := beat(ids[0], true)
	expect(first, 1, 3)
	second := beat(ids[1], true)
	expect(first, 2, 3)
	expect(second, 1, 3) // the first one has said nothing since
	beat(ids[0], false)
	expect(first, 1, 3)
	// A new start of the second one replaces its former one.
	if err := d.RegisterController(ctx, Controller{ID: uuid.New(), Name: "c"}, ids[1:2]); err != nil {
		t.Fatal(err)
	}
	expect(first, 0, 3)
	if _, err := d.Heartbeat(ctx, ids[1], true); !fault.Is(err, fault.NotFound) {
		t.Errorf("a controller that is not registered: %v", err)
	}
}

func TestAProbeOfASilentServerEndsSoon(t *testing.T) {
	t.Parallel()
	d, _, p := behindProxy(t)
	if err := d.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Stall()
	began := time.Now()
	if err := d.Probe(t.Context()); err == nil || time.Since(began) > 20*time.Second {
		t.Errorf("a silent server: %v after %v", err, time.Since(began))
	}
	p.Heal()
	if err := d.Probe(t.Context()); err != nil {
		t.Errorf("healed: %v", err)
	}
}

func TestMetricsCountTurns(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewPedanticRegistry()
	d := openDSN(t, testkit.NewDatabase(t), func(c *Config) { c.Metrics = reg })
	r := rigOn(t, d, 1)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{r.insert(r.agents[0], false)}})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			seen[f.GetName()] += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount()) + m.GetGauge().GetValue()
		}
	}
	if seen["headgate_store_turn_seconds"] != 1 || seen["headgate_store_turn_rows_total"] != 1 || seen["headgate_store_pool_open_connections"] < 1 {
		t.Errorf("metrics: %v", seen)
	}
}

// Cases Q24.
func TestNotifierDeliversAndComesBack(t *testing.T) {
	t.Parallel()
	d, direct, p := behindProxy(t)
	ctx, stop := context.WithCancel(t.Context())
	got, resyncs := make(chan string, 10), make(chan struct{}, 10)
	ended := make(chan error, 1)
	n := d.NewNotifier("wake")
	go func() {
		ended <- n.Run(ctx, func(s string) { got <- s }, func() { resyncs <- struct{}{} })
	}()
	<-resyncs
	if err := direct.Notify(ctx, "wake", "42"); err != nil {
		t.Fatal(err)
	}
	if s := <-got; s != "42" {
		t.Errorf("payload %q", s)
	}
	p.Cut()
	<-resyncs // it has connected again and says that something may be lost
	if err := direct.Notify(ctx, "wake", "43"); err != nil {
		t.Fatal(err)
	}
	if s := <-got; s != "43" {
		t.Errorf("payload after the cut %q", s)
	}
	if err := direct.Notify(ctx, "wake", string(make([]byte, MaxPayload+1))); err == nil {
		t.Error("a payload over the limit was sent")
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("run ended with %v", err)
	}
}
