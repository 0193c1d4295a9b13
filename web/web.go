package web

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"time"
	"uuid"

	"github.com/go-chi/chi/v5"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/tasks"
)

// Tasks is the queue as the pages use it; *tasks.Service implements it.
type Tasks interface {
	Submit(ctx context.Context, s tasks.Submission, actor string, key tasks.Idempotency) (*tasks.Task, error)
	Get(ctx context.Context, id tasks.ID) (*tasks.Task, error)
	List(ctx context.Context, f tasks.Filter) (tasks.Page, error)
	OutputChunks(ctx context.Context, id tasks.ID, fromSeq, limit int) ([]tasks.OutputChunk, error)
	OutputFacts(ctx context.Context, id tasks.ID) (*tasks.OutputFacts, error)
	Cancel(ctx context.Context, id tasks.ID, actor string) (*tasks.Task, error)
	Retry(ctx context.Context, id tasks.ID, actor string) (t *tasks.Task, replayed bool, err error)
}

// Fleet is the agents as the pages use them; *fleet.Fleet implements it.
type Fleet interface {
	List(f fleet.Filter) ([]fleet.View, error)
	Get(id uuid.UUID) (fleet.View, error)
	Lookup(ref string) (tasks.Agent, error)
	Update(ctx context.Context, id uuid.UUID, c fleet.Change, actor string) (fleet.View, error)
	Approve(ctx context.Context, id uuid.UUID, actor string) (fleet.View, error)
	Ping(ctx context.Context, id uuid.UUID) (fleet.Pong, error)
}

// Counters are what the queue knows from memory; *tasks.Manager implements it.
type Counters interface {
	Stats() tasks.Stats
	AgentStats(agent tasks.AgentNum) (tasks.AgentStats, bool)
	Series(since time.Time) []tasks.Point
}

// Config is what the pages need. Tasks, Fleet, Auth and Status are required.
type Config struct {
	Tasks  Tasks
	Fleet  Fleet
	Auth   *auth.Service
	Kinds  *kinds.Registry // nil = kinds.Default
	Status func() Status
	// Counters are the numbers of the overview and of agents; nil = the pages
	// go without them.
	Counters Counters
	// Hub says from which event on a page follows; nil = from whenever its
	// stream opens.
	Hub *tasks.Hub
	// BasePath stands before every address on the pages, for example /hg; it
	// begins with a slash and does not end with one. "" = none. Requests come
	// without it: package handlers takes it off.
	BasePath string
	Version  string
	Logger   *slog.Logger // nil = discard
}

const (
	// maxForm bounds a posted form: the arguments of a task, escaped.
	maxForm = 4 << 20
	// censusTerm is how long the list of all agents is shared by all tabs.
	censusTerm = time.Second
	// unfinished is how many open tasks of an agent its page shows.
	unfinished = 20
)

type server struct {
	cfg    Config
	log    *slog.Logger
	view   *renderer
	census census
}

// New makes the dashboard: everything that is not an API path.
func New(cfg Config) (http.Handler, error) {
	if cfg.Tasks == nil || cfg.Fleet == nil || cfg.Auth == nil || cfg.Status == nil {
		return nil, errors.New("web: Tasks, Fleet, Auth and Status are required")
	}
	if cfg.Kinds == nil {
		cfg.Kinds = kinds.Default()
	}
	base, err := CleanBasePath(cfg.BasePath)
	if err != nil {
		return nil, err
	}
	cfg.BasePath = base
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	view, err := newRenderer(base)
	if err != nil {
		return nil, err
	}
	s := &server{cfg: cfg, log: log, view: view}
	s.census.fleet = cfg.Fleet
	return s.handler(), nil
}

// CleanBasePath checks a base path, which becomes part of every address on a
// page, and takes a slash at its end off. A path of the pages themselves is
// refused: nobody could say what /tasks/5 means.
func CleanBasePath(base string) (string, error) {
	base = strings.TrimRight(base, "/")
	if base == "" {
		return "", nil
	}
	if base[0] != '/' || strings.Contains(base, "//") || strings.Trim(base, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._~-") != "" {
		return "", errors.New("a base path looks like /headgate: a slash, then letters, digits and ._~-")
	}
	if path.Clean(base) != base {
		return "", errors.New("a base path has no dots for parts")
	}
	for _, rt := range append((&server{}).routes(), route{pattern: "/static/*"}) {
		if firstPart(rt.pattern) == firstPart(base) {
			return "", fmt.Errorf("a base path may not begin with /%s, which is a page of ours", firstPart(base))
		}
	}
	return base, nil
}

func firstPart(path string) string {
	part, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return part
}

// handlerFunc answers one request; an error becomes an error page.
type handlerFunc func(w http.ResponseWriter, r *http.Request) error

// route is one line of the table: no page is served without a permission.
type route struct {
	method  string
	pattern string
	perm    auth.Permission
	handle  handlerFunc
	query   []string // parameters that it reads, for pages that refuse others
}

func (s *server) routes() []route {
	return []route{
		{"GET", "/", auth.ReadStatus, s.overview, nil},
		{"GET", "/agents", auth.ReadAgents, s.agents, agentQuery()},
		{"GET", "/agents/{id}", auth.ReadAgents, s.agent, []string{"done"}},
		{"POST", "/agents/{id}/pause", auth.ManageAgents, s.pauseAgent, nil},
		{"POST", "/agents/{id}/resume", auth.ManageAgents, s.resumeAgent, nil},
		{"POST", "/agents/{id}/approve", auth.ManageAgents, s.approveAgent, nil},
		{"POST", "/agents/{id}/ping", auth.PingAgents, s.pingAgent, nil},
		{"GET", "/tasks", auth.ReadTasks, s.tasks, taskQuery()},
		{"GET", "/tasks/{id}", auth.ReadTasks, s.task, []string{"from", "done"}},
		{"GET", "/tasks/{id}/output", auth.ReadTasks, s.moreOutput, []string{"from"}},
		{"POST", "/tasks/{id}/cancel", auth.CancelTasks, s.cancelTask, nil},
		{"POST", "/tasks/{id}/retry", auth.SubmitTasks, s.retryTask, nil},
		{"GET", "/run", auth.SubmitTasks, s.runForm, nil},
		{"POST", "/run", auth.SubmitTasks, s.submitRun, nil},
		{"GET", "/sign-in", auth.Public, s.signInPage, []string{"code", "next"}},
		{"POST", "/sign-in", auth.Public, s.signIn, nil},
		{"POST", "/sign-out", auth.Public, s.signOut, nil},
		{"POST", "/theme", auth.Public, s.setTheme, nil},
	}
}

// handler builds the router from the table.
func (s *server) handler() http.Handler {
	mux := chi.NewMux()
	for _, rt := range s.routes() {
		guarded := s.guard(rt)
		mux.Method(rt.method, rt.pattern, guarded)
		if rt.method == http.MethodGet {
			mux.Method(http.MethodHead, rt.pattern, guarded)
		}
	}
	mux.Get("/static/*", s.asset)
	mux.Head("/static/*", s.asset)
	mux.NotFound(func(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, noSuchPage(r)) })
	mux.MethodNotAllowed(func(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, wrongMethod()) })
	return mux
}

func (s *server) asset(w http.ResponseWriter, r *http.Request) {
	if !s.view.assets.serve(w, r, chi.URLParam(r, "*")) {
		s.refuse(w, r, noSuchPage(r))
	}
}

// guard checks permission and form before a page.
func (s *server) guard(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.admit(rt, w, r); err != nil {
			s.refuse(w, r, err)
			return
		}
		if err := rt.handle(w, r); err != nil {
			s.refuse(w, r, err)
		}
	})
}

func (s *server) admit(rt route, w http.ResponseWriter, r *http.Request) error {
	if err := s.cfg.Auth.Check(r.Context(), rt.perm); err != nil {
		return err
	}
	if rt.query != nil {
		if err := checkQuery(r, rt.query); err != nil {
			return err
		}
	}
	if rt.method == http.MethodPost {
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		if err := r.ParseForm(); err != nil {
			return badForm(err)
		}
	}
	return nil
}

func principal(r *http.Request) auth.Principal { return auth.PrincipalFrom(r.Context()) }

// redirect answers a form that has done its work.
func (s *server) redirect(w http.ResponseWriter, r *http.Request, to string) {
	w.Header().Set("Cache-Control", "no-store")
	http.Redirect(w, r, s.cfg.BasePath+to, http.StatusSeeOther)
}

func noSuchPage(r *http.Request) error {
	return fault.Newf(fault.NotFound, "no_such_page", "There is no page at %s.", clip(r.URL.Path, 100))
}

// codeMethod is the code of a request whose method a page does not serve.
const codeMethod = "method_not_allowed"

func wrongMethod() error {
	return fault.New(fault.Unsupported, codeMethod, "This address is for a form, not for reading.").
		WithHint("Go back and use the button.")
}

func badForm(err error) error {
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return fault.Newf(fault.TooLarge, "body_too_large", "The form is larger than %s.", size(tooLong.Limit))
	}
	return fault.Wrap(err, fault.Malformed, "malformed_form", "The form could not be read.").WithHint("Go back and send it again.")
}
