package web

import (
	"net/http"
	"time"
)

// overloadedData is what the page of a connection that is turned away shows.
type overloadedData struct{ Every int }

// Overloaded makes the page for readers whose connection is turned away. It
// needs neither the database nor a principal. base is as in Config.BasePath.
// It panics when the embedded templates are broken.
func Overloaded(base string) func(w http.ResponseWriter, r *http.Request, seconds int) {
	view, err := newRenderer(base)
	if err != nil {
		panic(err)
	}
	return func(w http.ResponseWriter, r *http.Request, seconds int) {
		p := &page{Title: "Too many connections", Theme: themeOf(r), Now: time.Now(), Path: r.URL.RequestURI(), Data: overloadedData{Every: seconds}}
		p.RequestID = w.Header().Get("X-Request-Id")
		if err := view.write(w, r, http.StatusTooManyRequests, "overloaded", p); err != nil {
			http.Error(w, "The public port has as many connections as it may have. Try again later.", http.StatusTooManyRequests)
		}
	}
}
