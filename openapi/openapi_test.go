package openapi_test

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"headgate/openapi"
)

// TestVendoredFilesAreTheReleasedOnes compares with the files of the npm
// package swagger-ui-dist 5.35.0.
func TestVendoredFilesAreTheReleasedOnes(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"swagger-ui-bundle.js.gz": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
		"swagger-ui.css.gz":       "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
		"LICENSE":                 "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
		"NOTICE":                  "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
	} {
		f, err := os.Open("swagger/" + name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var r io.Reader = f
		if strings.HasSuffix(name, ".gz") {
			if r, err = gzip.NewReader(f); err != nil {
				t.Fatal(err)
			}
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, r); err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(sum.Sum(nil)); got != want {
			t.Errorf("%s: SHA-256 %s, want %s", name, got, want)
		}
	}
}

func get(t *testing.T, h http.Handler, path string, header http.Header) *http.Response {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	for k, v := range header {
		r.Header[k] = v
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, res *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestDocumentIsServedWithETag(t *testing.T) {
	t.Parallel()
	h := openapi.Document("")
	for path, mediaType := range map[string]string{"/api/v1/openapi.json": "application/json", "/api/v1/openapi.yaml": "application/yaml"} {
		for _, encoding := range []string{"", "gzip"} {
			header := http.Header{}
			if encoding != "" {
				header.Set("Accept-Encoding", encoding)
			}
			res := get(t, h, path, header)
			if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != mediaType || res.Header.Get("Content-Encoding") != encoding {
				t.Fatalf("%s %q: %v %v", path, encoding, res.StatusCode, res.Header)
			}
			header.Set("If-None-Match", res.Header.Get("ETag"))
			if again := get(t, h, path, header); again.StatusCode != http.StatusNotModified || body(t, again) != "" {
				t.Errorf("%s %q: with the ETag %d", path, encoding, again.StatusCode)
			}
		}
	}
	if res := get(t, h, "/api/v1/other", nil); res.StatusCode != http.StatusNotFound {
		t.Errorf("unknown file: %d", res.StatusCode)
	}
}

func TestDocumentIsOpenAPI31(t *testing.T) {
	t.Parallel()
	var doc struct {
		OpenAPI string
		Paths   map[string]map[string]struct {
			OperationID string
			Responses   map[string]any
		}
	}
	if err := json.Unmarshal(openapi.JSON(), &doc); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || len(doc.Paths) < 20 {
		t.Fatalf("openapi %q with %d paths", doc.OpenAPI, len(doc.Paths))
	}
	seen := map[string]bool{}
	for path, methods := range doc.Paths {
		for method, op := range methods {
			if op.OperationID == "" || seen[op.OperationID] {
				t.Errorf("%s %s: operationId %q is missing or not unique", method, path, op.OperationID)
			}
			seen[op.OperationID] = true
		}
	}
}

func TestExplorerIsServedWithoutRedirectAndUnderAStrictPolicy(t *testing.T) {
	t.Parallel()
	h := openapi.Swagger()
	res := get(t, h, "/swagger/", nil)
	page := body(t, res)
	if res.StatusCode != http.StatusOK {
		t.Fatalf("status %d", res.StatusCode)
	}
	policy := res.Header.Get("Content-Security-Policy")
	if !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") {
		t.Errorf("policy %q", policy)
	}
	checkNothingInline(t, page)
	for _, name := range regexp.MustCompile(`(?:src|href)="([^":]+\.(?:js|css))"`).FindAllStringSubmatch(page, -1) {
		for _, encoding := range []string{"gzip", "identity"} {
			res := get(t, h, "/swagger/"+name[1], http.Header{"Accept-Encoding": {encoding}})
			if res.StatusCode != http.StatusOK || body(t, res) == "" {
				t.Errorf("%s (%s): %d", name[1], encoding, res.StatusCode)
			}
		}
	}
	script := body(t, get(t, h, "/swagger/init.js", nil))
	for _, want := range []string{"persistAuthorization: false", `layout: "BaseLayout"`, "validatorUrl: null"} {
		if !strings.Contains(script, want) {
			t.Errorf("init.js lacks %s", want)
		}
	}
}

// checkNothingInline finds what a strict content security policy would block.
func checkNothingInline(t *testing.T, page string) {
	t.Helper()
	for _, bad := range []string{`<script>[^<]`, `<style`, `\sstyle=`, `\son[a-z]+=`, `javascript:`, `https?://`} {
		if found := regexp.MustCompile(bad).FindString(page); found != "" {
			t.Errorf("the page holds %q", found)
		}
	}
}

func TestReferenceShowsEveryOperation(t *testing.T) {
	t.Parallel()
	h := openapi.Reference("")
	res := get(t, h, "/docs/api", nil)
	page := body(t, res)
	if res.StatusCode != http.StatusOK || !strings.Contains(res.Header.Get("Content-Security-Policy"), "default-src 'none'") {
		t.Fatalf("%d %v", res.StatusCode, res.Header)
	}
	checkNothingInline(t, page)
	var doc struct {
		Paths map[string]map[string]struct{ OperationID string }
	}
	if err := json.Unmarshal(openapi.JSON(), &doc); err != nil {
		t.Fatal(err)
	}
	for path, methods := range doc.Paths {
		for method, op := range methods {
			if !strings.Contains(page, `<article id="`+op.OperationID+`"`) {
				t.Errorf("%s %s is missing on the page", method, path)
			}
		}
	}
	for _, link := range regexp.MustCompile(`href="#([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if !strings.Contains(page, `id="`+link[1]+`"`) {
			t.Errorf("link to #%s leads nowhere", link[1])
		}
	}
	if css := get(t, h, "/docs/assets/reference.css", nil); css.StatusCode != http.StatusOK {
		t.Errorf("style sheet: %d", css.StatusCode)
	}
}
