package handlers

import (
	"context"
	"encoding/json/v2"
	"errors"
	"net/http"
	"strconv"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// Problem is the body of every error answer (RFC 9457).
type Problem struct {
	Type      string         `json:"type"`       // base path, /problems/ and the code
	Title     string         `json:"title"`      // of the HTTP status
	Status    int            `json:"status"`     // HTTP status
	Detail    string         `json:"detail"`     // what went wrong, for people
	Instance  string         `json:"instance"`   // path of the request
	Code      string         `json:"code"`       // stable, for programs
	RequestID string         `json:"request_id"` // also in the X-Request-Id header and the log
	Errors    []ProblemField `json:"errors,omitempty"`
	Hint      string         `json:"hint,omitempty"` // what to do next
} //	@name	Problem

// ProblemField names one wrong part of the request.
type ProblemField struct {
	Pointer string `json:"pointer"` // RFC 6901 pointer into the body, or the name of a query parameter
	Detail  string `json:"detail"`
} //	@name	ProblemField

// Codes that are answered in their own way, which no fault.Kind stands for.
const (
	codeMethod     = "method_not_allowed"
	codeRange      = "range_not_satisfiable"
	codeInProgress = "key_in_progress" // of package tasks: soon it is known
)

// statusClientGone is what the log and the metrics say when the client left
// before its answer; no client sees it.
const statusClientGone = 499

// defaultRetryAfter is what a client is told to wait, in seconds, when the
// cause gives no better number: a take-over of agents ends within 20 s, most
// causes within one.
const defaultRetryAfter = 2

// statusOf maps a fault to its HTTP status.
func statusOf(err error) int {
	switch fault.CodeOf(err) {
	case auth.CodeWrongHost:
		return http.StatusMisdirectedRequest
	case codeMethod:
		return http.StatusMethodNotAllowed
	case codeRange:
		return http.StatusRequestedRangeNotSatisfiable
	}
	switch fault.KindOf(err) {
	case fault.Malformed:
		return http.StatusBadRequest
	case fault.Invalid:
		return http.StatusUnprocessableEntity
	case fault.Unauthenticated:
		return http.StatusUnauthorized
	case fault.Forbidden:
		return http.StatusForbidden
	case fault.NotFound:
		return http.StatusNotFound
	case fault.Conflict:
		return http.StatusConflict
	case fault.Precondition:
		return http.StatusPreconditionFailed
	case fault.TooLarge:
		return http.StatusRequestEntityTooLarge
	case fault.Unsupported:
		return http.StatusUnsupportedMediaType
	case fault.Exhausted:
		return http.StatusTooManyRequests
	case fault.Unavailable, fault.Deadline:
		return http.StatusServiceUnavailable
	case fault.Internal:
	}
	return http.StatusInternalServerError
}

// meaning finds what an error says to the caller. An error without a meaning
// is a defect of ours: the caller gets the request id, the log the cause.
func meaning(err error) *fault.Error {
	if f, ok := errors.AsType[*fault.Error](err); ok && f.Kind != fault.Internal {
		return f
	}
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return bodyTooLarge(tooLong.Limit)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fault.Wrap(err, fault.Deadline, "timed_out", "The controller did not finish this in time.").
			WithHint("Try again; a submission with an Idempotency-Key can be sent again without harm.")
	}
	return fault.Wrap(err, fault.Internal, "internal", "The controller met an error that it did not expect.").
		WithHint("Look for the request id in the controller's log.")
}

// refuse writes an error answer. It is the only place that does.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil && errors.Is(err, context.Canceled) {
		noteStatus(w, statusClientGone)
		return
	}
	f := meaning(err)
	status := statusOf(f)
	if status >= http.StatusInternalServerError {
		s.log.LogAttrs(r.Context(), levelOf(status), "request not served", logAttrs(r, status, err)...)
	}
	if begun(w) {
		// The answer is under way and can only be broken off, so that the
		// client does not take a part for the whole.
		panic(http.ErrAbortHandler)
	}
	h := w.Header()
	for _, name := range []string{"Etag", "Location", "Link", "Last-Modified", "Content-Length", "Content-Encoding"} {
		h.Del(name)
	}
	switch status {
	case http.StatusUnauthorized:
		h.Set("WWW-Authenticate", `Bearer realm="headgate"`)
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		h.Set("Retry-After", strconv.Itoa(defaultRetryAfter))
	case http.StatusConflict:
		if f.Code == codeInProgress {
			h.Set("Retry-After", "1")
		}
	}
	s.writeProblem(w, r, status, f)
}

func (s *server) writeProblem(w http.ResponseWriter, r *http.Request, status int, f *fault.Error) {
	p := Problem{
		Type: s.at("/problems/" + f.Code), Title: titleOf(status), Status: status, Detail: f.Message,
		Instance: s.at(r.URL.Path), Code: f.Code, RequestID: requestID(r.Context()), Hint: f.Hint,
	}
	for _, field := range f.Fields {
		p.Errors = append(p.Errors, ProblemField(field))
	}
	body, err := json.Marshal(p)
	if err != nil { // a path that is not UTF-8
		p.Instance = s.at(r.URL.EscapedPath())
		body, err = json.Marshal(p)
	}
	if err != nil {
		s.log.Error("problem document not encoded", "err", err)
		body = []byte("{}")
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone
}

func titleOf(status int) string {
	if status == http.StatusUnprocessableEntity {
		return "Unprocessable Content" // its name since RFC 9110
	}
	return http.StatusText(status)
}

func bodyTooLarge(limit int64) *fault.Error {
	return fault.Newf(fault.TooLarge, "body_too_large", "The request body is larger than %d bytes.", limit).
		WithHint("Send less in one call.")
}

func noSuchPath(r *http.Request) *fault.Error {
	return fault.Newf(fault.NotFound, "no_such_path", "There is nothing at %s.", at(r, r.URL.Path)).
		WithHint("The calls are listed at " + at(r, "/docs/api") + " and in " + at(r, base+"/openapi.json") + ".")
}

func methodNotAllowed(method, allow string) *fault.Error {
	return fault.Newf(fault.Unsupported, codeMethod, "This address does not serve the method %s.", method).
		WithHint("It serves " + allow + ".")
}
