package handlers

import (
	"context"
	"encoding/json/v2"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/auth"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/listener"
	"headgate/tasks"
)

// Config is what the handlers need. Auth is required; while Tasks is nil the
// controller is starting, and all calls but those at the root answer 503.
type Config struct {
	Auth    *auth.Service
	Tasks   *tasks.Service
	Manager *tasks.Manager // for counters
	Hub     *tasks.Hub
	Fleet   *fleet.Fleet
	Kinds   *kinds.Registry // nil = kinds.Default

	Ready    func() Readiness            // for /readyz; required
	Live     func(context.Context) error // for /livez; nil = alive as long as it answers
	Status   func() Status               // for /api/v1/status; required
	Listener func() listener.Status      // for /status/listener; required
	Checks   func() []Check              // for the same; nil = none
	Version  Version

	Metrics http.Handler // for /metrics; required
	Web     http.Handler // the dashboard: everything that is not listed in routes.go
	// The next three serve by the last part of the path; see package openapi.
	OpenAPI   http.Handler // /api/v1/openapi.json and .yaml
	Swagger   http.Handler // /swagger/
	Reference http.Handler // /docs/api and /docs/assets/

	// BasePath stands before every address given out, for example /headgate;
	// see basepath.go. It is clean: "" or a slash and more, without one at the end.
	BasePath string
	// TrustedProxies are the networks of proxies whose X-Forwarded-For, -Proto
	// and -Host are believed.
	TrustedProxies []netip.Prefix

	// OnePort: there is no controller port, and what only it would serve is
	// served to those who may.
	OnePort bool
	// OnControllerPort says whether a request came in at the controller port;
	// nil asks the listener.
	OnControllerPort func(*http.Request) bool
	// Shed says whether the connection of a request is to be turned away, and
	// for how long; nil asks the listener.
	Shed func(*http.Request) (pause time.Duration, shed bool)
	// Overloaded writes the page for readers who are turned away; nil = all get
	// a problem document.
	Overloaded func(w http.ResponseWriter, r *http.Request, seconds int)
	Farewell   *Farewell // ends streams and waits when the controller stops; nil = never

	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil = metrics are kept but not shown

	BodyTimeout         time.Duration // of a request's body; 0 = DefaultBodyTimeout
	Heartbeat           time.Duration // of event streams; 0 = DefaultHeartbeat
	MaxStreams          int           // 0 = DefaultMaxStreams
	MaxStreamsPrincipal int           // 0 = DefaultMaxStreamsPrincipal
}

// server holds what handlers share. It is immutable but for its pools and
// counters.
type server struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	bodies  bodies
	streams *streamLimit
	router  *chi.Mux
}

// New makes the handler of both ports. It panics when something required is
// missing: that is a mistake in the program.
func New(cfg Config) http.Handler {
	if cfg.Auth == nil || cfg.Ready == nil || cfg.Status == nil || cfg.Listener == nil || cfg.Metrics == nil {
		panic("handlers: Auth, Ready, Status, Listener and Metrics are required")
	}
	return newServer(cfg).handler()
}

func newServer(cfg Config) *server {
	if cfg.OnControllerPort == nil {
		cfg.OnControllerPort = func(r *http.Request) bool {
			info, ok := listener.InfoFrom(r.Context())
			return ok && info.Port == listener.PortController
		}
	}
	if cfg.Shed == nil {
		cfg.Shed = shedByListener
	}
	if cfg.Kinds == nil {
		cfg.Kinds = kinds.Default()
	}
	if cfg.BodyTimeout <= 0 {
		cfg.BodyTimeout = DefaultBodyTimeout
	}
	if cfg.Heartbeat <= 0 {
		cfg.Heartbeat = DefaultHeartbeat
	}
	if cfg.MaxStreams <= 0 {
		cfg.MaxStreams = DefaultMaxStreams
	}
	if cfg.MaxStreamsPrincipal <= 0 {
		cfg.MaxStreamsPrincipal = DefaultMaxStreamsPrincipal
	}
	if cfg.Farewell == nil {
		cfg.Farewell = NewFarewell()
	}
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &server{
		cfg: cfg, log: log, metrics: newMetrics(cfg.Registerer),
		streams: newStreamLimit(cfg.MaxStreams, cfg.MaxStreamsPrincipal),
	}
}

// handler builds the router from the table.
func (s *server) handler() http.Handler {
	s.router = chi.NewMux()
	for _, rt := range s.routes() {
		guarded := s.guard(rt)
		s.router.Method(rt.method, rt.pattern, guarded)
		if rt.method == http.MethodGet && !rt.stream {
			s.router.Method(http.MethodHead, rt.pattern, guarded)
		}
	}
	s.router.MethodNotAllowed(s.otherMethod)
	s.router.NotFound(s.elsewhere)
	return s.outer(s.shedding(s.cfg.Auth.Middleware(s.refuse)(identified(s.router))))
}

// elsewhere hands what no route has to the dashboard.
func (s *server) elsewhere(w http.ResponseWriter, r *http.Request) {
	if s.cfg.Web == nil || isAPI(r.URL.Path) {
		s.notFound(w, r)
		return
	}
	callOf(r.Context()).pattern = "web"
	s.cfg.Web.ServeHTTP(w, r)
}

// writeJSON answers with v.
func (s *server) writeJSON(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return errors.Join(errors.New("encode answer"), err)
	}
	s.writeBody(w, status, append(body, '\n'))
	return nil
}

func (s *server) writeBody(w http.ResponseWriter, status int, body []byte) {
	w.Header()["Content-Type"] = []string{"application/json"}
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}

// writeTask answers with one task.
func (s *server) writeTask(w http.ResponseWriter, status int, t *tasks.Task) {
	buf := s.bodies.get(taskSize(t))
	defer s.bodies.put(buf)
	buf.Write(append(appendTask(buf.AvailableBuffer(), t), '\n'))
	s.writeBody(w, status, buf.Bytes())
}

// writeTasks answers with a list of tasks; next is the cursor, "" at the end.
func (s *server) writeTasks(w http.ResponseWriter, status int, items []tasks.Task, next string) {
	size := taskBytes // the frame and the cursor
	for i := range items {
		size += taskSize(&items[i])
	}
	buf := s.bodies.get(size)
	defer s.bodies.put(buf)
	buf.WriteString(`{"items":[`)
	for i := range items {
		if i > 0 {
			buf.WriteByte(',')
		}
		buf.Write(appendTask(buf.AvailableBuffer(), &items[i]))
	}
	buf.WriteString(`],"next_cursor":`)
	buf.Write(append(appendOptional(buf.AvailableBuffer(), next), "}\n"...))
	s.writeBody(w, status, buf.Bytes())
}

// taskBytes is what a task takes in an answer beside its free texts, in bytes:
// names and times, and why it waits.
const taskBytes = 1 << 10

// taskSize guesses how many bytes a task takes in an answer.
func taskSize(t *tasks.Task) int {
	return taskBytes + len(t.Args) + len(t.Ending.Result) + 2*len(t.Ending.ResultBytes) + len(t.Ending.Detail)
}

func principal(r *http.Request) auth.Principal { return auth.PrincipalFrom(r.Context()) }

// writeTimeout bounds a change; pairing, which dials, is the slowest.
const writeTimeout = 60 * time.Second

// writeContext gives the context of a change: it does not end when the client
// goes away, because a write that is broken off leaves its outcome unknown.
func writeContext(r *http.Request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(r.Context()), writeTimeout)
}

// waitGrace is what is left for the answer after a wait.
const waitGrace = 15 * time.Second

// keepOpen lets a request wait for d, whatever the limits of the HTTP server
// say about ordinary ones.
func keepOpen(w http.ResponseWriter, d time.Duration) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // neither is there in tests
	_ = rc.SetWriteDeadline(time.Now().Add(d + waitGrace))
}
