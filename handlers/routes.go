package handlers

import (
	"net/http"
	"strings"

	"headgate/internal/auth"
)

// base is where the API begins.
const base = "/api/v1"

// handlerFunc decodes a request, calls a service and encodes its answer. An
// error that it returns becomes a problem document.
type handlerFunc func(w http.ResponseWriter, r *http.Request) error

// route is one line of the table: nothing is served without one.
type route struct {
	method         string
	pattern        string
	perm           auth.Permission
	handle         handlerFunc
	query          []string // query parameters that it accepts; others are refused
	body           int64    // largest JSON body in bytes; 0 = none is read
	controllerOnly bool     // not there on the public port, unless it is the only one
	usesTasks      bool     // answers 503 until the queue is there
	stream         bool     // stays open: no HEAD
	page           bool     // for people, or for other controllers: not in the OpenAPI document
}

func (rt route) api() bool { return isAPI(rt.pattern) }

func isAPI(path string) bool { return path == "/api" || strings.HasPrefix(path, "/api/") }

// routes is the table of everything that the product serves but the pages of
// the dashboard.
func (s *server) routes() []route {
	all := append(s.rootRoutes(), s.peerRoutes()...)
	for _, rt := range s.apiRoutes() {
		rt.pattern = base + rt.pattern
		all = append(all, rt)
	}
	return all
}

func (s *server) rootRoutes() []route {
	return []route{
		{method: "GET", pattern: "/healthz", perm: auth.Public, handle: s.healthz},
		{method: "GET", pattern: "/livez", perm: auth.Public, handle: s.livez},
		{method: "GET", pattern: "/readyz", perm: auth.Public, handle: s.readyz},
		{method: "GET", pattern: "/version", perm: auth.Public, handle: s.version},
		{method: "GET", pattern: "/metrics", perm: auth.ReadMetrics, handle: s.prometheus, controllerOnly: true, query: []string{"name[]"}},
		{method: "GET", pattern: "/status/listener", perm: auth.ReadMetrics, handle: s.listenerStatus, controllerOnly: true},
		{method: "GET", pattern: "/problems/{code}", perm: auth.Public, handle: s.problemPage, page: true},
		{method: "GET", pattern: "/docs/api", perm: auth.Public, handle: s.reference, page: true},
		{method: "GET", pattern: "/docs/assets/{file}", perm: auth.Public, handle: s.reference, page: true},
		{method: "GET", pattern: "/swagger/", perm: auth.Public, handle: s.swagger, page: true},
		{method: "GET", pattern: "/swagger/{file}", perm: auth.Public, handle: s.swagger, page: true},
	}
}

func (s *server) apiRoutes() []route {
	taskQuery := []string{"state", "outcome", "agent", "kind", "q", "created_after", "created_before", labelPrefix + "*", "sort", "limit", "cursor"}
	return []route{
		{method: "POST", pattern: "/tasks", perm: auth.SubmitTasks, handle: s.submitTask, query: []string{"wait"}, body: maxBody, usesTasks: true},
		{method: "POST", pattern: "/tasks/batch", perm: auth.SubmitTasks, handle: s.submitBatch, body: maxBatchBody, usesTasks: true},
		{method: "GET", pattern: "/tasks", perm: auth.ReadTasks, handle: s.listTasks, query: taskQuery, usesTasks: true},
		{method: "GET", pattern: "/tasks/{id}", perm: auth.ReadTasks, handle: s.getTask, query: []string{"wait"}, usesTasks: true},
		{method: "POST", pattern: "/tasks/{id}/cancel", perm: auth.CancelTasks, handle: s.cancelTask, usesTasks: true},
		{method: "POST", pattern: "/tasks/{id}/retry", perm: auth.SubmitTasks, handle: s.retryTask, usesTasks: true},
		{method: "GET", pattern: "/tasks/{id}/output", perm: auth.ReadTasks, handle: s.taskOutput, query: []string{"stream"}, usesTasks: true},
		{method: "GET", pattern: "/tasks/{id}/output/events", perm: auth.ReadTasks, handle: s.outputEvents, query: []string{"stream", "last_event_id"}, usesTasks: true, stream: true},

		{method: "GET", pattern: "/agents", perm: auth.ReadAgents, handle: s.listAgents, query: []string{"health", "q", labelPrefix + "*", "limit", "cursor"}, usesTasks: true},
		{method: "POST", pattern: "/agents/pair", perm: auth.PairAgents, handle: s.pairAgent, body: maxSmallBody, usesTasks: true},
		{method: "GET", pattern: "/agents/{id}", perm: auth.ReadAgents, handle: s.getAgent, usesTasks: true},
		{method: "PATCH", pattern: "/agents/{id}", perm: auth.ManageAgents, handle: s.changeAgent, body: maxSmallBody, usesTasks: true},
		{method: "DELETE", pattern: "/agents/{id}", perm: auth.ManageAgents, handle: s.removeAgent, usesTasks: true},
		{method: "POST", pattern: "/agents/{id}/approve", perm: auth.ManageAgents, handle: s.approveAgent, usesTasks: true},
		{method: "POST", pattern: "/agents/{id}/ping", perm: auth.PingAgents, handle: s.pingAgent, usesTasks: true},
		{method: "GET", pattern: "/agents/{id}/kinds", perm: auth.ReadAgents, handle: s.agentKinds, usesTasks: true},
		{method: "POST", pattern: "/enrolment-tokens", perm: auth.PairAgents, handle: s.newEnrolmentToken, body: maxSmallBody, usesTasks: true},
		{method: "GET", pattern: "/kinds", perm: auth.ReadAgents, handle: s.listKinds},

		{method: "GET", pattern: "/events", perm: auth.ReadTasks, handle: s.events, query: []string{"topics", "last_event_id"}, usesTasks: true, stream: true},
		{method: "GET", pattern: "/status", perm: auth.ReadStatus, handle: s.status},
		{method: "GET", pattern: "/stats", perm: auth.ReadStatus, handle: s.stats, query: []string{"since"}, usesTasks: true},

		{method: "GET", pattern: "/session", perm: auth.OwnSession, handle: s.getSession},
		{method: "POST", pattern: "/session", perm: auth.Public, handle: s.signIn, body: maxSmallBody},
		{method: "POST", pattern: "/session/links", perm: auth.ManageTokens, handle: s.newSignInLink, body: maxSmallBody},
		{method: "DELETE", pattern: "/session", perm: auth.OwnSession, handle: s.signOut},
		{method: "GET", pattern: "/tokens", perm: auth.ManageTokens, handle: s.listTokens},
		{method: "POST", pattern: "/tokens", perm: auth.ManageTokens, handle: s.newToken, body: maxSmallBody},
		{method: "DELETE", pattern: "/tokens/{id}", perm: auth.ManageTokens, handle: s.revokeToken},

		{method: "GET", pattern: "/openapi.json", perm: auth.Public, handle: s.contractJSON},
		{method: "GET", pattern: "/openapi.yaml", perm: auth.Public, handle: s.contractYAML},
	}
}
