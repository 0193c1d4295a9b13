package handlers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"
	"uuid"

	"github.com/go-chi/chi/v5"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// maxRequestID is how long a request id from outside may be, in characters.
const maxRequestID = 64

// recorder remembers what was answered. It lies around every response.
type recorder struct {
	http.ResponseWriter
	status int // 0 = nothing sent
	bytes  int64
}

// Unwrap serves http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader notes the status.
func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write counts the bytes.
func (w *recorder) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(b)
	w.bytes += int64(n)
	return n, err
}

func begun(w http.ResponseWriter) bool {
	rec, ok := w.(*recorder)
	return ok && rec.status != 0
}

func noteStatus(w http.ResponseWriter, status int) {
	if rec, ok := w.(*recorder); ok && rec.status == 0 {
		rec.status = status
	}
}

// call is what the outer layers know of a request; one value in the context
// serves all of them.
type call struct {
	id      string
	base    string                   // the base path
	client  auth.Client              // where the request comes from
	pattern string                   // of the route, "" = none matched
	body    int64                    // largest body of the route in bytes, 0 = none
	reading *http.ResponseController // of a request with a body
}

// DefaultBodyTimeout is how long a request's body may take, whoever sends it:
// the largest batch in half a minute is 4.5 Mbit/s. Without it a client that
// sends a byte a second would keep its connection for ever.
const DefaultBodyTimeout = 30 * time.Second

// bodyRead lifts the time limit of the body, since the answer may take longer.
func (c *call) bodyRead() {
	if c.reading != nil {
		_ = c.reading.SetReadDeadline(time.Time{})
	}
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	if c == nil {
		return &call{}
	}
	return c
}

func requestID(ctx context.Context) string { return callOf(ctx).id }

// outer is the outermost layer: request id, panics, access log, metrics and
// the headers that every answer has.
func (s *server) outer(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		c := &call{id: cleanRequestID(r.Header.Get("X-Request-Id")), base: s.cfg.BasePath}
		r = s.located(r, c)
		rec := &recorder{ResponseWriter: w}
		h := w.Header()
		h["X-Request-Id"] = []string{c.id}
		h["X-Content-Type-Options"] = []string{"nosniff"}
		h["Referrer-Policy"] = []string{"no-referrer"}
		if r.ContentLength != 0 {
			c.reading = http.NewResponseController(w)
			_ = c.reading.SetReadDeadline(start.Add(s.cfg.BodyTimeout)) // of what has one
		}
		aborted := true
		defer func() {
			if cause := recover(); cause != nil {
				aborted = s.recovered(rec, r, cause)
			} else {
				aborted = false
			}
			s.served(rec, r, c, time.Since(start))
			if aborted {
				panic(http.ErrAbortHandler)
			}
		}()
		if !s.toBase(rec, r) {
			next.ServeHTTP(rec, r)
		}
	})
}

// recovered answers after a panic; it says whether the connection must be
// broken off because the answer had begun.
func (s *server) recovered(w *recorder, r *http.Request, cause any) (abort bool) {
	if err, ok := cause.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		return true
	}
	s.log.LogAttrs(r.Context(), slog.LevelError, "panic in a handler",
		slog.String("request_id", requestID(r.Context())), slog.String("path", r.URL.Path),
		slog.String("cause", fmt.Sprint(cause)), slog.String("stack", string(debug.Stack())))
	if w.status != 0 {
		return true
	}
	s.writeProblem(w, r, http.StatusInternalServerError, meaning(errors.New("panic")))
	return false
}

// served writes the access log and the metrics, once for each request.
func (s *server) served(w *recorder, r *http.Request, c *call, took time.Duration) {
	status := w.status
	if status == 0 {
		status = http.StatusOK
	}
	s.metrics.observe(c.pattern, r.Method, status, took)
	if !s.log.Enabled(r.Context(), slog.LevelDebug) {
		return
	}
	s.log.LogAttrs(r.Context(), slog.LevelDebug, "request",
		slog.String("request_id", c.id), slog.String("method", r.Method), slog.String("path", r.URL.Path),
		slog.Int("status", status), slog.Int64("bytes", w.bytes), slog.Duration("took", took),
		slog.Any("remote", c.client.Addr), slog.Any("via", c.client.Via))
}

func levelOf(status int) slog.Level {
	if status == http.StatusServiceUnavailable {
		return slog.LevelWarn
	}
	return slog.LevelError
}

func logAttrs(r *http.Request, status int, err error) []slog.Attr {
	return []slog.Attr{
		slog.String("request_id", requestID(r.Context())), slog.String("method", r.Method), slog.String("path", r.URL.Path),
		slog.Int("status", status), slog.String("actor", auth.PrincipalFrom(r.Context()).Actor()),
		slog.Any("remote", callOf(r.Context()).client.Addr), slog.Any("err", err),
	}
}

// cleanRequestID keeps an id from outside if it is harmless in logs and
// headers, and makes one otherwise.
func cleanRequestID(id string) string {
	if id == "" || len(id) > maxRequestID {
		return uuid.NewV4().String()
	}
	for _, c := range []byte(id) {
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.'
		if !ok {
			return uuid.NewV4().String()
		}
	}
	return id
}

// guard is what stands between the router and a handler: port, permission,
// query parameters, and the size of the body.
func (s *server) guard(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		callOf(r.Context()).pattern = rt.pattern
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
	if rt.controllerOnly && !s.cfg.OnePort && !s.cfg.OnControllerPort(r) {
		return noSuchPath(r)
	}
	if err := s.cfg.Auth.Check(r.Context(), rt.perm); err != nil {
		return err
	}
	if err := checkQuery(r, rt.query); err != nil {
		return err
	}
	if rt.api() {
		w.Header().Set("Cache-Control", "no-store")
	}
	if rt.body > 0 {
		r.Body = http.MaxBytesReader(w, r.Body, rt.body)
		callOf(r.Context()).body = rt.body
		if err := checkContentType(r); err != nil {
			return err
		}
	}
	if rt.usesTasks && s.cfg.Tasks == nil {
		return errNotReady()
	}
	return nil
}

func errNotReady() error {
	return fault.New(fault.Unavailable, "not_ready", "The controller is starting and does not serve this yet.").
		WithHint("Look at /readyz for the condition that is not met.")
}

// notFound answers for paths that no route has.
func (s *server) notFound(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, noSuchPath(r)) }

// otherMethod answers for a known path with a method that it does not serve.
func (s *server) otherMethod(w http.ResponseWriter, r *http.Request) {
	allow := s.allowed(r)
	w.Header().Set("Allow", allow)
	if r.Method == http.MethodOptions {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	s.refuse(w, r, methodNotAllowed(r.Method, allow))
}

// allowed lists the methods of a path for the Allow header.
func (s *server) allowed(r *http.Request) string {
	list := ""
	for _, m := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"} {
		if s.router.Match(chi.NewRouteContext(), m, r.URL.Path) {
			list += m + ", "
		}
	}
	return list + http.MethodOptions
}
