package web

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// themeCookie keeps the choice of a theme, so that the server renders it and
// no page flashes in the wrong one.
const themeCookie = "headgate_theme"

// themeTerm is how long a browser keeps the choice.
const themeTerm = 365 * 24 * time.Hour

func themeOf(r *http.Request) string {
	if c, err := r.Cookie(themeCookie); err == nil && (c.Value == "light" || c.Value == "dark") {
		return c.Value
	}
	return ""
}

// NextTheme is what the theme button changes to: system, light, dark, system.
func (p *page) NextTheme() string {
	switch p.Theme {
	case "":
		return "light"
	case "light":
		return "dark"
	}
	return "system"
}

// ThemeName says which theme is on.
func (p *page) ThemeName() string {
	if p.Theme == "" {
		return "as the system"
	}
	return p.Theme
}

func (s *server) setTheme(w http.ResponseWriter, r *http.Request) error {
	c := &http.Cookie{
		Name: themeCookie, Path: s.cfg.BasePath + "/", MaxAge: int(themeTerm.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: s.cfg.Auth.Secure(r),
	}
	switch v := r.PostFormValue("theme"); v {
	case "light", "dark":
		c.Value = v
	default:
		c.MaxAge = -1
	}
	http.SetCookie(w, c)
	s.redirect(w, r, localPath(r.PostFormValue("back")))
	return nil
}

// localPath accepts a path of this site to come back to, without the base
// path; anything else becomes the overview. Dots, also escaped ones, would lead
// out of the base path to whatever else the host serves.
func localPath(p string) string {
	if !strings.HasPrefix(p, "/") || strings.HasPrefix(p, "//") || strings.ContainsAny(p, "\\\r\n\t") {
		return "/"
	}
	u, err := url.Parse(p)
	if err != nil || slices.ContainsFunc(strings.Split(u.Path, "/"), func(part string) bool { return part == "." || part == ".." }) {
		return "/"
	}
	return p
}
