package web_test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"headgate/internal/auth"
	"headgate/internal/kinds"
)

func TestCompletedTasksAreRetried(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-1")
	r.ready()
	done := r.done("dns-1", kinds.Echo, `{"n":1}`)
	path := "/tasks/" + done.ID.String()
	form := `action="` + path + `/retry"`
	if page := r.get(auth.Operator, path).Body.String(); !strings.Contains(page, form) || !strings.Contains(page, `method="post"`) {
		t.Error("the page of a completed task offers no retry")
	}
	if page := r.get(auth.Viewer, path).Body.String(); strings.Contains(page, form) {
		t.Error("the page offers the retry to a viewer")
	}
	if w := r.post(auth.Viewer, path+"/retry", url.Values{}); w.Code != http.StatusForbidden {
		t.Errorf("retry by a viewer: %d", w.Code)
	}
	first := r.post(auth.Operator, path+"/retry", nil)
	target, _, _ := strings.Cut(first.Header().Get("Location"), "?")
	if first.Code != http.StatusSeeOther || target == path || !strings.HasPrefix(target, "/tasks/") {
		t.Fatalf("retry: %d %s", first.Code, first.Header().Get("Location"))
	}
	if page := r.get(auth.Operator, first.Header().Get("Location")).Body.String(); !strings.Contains(page, "Retry of") || !strings.Contains(page, `href="`+path+`"`) ||
		!strings.Contains(page, "repeats task "+done.ID.String()) {
		t.Error("the new task does not lead to the first one")
	}
	if page := r.get(auth.Operator, path).Body.String(); !strings.Contains(page, "Retried as") || !strings.Contains(page, `href="`+target+`"`) || strings.Contains(page, form) {
		t.Error("the first task does not lead to its retry, or offers another one")
	}
	again := r.post(auth.Operator, path+"/retry", nil) // from a page that is older
	if now, _, _ := strings.Cut(again.Header().Get("Location"), "?"); now != target {
		t.Errorf("the second retry leads to %s, not %s", now, target)
	}
	if page := r.get(auth.Operator, again.Header().Get("Location")).Body.String(); !strings.Contains(page, "had been retried before") {
		t.Error("the page does not say that it is the earlier retry")
	}
	running := r.submit("dns-1", kinds.Sleep, `{"seconds":3600}`)
	if w := r.post(auth.Operator, "/tasks/"+running.ID.String()+"/retry", nil); w.Code != http.StatusConflict || !strings.Contains(w.Body.String(), `role="alert"`) {
		t.Errorf("retry of a running task: %d", w.Code)
	}
}
