package handlers

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"headgate/internal/fault"
	"headgate/listener"
)

// shedding answers the requests of connections that the listener let in only
// to be told to come back later: the port has more than it is meant to have.
// It lies before everything that costs something. What pages are made of is
// served all the same, from memory, since without it the page that explains
// this could not be read.
func (s *server) shedding(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		pause, shed := s.cfg.Shed(r)
		if !shed {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Connection", "close") // over HTTP/2 the server makes a GOAWAY of it
		if s.cfg.Web != nil && strings.HasPrefix(r.URL.Path, "/static/") {
			next.ServeHTTP(w, r)
			return
		}
		seconds := int(math.Ceil(pause.Seconds()))
		w.Header().Set("Retry-After", strconv.Itoa(seconds))
		if s.cfg.Overloaded != nil && wantsPage(r) {
			s.cfg.Overloaded(w, r, seconds)
			return
		}
		s.writeProblem(w, r, http.StatusTooManyRequests, overloaded(seconds))
	})
}

// wantsPage says whether a person waits for the answer.
func wantsPage(r *http.Request) bool {
	return !isAPI(r.URL.Path) && strings.Contains(r.Header.Get("Accept"), "text/html")
}

func overloaded(seconds int) *fault.Error {
	return fault.New(fault.Exhausted, "overloaded", "The public port has as many connections as it may have, so this one is turned away. Nothing was done.").
		WithHint(fmt.Sprintf("Connect again in %d s, as Retry-After says; the pause grows while this lasts.", seconds))
}

// shedByListener asks the listener whether a connection is to be turned away.
func shedByListener(r *http.Request) (pause time.Duration, shed bool) {
	info, ok := listener.InfoFrom(r.Context())
	if !ok || !info.Shed {
		return 0, false
	}
	return listener.RetryAfter(r.Context()), true
}

// identified tells the listener whom a connection has proved to come from, so
// that it no longer counts against all who share its address.
func identified(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p := principal(r); p.Kind != "" {
			if info, ok := listener.InfoFrom(r.Context()); ok && info.Identity == "" {
				listener.Authenticated(r.Context(), p.Kind+":"+p.ID.String())
			}
		}
		next.ServeHTTP(w, r)
	})
}
