package web_test

import (
	"html"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"headgate/internal/auth"
	"headgate/web"
)

// crawler follows every address of a site below a base path, as a browser
// with JavaScript would, from what the pages say.
type crawler struct {
	*testing.T
	client *http.Client
	site   *url.URL // with the base path and a slash
	seen   map[string]bool
	todo   []string
	posts  int // forms
	curls  int // commands shown
	stream bool
}

// Attributes that hold an address, and addresses in scripts that are shown.
var (
	addressAttr = regexp.MustCompile(`\s(href|src|action|formaction|hx-[a-z:-]+|data-refresh|data-more)="([^"]*)"`)
	curlAddress = regexp.MustCompile(`'(https?://[^']*)'`)
	metaRefresh = regexp.MustCompile(`http-equiv="refresh" content="[0-9]+;\s*url=([^"]*)"`)
)

// follow notes an address found on a page.
func (c *crawler) follow(from *url.URL, text string) {
	c.Helper()
	to, err := from.Parse(html.UnescapeString(text))
	if err != nil {
		c.Errorf("%s: address %q: %v", from.Path, text, err)
		return
	}
	if to.Scheme == "data" || to.Fragment != "" && strings.HasPrefix(text, "#") {
		return
	}
	if to.Host != c.site.Host || !strings.HasPrefix(to.Path, c.site.Path) {
		c.Errorf("%s leads out of the base path: %s", from.Path, to)
		return
	}
	to.Fragment = ""
	if key := to.String(); !c.seen[key] {
		c.seen[key] = true
		c.todo = append(c.todo, key)
	}
}

// read fetches one address and notes what it leads to.
func (c *crawler) read(address string) {
	c.Helper()
	if strings.Contains(address, "/api/v1/events?") {
		if c.stream { // one is proof enough, and the number of open ones is limited
			return
		}
		c.stream = true
	}
	req, err := http.NewRequestWithContext(c.Context(), http.MethodGet, address, nil)
	if err != nil {
		c.Fatal(err)
	}
	res, err := c.client.Do(req)
	if err != nil {
		c.Fatalf("%s: %v", address, err)
	}
	defer res.Body.Close()
	form := res.StatusCode == http.StatusMethodNotAllowed // where a form is sent to
	if form {
		c.posts++
	}
	if res.StatusCode != http.StatusOK && res.StatusCode != http.StatusSeeOther && !form {
		c.Errorf("%s answers %d", address, res.StatusCode)
	}
	for _, cookie := range res.Cookies() {
		if cookie.Path != c.site.Path {
			c.Errorf("%s sets a cookie for %s", address, cookie.Path)
		}
	}
	from := res.Request.URL
	if to := res.Header.Get("Location"); to != "" {
		c.follow(from, to)
	}
	if kind := res.Header.Get("Content-Type"); strings.HasPrefix(kind, "text/html") {
		body, err := io.ReadAll(res.Body)
		if err != nil {
			c.Fatal(err)
		}
		c.page(from, string(body))
	}
}

func (c *crawler) page(from *url.URL, body string) {
	c.Helper()
	for _, m := range addressAttr.FindAllStringSubmatch(body, -1) {
		if name := m[1]; strings.HasPrefix(name, "hx-") && !strings.HasPrefix(m[2], "/") {
			continue // htmx attributes that are no address
		}
		c.follow(from, m[2])
	}
	for _, m := range metaRefresh.FindAllStringSubmatch(body, -1) {
		c.follow(from, m[1])
	}
	for _, m := range curlAddress.FindAllStringSubmatch(html.UnescapeString(body), -1) {
		c.curls++
		if !strings.HasPrefix(m[1], c.site.String()+"api/v1/") {
			c.Errorf("%s shows a command for %s", from.Path, m[1])
		}
	}
}

// Every address on every page stays below the base path and leads somewhere.
func TestEveryAddressStaysBelowTheBasePath(t *testing.T) {
	t.Parallel()
	r := newRig(t, withBase("/ops/hg"), withDay())
	demo := r.demo()
	server := httptest.NewServer(r.handler)
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	site, err := url.Parse(server.URL + "/ops/hg/")
	if err != nil {
		t.Fatal(err)
	}
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &crawler{T: t, site: site, seen: map[string]bool{}, client: &http.Client{
		Jar: jar, Transport: server.Client().Transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	// Signing in by the form also shows that the browser sends the cookie back.
	res, err := c.client.PostForm(site.String()+"sign-in", url.Values{"code": {r.link("rosa", auth.Admin)}, "next": {"/tasks"}})
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusSeeOther || res.Header.Get("Location") != "/ops/hg/tasks" || len(res.Cookies()) != 1 || res.Cookies()[0].Path != "/ops/hg/" {
		t.Fatalf("signing in: %d %v", res.StatusCode, res.Header)
	}
	for _, path := range append(everyPage(r, demo), "/docs/api", "/swagger/") {
		c.follow(site, "/ops/hg"+path)
	}
	for len(c.todo) > 0 {
		next := c.todo[0]
		c.todo = c.todo[1:]
		c.read(next)
	}
	if len(c.seen) < 60 || c.posts < 5 || c.curls < 5 {
		t.Errorf("the crawl saw %d addresses, %d forms and %d commands; it has missed most", len(c.seen), c.posts, c.curls)
	}
	for _, must := range []string{"api/v1/events?", "static/", "swagger/init.js", "/output", "docs/assets/", "api/v1/openapi.json"} {
		found := false
		for address := range c.seen {
			found = found || strings.Contains(address, must)
		}
		if !found {
			t.Errorf("no page leads to %s", must)
		}
	}
}

func TestNotReadyPageUnderABasePath(t *testing.T) {
	t.Parallel()
	h := web.NotReady(startingStatus, "/hg")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	for _, m := range addressAttr.FindAllStringSubmatch(w.Body.String(), -1) {
		if !strings.HasPrefix(m[2], "/hg/") && !strings.HasPrefix(m[2], "data:") && !strings.HasPrefix(m[2], "#") {
			t.Errorf("the page leads to %s", m[2])
		}
	}
}

func TestCleanBasePath(t *testing.T) {
	t.Parallel()
	for base, want := range map[string]string{"": "", "/": "", "/hg": "/hg", "/hg/": "/hg", "/ops/hg_1.x~": "/ops/hg_1.x~", "/tasksx": "/tasksx"} {
		if got, err := web.CleanBasePath(base); got != want || err != nil {
			t.Errorf("%q: %q, %v", base, got, err)
		}
	}
	for _, base := range []string{"hg", "/h g", "//hg", "/hg//x", "/hg/../x", "/.", "/hg?x", "/hg#", "/h%67", "/\"", "/ä", "/tasks", "/static/x", "/sign-in"} {
		if got, err := web.CleanBasePath(base); err == nil {
			t.Errorf("%q is taken as %q", base, got)
		}
	}
}
