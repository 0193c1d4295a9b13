package web

import (
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"html/template"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"headgate/internal/auth"
)

//go:embed templates
var templateFiles embed.FS

// contentPolicy allows our own files and nothing else: no inline script or
// style, no frame, no other host.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// minCompressed is the size from which compressing pays.
const minCompressed = 1 << 10

// renderer holds the parsed templates and the assets. It does not change
// after it was made, but for its pool of writers.
type renderer struct {
	base   string
	assets *assets
	pages  map[string]*template.Template
	icons  map[string]bool
	zip    sync.Pool
}

// page is what every page knows beside its own data.
type page struct {
	Title     string
	Nav       string // entry of the rail that is current
	Refresh   string // address that the live view reads this page from; "" = not live
	Theme     string // light, dark or "" for the system's
	Now       time.Time
	User      auth.Principal
	Status    Status
	Stream    bool   // the live view may open an event stream
	From      string // id of the newest event when the page was made
	Topics    string // what the stream is about
	May       map[auth.Permission]bool
	Agents    int
	Open      int // tasks not completed, -1 = unknown
	Flash     *flash
	RequestID string
	Path      string // of this page, to come back to
	Data      any
}

// flash is a short message about what was just done.
type flash struct {
	State string
	Text  string
}

// MayRun and its like say what the templates may offer.
func (p *page) MayRun() bool    { return p.May[auth.SubmitTasks] }
func (p *page) MayCancel() bool { return p.May[auth.CancelTasks] }
func (p *page) MayManage() bool { return p.May[auth.ManageAgents] }
func (p *page) MayPing() bool   { return p.May[auth.PingAgents] }

func newRenderer(base string) (*renderer, error) {
	a, err := newAssets()
	if err != nil {
		return nil, err
	}
	v := &renderer{base: base, assets: a, pages: map[string]*template.Template{}, icons: iconNames(a)}
	shared, err := template.New("").Funcs(v.funcs()).ParseFS(templateFiles, "templates/shared/*.html")
	if err != nil {
		return nil, fmt.Errorf("web: templates: %w", err)
	}
	names, err := fs.Glob(templateFiles, "templates/*.html")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		t, err := shared.Clone()
		if err != nil {
			return nil, err
		}
		if t, err = t.ParseFS(templateFiles, name); err != nil {
			return nil, fmt.Errorf("web: template %s: %w", name, err)
		}
		v.pages[strings.TrimSuffix(path.Base(name), ".html")] = t
	}
	return v, nil
}

// iconNames reads which icons the sprite has, so that a wrong name shows in
// tests and never as a hole in a page.
func iconNames(a *assets) map[string]bool {
	names := map[string]bool{}
	for part := range strings.SplitSeq(string(a.files[a.hashed["icons.svg"]].plain), `<symbol id="`) {
		name, _, _ := strings.Cut(part, `"`)
		names[name] = true
	}
	return names
}

func (v *renderer) funcs() template.FuncMap {
	return template.FuncMap{
		"url":   func(p string) string { return v.base + p },
		"asset": func(name string) (string, error) { p, err := v.assets.path(name); return v.base + p, err },
		"icon":  func(name string) (template.HTML, error) { return v.icon(name, "i") },
		"iconOf": func(class, name string) (template.HTML, error) {
			return v.icon(name, class)
		},
		"st":       v.state,
		"gate":     v.gate,
		"took":     took,
		"age":      age,
		"size":     size,
		"peer":     peer,
		"sentence": func(reason string) string { return strings.TrimSpace(clause(reason)) },
		"count":    func(n int) string { return count(n) },
		"count64": func(n int64) string {
			return count(n)
		},
		"plural": func(n int, word string) string { return plural(n, word) },
		"actor":  actorName,
		"clip":   clip,
		"stamp":  stampAt,
		"clock":  func(t, now time.Time) template.HTML { return timeTag(t, "", clockAt(t, now)) },
		"ago":    func(t, now time.Time) template.HTML { return timeTag(t, "ago", ago(now.Sub(t))) },
		"since":  func(t, now time.Time) template.HTML { return timeTag(t, "since", age(now.Sub(t))) },
		"date":   func(t time.Time) template.HTML { return timeTag(t, "", t.UTC().Format("2 Jan 2006")) },
		"add":    func(a, b int) int { return a + b },
		"list":   func(items ...any) []any { return items },
	}
}

// icon makes a reference into the sprite. Its name is one of ours.
func (v *renderer) icon(name, class string) (template.HTML, error) {
	if !v.icons[name] {
		return "", fmt.Errorf("web: there is no icon %q", name)
	}
	p, err := v.assets.path("icons.svg")
	return template.HTML(`<svg class="` + class + `" aria-hidden="true"><use href="` + v.base + p + `#` + name + `"/></svg>`), err //nolint:gosec // checked names only
}

// stateIcons names the icons of states that have none of their own.
func stateIcons() map[string]string {
	return map[string]string{
		"open": "gate-open", "closed": "gate-closed", "connecting": "waiting-for-agent-response", "elsewhere": "external",
	}
}

// state writes a state, outcome or health: its glyph and its exact word.
func (v *renderer) state(word any) (template.HTML, error) {
	name := fmt.Sprint(word)
	glyph := orElse(stateIcons()[name], name)
	class := "i"
	if glyph == "waiting-for-agent-response" {
		class = "i turn"
	}
	svg, err := v.icon(glyph, class)
	return template.HTML(`<span class="st" data-s="`+name+`">`) + svg + template.HTML(name+`</span>`), err //nolint:gosec // the icon's name was checked, and so the word
}

// gate writes a state of the listener: its glyph and its exact word. A state
// without a glyph of its own is one in which the public port is closed.
func (v *renderer) gate(word string) (template.HTML, error) {
	glyph := orElse(gateGlyphs()[word], "gate-closed")
	state, class := glyph, "i"
	switch glyph {
	case "gate-open":
		state = gateOpen
	case "gate-closed":
		state = gateClosed
	case "waiting-for-agent-response":
		class = "i turn"
	}
	svg, err := v.icon(glyph, class)
	return template.HTML(`<span class="st" data-s="`+state+`">`) + svg + template.HTML(template.HTMLEscapeString(word)+`</span>`), err //nolint:gosec // both are escaped or ours
}

// newPage fills what every page needs.
func (s *server) newPage(r *http.Request, title, nav string, data any) *page {
	p := &page{
		Title: title, Nav: nav, Theme: themeOf(r), Now: time.Now(), User: principal(r), Status: s.cfg.Status(),
		May: map[auth.Permission]bool{}, Open: -1, Path: r.URL.RequestURI(), Data: data,
	}
	for _, perm := range auth.Permissions(p.User.Role) {
		p.May[perm] = true
	}
	p.Stream = p.User.Kind != "" && p.May[auth.ReadTasks]
	if p.May[auth.ReadTasks] && s.cfg.Counters != nil {
		st := s.cfg.Counters.Stats()
		p.Open = st.New + st.Waiting
	}
	if p.Stream && s.cfg.Hub != nil {
		p.From = s.cfg.Hub.LastEventID()
	}
	if p.May[auth.ReadAgents] {
		p.Agents = s.census.now(p.Now).total
	}
	return p
}

// live makes a page one that follows events about topics; address is where it
// is read from.
func (p *page) live(address, topics string) *page {
	p.Refresh, p.Topics = address, topics
	return p
}

// EventsPath is the address of the page's event stream.
func (p *page) EventsPath() string {
	q := url.Values{"topics": {p.Topics}}
	if p.From != "" {
		q.Set("last_event_id", p.From)
	}
	return "/api/v1/events?" + q.Encode()
}

// render answers with a page.
func (s *server) render(w http.ResponseWriter, r *http.Request, status int, name string, p *page) error {
	p.RequestID = w.Header().Get("X-Request-Id")
	return s.view.write(w, r, status, name, p)
}

// write renders into memory first, so that an error is never half a page.
func (v *renderer) write(w http.ResponseWriter, r *http.Request, status int, name string, p *page) error {
	var buf bytes.Buffer
	t := v.pages[name]
	if t == nil {
		return fmt.Errorf("web: there is no template %s", name)
	}
	if err := t.ExecuteTemplate(&buf, "page", p); err != nil {
		return fmt.Errorf("web: render %s: %w", name, err)
	}
	v.send(w, r, status, buf.Bytes())
	return nil
}

// fragment answers with one template of a page, without its frame.
func (v *renderer) fragment(w http.ResponseWriter, r *http.Request, name, part string, data any) error {
	var buf bytes.Buffer
	if err := v.pages[name].ExecuteTemplate(&buf, part, data); err != nil {
		return fmt.Errorf("web: render %s of %s: %w", part, name, err)
	}
	v.send(w, r, http.StatusOK, buf.Bytes())
	return nil
}

func (v *renderer) send(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	// same-origin, not no-referrer: with the latter browsers send forms with
	// the origin null, which protection against foreign forms must refuse.
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Vary", "Accept-Encoding, Cookie")
	if len(body) >= minCompressed && acceptsGzip(r) {
		body = v.compress(body)
		h.Set("Content-Encoding", "gzip")
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // the client may be gone
	}
}

func (v *renderer) compress(body []byte) []byte {
	var buf bytes.Buffer
	z, ok := v.zip.Get().(*gzip.Writer)
	if !ok {
		z = gzip.NewWriter(nil)
	}
	defer v.zip.Put(z)
	z.Reset(&buf)
	_, _ = z.Write(body) // into memory: it cannot fail
	_ = z.Close()
	return buf.Bytes()
}

// sortedLabels writes labels as key=value in a fixed order.
func sortedLabels(m map[string]string) []string {
	out := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return out
}
