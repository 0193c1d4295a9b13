package web_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"uuid"

	"go.uber.org/goleak"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/internal/auth/authtest"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/listener"
	"headgate/openapi"
	"headgate/tasks"
	"headgate/tasks/tasktest"
	"headgate/web"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is the dashboard behind the real middleware and event stream, over the
// real queue with a store in memory, and a fleet of values.
type rig struct {
	t        testing.TB
	handler  http.Handler
	auth     *auth.Service
	store    *tasktest.Store
	runner   *tasktest.ScriptedRunner
	manager  *tasks.Manager
	service  *tasks.Service
	fleet    *agents
	status   web.Status
	base     string
	counters web.Counters
	proxies  []netip.Prefix // trusted
	hosts    []string       // allowed
	log      *slog.Logger   // of requests and sign-ins
	cookies  map[auth.Role]string
}

// agents is a fleet whose state is set by tests.
type agents struct {
	mu     sync.Mutex
	views  map[uuid.UUID]*fleet.View
	runner *tasktest.ScriptedRunner
	pinged error
}

func (a *agents) List(f fleet.Filter) ([]fleet.View, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var list []fleet.View
	for _, v := range a.views {
		match := strings.HasPrefix(v.Name, f.Query) || strings.HasPrefix(v.ID.String(), f.Query) || strings.HasPrefix(v.Live.Address, f.Query)
		for key, want := range f.Labels {
			match = match && v.Labels[key] == want
		}
		if match && (f.After == "" || fleet.Cursor(*v) > f.After) {
			list = append(list, *v)
		}
	}
	slices.SortFunc(list, func(x, y fleet.View) int { return strings.Compare(fleet.Cursor(x), fleet.Cursor(y)) })
	return list[:min(len(list), f.Limit)], nil
}

func (a *agents) Get(id uuid.UUID) (fleet.View, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if v := a.views[id]; v != nil {
		return *v, nil
	}
	return fleet.View{}, fault.New(fault.NotFound, "unknown_agent", "There is no such agent.")
}

func (a *agents) Lookup(ref string) (tasks.Agent, error) { return a.runner.Lookup(ref) }

func (a *agents) Update(_ context.Context, id uuid.UUID, c fleet.Change, actor string) (fleet.View, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	v := a.views[id]
	if v == nil {
		return fleet.View{}, fault.New(fault.NotFound, "unknown_agent", "There is no such agent.")
	}
	v.PausedAt, v.PausedBy = time.Time{}, ""
	if c.Paused != nil && *c.Paused {
		v.PausedAt, v.PausedBy = time.Now(), actor
	}
	return *v, nil
}

func (a *agents) Approve(_ context.Context, id uuid.UUID, _ string) (fleet.View, error) {
	a.set(id, func(v *fleet.View) { v.Status, v.Live.Health = fleet.Active, fleet.HealthConnecting })
	return a.Get(id)
}

func (a *agents) Ping(_ context.Context, id uuid.UUID) (fleet.Pong, error) {
	return fleet.Pong{RTT: 3200 * time.Microsecond, Version: "0.1.0", Clock: time.Now()}, a.pinged
}

func (a *agents) set(id uuid.UUID, f func(*fleet.View)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(a.views[id])
}

type rigOption func(*rig)

func withBase(base string) rigOption { return func(r *rig) { r.base = base } }

func newRig(t testing.TB, options ...rigOption) *rig {
	t.Helper()
	r := &rig{t: t, store: tasktest.NewStore(), runner: tasktest.NewScriptedRunner(), cookies: map[auth.Role]string{}}
	r.fleet = &agents{views: map[uuid.UUID]*fleet.View{}, runner: r.runner}
	r.status = readyStatus()
	for _, o := range options {
		o(r)
	}
	r.manager = tasks.NewManager(tasks.Config{Store: r.store, Runner: r.runner, Owner: tasks.Owner{ID: uuid.NewV4(), Name: "ctl-ams-1"}})
	r.runner.Attach(r.manager)
	r.service = tasks.NewService(tasks.ServiceConfig{Manager: r.manager, Kinds: kinds.Default()})
	if r.counters == nil {
		r.counters = r.manager
	}
	authStore := authtest.NewStore()
	var err error
	if r.auth, err = auth.New(auth.Config{Store: authStore, CookiePath: r.base + "/", AllowedHosts: r.hosts, Logger: r.log}); err != nil {
		t.Fatal(err)
	}
	dashboard, err := web.New(web.Config{
		Tasks: r.service, Fleet: r.fleet, Auth: r.auth, Counters: r.counters, Hub: r.manager.Hub(),
		Status: func() web.Status { return r.status }, BasePath: r.base, Version: "0.1.0",
	})
	if err != nil {
		t.Fatal(err)
	}
	r.handler = handlers.New(handlers.Config{
		Auth: r.auth, Tasks: r.service, Manager: r.manager, Hub: r.manager.Hub(),
		Ready:    func() handlers.Readiness { return handlers.Readiness{Ready: true, Phase: "open"} },
		Status:   func() handlers.Status { return handlers.Status{} },
		Listener: func() listener.Status { return listener.Status{} },
		Metrics:  http.NotFoundHandler(), Web: dashboard, BasePath: r.base, TrustedProxies: r.proxies, Logger: r.log,
		OpenAPI: openapi.Document(r.base), Swagger: openapi.Swagger(), Reference: openapi.Reference(r.base),
	})
	for _, role := range []auth.Role{auth.Viewer, auth.Operator, auth.Admin} {
		r.signIn(role)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = r.manager.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r
}

// link gives a one-time sign-in code.
func (r *rig) link(name string, role auth.Role) string {
	r.t.Helper()
	u, err := r.auth.EnsureUser(r.t.Context(), name, role)
	if err != nil {
		r.t.Fatal(err)
	}
	code, _, err := r.auth.NewSignInLink(r.t.Context(), u)
	if err != nil {
		r.t.Fatal(err)
	}
	return code
}

func (r *rig) signIn(role auth.Role) {
	r.t.Helper()
	value, _, err := r.auth.SignInWithCode(r.t.Context(), r.link(map[auth.Role]string{auth.Viewer: "vera", auth.Operator: "omar", auth.Admin: "mira"}[role], role))
	if err != nil {
		r.t.Fatal(err)
	}
	r.cookies[role] = value
}

// get reads a page; the role "" is a stranger.
func (r *rig) get(role auth.Role, path string, change ...func(*http.Request)) *httptest.ResponseRecorder {
	return r.do(role, httptest.NewRequest(http.MethodGet, "http://localhost"+r.base+path, nil), change...)
}

// post sends a form as a browser on the same site does.
func (r *rig) post(role auth.Role, path string, form url.Values) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodPost, "http://localhost"+r.base+path, strings.NewReader(form.Encode()))
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Sec-Fetch-Site", "same-origin")
	return r.do(role, req)
}

func (r *rig) do(role auth.Role, req *http.Request, change ...func(*http.Request)) *httptest.ResponseRecorder {
	if role != "" {
		req.AddCookie(&http.Cookie{Name: auth.CookieName, Value: r.cookies[role]})
	}
	for _, f := range change {
		f(req)
	}
	w := httptest.NewRecorder()
	r.handler.ServeHTTP(w, req)
	return w
}

func readyStatus() web.Status {
	now := time.Now()
	return web.Status{
		Name: "ctl-ams-1", Version: "0.1.0", Began: now.Add(-292 * time.Hour), Ready: true, Since: now.Add(-292 * time.Hour), Phase: "serving",
		Phases: []web.Phase{
			{Name: "parse", Took: 11 * time.Millisecond},
			{Name: "open", Took: 9 * time.Millisecond},
			{Name: "bind", Took: 3 * time.Millisecond},
			{Name: "database", Took: 403 * time.Millisecond},
			{Name: "join", Took: 900 * time.Millisecond},
			{Name: "open public", Took: 2 * time.Second},
		},
		Ports: []web.Port{
			{Name: "Controller", Addresses: []string{"127.0.0.1:7441"}, Open: true, Conns: 3, Note: "never limited"},
			{Name: "Public", Addresses: []string{"[::]:7440"}, Open: true, Conns: 41, Classes: []web.ClassConns{{Class: "user", Count: 38}, {Class: "unknown", Count: 3}}},
		},
		Listener: openListener(now),
	}
}

// openListener is a gate that has been open for long, after a stormy time.
func openListener(now time.Time) *web.Listener {
	at := func(d time.Duration) time.Time { return now.Add(-292*time.Hour - d) }
	return &web.Listener{
		State: "open", Since: at(0), Reason: "joined, and a call to myself succeeded",
		Checks:  []web.Check{{Name: "database", OK: true, Since: at(0)}, {Name: "self_call", OK: true, Since: at(0)}},
		Queue:   []web.Lane{{Name: "known", Count: 2}, {Name: "unknown", Count: 17}},
		Mode:    "enforce",
		Limits:  []web.Limit{{Name: "new connections", Value: "400/s"}, {Name: "of one source", Value: "20/s, at once 40"}},
		Sources: []web.Source{{Address: "203.0.113.77", Class: "unknown", Conns: 12, Refused: 48231}, {Address: "2001:db8:1:2::/64", Class: "known", Conns: 20}},
		Transitions: []web.Transition{
			{At: at(4 * time.Second), From: "starting", To: "controller-only", Reason: "controller port accepts"},
			{At: at(2 * time.Second), From: "controller-only", To: "settling", Reason: "joined, and a call to myself succeeded"},
			{At: at(0), From: "settling", To: "open", Reason: "joined, and a call to myself succeeded"},
		},
	}
}

// reclosed is what the pages know after the database went away.
func reclosed() web.Status {
	s := readyStatus()
	now := time.Now()
	s.Ready = false
	s.Ports[1].Open = false
	s.Listener.State, s.Listener.Since, s.Listener.Reason = "reclosed", now.Add(-42*time.Second), "the database has not answered for 44 s"
	s.Listener.Checks[0] = web.Check{Name: "database", Since: now.Add(-86 * time.Second), Detail: "The database gives no answer within 1 s."}
	s.Listener.Transitions = append(s.Listener.Transitions,
		web.Transition{At: now.Add(-72 * time.Second), From: "open", To: "shedding", Reason: "the database has not answered for 14 s"},
		web.Transition{At: now.Add(-42 * time.Second), From: "shedding", To: "reclosed", Reason: s.Listener.Reason})
	return s
}

// add enrols an agent that is connected and runs what it is given.
func (r *rig) add(name string, change ...func(*fleet.View)) *fleet.View {
	r.t.Helper()
	id := uuid.NewV7()
	labels := map[string]string{"site": name[max(0, len(name)-6):max(0, len(name)-3)], "tier": "edge"}
	num := r.store.NewAgent(id, name, labels)
	now := time.Now()
	v := &fleet.View{
		Agent: fleet.Agent{
			Num: num, ID: id, Name: name, Addresses: []string{"192.0.2.10:7442"}, Labels: labels, Status: fleet.Active, Revision: 1,
			CertExpires: now.Add(19 * 24 * time.Hour), LedgerID: uuid.NewV4(), Hostname: name, OS: "Debian 13", Version: "0.1.0",
			PairedAt: now.Add(-200 * 24 * time.Hour), PairedBy: "user:jon", Facts: json.RawMessage(inventory), FactsAt: now.Add(-20 * time.Minute),
		},
		Live: fleet.Live{
			Health: fleet.HealthConnected, Since: now.Add(-52 * time.Hour), Address: "192.0.2.10:7442", RTT: 3 * time.Millisecond, LastHeard: now.Add(-2 * time.Second),
			Kinds: offers(),
		},
	}
	for i := range v.SPKI {
		v.SPKI[i] = byte(i*37 + int(num))
	}
	for _, f := range change {
		f(v)
	}
	r.fleet.mu.Lock()
	r.fleet.views[id] = v
	r.fleet.mu.Unlock()
	r.runner.Add(tasks.Agent{Num: num, ID: id, Name: name, Paused: !v.PausedAt.IsZero(), PausedBy: v.PausedBy, PausedAt: v.PausedAt, Quarantined: v.Status == fleet.Quarantined, Why: v.StatusWhy}, script)
	return v
}

const inventory = `{"hostname":"dns-ams-01","os":"Debian GNU/Linux 13","kernel":"6.12.48","arch":"x86_64","cpu":{"model":"AMD EPYC 9354P","logical":4},
"memory":{"total_bytes":8323072000,"used_bytes":3123072000},"disks":[{"mount":"/","total_bytes":42949672960,"used_bytes":12949672960},{"mount":"/var","total_bytes":21474836480,"used_bytes":20474836480}],
"addresses":["192.0.2.10/24","2001:db8:51::10/64"]}`

func offers() []fleet.KindOffer {
	return []fleet.KindOffer{
		{Name: kinds.Run, Programs: []fleet.Program{
			{Name: "df", Description: "How full the file systems are.", ParamsSchema: json.RawMessage(`{"type":"object","properties":{"human":{"type":"boolean","description":"Sizes in units that people read.","default":true},"path":{"type":"string","description":"One file system only.","maxLength":256,"pattern":"^(?:/[a-z/]*)$"}},"required":[],"additionalProperties":false}`)},
			{Name: "journal", Description: "The newest lines of a unit's log.", ParamsSchema: json.RawMessage(`{"type":"object","properties":{"lines":{"type":"integer","minimum":1,"maximum":500,"default":50},"unit":{"type":"string","enum":["named","kea-dhcp4"],"description":"Whose log."}},"required":["unit"],"additionalProperties":false}`)},
			{Name: "uname", Description: "Name and version of the system."},
		}},
		{Name: kinds.Echo},
		{Name: kinds.Inventory},
		{Name: kinds.Ping},
		{Name: kinds.Sleep},
	}
}

// script makes agents do what the arguments of a task say.
func script(a tasks.Assignment) tasktest.Answer {
	var args struct {
		Do     string            `json:"do"`
		Reason string            `json:"reason"`
		Detail string            `json:"detail"`
		MS     int               `json:"ms"`
		Prog   string            `json:"program"`
		Args   map[string]string `json:"args"`
	}
	_ = json.Unmarshal([]byte(a.Args), &args)
	code := 0
	ans := tasktest.Answer{After: time.Duration(args.MS) * time.Millisecond, Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(a.Args)}}
	if a.Kind == kinds.Sleep {
		ans.Silent = true
	}
	if a.Kind == kinds.Run {
		text := demoOutput
		if args.Prog == "uname" {
			text = "Linux dns-ams-01 6.12.48 x86_64 GNU/Linux\n"
		}
		ans.Output = []tasks.OutputChunk{
			{Seq: 0, Stream: "stdout", At: time.Now(), Data: []byte(text)},
			{Seq: 1, Stream: "stderr", At: time.Now(), Data: []byte("\x1b[33mwarning\x1b[0m  old.example.net: TTL 30 is below 60, kept\n")},
		}
		ans.Ending = tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"program":"` + args.Prog + `","bytes":9007199254740993}`), Exit: &tasks.Exit{Code: &code, UserMS: 12, SystemMS: 4, MaxRSSBytes: 9 << 20}, OutputBytes: int64(len(text)) + 64}
	}
	switch args.Do {
	case "":
	default:
		ans.Ending = tasks.Ending{Outcome: tasks.Outcome(args.Do), Reason: args.Reason, Detail: args.Detail}
		if args.Do == "failed" {
			code = 1
			ans.Ending.Exit = &tasks.Exit{Code: &code, UserMS: 31, SystemMS: 9, MaxRSSBytes: 21 << 20}
			ans.Ending.Result = json.RawMessage(`{"zones":[{"zone":"corp.example.net","view":"internal","loaded":false,"serial":2026112901}],"big":9007199254740993}`)
		}
	}
	return ans
}

const demoOutput = "\x1b[36mchecking\x1b[0m named.conf\n\x1b[32mok\x1b[0m       named.conf, 2 views, 318 zones\n\x1b[36mchecking\x1b[0m corp.example.net, view \x1b[1minternal\x1b[0m\n" +
	"\x1b[90mzones/internal/corp.example.net.db: 214 records\x1b[0m\n\x1b[1;31merror\x1b[0m    zones/internal/corp.example.net.db:12: unknown RR type 'AAAAA'\n" +
	"\x1b[90m         mail    300 IN AAAAA 2001:db8:51::25\x1b[0m\n\x1b[31m                        ^^^^^\x1b[0m\n\x1b[34mreload\x1b[0m   rndc reload corp.example.net IN external\n\x1b[35msummary\x1b[0m  1 zone loaded, \x1b[31m1 not loaded\x1b[0m, 316 untouched; exit code 1\n"

// submit hands in a task and gives it back as it is on disk.
func (r *rig) submit(agent, kind, args string, change ...func(*tasks.Submission)) *tasks.Task {
	r.t.Helper()
	sub := tasks.Submission{Agent: agent, Kind: kind, Args: json.RawMessage(args)}
	for _, f := range change {
		f(&sub)
	}
	t, err := r.service.Submit(r.t.Context(), sub, "user:mira", tasks.Idempotency{})
	if err != nil {
		r.t.Fatalf("submit %s %s on %s: %v", kind, args, agent, err)
	}
	return t
}

// done submits a task and waits for its end.
func (r *rig) done(agent, kind, args string) *tasks.Task {
	r.t.Helper()
	t := r.submit(agent, kind, args)
	t, err := r.service.Wait(r.t.Context(), t.ID, 20*time.Second)
	if err != nil {
		r.t.Fatal(err)
	}
	if t.State != tasks.StateCompleted {
		r.t.Fatalf("task %d is %s: %+v", t.ID, t.State, t.Waiting)
	}
	return t
}

// ready waits until the queue takes tasks.
func (r *rig) ready() {
	r.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); len(r.manager.Ready()) > 0; {
		if time.Now().After(deadline) {
			r.t.Fatalf("the queue is not ready: %v", r.manager.Ready())
		}
		<-time.After(5 * time.Millisecond)
	}
	r.fleet.mu.Lock()
	defer r.fleet.mu.Unlock()
	for _, v := range r.fleet.views {
		r.runner.Connect(v.Num) // those that were added after the shards were taken
	}
}

// demo fills the rig with a fleet as in the design: most agents well, some in
// trouble, tasks in every state and with every outcome.
func (r *rig) demo() map[string]*tasks.Task {
	r.t.Helper()
	now := time.Now()
	for _, name := range []string{"dns-ams-01", "dns-fra-01", "dns-fra-02", "dhcp-ams-01", "dhcp-sin-01", "dns-edge-07"} {
		r.add(name)
	}
	r.add("dns-ams-02")
	r.add("dhcp-lon-02", func(v *fleet.View) {
		v.Live = fleet.Live{
			Health: fleet.HealthUnreachable, Since: now.Add(-151 * time.Second), Address: "192.0.2.40:7442", Cause: fleet.CauseRefused,
			Sentence: "connection refused by 192.0.2.40:7442, 10 tries, next in 38 s", Failures: 10, NextTry: now.Add(38 * time.Second), LastHeard: now.Add(-151 * time.Second),
		}
	})
	r.add("dns-sin-01", func(v *fleet.View) {
		v.Status, v.StatusWhy = fleet.Quarantined, "it came back with another ledger, as after restoring a snapshot"
		v.Live.Health = fleet.HealthQuarantined
	})
	r.add("dhcp-ams-02", func(v *fleet.View) { v.PausedAt, v.PausedBy = now.Add(-89*time.Minute), "user:mira" })
	r.ready()
	out := map[string]*tasks.Task{}
	lon, err := r.fleet.Lookup("dhcp-lon-02")
	if err != nil {
		r.t.Fatal(err)
	}
	r.done("dhcp-lon-02", kinds.Ping, `{}`)
	r.runner.Disconnect(lon.Num, "connection refused by 192.0.2.40:7442")
	for range 12 {
		r.done("dhcp-ams-01", kinds.Echo, `{"source":"stat-lease4-get"}`)
	}
	out["rejected"] = r.done("dns-ams-01", kinds.Echo, `{"do":"rejected","reason":"policy_denied","detail":"The agent's policy file does not allow program tcpdump."}`)
	out["timed-out"] = r.done("dns-fra-02", kinds.Echo, `{"do":"timed-out","reason":"deadline_exceeded","detail":"No result within 10 s; the agent ended the process group."}`)
	out["unknown"] = r.done("dns-fra-01", kinds.Echo, `{"do":"failed","reason":"exit_nonzero","detail":"Zone corp.example.net was not loaded in view internal: unknown RR type at line 12"}`)
	out["succeeded"] = r.done("dns-ams-01", kinds.Run, `{"program":"df","args":{"human":true}}`)
	out["failed"] = r.done("dns-fra-01", kinds.Run, `{"program":"journal","args":{"unit":"named","lines":50}}`)
	out["echo"] = r.done("dns-ams-01", kinds.Echo, `{"n":9007199254740993,"text":"<script>alert(1)</script>"}`)
	out["running"] = r.submit("dns-ams-02", kinds.Sleep, `{"seconds":3600}`)
	out["behind"] = r.submit("dns-ams-02", kinds.Echo, `{"verb":"flush"}`)
	out["waiting"] = r.submit("dhcp-lon-02", kinds.Echo, `{"unit":"kea-dhcp4-server.service"}`)
	out["paused"] = r.submit("dhcp-ams-02", kinds.Ping, `{}`)
	return out
}

// dayOf is a Counters whose series covers a day.
type dayOf struct{ *tasks.Manager }

func (d dayOf) Stats() tasks.Stats {
	s := d.Manager.Stats()
	s.PerMinute = 34
	s.Wait = tasks.Quantiles{Count: 900, P50: 4 * time.Millisecond, P95: 38 * time.Millisecond, P99: 210 * time.Millisecond}
	s.Completed = map[tasks.Outcome]int64{tasks.Succeeded: 48150, tasks.Failed: 36, tasks.TimedOut: 11, tasks.Rejected: 8, tasks.Unknown: 3, tasks.Expired: 2, tasks.Cancelled: 1}
	s.Since = time.Now().Add(-24 * time.Hour)
	s.Oldest = time.Now().Add(-131 * time.Second)
	return s
}

func (d dayOf) Series(time.Time) []tasks.Point {
	var out []tasks.Point
	end := time.Now().Truncate(time.Minute)
	for i := range 1440 {
		x := float64(i) / 1440
		wave := math.Sin(x*7) + 0.4*math.Sin(x*61)
		v := tasks.MinutePoint{
			Completed: map[tasks.Outcome]int64{tasks.Succeeded: int64(32 + 9*wave)},
			RunP50:    900 + 120*wave, RunP95: 5600 + 900*wave, RunP99: 13000 + 2500*math.Sin(x*37),
		}
		if i%97 == 0 {
			v.Completed[tasks.Failed] = 4
		}
		raw, _ := json.Marshal(v)
		out = append(out, tasks.Point{Name: tasks.SeriesMinute, At: end.Add(time.Duration(i-1440) * time.Minute), Value: raw})
	}
	return out
}

// withDay gives the overview a day of history.
func withDay() rigOption {
	return func(r *rig) { r.counters = lateCounters{r} }
}

// lateCounters finds the manager when it is asked, since it is made after the
// options are read.
type lateCounters struct{ r *rig }

func (l lateCounters) Stats() tasks.Stats { return dayOf{l.r.manager}.Stats() }
func (l lateCounters) AgentStats(n tasks.AgentNum) (tasks.AgentStats, bool) {
	return l.r.manager.AgentStats(n)
}
func (l lateCounters) Series(t time.Time) []tasks.Point { return dayOf{l.r.manager}.Series(t) }

func agentPath(v *fleet.View) string { return fmt.Sprintf("/agents/%s", v.ID) }

type tasktestAnswer = tasktest.Answer

// started waits until a task is in its agent's slot.
func (r *rig) started(id tasks.ID) {
	r.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; <-time.After(5 * time.Millisecond) {
		t, err := r.service.Get(r.t.Context(), id)
		if err == nil && t.State == tasks.StateWaiting {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("task %d does not start: %v, %+v", id, err, t)
		}
	}
}
