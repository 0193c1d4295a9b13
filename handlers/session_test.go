package handlers_test

import (
	"net/http"
	"strings"
	"testing"

	"headgate/handlers"
	"headgate/internal/auth"
)

func TestSignInByLinkAndByToken(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	user, err := rig.auth.EnsureUser(t.Context(), "admin", auth.Admin)
	if err != nil {
		t.Fatal(err)
	}
	code, _, err := rig.auth.NewSignInLink(t.Context(), user)
	if err != nil {
		t.Fatal(err)
	}
	for body, want := range map[string]string{`{"code":"` + code + `"}`: "admin", `{"token":"` + rig.tokens[auth.Viewer] + `"}`: "viewer"} {
		res := rig.do(t, "POST", "/api/v1/session", body, "", map[string]string{"Sec-Fetch-Site": "same-origin"})
		cookies := res.Cookies()
		who := decode[handlers.SessionBody](t, res, http.StatusOK)
		if who.Name != want || who.ExpiresAt == nil || len(cookies) != 1 || !cookies[0].HttpOnly {
			t.Fatalf("%+v %v", who, cookies)
		}
		header := map[string]string{"Cookie": cookies[0].Name + "=" + cookies[0].Value}
		if me := decode[handlers.SessionBody](t, rig.do(t, "GET", "/api/v1/session", "", "", header), http.StatusOK); me.Name != want {
			t.Errorf("session of %q", me.Name)
		}
		header["Sec-Fetch-Site"] = "cross-site"
		if res := rig.do(t, "DELETE", "/api/v1/session", "", "", header); res.StatusCode != http.StatusForbidden {
			t.Errorf("cross-site sign-out: %d", res.StatusCode)
		}
		header["Sec-Fetch-Site"] = "same-origin"
		if res := rig.do(t, "DELETE", "/api/v1/session", "", "", header); res.StatusCode != http.StatusNoContent {
			t.Errorf("sign-out: %d", res.StatusCode)
		}
		if res := rig.do(t, "GET", "/api/v1/session", "", "", header); res.StatusCode != http.StatusUnauthorized {
			t.Errorf("after the sign-out: %d", res.StatusCode)
		}
	}
	if res := rig.do(t, "POST", "/api/v1/session", `{"code":"`+code+`"}`, "", nil); res.StatusCode != http.StatusUnauthorized {
		t.Errorf("the link once more: %d", res.StatusCode)
	}
}

func TestTokensAreShownOnceAndEnd(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	made := decode[handlers.MadeTokenBody](t, rig.do(t, "POST", "/api/v1/tokens", `{"name":"report","role":"viewer"}`, auth.Admin, nil), http.StatusCreated)
	header := map[string]string{"Authorization": "Bearer " + made.Secret}
	if res := rig.do(t, "GET", "/api/v1/agents", "", "", header); res.StatusCode != http.StatusOK {
		t.Fatalf("the new token: %d", res.StatusCode)
	}
	text := readBody(t, rig.do(t, "GET", "/api/v1/tokens", "", auth.Admin, nil))
	if strings.Contains(text, made.Secret) || !strings.Contains(text, made.Token.ID) {
		t.Errorf("list of tokens: %s", text)
	}
	if res := rig.do(t, "DELETE", "/api/v1/tokens/"+made.Token.ID, "", auth.Admin, nil); res.StatusCode != http.StatusNoContent {
		t.Fatalf("revoke: %d", res.StatusCode)
	}
	if p := readProblem(t, rig.do(t, "GET", "/api/v1/agents", "", "", header)); p.Code != "token_revoked" {
		t.Errorf("after the revocation: %+v", p)
	}
}

func TestReadinessNamesWhatIsUnmet(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	if r := decode[handlers.Readiness](t, rig.do(t, "GET", "/readyz", "", "", nil), http.StatusOK); !r.Ready || r.Unmet == nil {
		t.Errorf("%+v", r)
	}
	rig.ready.Store(false)
	r := decode[handlers.Readiness](t, rig.do(t, "GET", "/readyz", "", "", nil), http.StatusServiceUnavailable)
	if r.Ready || len(r.Unmet) != 1 || r.Unmet[0].Condition != "database" {
		t.Errorf("%+v", r)
	}
}

func TestWhileStartingOnlyTheRootIsServed(t *testing.T) {
	t.Parallel()
	rig := newRig(t, func(c *handlers.Config) { c.Tasks, c.Hub, c.Fleet = nil, nil, nil })
	for path, want := range map[string]int{
		"/healthz": 200, "/readyz": 200, "/version": 200, "/livez": 200, "/metrics": 200, "/status/listener": 200, "/api/v1/status": 200,
		"/api/v1/tasks": 503, "/api/v1/agents": 503, "/api/v1/tasks/1": 503,
	} {
		if res := rig.do(t, "GET", path, "", auth.Admin, nil); res.StatusCode != want {
			t.Errorf("%s: %d, want %d", path, res.StatusCode, want)
		}
	}
}

func TestTheDashboardGetsTheRest(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	for path, want := range map[string]string{"/": "dashboard", "/tasks": "dashboard", "/swagger/": "explorer", "/docs/api": "API reference"} {
		res := rig.do(t, "GET", path, "", "", nil)
		if text := readBody(t, res); res.StatusCode != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s: %d %.80s", path, res.StatusCode, text)
		}
	}
}

func TestAPanicIsAProblemAndNotTheEnd(t *testing.T) {
	t.Parallel()
	rig := newRig(t, func(c *handlers.Config) { c.Status = func() handlers.Status { panic("boom") } })
	p := readProblem(t, rig.do(t, "GET", "/api/v1/status", "", auth.Viewer, nil))
	if p.Status != http.StatusInternalServerError || p.Code != "internal" || strings.Contains(p.Detail, "boom") {
		t.Errorf("%+v", p)
	}
}

func TestRequestsAreCountedByPattern(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	rig.do(t, "GET", "/api/v1/tasks/4711", "", auth.Viewer, nil)
	rig.do(t, "GET", "/nowhere", "", "", nil)
	rig.do(t, "GET", "/api/v1/nowhere", "", "", nil)
	text := readBody(t, rig.do(t, "GET", "/metrics", "", auth.Metrics, nil))
	for _, want := range []string{
		`headgate_http_requests_total{code="404",method="GET",pattern="/api/v1/tasks/{id}"} 1`,
		`headgate_http_requests_total{code="200",method="GET",pattern="web"} 1`,
		`headgate_http_requests_total{code="404",method="GET",pattern="other"} 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	if strings.Contains(text, "4711") {
		t.Error("a path became a label")
	}
}
