package handlers_test

import (
	"context"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	cdppage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"headgate/internal/auth"
	"headgate/internal/testkit"
)

// explorerTime bounds one step in the browser; a busy machine needs it.
const explorerTime = 60 * time.Second

// explorerTab opens a page in a fresh Chromium.
func explorerTab(t *testing.T, server *httptest.Server) context.Context {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		testkit.Lacks(t, "there is no Chromium on this machine; the explorer can only be tried in one")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true))
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, cancel := chromedp.NewContext(allocator)
	t.Cleanup(func() { _ = chromedp.Cancel(ctx); cancel(); stop() })
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", path, err)
	}
	if _, err := chromedp.Call(ctx, cdppage.AddScriptToEvaluateOnNewDocument, cdppage.AddScriptToEvaluateOnNewDocumentParams{
		Source: `window.__csp = []; addEventListener("securitypolicyviolation", (e) => window.__csp.push(e.effectiveDirective + " " + e.blockedURI));`,
	}); err != nil {
		t.Fatal(err)
	}
	within, done := context.WithTimeout(ctx, explorerTime)
	defer done()
	if err := chromedp.Do(within, chromedp.Navigate(server.URL+"/swagger/")); err != nil {
		t.Fatal(err)
	}
	return ctx
}

func until(t *testing.T, ctx context.Context, expression string) {
	t.Helper()
	within, done := context.WithTimeout(ctx, explorerTime)
	defer done()
	if _, err := chromedp.Run(within, chromedp.Poll[bool](expression, chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(explorerTime))); err != nil {
		text, _ := chromedp.Run(ctx, chromedp.Evaluate[string](`document.body.innerText.slice(0, 2000)`))
		t.Fatalf("never true: %s: %v\n%s", expression, err, text)
	}
}

func evaluate[T any](t *testing.T, ctx context.Context, expression string) T {
	t.Helper()
	within, done := context.WithTimeout(ctx, explorerTime)
	defer done()
	v, err := chromedp.Run(within, chromedp.Evaluate[T](expression))
	if err != nil {
		t.Fatalf("evaluate %s: %v", expression, err)
	}
	return v
}

// execute opens an operation, sends it, and gives the status shown.
func execute(t *testing.T, ctx context.Context, id, body string) string {
	t.Helper()
	block := `document.querySelector("#` + id + `")`
	until(t, ctx, `!!`+block)
	evaluate[bool](t, ctx, block+`.querySelector(".opblock-summary-control").click() || true`)
	until(t, ctx, `!!`+block+`.querySelector(".btn.execute")`)
	if body != "" {
		until(t, ctx, `!!`+block+`.querySelector("textarea.body-param__text")`)
		evaluate[bool](t, ctx, `(() => { const box = `+block+`.querySelector("textarea.body-param__text");
			Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(box, '`+body+`');
			box.dispatchEvent(new Event("input", { bubbles: true })); return true; })()`)
	}
	evaluate[bool](t, ctx, block+`.querySelector(".btn.execute").click() || true`)
	shown := block + `.querySelector(".live-responses-table tbody .response-col_status")`
	until(t, ctx, `!!`+shown+` && /\d{3}/.test(`+shown+`.innerText)`)
	return strings.TrimSpace(evaluate[string](t, ctx, shown+`.innerText`))
}

func TestTheExplorerWorksInABrowserUnderItsPolicy(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	server := serve(t, rig)
	ctx := explorerTab(t, server)
	if got := execute(t, ctx, "operations-tokens-listTokens", ""); !strings.HasPrefix(got, "401") {
		t.Errorf("GET /tokens without a sign-in: %q", got)
	}
	if _, err := chromedp.Call(ctx, network.SetCookie, network.SetCookieParams{Name: auth.CookieName, Value: rig.cookies[auth.Operator], URL: server.URL}); err != nil {
		t.Fatal(err)
	}
	if got := execute(t, ctx, "operations-tasks-listTasks", ""); !strings.HasPrefix(got, "200") {
		t.Errorf("GET /tasks: %q", got)
	}
	if got := execute(t, ctx, "operations-tasks-submitTask", `{"agent":"alpha","kind":"core.echo"}`); !strings.HasPrefix(got, "202") {
		t.Errorf("POST /tasks: %q", got)
	}
	// The dialog for tokens opens too.
	evaluate[bool](t, ctx, `document.querySelector(".btn.authorize").click() || true`)
	until(t, ctx, `!!document.querySelector(".auth-container input")`)
	if v := evaluate[[]string](t, ctx, `window.__csp`); len(v) > 0 {
		t.Errorf("content policy violated: %v", v)
	}
}
