package web

import (
	"net/http"
	"net/url"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// signInData is what the sign-in page shows.
type signInData struct {
	Code  string // of a one-time link; spent by the button, never by opening
	Next  string
	Error *problem
}

func (s *server) signInPage(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	next := s.nextPath(q.Get("next"))
	if signedIn(principal(r)) && q.Get("code") == "" {
		s.redirect(w, r, next)
		return nil
	}
	return s.showSignIn(w, r, http.StatusOK, signInData{Code: clip(q.Get("code"), 200), Next: next})
}

// nextPath is where to go after signing in.
func (s *server) nextPath(next string) string {
	path := localPath(next)
	if u, err := url.Parse(path); err != nil || u.Path == "/sign-in" {
		return "/"
	}
	return path
}

func (s *server) showSignIn(w http.ResponseWriter, r *http.Request, status int, d signInData) error {
	p := s.newPage(r, "Sign in", "", d)
	return s.render(w, r, status, "sign-in", p)
}

func (s *server) signIn(w http.ResponseWriter, r *http.Request) error {
	open, secret := s.cfg.Auth.SignInWithToken, r.PostFormValue("token")
	if code := r.PostFormValue("code"); code != "" {
		open, secret = s.cfg.Auth.SignInWithCode, code
	}
	next := s.nextPath(r.PostFormValue("next"))
	value, session, err := open(r.Context(), secret)
	if err != nil {
		if fault.KindOf(err) == fault.Internal {
			return err
		}
		pr := problemOf(err)
		return s.showSignIn(w, r, pr.Status, signInData{Next: next, Error: &pr})
	}
	s.cfg.Auth.SetCookie(w, r, value, session)
	s.redirect(w, r, next)
	return nil
}

func (s *server) signOut(w http.ResponseWriter, r *http.Request) error {
	if c, err := r.Cookie(auth.CookieName); err == nil {
		if err := s.cfg.Auth.SignOut(r.Context(), c.Value); err != nil {
			return err
		}
	}
	s.cfg.Auth.ClearCookie(w, r)
	s.redirect(w, r, "/sign-in")
	return nil
}
