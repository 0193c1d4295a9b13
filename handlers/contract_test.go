package handlers_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"headgate/openapi"
)

// contract is the OpenAPI document, ready to judge answers. Its schemas are
// JSON Schema 2020-12, so a validator for that is all it takes.
type contract struct {
	paths    map[string]map[string]any // path, method
	compiler *jsonschema.Compiler
	mu       sync.Mutex // guards the compiler
}

const documentURL = "mem:///openapi.json"

var theContract = sync.OnceValues(loadContract) // parsing it once is enough for all tests

func loadContract() (*contract, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(openapi.JSON()))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.AssertFormat()
	if err := c.AddResource(documentURL, doc); err != nil {
		return nil, err
	}
	var plain struct{ Paths map[string]map[string]any }
	if err := json.Unmarshal(openapi.JSON(), &plain); err != nil {
		return nil, err
	}
	return &contract{paths: plain.Paths, compiler: c}, nil
}

// find gives the path template that a path belongs to; one without
// parameters wins.
func (c *contract) find(method, path string) (string, bool) {
	best, found := "", false
	for template, methods := range c.paths {
		if _, ok := methods[strings.ToLower(method)]; ok && matches(template, path) && (!found || !strings.Contains(template, "{")) {
			best, found = template, true
		}
	}
	return best, found
}

func matches(template, path string) bool {
	a, b := strings.Split(template, "/"), strings.Split(path, "/")
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] && !strings.HasPrefix(a[i], "{") {
			return false
		}
	}
	return true
}

// checkContract fails when an answer is not what the document promises for
// its operation: unknown status, other media type, or a body that its schema
// refuses. It runs on every answer of the tests.
func checkContract(t testing.TB, req *http.Request, res *http.Response, body []byte) {
	t.Helper()
	c, err := theContract()
	if err != nil {
		t.Fatal(err)
	}
	template, ok := c.find(req.Method, req.URL.Path)
	if !ok {
		return // a page, or a path that does not exist
	}
	pointer := func(parts ...string) string {
		for i, p := range parts {
			parts[i] = strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(p, "~", "~0"), "/", "~1"), "{", "%7B")
			parts[i] = strings.ReplaceAll(parts[i], "}", "%7D")
		}
		return "/" + strings.Join(parts, "/")
	}
	op, ok := c.paths[template][strings.ToLower(req.Method)].(map[string]any)
	if !ok {
		t.Fatalf("%s %s is no operation", req.Method, template)
	}
	status := res.Status[:3]
	responses, _ := op["responses"].(map[string]any)
	response, ok := responses[status].(map[string]any)
	if !ok {
		t.Errorf("%s %s answered %s, which the contract does not know: %s", req.Method, template, status, body)
		return
	}
	content, _ := response["content"].(map[string]any)
	if len(content) == 0 {
		if len(body) > 0 {
			t.Errorf("%s %s %s has a body that the contract does not know: %s", req.Method, template, status, body)
		}
		return
	}
	media, _, _ := strings.Cut(res.Header.Get("Content-Type"), ";")
	if _, ok := content[media]; !ok {
		t.Errorf("%s %s %s has the media type %q, the contract says %v", req.Method, template, status, media, content)
		return
	}
	if !strings.HasSuffix(media, "json") || template == "/api/v1/openapi.json" {
		return
	}
	c.validate(t, documentURL+"#"+pointer("paths", template, strings.ToLower(req.Method), "responses", status, "content", media, "schema"), body)
}

func (c *contract) validate(t testing.TB, schemaURL string, body []byte) {
	t.Helper()
	c.mu.Lock()
	schema, err := c.compiler.Compile(schemaURL)
	c.mu.Unlock()
	if err != nil {
		t.Fatalf("schema %s: %v", schemaURL, err)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		t.Fatalf("answer is not JSON: %v: %s", err, body)
	}
	if err := schema.Validate(v); err != nil {
		t.Errorf("%s: %v\n%s", schemaURL, err, body)
	}
}
