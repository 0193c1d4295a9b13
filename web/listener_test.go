package web_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"headgate/internal/auth"
)

func TestTheOverviewShowsTheListener(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-ams-01")
	r.ready()
	body := r.get(auth.Admin, "/").Body.String()
	for _, want := range []string{
		">Listener<", "[::]:7440", "38 signed in, 3 from others", "2 known, 17 unknown", "in force", "400/s", "203.0.113.77", "48,231",
		"Last 3 changes of state", "controller port accepts", "Gate open",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("the overview does not say %q", want)
		}
	}
	if strings.Contains(body, `id="h-gate"`) || strings.Contains(body, "self_call") {
		t.Error("an open gate has a banner, or a check that is well is listed")
	}
	viewer := r.get(auth.Viewer, "/").Body.String()
	if !strings.Contains(viewer, ">Listener<") || strings.Contains(viewer, "203.0.113.77") || strings.Contains(viewer, "2001:db8") {
		t.Error("a viewer must see the listener, but not who connects")
	}
}

func TestABannerSaysThatTheGateIsNotOpen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ state, title, text string }{
		{"open", "is still open", "The database is slow. If that lasts"},
		{"controller-only", "not ready for it yet", "opens by itself"},
		{"settling", "The public port opens at ", "waits a little"},
		{"shedding", "lets in only those it knows", "The database is slow. All others"},
		{"reclosed", "has not been stable", "The database is slow. Connections"},
		{"public-failed", "cannot be opened", "Address in use. Headgate"},
		{"draining", "is stopping", "Running tasks go on"},
	} {
		t.Run(c.state, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.add("dns-ams-01")
			r.ready()
			r.status = reclosed()
			l := r.status.Listener
			l.State, l.Reason, l.Unstable = c.state, "the database is slow", "the database is slow"
			if c.state == "settling" {
				l.OpensAt = time.Now().Add(2 * time.Second)
			}
			if c.state == "public-failed" {
				l.Error = "address in use"
			}
			for _, path := range []string{"/", "/tasks"} {
				w := r.get(auth.Viewer, path)
				body := w.Body.String()
				if w.Code != http.StatusOK || !strings.Contains(body, c.title) || !strings.Contains(body, c.text) || strings.Contains(body, `<code>`+c.state+`</code>`) == (c.state == "open") {
					t.Errorf("%s: %d, without the banner of %s", path, w.Code, c.state)
				}
				if open := strings.Contains(body, "Gate open"); open != (c.state == "shedding" || c.state == "open") {
					t.Errorf("%s: gate open = %v", path, open)
				}
			}
			body := r.get(auth.Viewer, "/").Body.String()
			if strings.Contains(body, "All is well") || !strings.Contains(body, "The database gives no answer within 1 s.") {
				t.Error("the overview does not name the failed check")
			}
		})
	}
}
