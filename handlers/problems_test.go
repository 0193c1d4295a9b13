package handlers_test

import (
	"net/http"
	"strings"
	"testing"

	"headgate/internal/auth"
)

// badInput is the table of requests that must each get a clear problem.
type badInput struct {
	name         string
	method, path string
	body         string
	header       map[string]string
	role         auth.Role // "" = no credential
	status       int
	code         string
	says         string // part of detail or hint
	pointer      string // of the first error, "" = none wanted
}

func submitCase(name, body string, status int, code, says, pointer string) badInput {
	return badInput{name: name, method: "POST", path: "/api/v1/tasks", body: body, role: auth.Operator, status: status, code: code, says: says, pointer: pointer}
}

func badInputs() []badInput {
	deep := strings.Repeat("[", 40) + strings.Repeat("]", 40)
	list := []badInput{
		submitCase("unknown field", `{"agent":"alpha","kind":"core.echo","arg":{}}`, 422, "unknown_field", "Did you mean args?", "/arg"),
		submitCase("unknown field far off", `{"agent":"alpha","kind":"core.echo","zzzzzzzz":1}`, 422, "unknown_field", "is one of agent, args", "/zzzzzzzz"),
		submitCase("wrong type", `{"agent":7,"kind":"core.echo"}`, 422, "wrong_type", "/agent must be a string", "/agent"),
		submitCase("wrong type of priority", `{"agent":"alpha","kind":"core.echo","priority":"high"}`, 422, "wrong_type", "must be a whole number", "/priority"),
		submitCase("fraction as priority", `{"agent":"alpha","kind":"core.echo","priority":1.5}`, 422, "wrong_type", "must be a whole number", "/priority"),
		submitCase("priority out of range", `{"agent":"alpha","kind":"core.echo","priority":10}`, 422, "invalid_field", "from 0 (first) to 9", "/priority"),
		submitCase("bad time", `{"agent":"alpha","kind":"core.echo","not_before":"tomorrow"}`, 422, "wrong_type", "a time such as", "/not_before"),
		submitCase("bad timeout", `{"agent":"alpha","kind":"core.echo","timeout":"soon"}`, 422, "invalid_field", "such as 30s", "/timeout"),
		submitCase("bad delivery", `{"agent":"alpha","kind":"core.echo","delivery":"twice"}`, 422, "invalid_field", "once or repeatable", "/delivery"),
		submitCase("missing agent and kind", `{}`, 422, "invalid_field", "2 wrong fields", "/agent"),
		submitCase("unknown agent", `{"agent":"alpah","kind":"core.echo"}`, 422, "unknown_agent", "alpha", ""),
		submitCase("ambiguous agent", `{"agent":"twin","kind":"core.echo"}`, 409, "ambiguous_agent", "id", ""),
		submitCase("unknown kind", `{"agent":"alpha","kind":"core.ecko"}`, 422, "unknown_kind", "core.echo", "/kind"),
		submitCase("wrong args", `{"agent":"alpha","kind":"core.sleep","args":{"seconds":"x"}}`, 422, "invalid_args", "", "/args/seconds"),
		submitCase("deep args", `{"agent":"alpha","kind":"core.echo","args":{"a":`+deep+`}}`, 422, "invalid_field", "nested deeper", "/args"),
		submitCase("NUL in agent", `{"agent":"al\u0000pha","kind":"core.echo"}`, 422, "invalid_field", "NUL", "/agent"),
		submitCase("NUL in kind", `{"agent":"alpha","kind":"core\u0000"}`, 422, "invalid_field", "NUL", "/kind"),
		submitCase("NUL in an argument of a program", `{"agent":"alpha","kind":"cmd.run","args":{"program":"x","args":{"a":"b\u0000c"}}}`, 422, "invalid_args", "NUL", "/args/args/a"),
		submitCase("NUL as a byte", "{\"agent\":\"alpha\",\"kind\":\"core.echo\",\"args\":{\"a\":\"b\x00c\"}}", 400, "malformed_json", "", ""),
		submitCase("not UTF-8", "{\"agent\":\"al\xff\",\"kind\":\"core.echo\"}", 400, "malformed_json", "not UTF-8", "/agent"),
		submitCase("not JSON", "{\"agent\":\"alpha\",\n  kind:1}", 400, "malformed_json", "line 2, column 3", ""),
		submitCase("half", `{"agent":"alpha"`, 400, "malformed_json", "ends in the middle", ""),
		submitCase("two values", `{"agent":"alpha","kind":"core.echo"} {}`, 400, "malformed_json", "not valid JSON", ""),
		submitCase("same name twice", `{"agent":"alpha","agent":"beta","kind":"core.echo"}`, 400, "malformed_json", "same name twice", "/agent"),
		submitCase("empty body", ``, 400, "malformed_json", "is empty", ""),
		submitCase("null", `null`, 422, "wrong_type", "the body must be an object", ""),
		submitCase("array", `[]`, 422, "wrong_type", "the body must be an object", ""),
		submitCase("oversized", `{"agent":"alpha","kind":"core.echo","args":{"x":"`+strings.Repeat("a", 1<<20)+`"}}`, 413, "body_too_large", "1048576 bytes", ""),
		submitCase("lone surrogate", `{"agent":"\ud800","kind":"core.echo"}`, 400, "malformed_json", "", "/agent"),
	}
	return append(append(list, badBatches()...), badCalls()...)
}

func badBatches() []badInput {
	batch := func(name, body string, status int, code, says, pointer string) badInput {
		b := submitCase(name, body, status, code, says, pointer)
		b.path = "/api/v1/tasks/batch"
		return b
	}
	many := `{"tasks":[` + strings.Repeat(`{"agent":"alpha","kind":"core.ping"},`, 10_000) + `{"agent":"alpha","kind":"core.ping"}]}`
	return []badInput{
		batch("second of batch", `{"tasks":[{"agent":"alpha","kind":"core.ping"},{"agent":"nobody","kind":"core.ping"}]}`, 422, "unknown_agent", "Task 1 of the batch", "/tasks/1/agent"),
		batch("field of batch", `{"tasks":[{"agent":"alpha","kind":"core.ping"},{"agent":"alpha","knd":"core.ping"}]}`, 422, "unknown_field", "kind", "/tasks/1/knd"),
		batch("kind of batch", `{"tasks":[{"agent":"alpha","kind":"core.pin"}]}`, 422, "unknown_kind", "Task 0 of the batch", "/tasks/0/kind"),
		batch("wrong tasks", `{"tasks":{}}`, 422, "wrong_type", "/tasks must be an array", "/tasks"),
		batch("empty batch", `{"tasks":[]}`, 422, "empty_batch", "no task", "/tasks"),
		batch("too many", many, 413, "batch_too_large", "10000", "/tasks"),
	}
}

func badCalls() []badInput {
	return []badInput{
		{name: "no token", method: "GET", path: "/api/v1/tasks", status: 401, code: "no_credential", says: "Authorization: Bearer"},
		{name: "wrong token", method: "GET", path: "/api/v1/tasks", header: map[string]string{"Authorization": "Bearer hgt_wrong"}, status: 401, code: "invalid_token", says: "not known"},
		{name: "wrong token on an open path", method: "GET", path: "/healthz", header: map[string]string{"Authorization": "Bearer hgt_wrong"}, status: 401, code: "invalid_token"},
		{name: "basic", method: "GET", path: "/api/v1/tasks", header: map[string]string{"Authorization": "Basic YTpi"}, status: 401, code: "wrong_scheme"},
		{name: "viewer submits", method: "POST", path: "/api/v1/tasks", body: `{}`, role: auth.Viewer, status: 403, code: "permission_missing", says: "tasks:submit"},
		{name: "foreign host", method: "GET", path: "http://evil.example/api/v1/tasks", role: auth.Admin, status: 421, code: "wrong_host"},
		{name: "cross-site", method: "POST", path: "/api/v1/session", body: `{"token":"x"}`, header: map[string]string{"Sec-Fetch-Site": "cross-site"}, status: 403, code: "cross_site"},
		{name: "form", method: "POST", path: "/api/v1/tasks", body: `a=b`, header: map[string]string{"Content-Type": "application/x-www-form-urlencoded"}, role: auth.Operator, status: 415, code: "content_type"},
		{name: "text", method: "POST", path: "/api/v1/tasks", body: `{}`, header: map[string]string{"Content-Type": "text/plain"}, role: auth.Operator, status: 415, code: "content_type"},
		{name: "no content type", method: "POST", path: "/api/v1/tasks", body: `{}`, header: map[string]string{"Content-Type": ""}, role: auth.Operator, status: 415, code: "content_type"},
		{name: "latin", method: "POST", path: "/api/v1/tasks", body: `{}`, header: map[string]string{"Content-Type": "application/json; charset=latin1"}, role: auth.Operator, status: 415, code: "content_type"},
		{name: "compressed", method: "POST", path: "/api/v1/tasks", body: `{}`, header: map[string]string{"Content-Encoding": "gzip"}, role: auth.Operator, status: 415, code: "content_encoding"},
		{name: "unknown path", method: "GET", path: "/api/v1/task", role: auth.Admin, status: 404, code: "no_such_path"},
		{name: "api root", method: "GET", path: "/api", role: auth.Admin, status: 404, code: "no_such_path"},
		{name: "wrong method", method: "PUT", path: "/api/v1/tasks", role: auth.Admin, status: 405, code: "method_not_allowed", says: "GET, HEAD, POST, OPTIONS"},
		{name: "invented method", method: "BREW", path: "/api/v1/tasks", role: auth.Admin, status: 405, code: "method_not_allowed"},
		{name: "unknown parameter", method: "GET", path: "/api/v1/tasks?stat=new", role: auth.Viewer, status: 400, code: "unknown_parameter", says: "Did you mean state?", pointer: "stat"},
		{name: "parameter where none is", method: "POST", path: "/api/v1/tasks/batch?wait=1s", body: `{}`, role: auth.Operator, status: 400, code: "unknown_parameter"},
		{name: "parameter twice", method: "GET", path: "/api/v1/tasks?state=new&state=completed", role: auth.Viewer, status: 400, code: "bad_parameter", pointer: "state"},
		{name: "unknown state", method: "GET", path: "/api/v1/tasks?state=done", role: auth.Viewer, status: 400, code: "bad_parameter", says: "completed", pointer: "state"},
		{name: "unknown agent in a filter", method: "GET", path: "/api/v1/tasks?agent=nobody", role: auth.Viewer, status: 422, code: "unknown_agent"},
		{name: "bad limit", method: "GET", path: "/api/v1/tasks?limit=0", role: auth.Viewer, status: 400, code: "bad_parameter", pointer: "limit"},
		{name: "bad cursor", method: "GET", path: "/api/v1/tasks?cursor=xyz", role: auth.Viewer, status: 400, code: "bad_parameter", pointer: "cursor"},
		{name: "bad time", method: "GET", path: "/api/v1/tasks?created_after=now", role: auth.Viewer, status: 400, code: "bad_parameter", pointer: "created_after"},
		{name: "bad wait", method: "GET", path: "/api/v1/tasks/1?wait=10m", role: auth.Viewer, status: 400, code: "bad_parameter", pointer: "wait"},
		{name: "bad escape", method: "GET", path: "/api/v1/tasks?q=%zz", role: auth.Viewer, status: 400, code: "malformed_query"},
		{name: "NUL in a parameter", method: "GET", path: "/api/v1/tasks?q=%00", role: auth.Viewer, status: 400, code: "bad_parameter", pointer: "q"},
		{name: "unknown task", method: "GET", path: "/api/v1/tasks/999999", role: auth.Viewer, status: 404, code: "unknown_task"},
		{name: "task id with zeros", method: "GET", path: "/api/v1/tasks/007", role: auth.Viewer, status: 404, code: "unknown_task"},
		{name: "cancel of an unknown task", method: "POST", path: "/api/v1/tasks/999999/cancel", role: auth.Operator, status: 404, code: "unknown_task"},
		{name: "output of an unknown task", method: "GET", path: "/api/v1/tasks/999999/output", role: auth.Operator, status: 404, code: "unknown_task"},
		{name: "unknown agent in a path", method: "GET", path: "/api/v1/agents/nobody", role: auth.Viewer, status: 404, code: "unknown_agent"},
		{name: "ambiguous agent in a path", method: "GET", path: "/api/v1/agents/twin", role: auth.Viewer, status: 409, code: "ambiguous_agent"},
		{name: "bad idempotency key", method: "POST", path: "/api/v1/tasks", body: `{"agent":"alpha","kind":"core.ping"}`, header: map[string]string{"Idempotency-Key": strings.Repeat("k", 256)}, role: auth.Operator, status: 400, code: "bad_idempotency_key"},
		{name: "spent link", method: "POST", path: "/api/v1/session", body: `{"code":"abc"}`, status: 401, code: "link_spent"},
		{name: "code and token", method: "POST", path: "/api/v1/session", body: `{}`, status: 422, code: "one_of_code_and_token"},
		{name: "token id", method: "DELETE", path: "/api/v1/tokens/abc", role: auth.Admin, status: 404, code: "unknown_token"},
		{name: "stale revision", method: "PATCH", path: "/api/v1/agents/alpha", body: `{"paused":true}`, header: map[string]string{"If-Match": `"r99"`}, role: auth.Admin, status: 412, code: "revision_changed"},
		{name: "bad revision", method: "PATCH", path: "/api/v1/agents/alpha", body: `{"paused":true}`, header: map[string]string{"If-Match": `xyz`}, role: auth.Admin, status: 412, code: "revision_changed"},
		{name: "NUL in a label", method: "PATCH", path: "/api/v1/agents/alpha", body: `{"labels":{"a":"b\u0000c"}}`, role: auth.Admin, status: 422, code: "invalid_field", says: "NUL", pointer: "/labels"},
		{name: "pair without a token", method: "POST", path: "/api/v1/agents/pair", body: `{"address":"127.0.0.1:1"}`, role: auth.Admin, status: 422, code: "invalid_field", pointer: "/token"},
		{name: "ping of an agent that is away", method: "POST", path: "/api/v1/agents/alpha/ping", role: auth.Operator, status: 503, code: "agent_elsewhere"},
	}
}

// Cases P46.
func TestBadInputGetsAClearProblem(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	for _, c := range badInputs() {
		t.Run(c.name, func(t *testing.T) {
			res := rig.do(t, c.method, c.path, c.body, c.role, c.header)
			p := readProblem(t, res)
			if res.StatusCode != c.status || p.Status != c.status || p.Code != c.code {
				t.Fatalf("got %d %+v, want %d %s", res.StatusCode, p, c.status, c.code)
			}
			if text := p.Detail + " " + p.Hint; !strings.Contains(text, c.says) {
				t.Errorf("%q does not say %q", text, c.says)
			}
			if c.pointer != "" && (len(p.Errors) == 0 || p.Errors[0].Pointer != c.pointer) {
				t.Errorf("errors %+v, want the pointer %s", p.Errors, c.pointer)
			}
			if p.Type != "/problems/"+c.code || p.Title == "" || p.RequestID == "" || p.RequestID != res.Header.Get("X-Request-Id") {
				t.Errorf("incomplete problem %+v", p)
			}
			checkStatusHeaders(t, res)
		})
	}
}

func checkStatusHeaders(t *testing.T, res *http.Response) {
	t.Helper()
	for status, name := range map[int]string{401: "Www-Authenticate", 405: "Allow", 503: "Retry-After"} {
		if res.StatusCode == status && res.Header.Get(name) == "" {
			t.Errorf("%d without the header %s", status, name)
		}
	}
}

// TestProblemDocumentIsExactlyThis pins the form of a problem, byte for byte.
func TestProblemDocumentIsExactlyThis(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	res := rig.do(t, "POST", "/api/v1/tasks", `{"agent":7,"kind":"core.echo"}`, auth.Operator, map[string]string{"X-Request-Id": "req-1"})
	want := `{"type":"/problems/wrong_type","title":"Unprocessable Content","status":422,"detail":"/agent must be a string, not a number.",` +
		`"instance":"/api/v1/tasks","code":"wrong_type","request_id":"req-1","errors":[{"pointer":"/agent","detail":"must be a string"}],` +
		`"hint":"The fields and their types are listed in the API reference, docs/api below the address of the dashboard."}` + "\n"
	if got := readBody(t, res); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if ct := res.Header.Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("content type %q", ct)
	}
}

func TestRequestIDsAreKeptOnlyWhenHarmless(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	for id, keep := range map[string]bool{"abc-1.2_X": true, "": false, "a b": false, "a\tb": false, strings.Repeat("x", 65): false, "<script>": false} {
		res := rig.do(t, "GET", "/healthz", "", "", map[string]string{"X-Request-Id": id})
		if got := res.Header.Get("X-Request-Id"); (got == id) != keep || got == "" {
			t.Errorf("%q became %q", id, got)
		}
	}
}

func TestEveryMethodOfAKnownPathIsAnswered(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	res := rig.do(t, "OPTIONS", "/api/v1/tasks", "", auth.Viewer, nil)
	if res.StatusCode != http.StatusNoContent || res.Header.Get("Allow") != "GET, HEAD, POST, OPTIONS" {
		t.Errorf("OPTIONS: %d %v", res.StatusCode, res.Header)
	}
	res = rig.do(t, "HEAD", "/api/v1/tasks", "", auth.Viewer, nil)
	if res.StatusCode != http.StatusOK {
		t.Errorf("HEAD: %d", res.StatusCode)
	}
	if res := rig.do(t, "OPTIONS", "/api/v1/nothing", "", auth.Viewer, nil); res.StatusCode != http.StatusNotFound {
		t.Errorf("OPTIONS of nothing: %d", res.StatusCode)
	}
}
