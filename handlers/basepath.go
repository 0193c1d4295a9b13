package handlers

import (
	"net/http"
	"net/url"
	"strings"
)

// A base path is what stands before every path of ours when a proxy gives us
// only a part of a site. Requests may come with it or without it: some proxies
// take it off, and scripts at the controller port need not know of it. All
// addresses that are given out carry it.

// at gives the address of a path of ours.
func (s *server) at(path string) string { return s.cfg.BasePath + path }

// at gives the address of a path of ours to where only the request is known.
func at(r *http.Request, path string) string { return callOf(r.Context()).base + path }

// stripBase takes the base path off a request that is ours to change.
func (s *server) stripBase(r *http.Request) {
	base := s.cfg.BasePath
	if base == "" || !strings.HasPrefix(r.URL.Path, base+"/") {
		return
	}
	u := new(url.URL)
	*u = *r.URL
	u.Path = strings.TrimPrefix(u.Path, base)
	var ok bool
	if u.RawPath, ok = strings.CutPrefix(u.RawPath, base); !ok {
		u.RawPath = "" // the base path itself was escaped: go by the plain path
	}
	r.URL = u
}

// toBase sends a browser from the bare base path to the page below it, whose
// relative addresses then work.
func (s *server) toBase(w http.ResponseWriter, r *http.Request) bool {
	if s.cfg.BasePath == "" || r.URL.Path != s.cfg.BasePath || r.Method != http.MethodGet && r.Method != http.MethodHead {
		return false
	}
	to := s.at("/")
	if r.URL.RawQuery != "" {
		to += "?" + r.URL.RawQuery
	}
	http.Redirect(w, r, to, http.StatusTemporaryRedirect)
	return true
}

// OwnPath says whether a path begins like one of the API or of the operations
// endpoints: it cannot be a base path.
func OwnPath(path string) bool {
	for _, rt := range (&server{}).routes() {
		if firstPart(rt.pattern) == firstPart(path) {
			return true
		}
	}
	return false
}

func firstPart(path string) string {
	part, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return part
}
