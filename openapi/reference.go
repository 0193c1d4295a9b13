package openapi

import (
	"bytes"
	"encoding/json"
	"html/template"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// Reference serves the contract as one page without JavaScript, at any path,
// and its style sheet at a path that ends with reference.css. Its links begin
// with base; see Document.
func Reference(base string) http.Handler {
	page, err := renderReference(JSON(), base)
	if err != nil {
		panic(err) // the document is embedded and tested
	}
	html := newFile("text/html; charset=utf-8", page)
	return files{policy: policy, byName: map[string]file{
		"": html, "api": html, "reference.css": newFile("text/css; charset=utf-8", asset("reference.css")),
	}}
}

// The parts of the document that the page shows.
type apiDocument struct {
	Info struct{ Title, Description, Version string }
	Tags []struct{ Name, Description string }
	// Paths also holds nothing but operations: we write it ourselves.
	Paths      map[string]map[string]operation
	Components struct{ Schemas map[string]schema }
}

type operation struct {
	Method, Path         string
	OperationID          string
	Summary, Description string
	Tags                 []string
	Parameters           []parameter
	RequestBody          struct {
		Content map[string]struct{ Schema schema }
	}
	Responses map[string]struct {
		Description string
		Content     map[string]struct{ Schema schema }
	}
	Security []map[string][]string
}

type parameter struct {
	Name, In, Description string
	Required              bool
	Schema                schema
	Example               any
}

type schema struct {
	Ref                  string `json:"$ref"`
	Type                 any
	Format               string
	Description          string
	Enum                 []any
	Items                *schema
	OneOf, AllOf         []schema
	Properties           map[string]schema
	AdditionalProperties any
	Required             []string
	Examples             []any
}

// group is the operations of one tag.
type group struct {
	Name, Description string
	Operations        []operation
}

// row is a field of a schema.
type row struct {
	Name, Type, Link, Description string
	Required                      bool
}

// model is what the template shows.
type model struct {
	Base               string
	Title, Description string
	Groups             []group
	Schemas            []namedSchema
}

type namedSchema struct {
	Name string
	Rows []row
	Enum string
}

func renderReference(doc []byte, base string) ([]byte, error) {
	var d apiDocument
	if err := json.Unmarshal(doc, &d); err != nil {
		return nil, err
	}
	t, err := template.New("reference").Funcs(template.FuncMap{
		"typeOf": func(s schema) string { text, _ := s.describe(); return text },
		"linkOf": func(s schema) string { _, link := s.describe(); return link },
		"upper":  strings.ToUpper,
		"curl":   curlOf(d.Components.Schemas),
		"json":   func(m map[string]struct{ Schema schema }) schema { return firstSchema(m) },
	}).Parse(referenceHTML)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = t.Execute(&out, model{base, d.Info.Title, d.Info.Description, d.groups(), d.schemas()})
	return out.Bytes(), err
}

func (d apiDocument) groups() []group {
	var all []group
	for _, tag := range d.Tags {
		g := group{Name: tag.Name, Description: tag.Description}
		for _, path := range slices.Sorted(maps.Keys(d.Paths)) {
			for _, method := range []string{"get", "post", "put", "patch", "delete"} {
				op, ok := d.Paths[path][method]
				if !ok || !slices.Contains(op.Tags, tag.Name) {
					continue
				}
				op.Method, op.Path = method, path
				g.Operations = append(g.Operations, op)
			}
		}
		all = append(all, g)
	}
	return all
}

func (d apiDocument) schemas() []namedSchema {
	var all []namedSchema
	for _, name := range slices.Sorted(maps.Keys(d.Components.Schemas)) {
		s := d.Components.Schemas[name]
		n := namedSchema{Name: name, Enum: s.values()}
		for _, field := range slices.Sorted(maps.Keys(s.Properties)) {
			p := s.Properties[field]
			text, link := p.describe()
			n.Rows = append(n.Rows, row{field, text, link, p.Description, slices.Contains(s.Required, field)})
		}
		all = append(all, n)
	}
	return all
}

// describe says in a few words what a schema admits, and which schema of the
// page it names.
func (s schema) describe() (text, link string) {
	if name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/"); ok {
		return name, name
	}
	for _, inner := range slices.Concat(s.OneOf, s.AllOf) {
		if inner.Ref != "" {
			text, link = inner.describe()
			if len(s.OneOf) > 0 {
				text += " or null"
			}
			return text, link
		}
	}
	switch kind := s.Type.(type) {
	case string:
		text = kind
	case []any:
		var words []string
		for _, k := range kind {
			if word, ok := k.(string); ok {
				words = append(words, word)
			}
		}
		text = strings.Join(words, " or ")
	default:
		return "any JSON", ""
	}
	if s.Format != "" {
		text += " (" + s.Format + ")"
	}
	if s.Items != nil {
		inner, link := s.Items.describe()
		return text + " of " + inner, link
	}
	if values := s.values(); values != "" {
		text += ": " + values
	}
	return text, ""
}

func (s schema) values() string {
	var words []string
	for _, v := range s.Enum {
		if word, ok := v.(string); ok {
			words = append(words, word)
		}
	}
	return strings.Join(words, ", ")
}

func firstSchema(content map[string]struct{ Schema schema }) schema {
	for _, name := range slices.Sorted(maps.Keys(content)) {
		return content[name].Schema
	}
	return schema{}
}

// curlOf gives a function that writes an operation as a curl command. $URL and
// $TOKEN stand for the controller's address and a token.
func curlOf(schemas map[string]schema) func(operation) string {
	return func(op operation) string {
		text := `curl`
		if op.Method != "get" {
			text += " -X " + strings.ToUpper(op.Method)
		}
		if len(op.Security) > 0 {
			text += ` -H "Authorization: Bearer $TOKEN"`
		}
		name := strings.TrimPrefix(firstSchema(op.RequestBody.Content).Ref, "#/components/schemas/")
		if s, ok := schemas[name]; ok && len(s.Examples) > 0 {
			body, err := json.Marshal(s.Examples[0])
			if err == nil {
				text += " \\\n  -H 'Content-Type: application/json' -d '" + string(body) + "'"
			}
		}
		return text + ` "$URL` + op.Path + `"`
	}
}

const referenceHTML = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{.Title}} API reference</title>
<link rel="stylesheet" href="{{.Base}}/docs/assets/reference.css">
</head>
<body>
<header><h1>{{.Title}} API reference</h1>
<p>{{.Description}}</p>
<p>The contract for programs: <a href="{{.Base}}/api/v1/openapi.json">openapi.json</a>, <a href="{{.Base}}/api/v1/openapi.yaml">openapi.yaml</a>. To try calls out: <a href="{{.Base}}/swagger/">explorer</a>. To the <a href="{{.Base}}/">dashboard</a>.</p></header>
<nav aria-label="Calls"><ul>
{{range .Groups}}{{if .Operations}}<li><a href="#tag-{{.Name}}">{{.Name}}</a></li>{{end}}
{{end}}<li><a href="#schemas">schemas</a></li></ul></nav>
<main>
{{range .Groups}}{{if .Operations}}<section aria-labelledby="tag-{{.Name}}"><h2 id="tag-{{.Name}}">{{.Name}}</h2><p>{{.Description}}</p>
{{range .Operations}}<article id="{{.OperationID}}"><h3><span class="method">{{upper .Method}}</span> <code>{{.Path}}</code></h3>
<p><strong>{{.Summary}}</strong>{{if .Description}} {{.Description}}{{end}}{{if not .Security}} <em>Needs no credential.</em>{{end}}</p>
{{if .Parameters}}<table tabindex="0"><caption>Parameters</caption><thead><tr><th scope="col">Name</th><th scope="col">In</th><th scope="col">Type</th><th scope="col">Meaning</th></tr></thead><tbody>
{{range .Parameters}}<tr><th scope="row"><code>{{.Name}}</code>{{if .Required}} *{{end}}</th><td>{{.In}}</td><td>{{typeOf .Schema}}</td><td>{{.Description}}</td></tr>
{{end}}</tbody></table>{{end}}
{{with linkOf (json .RequestBody.Content)}}<p>Body: <a href="#schema-{{.}}">{{.}}</a></p>{{end}}
<table tabindex="0"><caption>Answers</caption><thead><tr><th scope="col">Status</th><th scope="col">Meaning</th><th scope="col">Body</th></tr></thead><tbody>
{{range $status, $r := .Responses}}<tr><th scope="row">{{$status}}</th><td>{{$r.Description}}</td><td>{{with linkOf (json $r.Content)}}<a href="#schema-{{.}}">{{.}}</a>{{end}}</td></tr>
{{end}}</tbody></table>
<pre tabindex="0"><code>{{curl .}}</code></pre>
</article>
{{end}}</section>{{end}}
{{end}}
<section aria-labelledby="schemas"><h2 id="schemas">Schemas</h2>
{{range .Schemas}}<article><h3 id="schema-{{.Name}}">{{.Name}}</h3>{{with .Enum}}<p>One of: {{.}}</p>{{end}}
{{if .Rows}}<table tabindex="0"><thead><tr><th scope="col">Field</th><th scope="col">Type</th><th scope="col">Meaning</th></tr></thead><tbody>
{{range .Rows}}<tr><th scope="row"><code>{{.Name}}</code>{{if .Required}} *{{end}}</th><td>{{if .Link}}<a href="#schema-{{.Link}}">{{.Type}}</a>{{else}}{{.Type}}{{end}}</td><td>{{.Description}}</td></tr>
{{end}}</tbody></table>{{end}}</article>
{{end}}</section>
</main>
</body>
</html>
`
