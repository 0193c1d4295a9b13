package web

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// notReadyEvery is how often the not-ready page asks again by itself.
const notReadyEvery = 2 * time.Second

// notReadyData is what the not-ready page shows: phase, ports and conditions,
// and nothing else, since anybody may read it.
type notReadyData struct {
	Every  int
	Lasted string
	Phases []phaseView
	Code   string
	Drains bool
}

type phaseView struct {
	State string
	Name  string
	Text  string
	Took  string
	Unmet []Unmet
}

// NotReady makes the handler of all pages while the controller is starting or
// draining. It needs no database. base stands before its addresses, as in
// Config.BasePath. It panics when the embedded templates are broken.
func NotReady(status func() Status, base string) http.Handler {
	view, err := newRenderer(base)
	if err != nil {
		panic(err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name, ok := strings.CutPrefix(r.URL.Path, "/static/"); ok && view.assets.serve(w, r, name) {
			return
		}
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		p := notReadyPage(r, status(), time.Now())
		p.RequestID = w.Header().Get("X-Request-Id")
		if err := view.write(w, r, http.StatusServiceUnavailable, "not-ready", p); err != nil {
			http.Error(w, "The controller is starting.", http.StatusServiceUnavailable)
		}
	})
}

func notReadyPage(r *http.Request, st Status, now time.Time) *page {
	d := notReadyData{Every: int(notReadyEvery.Seconds()), Drains: st.Phase == "drain", Phases: phaseViews(st, now)}
	if !st.Began.IsZero() {
		d.Lasted = took(now.Sub(st.Began))
	}
	if len(st.Unmet) > 0 {
		d.Code = st.Unmet[0].Condition
	}
	title := "Starting"
	if d.Drains {
		title = "Stopping"
	}
	return &page{Title: title, Theme: themeOf(r), Now: now, Status: st, Data: d}
}

// phaseViews lists all phases: done, under way, to come.
func phaseViews(st Status, now time.Time) []phaseView {
	done := map[string]time.Duration{}
	for _, p := range st.Phases {
		done[p.Name] = p.Took
	}
	var views []phaseView
	for _, n := range phaseNames() {
		v := phaseView{Name: n.name, Text: n.text, State: "new"}
		if d, ok := done[n.name]; ok && n.name != st.Phase {
			v.State, v.Took = "succeeded", took(d)
		}
		if n.name == st.Phase && !st.Ready {
			v.State, v.Unmet = "waiting-for-agent-response", st.Unmet
			if !st.Since.IsZero() {
				v.Took = "for " + took(now.Sub(st.Since))
			}
		}
		views = append(views, v)
	}
	return views
}
