package handlers

import (
	"context"
	"net/http"

	"github.com/go-chi/chi/v5"

	"headgate/internal/auth"
	"headgate/tasks"
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

// Enter notes an answer that stays open, as streams and waits do.
func (f *Farewell) Enter() (leave <-chan struct{}, gone func()) { return f.enter() }

// ReadBody reads a body as a route of this limit does, and gives what was read
// and the memory that was held for it.
func ReadBody(r *http.Request, limit int64) (body []byte, held int, err error) {
	var s server
	r.Body = http.MaxBytesReader(nil, r.Body, limit)
	r = r.WithContext(context.WithValue(r.Context(), callKey{}, &call{body: limit}))
	buf, err := s.readBody(r)
	if err != nil {
		return nil, 0, err
	}
	return buf.Bytes(), buf.Cap(), nil
}

// BodyReader reads the same request again and again with one pool.
func BodyReader(limit int64) func(r *http.Request) error {
	var s server
	return func(r *http.Request) error {
		r = r.WithContext(context.WithValue(r.Context(), callKey{}, &call{body: limit}))
		buf, err := s.readBody(r)
		if err == nil {
			s.bodies.put(buf)
		}
		return err
	}
}

// ExitJSON is the exit of a program as the encoder of tasks writes it.
func ExitJSON(e *tasks.Exit) []byte { return appendExit(nil, e) }
