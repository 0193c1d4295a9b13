package web_test

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"headgate/internal/auth"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/internal/testkit"
	"headgate/tasks"
	"headgate/web"
)

// browserTime bounds one step in the browser; a machine that is busy with
// other tests needs most of it.
const browserTime = 60 * time.Second

// browser is one Chromium that all browser tests of this package share.
type browser struct {
	ctx context.Context
}

var errNoBrowser = errors.New("no Chromium")

func findBrowser() (string, error) {
	if path := os.Getenv("HEADGATE_TEST_BROWSER"); path != "" {
		return exec.LookPath(path)
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errNoBrowser
}

func startBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := findBrowser()
	if errors.Is(err, errNoBrowser) {
		testkit.Lacks(t, "there is no Chromium on this machine; install it, or name one by HEADGATE_TEST_BROWSER")
	}
	if err != nil {
		t.Fatalf("HEADGATE_TEST_BROWSER: %v", err)
	}
	dir, err := os.MkdirTemp("", "headgate-browser-")
	if err != nil {
		t.Fatal(err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.UserDataDir(dir), chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true), chromedp.Flag("hide-scrollbars", true),
	)
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		_ = chromedp.Cancel(ctx)
		cancel()
		stop()
		_ = os.RemoveAll(dir)
	})
	// The first call starts the browser and must not carry a time limit: its
	// end would end the browser.
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	return &browser{ctx: ctx}
}

// tab is one page with cookies of its own.
type tab struct {
	t   *testing.T
	ctx context.Context
}

func (b *browser) open(t *testing.T) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	tb := &tab{t: t, ctx: ctx}
	if err := chromedp.Do(ctx); err != nil {
		t.Fatal(err)
	}
	_, err := chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
		Source: `window.__csp = []; addEventListener("securitypolicyviolation", (e) => window.__csp.push(e.effectiveDirective + " " + e.blockedURI + " " + e.sourceFile + ":" + e.lineNumber));
window.__err = []; addEventListener("error", (e) => window.__err.push(e.message)); addEventListener("unhandledrejection", (e) => window.__err.push(String(e.reason)));`,
	})
	if err != nil {
		t.Fatal(err)
	}
	return tb
}

func (tb *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	tb.t.Helper()
	ctx, cancel := context.WithTimeout(tb.ctx, browserTime)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		tb.t.Fatalf("browser: %v\nat %s", err, tb.where())
	}
}

func (tb *tab) where() string {
	ctx, cancel := context.WithTimeout(tb.ctx, browserTime)
	defer cancel()
	text, err := chromedp.Run(ctx, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText.slice(0, 1500)`))
	if err != nil {
		return err.Error()
	}
	return text
}

func eval[T any](tb *tab, expression string) T {
	tb.t.Helper()
	ctx, cancel := context.WithTimeout(tb.ctx, browserTime)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		tb.t.Fatalf("evaluate %s: %v", expression, err)
	}
	return v
}

// until waits until an expression is true, also over navigations.
func (tb *tab) until(expression string) {
	tb.t.Helper()
	ctx, cancel := context.WithTimeout(tb.ctx, browserTime)
	defer cancel()
	pause := time.NewTicker(20 * time.Millisecond)
	defer pause.Stop()
	for {
		// An error is a page that is being left, or an element not yet there.
		if ok, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("!!("+expression+")")); err == nil && ok {
			return
		}
		select {
		case <-ctx.Done():
			tb.t.Fatalf("never true: %s\nat %s", expression, tb.where())
		case <-pause.C:
		}
	}
}

func (tb *tab) resize(width int64) {
	tb.t.Helper()
	height := int64(900)
	if width < 500 {
		height = 844
	}
	tb.do(chromedp.EmulateViewport(width, height))
}

func (tb *tab) cookie(server, name, value string) {
	tb.t.Helper()
	if _, err := chromedp.Call(tb.ctx, network.SetCookie, network.SetCookieParams{Name: name, Value: value, URL: server}); err != nil {
		tb.t.Fatal(err)
	}
}

func (tb *tab) scheme(value string) {
	tb.t.Helper()
	if _, err := chromedp.Call(tb.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: value}, {Name: "prefers-reduced-motion", Value: "reduce"}}}); err != nil {
		tb.t.Fatal(err)
	}
}

// clean fails the test when the page broke its policy, threw, or can be
// scrolled sideways.
func (tb *tab) clean(name string) {
	tb.t.Helper()
	if v := eval[[]string](tb, `window.__csp`); len(v) > 0 {
		tb.t.Errorf("%s: content policy violated: %s", name, strings.Join(v, "; "))
	}
	if v := eval[[]string](tb, `window.__err`); len(v) > 0 {
		tb.t.Errorf("%s: script errors: %s", name, strings.Join(v, "; "))
	}
	if over := eval[int](tb, `document.documentElement.scrollWidth - innerWidth`); over > 0 {
		wide := eval[string](tb, `[...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1).slice(0, 4).map(e => e.outerHTML.slice(0, 120)).join("\n")`)
		tb.t.Errorf("%s: the page is %d px too wide: %s", name, over, wide)
	}
}

var axeSource = sync.OnceValues(func() (string, error) {
	f, err := os.Open("testdata/axe.min.js.gz")
	if err != nil {
		return "", err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return "", err
	}
	source, err := io.ReadAll(z)
	return string(source), err
})

// accessible runs axe over the page.
func (tb *tab) accessible(name string) {
	tb.t.Helper()
	source, err := axeSource()
	if err != nil {
		tb.t.Fatal(err)
	}
	if !eval[bool](tb, `"axe" in window`) {
		eval[bool](tb, source+";true")
	}
	found := eval[[]string](tb, `axe.run(document, {runOnly: {type: "tag", values: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}})
		.then(r => r.violations.flatMap(v => v.nodes.slice(0, 3).map(n => v.id + ": " + n.target.join(" ") + ": " + n.html.slice(0, 160) + " " + n.failureSummary.slice(0, 300))))`)
	for _, f := range found {
		tb.t.Errorf("%s: axe: %s", name, f)
	}
}

// shot keeps a picture of the whole page when a folder is named.
func (tb *tab) shot(name string) {
	tb.t.Helper()
	dir := os.Getenv("HEADGATE_TEST_SHOTS")
	if dir == "" {
		return
	}
	yes := true
	size := eval[[]float64](tb, `[document.documentElement.clientWidth, Math.min(document.documentElement.scrollHeight, 5000)]`)
	out, err := chromedp.Call(tb.ctx, page.CaptureScreenshot, page.CaptureScreenshotParams{CaptureBeyondViewport: &yes, Clip: &page.Viewport{Width: size[0], Height: size[1], Scale: 1}})
	if err != nil {
		tb.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), out.Data, 0o600); err != nil {
		tb.t.Fatal(err)
	}
}

// serve puts the rig on a real port.
func serve(t *testing.T, h http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s
}

// TestBrowser runs everything that needs a real browser, in one of them.
func TestBrowser(t *testing.T) {
	b := startBrowser(t)
	for _, c := range []struct {
		name string
		run  func(*testing.T, *browser)
	}{
		{"pages", pagesAreClean},
		{"sign in, submit and watch", func(t *testing.T, b *browser) { signInSubmitAndWatch(t, b) }},
		{"the same below a base path", func(t *testing.T, b *browser) { signInSubmitAndWatch(t, b, withBase("/ops/hg")) }},
		{"live list", liveListKeepsItsRows},
		{"output", outputIsFollowed},
		{"stale", staleIsSaid},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, b) })
	}
}

// pagesAreClean opens every page at both widths in both themes.
func pagesAreClean(t *testing.T, b *browser) {
	r := newRig(t, withDay())
	demo := r.demo()
	r.done("dns-fra-01", kinds.Echo, `{"do":"unknown","reason":"agent_restarted","detail":"The agent restarted in the middle; its ledger cannot tell"}`)
	byName := map[string]*fleet.View{}
	for _, v := range r.fleet.views {
		byName[v.Name] = v
	}
	empty := newRig(t)
	empty.ready()
	shut := newRig(t)
	shut.status = reclosed()
	shut.add("dns-ams-01")
	shut.ready()
	server, first, apart := serve(t, r.handler), serve(t, empty.handler), serve(t, shut.handler)
	starting := serve(t, stayingPut(web.NotReady(startingStatus, "")))
	full := serve(t, stayingPut(overloadedPage()))
	pages := []struct{ name, server, path string }{
		{"overview", server.URL, "/"},
		{"overview-first-run", first.URL, "/"},
		{"overview-reclosed", apart.URL, "/"},
		{"agents", server.URL, "/agents"},
		{"agents-none", first.URL, "/agents"},
		{"agent-connected", server.URL, agentPath(byName["dns-ams-01"])},
		{"agent-unreachable", server.URL, agentPath(byName["dhcp-lon-02"])},
		{"agent-quarantined", server.URL, agentPath(byName["dns-sin-01"])},
		{"tasks", server.URL, "/tasks"},
		{"tasks-no-match", server.URL, "/tasks?state=new&outcome=failed"},
		{"task-succeeded", server.URL, "/tasks/" + demo["succeeded"].ID.String()},
		{"task-failed", server.URL, "/tasks/" + demo["unknown"].ID.String()},
		{"task-running", server.URL, "/tasks/" + demo["running"].ID.String()},
		{"task-waiting", server.URL, "/tasks/" + demo["waiting"].ID.String()},
		{"run", server.URL, "/run?kind=cmd.run&arg.program=journal"},
		{"run-json", server.URL, "/run?kind=core.echo"},
		{"not-found", server.URL, "/tasks/999999"},
		{"sign-in", starting.URL, ""},
		{"not-ready", starting.URL, "/"},
		{"overloaded", full.URL, "/"},
	}
	for _, p := range pages {
		t.Run(p.name, func(t *testing.T) {
			tb := b.open(t)
			if p.name == "sign-in" {
				p.server, p.path = server.URL, "/sign-in"
			} else {
				tb.cookie(p.server, auth.CookieName, map[string]string{server.URL: r.cookies[auth.Admin], first.URL: empty.cookies[auth.Admin], apart.URL: shut.cookies[auth.Admin]}[p.server])
			}
			tb.resize(1280)
			tb.scheme("light")
			tb.do(chromedp.Navigate(p.server + p.path))
			if eval[bool](tb, `!!document.getElementById("stream")`) {
				tb.until(`document.getElementById("mark-word").textContent === "Live" && !document.getElementById("mark").hidden`)
			}
			for _, look := range []struct {
				width  int64
				scheme string
				axe    bool
			}{{1280, "light", true}, {1280, "dark", false}, {390, "light", false}, {390, "dark", true}} {
				name := fmt.Sprintf("%s-%d-%s", p.name, look.width, look.scheme)
				tb.resize(look.width)
				tb.scheme(look.scheme)
				tb.clean(name)
				if look.axe { // each theme and each width once: colours do not depend on the width
					tb.accessible(name)
				}
				eval[bool](tb, `document.querySelectorAll("#lis-limits, #lis-sources, #lis-changes").forEach(d => d.open = true), true`)
				tb.clean(name + ", all open")
				tb.shot(name)
			}
			tb.resize(320)
			tb.clean(p.name + "-320")
		})
	}
}

// stayingPut keeps a page from loading itself anew while it is looked at.
func stayingPut(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Header.Del("Accept-Encoding")
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		body := strings.Replace(rec.Body.String(), `http-equiv="refresh"`, "", 1)
		for name, v := range rec.Header() {
			w.Header()[name] = v
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.WriteHeader(rec.Code)
		_, _ = io.WriteString(w, body)
	})
}

// overloadedPage is what a reader sees whose connection is turned away.
func overloadedPage() http.Handler {
	turnedAway, assets := web.Overloaded(""), web.NotReady(startingStatus, "")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/static/") {
			assets.ServeHTTP(w, r)
			return
		}
		turnedAway(w, r, 17)
	})
}

func startingStatus() web.Status {
	now := time.Now()
	return web.Status{
		Name: "ctl-ams-1", Version: "0.1.0", Began: now.Add(-7 * time.Second), Since: now.Add(-6700 * time.Millisecond), Phase: "join",
		Phases: []web.Phase{{Name: "parse", Took: 11 * time.Millisecond}, {Name: "open", Took: 9 * time.Millisecond}, {Name: "bind", Took: 3 * time.Millisecond}, {Name: "database", Took: 403 * time.Millisecond}},
		Ports:  []web.Port{{Name: "Controller", Addresses: []string{"127.0.0.1:7441"}, Open: true}, {Name: "Public", Addresses: []string{"[::]:7440"}}},
		Unmet:  []web.Unmet{{Condition: "self_call", Detail: "the call to itself over the controller port got no answer yet, 3 tries"}},
	}
}

// signInSubmitAndWatch walks the whole way with a mouse: a one-time link,
// the form, and the task that completes while the page is open.
func signInSubmitAndWatch(t *testing.T, b *browser, options ...rigOption) {
	r := newRig(t, options...)
	v := r.add("dns-ams-01")
	r.ready()
	site := serve(t, r.handler).URL + r.base
	tb := b.open(t)
	tb.resize(1280)
	tb.do(chromedp.Navigate(site+"/sign-in?code="+r.link("nora", auth.Operator)),
		chromedp.Click(`form .go`), chromedp.WaitVisible(`#mark`))
	r.runner.Script(v.Num, func(a tasks.Assignment) tasktestAnswer { return tasktestAnswer{Silent: true} })
	tb.do(chromedp.Navigate(site+"/run?kind=core.sleep"), chromedp.SetValue(`[name="arg.seconds"]`, "2.5"), chromedp.Click(`#run .go`))
	tb.until(`document.body.innerText.includes("is submitted and on disk")`)
	tb.until(`document.querySelector("h1").textContent.includes("core.sleep") && document.getElementById("mark-word").textContent === "Live"`)
	tb.until(`document.querySelector(".head .st").textContent === "waiting-for-agent-response"`)
	tb.clean("task")
	r.runner.Finish(v.Num, tasks.Ending{Outcome: tasks.Succeeded, Result: []byte(`{"slept":2.5}`)})
	tb.until(`document.querySelector(".head .st").textContent === "succeeded"`)
	tb.until(`[...document.querySelectorAll("pre")].some(p => p.textContent.includes('"slept": 2.5'))`)
	tb.clean("task after its end")
	tb.accessible("task after its end")
}

// liveListKeepsItsRows looks at what a reader has in hand while tasks come
// and go: the rows, the text being typed, the focus, and open details.
func liveListKeepsItsRows(t *testing.T, b *browser) {
	r := newRig(t, withDay())
	r.add("dns-ams-01")
	r.ready()
	for range 3 {
		r.done("dns-ams-01", kinds.Echo, `{}`)
	}
	server := serve(t, r.handler)
	tb := b.open(t)
	tb.cookie(server.URL, auth.CookieName, r.cookies[auth.Admin])
	tb.resize(1280)
	tb.do(chromedp.Navigate(server.URL + "/tasks"))
	tb.until(`document.getElementById("mark-word").textContent === "Live"`)
	tb.do(chromedp.Focus(`#filter`), chromedp.SendKeys(`#filter`, "state=ne"))
	r.done("dns-ams-01", kinds.Echo, `{}`)
	tb.until(`document.querySelector(".news") && document.querySelector(".news").textContent.includes("1 new task, show it")`)
	r.done("dns-ams-01", kinds.Echo, `{}`)
	tb.until(`document.querySelector(".news").textContent.includes("2 new tasks, show them")`)
	if n := eval[int](tb, `document.querySelectorAll("#rows tbody").length`); n != 3 {
		t.Errorf("the list has %d rows, want the 3 it was opened with", n)
	}
	if got := eval[string](tb, `document.activeElement.id + " " + document.activeElement.value`); got != "filter state=ne" {
		t.Errorf("focus and typed text are %q", got)
	}
	tb.do(chromedp.Click(`.news a`))
	tb.until(`document.querySelectorAll("#rows tbody").length === 5`)

	tb.do(chromedp.Navigate(server.URL+"/"), chromedp.WaitVisible(`#chart-table summary`))
	tb.until(`document.getElementById("mark-word").textContent === "Live"`)
	tb.do(chromedp.Click(`#chart-table summary`))
	before := eval[string](tb, `document.querySelector("#chart-table").open + ""`)
	eval[bool](tb, `window.__swaps = 0, document.addEventListener("htmx:after:swap", () => window.__swaps++), true`)
	r.done("dns-ams-01", kinds.Echo, `{}`)
	tb.until(`window.__swaps > 0`)
	if after := eval[string](tb, `document.querySelector("#chart-table").open + ""`); before != "true" || after != "true" {
		t.Errorf("details open: %s before and %s after an update", before, after)
	}
	tb.clean("overview after an update")
}

// outputIsFollowed shows output that grows while the page is open.
func outputIsFollowed(t *testing.T, b *browser) {
	r := newRig(t)
	v := r.add("dns-ams-01")
	r.ready()
	r.runner.Script(v.Num, func(tasks.Assignment) tasktestAnswer { return tasktestAnswer{Silent: true} })
	task := r.submit("dns-ams-01", kinds.Run, `{"program":"uname"}`)
	r.started(task.ID)
	server := serve(t, r.handler)
	tb := b.open(t)
	tb.cookie(server.URL, auth.CookieName, r.cookies[auth.Viewer])
	tb.resize(1280)
	tb.do(chromedp.Navigate(server.URL + "/tasks/" + task.ID.String()))
	tb.until(`document.getElementById("mark-word").textContent === "Live"`)
	say := func(seq int, text string) {
		r.runner.Say(func(s tasks.Sessions) {
			s.Output(v.Num, tasks.OutputChunk{Ref: tasks.Ref{ID: task.ID, Attempt: 1}, Seq: seq, Stream: "stdout", At: time.Now(), Data: []byte(text)})
		})
	}
	say(0, "first\nsec")
	tb.until(`document.querySelectorAll("#log .ln").length === 2`)
	tb.until(`document.getElementById("L2").querySelector("code").textContent === "sec"`)
	say(1, "ond <script>alert(1)</script>\nthird\n")
	tb.until(`document.querySelectorAll("#log .ln").length === 3`)
	if got := eval[string](tb, `document.getElementById("L2").querySelector("code").textContent`); got != "second <script>alert(1)</script>" {
		t.Errorf("line 2 is %q", got)
	}
	r.runner.Finish(v.Num, tasks.Ending{Outcome: tasks.Succeeded})
	tb.until(`document.querySelector(".head .st").textContent === "succeeded"`)
	if n := eval[int](tb, `document.querySelectorAll("#log .ln").length`); n != 3 {
		t.Errorf("%d lines after the end, want 3", n)
	}
	tb.clean("followed output")
}

// staleIsSaid takes the controller away and gives it back.
func staleIsSaid(t *testing.T, b *browser) {
	r := newRig(t)
	r.add("dns-ams-01")
	r.ready()
	var gate sync.RWMutex
	down := false
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		gate.RLock()
		gone := down
		gate.RUnlock()
		if gone {
			panic(http.ErrAbortHandler)
		}
		r.handler.ServeHTTP(w, req)
	}))
	server.Config.ErrorLog = nil
	server.Start()
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	set := func(v bool) {
		gate.Lock()
		down = v
		gate.Unlock()
	}
	tb := b.open(t)
	tb.cookie(server.URL, auth.CookieName, r.cookies[auth.Admin])
	tb.resize(1280)
	tb.do(chromedp.Navigate(server.URL + "/"))
	tb.until(`document.getElementById("mark-word").textContent === "Live"`)
	set(true)
	server.CloseClientConnections()
	began := time.Now()
	tb.until(`document.getElementById("mark-word").textContent === "Stale" && !document.getElementById("stale").hidden`)
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("stale is said after %s", took)
	}
	tb.accessible("stale")
	tb.shot("overview-stale")
	set(false)
	tb.until(`document.getElementById("mark-word").textContent === "Live" && document.getElementById("stale").hidden`)
	tb.clean("after the controller came back")
}
