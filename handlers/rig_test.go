package handlers_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"uuid"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/goleak"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/internal/auth/authtest"
	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/internal/kinds"
	"headgate/internal/pki"
	"headgate/listener"
	"headgate/openapi"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is the whole interface over the real services with stores in memory.
type rig struct {
	handler http.Handler
	auth    *auth.Service
	store   *authtest.Store
	queue   *tasktest.Store
	manager *tasks.Manager
	service *tasks.Service
	fleet   *fleet.Fleet
	agents  *agents
	ready   atomic.Bool
	public  atomic.Bool // requests come in at the public port
	leave   *handlers.Farewell
	tokens  map[auth.Role]string
	cookies map[auth.Role]string
}

// sharedPages are built once: they are the same for every rig.
var sharedPages = sync.OnceValue(func() (p struct{ document, swagger, reference http.Handler }) {
	p.document, p.swagger, p.reference = openapi.Document(""), openapi.Swagger(), openapi.Reference("")
	return p
})

// names are the agents of every rig; two share a name.
func names() []string { return []string{"alpha", "beta", "gamma", "twin", "twin"} }

func newRig(t testing.TB, change ...func(*handlers.Config)) *rig {
	t.Helper()
	r := &rig{store: authtest.NewStore(), leave: handlers.NewFarewell(), tokens: map[auth.Role]string{}, cookies: map[auth.Role]string{}}
	r.ready.Store(true)
	var err error
	if r.auth, err = auth.New(auth.Config{Store: r.store}); err != nil {
		t.Fatal(err)
	}
	r.startQueue(t)
	reg := prometheus.NewRegistry()
	cfg := handlers.Config{
		Auth: r.auth, Tasks: r.service, Manager: r.manager, Hub: r.manager.Hub(), Fleet: r.fleet,
		Ready: r.readiness,
		Status: func() handlers.Status {
			return handlers.Status{Phase: "serving", Since: time.Now(), StartedAt: time.Now(), Ports: handlers.Ports{State: "open", LimitMode: "enforce"}}
		},
		Listener: func() listener.Status {
			return listener.Status{State: listener.StateOpen, Since: time.Now(), Admission: listener.Admission{Limits: listener.Limits{Mode: listener.ModeEnforce}}}
		},
		Version: handlers.Version{Version: "test", Commit: "none", Go: "go1.27"},
		Metrics: promhttp.HandlerFor(reg, promhttp.HandlerOpts{}), Registerer: reg,
		OpenAPI: sharedPages().document, Swagger: sharedPages().swagger, Reference: sharedPages().reference,
		Web:              http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "dashboard") }),
		OnControllerPort: func(*http.Request) bool { return !r.public.Load() },
		Farewell:         r.leave,
	}
	for _, f := range change {
		f(&cfg)
	}
	r.handler = handlers.New(cfg)
	r.signIn(t)
	return r
}

func (r *rig) readiness() handlers.Readiness {
	if r.ready.Load() {
		return handlers.Readiness{Ready: true, Phase: "serving"}
	}
	return handlers.Readiness{Phase: "database", Unmet: []handlers.UnmetCondition{{Condition: "database", Detail: "connection refused"}}}
}

// startQueue starts a Manager whose agents are scripted.
func (r *rig) startQueue(t testing.TB) {
	t.Helper()
	store, rows := tasktest.NewStore(), fleettest.NewStore()
	r.queue = store
	shards := map[tasks.AgentNum]tasks.Shard{}
	for i, name := range names() {
		id := uuid.NewV7()
		num := store.NewAgent(id, name, map[string]string{"env": "test", "n": string(rune('0' + i))})
		row := rows.Add(fleet.Agent{
			Num: num, ID: id, Name: name, Addresses: []string{"127.0.0.1:1"}, Labels: map[string]string{"env": "test"},
			Status: fleet.Active, Revision: 1, PairedAt: time.Now(),
		})
		if row.Num != num {
			t.Fatalf("the two stores number agents differently: %d and %d", row.Num, num)
		}
		shards[num] = tasks.ShardOf(id)
	}
	dir, err := pki.OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	r.fleet, err = fleet.New(fleet.Config{Store: rows, Dir: dir, ControllerID: uuid.NewV7(), FleetName: "test", AllowLoopback: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.fleet.EnsureCA(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.agents = &agents{
		Fleet: r.fleet, gate: make(chan struct{}), work: make(chan tasks.Assignment, 1000),
		up: make(chan tasks.AgentNum, 100), shards: shards, owned: map[tasks.Shard]int64{},
	}
	close(r.agents.gate)
	r.manager = tasks.NewManager(tasks.Config{
		Store: store, Runner: r.agents, Owner: tasks.Owner{ID: uuid.NewV4(), Name: "test"},
		Limits: tasks.Limits{AgentDepth: 10_000_000, TotalDepth: 10_000_000},
	})
	r.agents.manager = r.manager
	r.service = tasks.NewService(tasks.ServiceConfig{Manager: r.manager, Kinds: kinds.Default()})
	r.fleet.Attach(r.manager)
	if err := r.fleet.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.run(t)
}

func (r *rig) run(t testing.TB) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.manager.Run(ctx) })
	wg.Go(func() { r.agents.run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for len(r.manager.Ready()) > 0 { // before it has taken its shards it refuses
		<-tick.C
	}
}

// agents runs what it is given by returning the arguments, as core.echo does.
// While its gate is held, tasks stay in the slot.
type agents struct {
	*fleet.Fleet
	manager *tasks.Manager
	work    chan tasks.Assignment
	up      chan tasks.AgentNum
	shards  map[tasks.AgentNum]tasks.Shard // fixed once the queue runs
	printed atomic.Int64                   // what finals say beside what finish prints

	mu    sync.Mutex    // guards both below
	gate  chan struct{} // closed = tasks complete
	owned map[tasks.Shard]int64
}

func (a *agents) hold() (release func()) {
	gate := make(chan struct{})
	a.mu.Lock()
	a.gate = gate
	a.mu.Unlock()
	return sync.OnceFunc(func() { close(gate) })
}

// Own connects every agent of the shards held.
func (a *agents) Own(leases []tasks.Lease) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range leases {
		if a.owned[l.Shard] == l.Epoch {
			continue
		}
		a.owned[l.Shard] = l.Epoch
		for num, shard := range a.shards {
			if shard == l.Shard {
				a.up <- num
			}
		}
	}
}

func (a *agents) Execute(x tasks.Assignment)               { a.work <- x }
func (a *agents) Cancel(tasks.AgentNum, tasks.Ref, string) {}
func (a *agents) Forget(tasks.AgentNum, ...tasks.ID)       {}
func (a *agents) AckOutput(tasks.AgentNum, tasks.Ref, int) {}
func (a *agents) Reconnect(tasks.AgentNum, string)         {}
func (a *agents) Quarantine(tasks.AgentNum, string)        {}

func (a *agents) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case num := <-a.up:
			a.manager.SessionUp(tasks.Session{Agent: num, LedgerID: uuid.NewV4()})
		case x := <-a.work:
			a.mu.Lock()
			gate := a.gate
			a.mu.Unlock()
			select {
			case <-ctx.Done():
				return
			case <-gate:
				a.finish(x)
			}
		}
	}
}

func (a *agents) finish(x tasks.Assignment) {
	now := time.Now()
	a.manager.Accepted(x.Agent, x.Ref())
	out := a.printed.Load()
	if x.Kind == "core.sleep" { // prints, in these tests
		for i, text := range []string{"first\n", "oops\n", "second\n"} {
			c := tasks.OutputChunk{Ref: x.Ref(), Seq: i, Stream: "stdout", Offset: int64(6 * (i / 2)), At: now, Data: []byte(text)}
			if i == 1 {
				c.Stream, c.Offset = "stderr", 0
			}
			a.manager.Output(x.Agent, c)
			out += int64(len(text))
		}
	}
	a.manager.Final(x.Agent, tasks.Final{
		Ref: x.Ref(), Epoch: x.Epoch, StartedAt: now, EndedAt: now,
		Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(x.Args), OutputBytes: out},
	})
}

// signIn makes a token and a session of each role.
func (r *rig) signIn(t testing.TB) {
	t.Helper()
	admin := auth.Principal{Kind: auth.KindUser, Name: "admin", Role: auth.Admin}
	for _, role := range auth.TokenRoles() {
		_, secret, err := r.auth.NewToken(t.Context(), admin, string(role), role, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		value, _, err := r.auth.SignInWithToken(t.Context(), secret)
		if err != nil {
			t.Fatal(err)
		}
		r.tokens[role], r.cookies[role] = secret, value
	}
}

// request makes a request with the token of a role.
func (r *rig) request(t testing.TB, method, path, body string, role auth.Role, header map[string]string) *http.Request {
	t.Helper()
	if strings.HasPrefix(path, "/") {
		path = "http://localhost" + path
	}
	target, query, _ := strings.Cut(path, "?")
	req := httptest.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
	req.URL.RawQuery = query // also a malformed one
	if body != "" || method == "POST" || method == "PATCH" {
		req.Header.Set("Content-Type", "application/json")
	}
	if role != "" {
		req.Header.Set("Authorization", "Bearer "+r.tokens[role])
	}
	for k, v := range header {
		if req.Header.Set(k, v); v == "" {
			req.Header.Del(k)
		}
	}
	return req
}

// do sends a request and checks the answer against the contract.
func (r *rig) do(t testing.TB, method, path, body string, role auth.Role, header map[string]string) *http.Response {
	t.Helper()
	w := httptest.NewRecorder()
	req := r.request(t, method, path, body, role, header)
	r.handler.ServeHTTP(w, req)
	res := w.Result()
	checkContract(t, req, res, w.Body.Bytes())
	return res
}

func readBody(t testing.TB, res *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func readProblem(t testing.TB, res *http.Response) handlers.Problem {
	t.Helper()
	var p handlers.Problem
	text := readBody(t, res)
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatalf("no problem document: %d %s", res.StatusCode, text)
	}
	return p
}

// decode reads a JSON answer with the wanted status.
func decode[T any](t testing.TB, res *http.Response, status int) T {
	t.Helper()
	var v T
	text := readBody(t, res)
	if res.StatusCode != status {
		t.Fatalf("status %d, want %d: %s", res.StatusCode, status, text)
	}
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return v
}
