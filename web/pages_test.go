package web_test

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"uuid"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/web"
)

const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// everyPage gives the addresses of all pages in the demo.
func everyPage(r *rig, demo map[string]*tasks.Task) []string {
	pages := []string{"/", "/agents", "/agents?health=unreachable", "/agents?q=none", "/agents?label.tier=edge", "/tasks", "/tasks?state=new&outcome=failed", "/tasks?outcome=failed", "/run", "/run?kind=core.echo", "/run?kind=core.sleep", "/run?kind=cmd.run", "/run?agent=nobody", "/run?kind=cmd.run&arg.program=journal&raw=1"}
	for _, t := range demo {
		pages = append(pages, "/tasks/"+t.ID.String())
	}
	for _, v := range r.fleet.views {
		pages = append(pages, agentPath(v))
	}
	return pages
}

func TestEveryPageForEveryRole(t *testing.T) {
	t.Parallel()
	r := newRig(t, withDay())
	demo := r.demo()
	for _, path := range everyPage(r, demo) {
		for _, role := range []auth.Role{auth.Viewer, auth.Operator, auth.Admin} {
			w := r.get(role, path)
			if role == auth.Viewer && strings.HasPrefix(path, "/run") {
				if w.Code != http.StatusForbidden || !strings.Contains(w.Body.String(), "role <b>viewer</b>") {
					t.Errorf("%s for a viewer: %d", path, w.Code)
				}
				continue
			}
			if w.Code != http.StatusOK {
				t.Errorf("%s for a %s: %d\n%s", path, role, w.Code, w.Body)
			}
			if h := w.Header(); h.Get("Content-Security-Policy") != policy || h.Get("Cache-Control") != "no-store" || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Referrer-Policy") != "same-origin" {
				t.Errorf("%s: headers %v", path, h)
			}
			checkMarkup(t, path, w.Body.String())
		}
	}
}

// idAttribute finds ids; a page must not have one twice.
var idAttribute = regexp.MustCompile(`\bid="([^"]*)"`)

func checkMarkup(t *testing.T, path, page string) {
	t.Helper()
	seen := map[string]bool{}
	for _, m := range idAttribute.FindAllStringSubmatch(page, -1) {
		if seen[m[1]] {
			t.Errorf("%s: id %q is there twice", path, m[1])
		}
		seen[m[1]] = true
	}
	for _, bad := range []string{"<script>", " style=", " onclick=", "javascript:", "ZgotmplZ", "<no value>", "%!", "alert(1)</script>"} {
		if strings.Contains(page, bad) {
			t.Errorf("%s contains %q", path, bad)
		}
	}
}

func TestTemplatesKeepThePolicy(t *testing.T) {
	t.Parallel()
	bad := regexp.MustCompile(`(?i)\sstyle=|\son[a-z]+=|hx-on|hx-vals|js:|hx-trigger="[^"]*\[|<script(\s[^>]*)?>[^<\s]|<style|https?://|//[a-z]+\.`)
	err := filepath.WalkDir("templates", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if found := bad.FindAllString(string(text), -1); found != nil {
			t.Errorf("%s has %q", path, found)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestVendoredFilesAreTheOnesReviewed(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"htmx.min.js":       "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
		"hx-sse.min.js":     "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
		"uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
		"uPlot.min.css":     "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
	} {
		data, err := os.ReadFile(filepath.Join("static", "vendor", name))
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != want {
			t.Errorf("%s has SHA-256 %x, want %s", name, sum, want)
		}
	}
}

var assetLink = regexp.MustCompile(`(?:src|href)="(/[^"#]*static/[^"#]+)`)

// TestFirstViewIsLight weighs what a browser loads for one page.
func TestFirstViewIsLight(t *testing.T) {
	t.Parallel()
	r := newRig(t, withDay())
	demo := r.demo()
	zipped := func(req *http.Request) { req.Header.Set("Accept-Encoding", "gzip, br") }
	const limit = 60_000
	for _, path := range everyPage(r, demo) {
		w := r.get(auth.Admin, path, zipped)
		if w.Header().Get("Content-Encoding") != "gzip" {
			t.Fatalf("%s is not compressed", path)
		}
		total := w.Body.Len()
		z, err := gzip.NewReader(bytes.NewReader(w.Body.Bytes()))
		if err != nil {
			t.Fatal(err)
		}
		page, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, m := range assetLink.FindAllStringSubmatch(string(page), -1) {
			if seen[m[1]] {
				continue
			}
			seen[m[1]] = true
			a := r.get("", m[1], zipped)
			if a.Code != http.StatusOK || a.Header().Get("Cache-Control") != "public, max-age=31536000, immutable" || a.Header().Get("Content-Encoding") != "gzip" || a.Header().Get("Vary") == "" {
				t.Errorf("%s: %d %v", m[1], a.Code, a.Header())
			}
			total += a.Body.Len()
		}
		if total > limit || len(seen) > 6 {
			t.Errorf("%s weighs %d bytes in %d files, at most %d", path, total, len(seen)+1, limit)
		}
		if path == "/" {
			t.Logf("overview: page %d bytes, with %d files %d bytes", w.Body.Len(), len(seen), total)
		}
	}
	info, err := os.ReadFile("static/app.js")
	if err != nil {
		t.Fatal(err)
	}
	if n := r.get("", assetOf(t, r, "app"), zipped).Body.Len(); n > 8_000 || len(info) == 0 {
		t.Errorf("app.js weighs %d bytes, at most 8000", n)
	}
}

func assetOf(t *testing.T, r *rig, name string) string {
	t.Helper()
	m := regexp.MustCompile(`/static/` + name + `\.[0-9a-f]{8}\.\w+`).FindString(r.get(auth.Admin, "/run").Body.String())
	if m == "" {
		t.Fatalf("no page links %s", name)
	}
	return m
}

func TestAssetsAnswerPlainly(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	path := assetOf(t, r, "style")
	w := r.get("", path)
	if w.Code != http.StatusOK || w.Header().Get("Content-Encoding") != "" || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/css") {
		t.Errorf("without compression: %d %v", w.Code, w.Header())
	}
	refused := r.get("", path, func(req *http.Request) { req.Header.Set("Accept-Encoding", "gzip;q=0, identity") })
	if refused.Header().Get("Content-Encoding") != "" {
		t.Error("gzip was sent to who refused it")
	}
	if w := r.get("", "/static/style.00000000.css"); w.Code != http.StatusNotFound {
		t.Errorf("an old name gives %d", w.Code)
	}
	if w := r.get("", "/static/../web.go"); w.Code == http.StatusOK {
		t.Error("a path out of the assets is served")
	}
}

func TestHostileTextStaysText(t *testing.T) {
	t.Parallel()
	const evil = `<img src=x onerror=alert(1)>"'</script><script>alert(1)</script>`
	r := newRig(t)
	v := r.add("a"+evil, func(v *fleet.View) {
		v.Live.Sentence, v.StatusWhy, v.Hostname, v.OS, v.Version = evil, evil, evil, evil, evil
		v.Live.Health, v.Live.Address, v.PairedBy = fleet.HealthUnreachable, evil, "user:"+evil
		v.Labels = map[string]string{evil: evil}
		v.Facts = []byte(`{"os":"` + strings.ReplaceAll(evil, `"`, `\"`) + `","disks":[{"mount":"` + strings.ReplaceAll(evil, `"`, `\"`) + `","total_bytes":5,"used_bytes":1}]}`)
		v.Live.Kinds = []fleet.KindOffer{{Name: kinds.Run, Programs: []fleet.Program{{Name: evil, Description: evil, ParamsSchema: []byte(`{"properties":{"` + strings.ReplaceAll(evil, `"`, `\"`) + `":{"type":"string","description":"` + strings.ReplaceAll(evil, `"`, `\"`) + `"}}}`)}}}, {Name: evil}}
	})
	r.ready()
	r.runner.Script(v.Num, func(tasks.Assignment) tasktestAnswer {
		return tasktestAnswer{
			Output: []tasks.OutputChunk{{Seq: 0, Stream: "stdout", At: time.Now(), Data: []byte(evil + "\n\x1b]0;" + evil + "\x07\x1b[31m" + evil)}},
			Ending: tasks.Ending{Outcome: tasks.Failed, Reason: evil, Detail: evil, Result: []byte(`{"` + strings.ReplaceAll(evil, `"`, `\"`) + `":1}`), Exit: &tasks.Exit{Signal: evil}},
		}
	})
	task := r.done(v.ID.String(), kinds.Echo, `{"x":"`+strings.ReplaceAll(evil, `"`, `\"`)+`"}`)
	q := url.QueryEscape(evil)
	for _, path := range []string{
		"/", "/agents", agentPath(v), "/tasks", "/tasks/" + task.ID.String(), "/run?kind=cmd.run&agent=" + v.ID.String(), "/run?agent=" + q, "/run?kind=" + q, "/run?kind=core.echo&args=" + q,
		"/tasks?q=" + q, "/tasks?agent=" + q, "/agents?q=" + q, "/agents?label." + q + "=" + q, "/sign-in?code=" + q, "/sign-in?next=" + q, "/tasks/" + url.PathEscape(evil), "/nothing/" + url.PathEscape(evil), "/tasks?" + q + "=1",
	} {
		role := auth.Admin
		if strings.HasPrefix(path, "/sign-in") {
			role = ""
		}
		page := r.get(role, path).Body.String()
		for _, bad := range []string{"<img", "<script>alert", "onerror=alert(1)>\"'<"} {
			if strings.Contains(page, bad) {
				t.Errorf("%s: %q got through", path, bad)
			}
		}
	}
}

func TestStrangersSignInFirst(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w := r.get("", "/tasks?state=new")
	if w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/sign-in?next="+url.QueryEscape("/tasks?state=new") {
		t.Errorf("%d to %s", w.Code, w.Header().Get("Location"))
	}
	live := r.get("", "/tasks", func(req *http.Request) { req.Header.Set("X-Headgate-Live", "1") })
	if live.Code != http.StatusUnauthorized {
		t.Errorf("the live view of a stranger gets %d, want 401", live.Code)
	}
	if w := r.post("", "/run", url.Values{}); w.Code != http.StatusUnauthorized {
		t.Errorf("a stranger's form gets %d", w.Code)
	}
}

func TestOneTimeLinkIsSpentByTheButton(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	code := r.link("nora", auth.Operator)
	for range 2 { // opening it, as a preview does, changes nothing
		if w := r.get("", "/sign-in?code="+code); w.Code != http.StatusOK || len(w.Result().Cookies()) != 0 {
			t.Fatalf("opening the link: %d %v", w.Code, w.Result().Cookies())
		}
	}
	w := r.post("", "/sign-in", url.Values{"code": {code}, "next": {"/tasks"}})
	if w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/tasks" || len(w.Result().Cookies()) != 1 || w.Result().Cookies()[0].SameSite != http.SameSiteLaxMode || !w.Result().Cookies()[0].HttpOnly {
		t.Fatalf("%d %v", w.Code, w.Header())
	}
	if w := r.post("", "/sign-in", url.Values{"code": {code}}); w.Code != http.StatusUnauthorized || !strings.Contains(w.Body.String(), "has been used already") {
		t.Errorf("the second use gets %d", w.Code)
	}
	other := r.link("nora", auth.Operator)
	if w := r.post("", "/sign-in", url.Values{"code": {other}, "next": {"//evil.example/"}}); w.Header().Get("Location") != "/" {
		t.Errorf("signing in leads to %s", w.Header().Get("Location"))
	}
}

func TestTokenSignsInAndOut(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, secret, err := r.auth.NewToken(t.Context(), auth.Principal{Kind: auth.KindUser, Name: "mira", Role: auth.Admin}, "ci", auth.Viewer, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if w := r.post("", "/sign-in", url.Values{"token": {"hgt_wrong"}}); w.Code != http.StatusUnauthorized || !strings.Contains(w.Body.String(), `role="alert"`) || strings.Contains(w.Body.String(), "hgt_wrong") {
		t.Errorf("a wrong token gets %d", w.Code)
	}
	w := r.post("", "/sign-in", url.Values{"token": {secret}})
	if w.Code != http.StatusSeeOther {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	r.cookies["ci"] = w.Result().Cookies()[0].Value
	if w := r.get("ci", "/tasks"); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "ci, viewer") {
		t.Errorf("the token's session gets %d", w.Code)
	}
	if w := r.post("ci", "/sign-out", nil); w.Code != http.StatusSeeOther || w.Result().Cookies()[0].MaxAge >= 0 {
		t.Errorf("signing out: %d", w.Code)
	}
	if w := r.get("ci", "/tasks"); w.Code != http.StatusSeeOther {
		t.Errorf("after signing out: %d", w.Code)
	}
}

func TestViewersSeeAndMayDoNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v := r.add("dns-1")
	r.ready()
	task := r.submit("dns-1", kinds.Sleep, `{"seconds":3600}`)
	for _, path := range []string{"/", "/agents", agentPath(v), "/tasks", "/tasks/" + task.ID.String()} {
		page := r.get(auth.Viewer, path).Body.String()
		for _, action := range []string{"/cancel\"", "/pause\"", "/ping\"", "href=\"/run", "Repeat with changes"} {
			if strings.Contains(page, action) {
				t.Errorf("%s offers %s to a viewer", path, action)
			}
		}
	}
	for _, path := range []string{agentPath(v) + "/pause", agentPath(v) + "/resume", agentPath(v) + "/approve", agentPath(v) + "/ping", "/tasks/" + task.ID.String() + "/cancel", "/run"} {
		if w := r.post(auth.Viewer, path, url.Values{}); w.Code != http.StatusForbidden {
			t.Errorf("%s by a viewer: %d", path, w.Code)
		}
	}
	if w := r.post(auth.Operator, agentPath(v)+"/pause", url.Values{}); w.Code != http.StatusForbidden {
		t.Errorf("pausing by an operator: %d", w.Code)
	}
}

func TestFormsOfOtherSitesAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-1")
	r.ready()
	task := r.submit("dns-1", kinds.Sleep, `{"seconds":3600}`)
	for _, site := range []string{"cross-site", "same-site"} {
		req := httptest.NewRequest(http.MethodPost, "http://localhost/tasks/"+task.ID.String()+"/cancel", nil)
		req.Header.Set("Sec-Fetch-Site", site)
		if w := r.do(auth.Admin, req); w.Code != http.StatusForbidden {
			t.Errorf("a form of a %s page gets %d", site, w.Code)
		}
	}
	if w := r.get(auth.Admin, "/tasks/"+task.ID.String()+"/cancel"); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("cancelling by an address gets %d", w.Code)
	}
	if now, err := r.service.Get(t.Context(), task.ID); err != nil || !now.CancelRequestedAt.IsZero() {
		t.Errorf("the task was touched: %+v, %v", now, err)
	}
}

func TestRunFormSubmitsOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v := r.add("dns-1")
	r.ready()
	form := url.Values{"agent": {v.ID.String()}, "kind": {kinds.Sleep}, "arg.seconds": {"1.50"}, "timeout": {"5m"}, "priority": {"3"}, "key": {uuid.NewV4().String()}}
	first := r.post(auth.Operator, "/run", form)
	again := r.post(auth.Operator, "/run", form)
	if first.Code != http.StatusSeeOther || first.Header().Get("Location") != again.Header().Get("Location") {
		t.Fatalf("%d to %q, then %d to %q\n%s", first.Code, first.Header().Get("Location"), again.Code, again.Header().Get("Location"), first.Body)
	}
	page, err := r.service.List(t.Context(), tasks.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Items) != 1 {
		t.Fatalf("%d tasks, want 1", len(page.Items))
	}
	got := page.Items[0]
	if string(got.Args) != `{"seconds":1.50}` || got.Timeout != 5*time.Minute || got.Priority != 3 || got.Actor != "user:omar" || got.Kind != kinds.Sleep {
		t.Errorf("the task is %+v, args %s", got, got.Args)
	}
	w := r.get(auth.Operator, first.Header().Get("Location"))
	if !strings.Contains(w.Body.String(), "is submitted and on disk") {
		t.Error("the task's page does not say that it was submitted")
	}
}

func TestRunFormExplainsWhatIsWrong(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v := r.add("dns-1")
	r.ready()
	for _, c := range []struct {
		name string
		form url.Values
		want []string
	}{
		{"no agent", url.Values{"kind": {kinds.Ping}, "agent": {"nobody"}}, []string{"There is no agent", "nobody"}},
		{"not a number", url.Values{"kind": {kinds.Sleep}, "arg.seconds": {"ten"}}, []string{"Seconds must be a number", `value="ten"`, `aria-invalid="true"`}},
		{"too large", url.Values{"kind": {kinds.Sleep}, "arg.seconds": {"4000"}}, []string{"must be at most 3600"}},
		{"missing", url.Values{"kind": {kinds.Sleep}, "arg.seconds": {""}}, []string{"Seconds is missing"}},
		{"timeout", url.Values{"kind": {kinds.Ping}, "timeout": {"soon"}}, []string{"must be a duration such as 30s"}},
		{"timeout too long", url.Values{"kind": {kinds.Ping}, "timeout": {"30h"}}, []string{"was not submitted"}},
		{"priority", url.Values{"kind": {kinds.Ping}, "priority": {"11"}}, []string{"must be a whole number from 0 to 9"}},
		{"broken JSON", url.Values{"kind": {kinds.Echo}, "args": {"{"}, "raw": {"1"}}, []string{"is not valid JSON"}},
		{"JSON of another sort", url.Values{"kind": {kinds.Echo}, "args": {"[1]"}, "raw": {"1"}}, []string{"must be a JSON object"}},
	} {
		if c.form.Get("agent") == "" {
			c.form.Set("agent", v.ID.String())
		}
		w := r.post(auth.Operator, "/run", c.form)
		if w.Code != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d", c.name, w.Code)
		}
		for _, want := range c.want {
			if !strings.Contains(w.Body.String(), want) {
				t.Errorf("%s: %q is not said", c.name, want)
			}
		}
		checkMarkup(t, c.name, w.Body.String())
	}
	if page, err := r.service.List(t.Context(), tasks.Filter{}); err != nil || len(page.Items) != 0 {
		t.Errorf("%d tasks were stored: %v", len(page.Items), err)
	}
	if page := r.get(auth.Operator, "/run?kind=core.sleep").Body.String(); strings.Contains(page, "aria-invalid") {
		t.Error("a form that nobody has filled in complains already")
	}
}

func TestProgramsComeFromTheAgentsPolicy(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v := r.add("dns-1")
	r.ready()
	page := r.get(auth.Operator, "/run?kind=cmd.run&arg.program=journal&agent="+v.ID.String()).Body.String()
	for _, want := range []string{`<option value="df">`, `<option value="journal" selected>`, `name="param.unit"`, `<option value="kea-dhcp4">`, `name="param.lines" value="50"`, "At most 500."} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is missing", want)
		}
	}
	w := r.post(auth.Operator, "/run", url.Values{"agent": {v.ID.String()}, "kind": {kinds.Run}, "arg.program": {"journal"}, "param.unit": {"named"}, "param.lines": {"20"}})
	if w.Code != http.StatusSeeOther {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	list, err := r.service.List(t.Context(), tasks.Filter{})
	if err != nil || len(list.Items) != 1 || string(list.Items[0].Args) != `{"program":"journal","args":{"unit":"named","lines":20}}` {
		t.Fatalf("stored: %+v, %v", list.Items, err)
	}
	task := r.get(auth.Operator, "/tasks/"+list.Items[0].ID.String()).Body.String()
	again := regexp.MustCompile(`href="(/run\?[^"]*)"`).FindAllStringSubmatch(task, -1)
	filled := r.get(auth.Operator, strings.ReplaceAll(again[len(again)-1][1], "&amp;", "&")).Body.String()
	for _, want := range []string{`<option value="named" selected>`, `name="param.lines" value="20"`} {
		if !strings.Contains(filled, want) {
			t.Errorf("repeating does not fill in %q", want)
		}
	}
}

func TestListPagesInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-1")
	r.ready()
	for range 7 {
		r.done("dns-1", kinds.Echo, `{}`)
	}
	row := regexp.MustCompile(`<tbody id="task-(\d+)"`)
	older := regexp.MustCompile(`href="([^"]*before=[^"]*)"`)
	var seen []string
	path := "/tasks?limit=3"
	for range 5 {
		page := r.get(auth.Viewer, path).Body.String()
		for _, m := range row.FindAllStringSubmatch(page, -1) {
			seen = append(seen, m[1])
		}
		next := older.FindStringSubmatch(page)
		if next == nil {
			break
		}
		path = strings.ReplaceAll(next[1], "&amp;", "&")
	}
	if got := fmt.Sprint(seen); got != "[7 6 5 4 3 2 1]" {
		t.Errorf("the pages have %s", got)
	}

	at := r.get(auth.Viewer, "/tasks?at=5").Body.String()
	if rows := row.FindAllStringSubmatch(at, -1); len(rows) != 5 || rows[0][1] != "5" || !strings.Contains(at, "2 new tasks, show them") {
		t.Errorf("the list as of task 5 has %d rows", len(rows))
	}
}

func TestAgentsPageByAttention(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for i := range 8 {
		r.add(fmt.Sprintf("dns-%02d", i), func(v *fleet.View) {
			switch i {
			case 3:
				v.Live.Health, v.Live.Sentence = fleet.HealthUnreachable, "connection refused"
			case 5:
				v.PausedAt, v.PausedBy = time.Now(), "user:mira"
			}
		})
	}
	r.ready()
	row := regexp.MustCompile(`<b>(dns-\d\d)</b>`)
	next := regexp.MustCompile(`href="([^"]*after=[^"]*)">Next page`)
	var seen []string
	path := "/agents?limit=3"
	for range 5 {
		page := r.get(auth.Viewer, path).Body.String()
		for _, m := range row.FindAllStringSubmatch(page, -1) {
			seen = append(seen, m[1][4:])
		}
		more := next.FindStringSubmatch(page)
		if more == nil {
			break
		}
		path = strings.ReplaceAll(more[1], "&amp;", "&")
	}
	if got := fmt.Sprint(seen); got != "[03 05 00 01 02 04 06 07]" {
		t.Errorf("the pages have %s", got)
	}
	if page := r.get(auth.Viewer, "/agents?health=paused").Body.String(); !strings.Contains(page, "dns-05") || strings.Contains(page, "<b>dns-00</b>") {
		t.Error("the filter by health does not hold")
	}
}

func TestWrongFiltersAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, path := range []string{"/tasks?stat=new", "/tasks?state=done", "/tasks?outcome=bad", "/tasks?created_after=yesterday", "/tasks?limit=0", "/tasks?before=x", "/tasks?q=%00", "/tasks?q=%ff", "/agents?health=ill", "/agents?state=new", "/tasks?%zz"} {
		if w := r.get(auth.Viewer, path); w.Code != http.StatusBadRequest {
			t.Errorf("%s: %d, want 400", path, w.Code)
		}
	}
	if w := r.get(auth.Viewer, "/tasks/1/output?from=x"); w.Code != http.StatusNotFound && w.Code != http.StatusBadRequest {
		t.Errorf("a broken place in an output: %d", w.Code)
	}
}

func TestAgentsArePausedPingedAndApproved(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v := r.add("dns-1")
	q := r.add("dns-2", func(v *fleet.View) {
		v.Status, v.StatusWhy, v.Live.Health = fleet.Quarantined, "another ledger", fleet.HealthQuarantined
	})
	r.ready()
	w := r.post(auth.Admin, agentPath(v)+"/pause", nil)
	page := r.get(auth.Admin, w.Header().Get("Location")).Body.String()
	if !strings.Contains(page, "is paused. Its tasks wait") || !strings.Contains(page, "Paused by mira") || !strings.Contains(page, "/resume\"") {
		t.Error("the page does not say that the agent is paused")
	}
	w = r.post(auth.Admin, agentPath(v)+"/resume", nil)
	if page := r.get(auth.Admin, w.Header().Get("Location")).Body.String(); !strings.Contains(page, "is resumed") || !strings.Contains(page, "/pause\"") {
		t.Error("the page does not say that the agent is resumed")
	}
	if w := r.post(auth.Operator, agentPath(v)+"/ping", nil); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "dns-1 answered in 3 ms") {
		t.Errorf("ping: %d", w.Code)
	}
	r.fleet.pinged = fault.New(fault.Unavailable, "agent_offline", "The agent cannot be reached: connection refused.")
	if w := r.post(auth.Operator, agentPath(v)+"/ping", nil); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "cannot be reached") || !strings.Contains(w.Body.String(), "dns-1") {
		t.Errorf("a failed ping: %d", w.Code)
	}
	if page := r.get(auth.Admin, agentPath(q)).Body.String(); !strings.Contains(page, "Another ledger") || !strings.Contains(page, "/approve\"") {
		t.Error("the quarantine is not explained")
	}
	w = r.post(auth.Admin, agentPath(q)+"/approve", nil)
	if page := r.get(auth.Admin, w.Header().Get("Location")).Body.String(); !strings.Contains(page, "is approved") {
		t.Error("the approval is not confirmed")
	}
	if w := r.get(auth.Admin, "/agents/dns-1"); w.Code != http.StatusOK {
		t.Errorf("an agent by name: %d", w.Code)
	}
	if w := r.get(auth.Admin, "/agents/"+uuid.NewV4().String()); w.Code != http.StatusNotFound {
		t.Errorf("an unknown agent: %d", w.Code)
	}
}

func TestTasksAreCancelled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-1")
	r.ready()
	done := r.done("dns-1", kinds.Echo, `{}`)
	running := r.submit("dns-1", kinds.Sleep, `{"seconds":3600}`)
	behind := r.submit("dns-1", kinds.Echo, `{}`)
	page := r.get(auth.Operator, "/tasks/"+behind.ID.String()).Body.String()
	if !strings.Contains(page, "which is in the way") || !strings.Contains(page, "/tasks/"+running.ID.String()) {
		t.Error("the page does not lead to the task in the way")
	}
	w := r.post(auth.Operator, "/tasks/"+behind.ID.String()+"/cancel", nil)
	if page := r.get(auth.Operator, w.Header().Get("Location")).Body.String(); !strings.Contains(page, `data-s="cancelled"`) || strings.Contains(page, "/cancel\"") {
		t.Error("the cancelled task does not look cancelled")
	}
	if w := r.post(auth.Operator, "/tasks/"+done.ID.String()+"/cancel", nil); w.Code != http.StatusConflict || !strings.Contains(w.Body.String(), `role="alert"`) {
		t.Errorf("cancelling a completed task: %d", w.Code)
	}
}

func TestBasePathIsKeptEverywhere(t *testing.T) {
	t.Parallel()
	r := newRig(t, withBase("/hg"), withDay())
	demo := r.demo()
	link := regexp.MustCompile(`(?:href|src|action|formaction|data-refresh|data-more|hx-sse:connect)="(/[^"]*)"`)
	for _, path := range append(everyPage(r, demo), "/nothing") {
		for _, m := range link.FindAllStringSubmatch(r.get(auth.Admin, path).Body.String(), -1) {
			if !strings.HasPrefix(m[1], "/hg/") {
				t.Errorf("%s leads to %s", path, m[1])
			}
		}
	}
	if w := r.get("", "/tasks"); !strings.HasPrefix(w.Header().Get("Location"), "/hg/sign-in?next=%2F") {
		t.Errorf("a stranger is sent to %s", w.Header().Get("Location"))
	}
	w := r.post(auth.Admin, "/theme", url.Values{"theme": {"dark"}, "back": {"/tasks"}})
	if w.Header().Get("Location") != "/hg/tasks" || w.Result().Cookies()[0].Path != "/hg/" {
		t.Errorf("theme: %v", w.Header())
	}
	if _, err := web.New(web.Config{BasePath: "hg"}); err == nil {
		t.Error("a base path without a slash is taken")
	}
}

func TestThemeIsRenderedByTheServer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	themed := func(value string) string {
		return r.get(auth.Viewer, "/tasks", func(req *http.Request) { req.AddCookie(&http.Cookie{Name: "headgate_theme", Value: value}) }).Body.String()
	}
	if !strings.Contains(themed("dark"), `<html lang="en" data-theme="dark">`) || strings.Contains(themed(`><x`), "data-theme") || strings.Contains(themed(""), "data-theme") {
		t.Error("the theme of the cookie is not the page's")
	}
	if w := r.post("", "/theme", url.Values{"theme": {"system"}, "back": {"https://evil.example"}}); w.Header().Get("Location") != "/" || w.Result().Cookies()[0].MaxAge >= 0 {
		t.Errorf("back to the system's theme: %v", w.Header())
	}
}

func TestNotReadyPage(t *testing.T) {
	t.Parallel()
	h := web.NotReady(startingStatus, "")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/tasks", nil))
	page := w.Body.String()
	if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" || w.Header().Get("Content-Security-Policy") != policy {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	for _, want := range []string{`http-equiv="refresh" content="2"`, "The gate is still closed", "self_call", "3 tries", "127.0.0.1:7441", "closed"} {
		if !strings.Contains(page, want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, bad := range []string{"<script", "/tasks\"", "sign-out"} {
		if strings.Contains(page, bad) {
			t.Errorf("%q is on a page for strangers", bad)
		}
	}
	css := regexp.MustCompile(`/static/style[^"]*`).FindString(page)
	w = httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, css, nil))
	if w.Code != http.StatusOK {
		t.Errorf("%s: %d", css, w.Code)
	}
}

func TestErrorPagesNameTheRequest(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for path, want := range map[string]int{"/nothing": 404, "/tasks/0": 404, "/tasks/x": 404, "/tasks/12": 404, "/agents/nobody": 404} {
		w := r.get(auth.Viewer, path, func(req *http.Request) { req.Header.Set("X-Request-Id", "req-7f3a91c2") })
		if w.Code != want || !strings.Contains(w.Body.String(), "req-7f3a91c2") {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
}

func TestEmptyListsExplainThemselves(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for path, want := range map[string]string{"/": "no agent is paired yet", "/agents": "No agent is paired yet", "/tasks": "No task yet", "/tasks?state=new": "Drop <code>state=new</code>", "/run": "A task needs an agent"} {
		if w := r.get(auth.Admin, path); w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s: %d, %q is not said", path, w.Code, want)
		}
	}
}

func TestOverloadedPage(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	web.Overloaded("/hg")(w, httptest.NewRequest(http.MethodGet, "/tasks", nil), 17)
	body := w.Body.String()
	if w.Code != http.StatusTooManyRequests || !strings.Contains(body, `content="17"`) || !strings.Contains(body, "overloaded") || !strings.Contains(body, "/hg/static/") {
		t.Errorf("%d\n%s", w.Code, body)
	}
	if strings.Contains(body, "<script") {
		t.Error("the page loads scripts")
	}
}
