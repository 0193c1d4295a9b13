package handlers

import (
	"net/http"

	"github.com/go-chi/chi/v5"

	"headgate/internal/auth"
)

// RouteInfo is a line of the route table for tests.
type RouteInfo struct {
	Method, Pattern string
	Permission      auth.Permission
	Query           []string
	ControllerOnly  bool
	Page            bool
	Stream          bool
	Body            int64
}

// Table gives the route table and what the router really serves.
func Table(cfg Config) (table []RouteInfo, served map[string]bool, err error) {
	s := newServer(cfg)
	s.handler()
	for _, rt := range s.routes() {
		table = append(table, RouteInfo{rt.method, rt.pattern, rt.perm, rt.query, rt.controllerOnly, rt.page, rt.stream, rt.body})
	}
	served = map[string]bool{}
	err = chi.Walk(s.router, func(method, pattern string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		served[method+" "+pattern] = true
		return nil
	})
	return table, served, err
}
