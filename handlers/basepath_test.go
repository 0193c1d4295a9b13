package handlers_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/openapi"
)

func newBaseRig(t *testing.T) *rig {
	t.Helper()
	return newRig(t, func(cfg *handlers.Config) {
		cfg.BasePath = "/hg"
		cfg.OpenAPI, cfg.Reference = openapi.Document("/hg"), openapi.Reference("/hg")
		cfg.Web = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, "page "+r.URL.RequestURI()) })
	})
}

// call sends a request without checking it against the contract, whose paths
// have no base path.
func (r *rig) call(t *testing.T, method, path, body string, role auth.Role) *http.Response {
	t.Helper()
	w := httptest.NewRecorder()
	r.handler.ServeHTTP(w, r.request(t, method, path, body, role, nil))
	return w.Result()
}

// Addresses that are given out carry the base path, whether the request came
// with it or, as at the controller port, without.
func TestBasePathIsInEveryAddress(t *testing.T) {
	t.Parallel()
	r := newBaseRig(t)
	for _, prefix := range []string{"/hg", ""} {
		res := r.call(t, "POST", prefix+"/api/v1/tasks?wait=30s", `{"agent":"alpha","kind":"core.echo"}`, auth.Admin)
		task := decode[handlers.TaskBody](t, res, http.StatusOK)
		if got, want := res.Header.Get("Location"), "/hg/api/v1/tasks/"+task.ID; got != want {
			t.Errorf("Location %q, want %q", got, want)
		}
		if res := r.call(t, "GET", res.Header.Get("Location"), "", auth.Admin); res.StatusCode != http.StatusOK {
			t.Errorf("Location answers %d", res.StatusCode)
		}
		r.call(t, "POST", prefix+"/api/v1/tasks", `{"agent":"alpha","kind":"core.echo"}`, auth.Admin)
		link := r.call(t, "GET", prefix+"/api/v1/tasks?limit=1", "", auth.Admin).Header.Get("Link")
		next, _, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
		if !strings.HasPrefix(next, "/hg/api/v1/tasks?") {
			t.Errorf("Link %q", link)
		}
		if res := r.call(t, "GET", next, "", auth.Admin); res.StatusCode != http.StatusOK {
			t.Errorf("Link answers %d", res.StatusCode)
		}
		signIn := decode[handlers.MadeSignInLinkBody](t, r.call(t, "POST", prefix+"/api/v1/session/links", "{}", auth.Admin), http.StatusCreated)
		if !strings.HasPrefix(signIn.Path, "/hg/sign-in?code=") {
			t.Errorf("the sign-in link is at %q", signIn.Path)
		}
		p := readProblem(t, r.call(t, "GET", prefix+"/api/v1/none", "", auth.Admin))
		if p.Type != "/hg/problems/no_such_path" || p.Instance != "/hg/api/v1/none" || !strings.Contains(p.Hint, " /hg/docs/api ") || !strings.Contains(p.Detail, " /hg/api/v1/none.") {
			t.Errorf("problem %+v", p)
		}
		if res := r.call(t, "GET", p.Type, "", ""); res.StatusCode != http.StatusOK {
			t.Errorf("the problem's type answers %d", res.StatusCode)
		}
	}
}

func TestPathsBelowAndBesideTheBasePath(t *testing.T) {
	t.Parallel()
	r := newBaseRig(t)
	for path, want := range map[string]string{
		"/hg/":               "200 page /",
		"/hg/tasks?q=a%2Fb":  "200 page /tasks?q=a%2Fb",
		"/hg/a%2Fb":          "200 page /a%2Fb",
		"/%68g/a%2Fb":        "200 page /a/b",
		"/tasks":             "200 page /tasks",
		"/hgx/tasks":         "200 page /hgx/tasks",
		"/hg":                "307 /hg/",
		"/hg?next=x":         "307 /hg/?next=x",
		"/hg/healthz":        "200 ",
		"/healthz":           "200 ",
		"/metrics":           "401 ",
		"/hg/metrics":        "401 ",
		"/hg/hg/healthz":     "200 page /hg/healthz", // only once
		"/hg/api/v1/session": "401 ",
	} {
		res := r.call(t, "GET", path, "", "")
		got := fmt.Sprint(res.StatusCode, " ", res.Header.Get("Location"))
		if text := readBody(t, res); strings.HasPrefix(text, "page") {
			got += text
		}
		if got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

func TestContractUnderABasePath(t *testing.T) {
	t.Parallel()
	r := newBaseRig(t)
	type document struct {
		Servers []struct {
			URL string `json:"url"`
		} `json:"servers"`
	}
	doc := decode[document](t, r.call(t, "GET", "/hg/api/v1/openapi.json", "", ""), http.StatusOK)
	if len(doc.Servers) != 1 || doc.Servers[0].URL != "/hg" {
		t.Errorf("servers %+v", doc.Servers)
	}
	if text := readBody(t, r.call(t, "GET", "/hg/api/v1/openapi.yaml", "", "")); !strings.Contains(text, "\n  url: /hg\n") {
		t.Error("the YAML document names another server")
	}
	for part := range strings.SplitSeq(readBody(t, r.call(t, "GET", "/hg/docs/api", "", "")), `href="`) {
		if address, _, _ := strings.Cut(part, `"`); strings.HasPrefix(address, "/") && !strings.HasPrefix(address, "/hg/") {
			t.Errorf("the reference leads to %s", address)
		}
	}
}

func TestOwnPathsAreNoBasePath(t *testing.T) {
	t.Parallel()
	for path, own := range map[string]bool{"/api": true, "/metrics/x": true, "/swagger": true, "/headgate": false, "/apis": false} {
		if handlers.OwnPath(path) != own {
			t.Errorf("OwnPath(%q) = %v", path, !own)
		}
	}
}
