package web

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strconv"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// problem is what an error page shows.
type problem struct {
	Status int
	Title  string
	State  string // glyph
	Text   string
	Hint   string
	Code   string
	Role   string // of the reader, when a permission is missing
}

// statusOf maps a fault to its HTTP status.
func statusOf(err error) int {
	if fault.CodeOf(err) == codeMethod {
		return http.StatusMethodNotAllowed
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

// problemOf puts an error into words; what has no meaning for the reader is
// shown as our own defect.
func problemOf(err error) problem {
	f, ok := errors.AsType[*fault.Error](err)
	if !ok || f.Kind == fault.Internal {
		f = fault.New(fault.Internal, "internal", "The controller met an error that it did not expect.").
			WithHint("Look for the request id in the controller’s log.")
		if errors.Is(err, context.DeadlineExceeded) {
			f = fault.New(fault.Deadline, "timed_out", "The controller did not finish this in time.").WithHint("Try again in a few seconds.")
		}
	}
	p := problem{Status: statusOf(f), State: "failed", Text: f.Message, Hint: f.Hint, Code: f.Code}
	switch f.Kind {
	case fault.NotFound:
		p.Title, p.State = "Not here", "unknown"
	case fault.Forbidden:
		p.Title, p.State = "Your role may not do this", "rejected"
	case fault.Unavailable, fault.Deadline:
		p.Title, p.State = "Not available now", "timed-out"
	case fault.Internal:
		p.Title = "Something is wrong here"
	default:
		p.Title, p.State = "This could not be done", "rejected"
	}
	return p
}

// refuse answers with an error page, or sends strangers to sign in.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil && errors.Is(err, context.Canceled) {
		return // the reader is gone
	}
	p := problemOf(err)
	if p.Status >= http.StatusInternalServerError {
		s.log.Error("page not served", "request_id", w.Header().Get("X-Request-Id"), "path", r.URL.Path, "err", err)
	}
	if p.Status == http.StatusUnauthorized && (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get(liveHeader) == "" {
		s.redirect(w, r, "/sign-in?next="+url.QueryEscape(r.URL.RequestURI()))
		return
	}
	if p.Status == http.StatusForbidden && principal(r).Kind != "" {
		p.Role = string(principal(r).Role)
	}
	if p.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
	}
	pg := s.newPage(r, p.Title, "", p)
	if renderErr := s.render(w, r, p.Status, "error", pg); renderErr != nil {
		s.log.Error("error page not rendered", "err", renderErr)
		http.Error(w, p.Text, p.Status)
	}
}

// retryAfter is what a browser is told to wait, in seconds.
const retryAfter = 2

// liveHeader marks requests of the live view, which want an answer and no
// redirect.
const liveHeader = "X-Headgate-Live"

// signedIn says whether somebody is known by a credential.
func signedIn(p auth.Principal) bool { return p.Kind != "" }
