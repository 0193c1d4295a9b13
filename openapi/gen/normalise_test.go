package main

import (
	"encoding/json"
	"go/parser"
	"go/token"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const source = `package handlers

import ("encoding/json"; "time"; "headgate/tasks")

// Thing is one.
type Thing struct {
	ID    string          ` + "`json:\"id\"`" + `
	At    *time.Time      ` + "`json:\"at\"`" + `
	Args  json.RawMessage ` + "`json:\"args\"`" + `
	Exit  *tasks.Exit     ` + "`json:\"exit\"`" + `
	Count int64           ` + "`json:\"count\"`" + `
	Note  string          ` + "`json:\"note,omitempty\"`" + `
} //	@name	Renamed
`

func TestSchemasGetWhatTheGoTypesKnow(t *testing.T) {
	t.Parallel()
	f, err := parser.ParseFile(token.NewFileSet(), "thing.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	facts := types{}
	facts.addFile(f)
	var schema, want any
	mustParse(t, &schema, `{"type":"object","properties":{
		"id":{"type":"string"},"at":{"type":"string"},"args":{"type":"object","description":"any"},
		"exit":{"$ref":"#/components/schemas/Exit"},"count":{"type":"integer"},"note":{"type":"string"}}}`)
	mustParse(t, &want, `{"type":"object","required":["args","at","count","exit","id"],"properties":{
		"id":{"type":"string"},"at":{"type":["string","null"],"format":"date-time"},"args":{"description":"any"},
		"exit":{"oneOf":[{"$ref":"#/components/schemas/Exit"},{"type":"null"}]},"count":{"type":"integer","format":"int64"},"note":{"type":"string"}}}`)
	m, ok := schema.(map[string]any)
	if !ok {
		t.Fatal("no object")
	}
	repairSchema(m, facts["Renamed"], false)
	var got any
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	mustParse(t, &got, string(b))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestErrorsAreProblemDocuments(t *testing.T) {
	t.Parallel()
	var op map[string]any
	mustParse(t, &op, `{"responses":{
		"200":{"content":{"application/json":{"schema":{"$ref":"#/components/schemas/Task"}}}},
		"404":{"content":{"application/json":{"schema":{"$ref":"#/components/schemas/Problem"}}}},
		"503":{"content":{"application/json":{"schema":{"$ref":"#/components/schemas/Readiness"}}}}}}`)
	repairOperation(op)
	responses := object(op, "responses")
	for status, media := range map[string]string{"200": "application/json", "404": "application/problem+json", "500": "application/problem+json", "503": "application/json"} {
		content := object(object(responses, status), "content")
		if _, ok := content[media]; !ok || len(content) != 1 {
			t.Errorf("%s: %v, want %s", status, content, media)
		}
	}
}

func mustParse(t *testing.T, v any, text string) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), v); err != nil {
		t.Fatal(err)
	}
}
