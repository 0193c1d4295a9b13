package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// normalise repairs swag's document in place. Each step says which shortcoming
// of swag it stands for.
func normalise(doc map[string]any, facts types) error {
	doc["info"] = info(doc)
	delete(doc, "externalDocs") // swag writes one without an address
	delete(doc, "security")     // swag collects every operation's security here
	doc["tags"] = tags()
	doc["servers"] = []any{map[string]any{"url": "/", "description": "this controller"}}
	components := object(doc, "components")
	components["securitySchemes"] = securitySchemes() // swag mixes them up

	schemas := object(components, "schemas")
	rename(doc, schemas)
	requests := requestSchemas(doc)
	for name, s := range schemas {
		schema, ok := s.(map[string]any)
		if !ok {
			return fmt.Errorf("schema %s is no object", name)
		}
		repairSchema(schema, facts.of(name), requests[name])
	}
	addExamples(schemas)
	for path, item := range object(doc, "paths") {
		methods, ok := item.(map[string]any)
		if !ok {
			return fmt.Errorf("path %s is no object", path)
		}
		for method, op := range methods {
			operation, ok := op.(map[string]any)
			if !ok {
				return fmt.Errorf("%s %s is no object", method, path)
			}
			repairOperation(operation)
			if operation["operationId"] == nil || operation["summary"] == nil || operation["tags"] == nil {
				return fmt.Errorf("%s %s lacks an @ID, @Summary or @Tags", method, path)
			}
		}
	}
	return checkReferences(doc, schemas)
}

func info(doc map[string]any) map[string]any {
	i := object(doc, "info")
	i["license"] = map[string]any{"name": "Apache-2.0", "identifier": "Apache-2.0"}
	return i
}

func tags() []any {
	var list []any
	for _, t := range [][2]string{
		{"tasks", "Submit work, watch it, end it."},
		{"agents", "Enrol agents, look at them, change and remove them."},
		{"kinds", "What agents can do and how its arguments look."},
		{"events", "What changes, as it changes."},
		{"status", "How the controller, its ports and its queue stand."},
		{"session", "Who is calling."},
		{"tokens", "Credentials for programs."},
		{"operations", "For supervisors, load balancers and Prometheus."},
		{"contract", "This document."},
	} {
		list = append(list, map[string]any{"name": t[0], "description": t[1]})
	}
	return list
}

func securitySchemes() map[string]any {
	return map[string]any{
		"BearerAuth": map[string]any{"type": "http", "scheme": "bearer", "bearerFormat": "hgt_...", "description": "An API token."},
		"CookieAuth": map[string]any{"type": "apiKey", "in": "cookie", "name": "headgate_session", "description": "The session of a signed-in browser."},
	}
}

// rename gives schemas of other packages plain names: tasks.Exit is Exit, and
// fleet.Health, whose plain name is taken, AgentHealth.
func rename(doc, schemas map[string]any) {
	names := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(schemas)) {
		if !strings.Contains(name, ".") {
			continue
		}
		pkg, plain, _ := strings.Cut(name, ".")
		if pkg == "fleet" || pkg == "listener" || schemas[plain] != nil {
			plain = map[string]string{"fleet": "Agent", "listener": "Listener"}[pkg] + plain
		}
		names["#/components/schemas/"+name] = "#/components/schemas/" + plain
		schemas[plain] = schemas[name]
		delete(schemas, name)
	}
	walk(doc, func(m map[string]any) {
		if ref, ok := m["$ref"].(string); ok && names[ref] != "" {
			m["$ref"] = names[ref]
		}
	})
}

// of finds the facts of a schema by its plain name.
func (t types) of(name string) map[string]field {
	if f, ok := t[name]; ok {
		return f
	}
	for _, pkg := range []string{"tasks.", "auth."} {
		if f, ok := t[pkg+name]; ok {
			return f
		}
	}
	if f, ok := t["listener."+strings.TrimPrefix(name, "Listener")]; ok {
		return f
	}
	return t["fleet."+strings.TrimPrefix(name, "Agent")]
}

// requestSchemas finds the schemas that clients send: they are closed, because
// unknown fields are refused.
func requestSchemas(doc map[string]any) map[string]bool {
	found := map[string]bool{}
	walk(doc, func(m map[string]any) {
		body, ok := m["requestBody"].(map[string]any)
		if !ok {
			return
		}
		walk(body, func(inner map[string]any) {
			if ref, ok := inner["$ref"].(string); ok {
				found[strings.TrimPrefix(ref, "#/components/schemas/")] = true
			}
		})
	})
	schemas := object(object(doc, "components"), "schemas")
	for again := true; again; { // what a request holds is a request too
		again = false
		for name := range found {
			walk(schemas[name], func(inner map[string]any) {
				ref, _ := inner["$ref"].(string)
				held := strings.TrimPrefix(ref, "#/components/schemas/")
				if ref != "" && !found[held] {
					found[held], again = true, true
				}
			})
		}
	}
	return found
}

// repairSchema adds what the Go types know: null for pointers, formats,
// required fields, and any JSON for raw messages.
func repairSchema(schema map[string]any, facts map[string]field, request bool) {
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return
	}
	var required []any
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		p, ok := properties[name].(map[string]any)
		if !ok {
			continue
		}
		f := facts[name]
		properties[name] = repairProperty(p, f)
		if !request && !f.optional {
			required = append(required, name)
		}
	}
	if request {
		schema["additionalProperties"] = false
	} else if len(required) > 0 {
		schema["required"] = required
	}
}

func repairProperty(p map[string]any, f field) map[string]any {
	if f.raw {
		out := map[string]any{}
		if d, ok := p["description"]; ok {
			out["description"] = d
		}
		return out
	}
	switch f.goType {
	case "time.Time":
		p["format"] = "date-time"
	case "int64":
		p["format"] = "int64"
	}
	delete(p, "uniqueItems")
	if example, ok := p["example"]; ok {
		delete(p, "example") // its name of OpenAPI 3.0
		p["examples"] = []any{example}
	}
	if ref, ok := p["$ref"]; ok && (len(p) > 1 || f.nullable) {
		delete(p, "$ref") // beside a $ref nothing else is read by many tools
		inner := map[string]any{"$ref": ref}
		if f.nullable {
			p["oneOf"] = []any{inner, map[string]any{"type": "null"}}
		} else {
			p["allOf"] = []any{inner}
		}
		return p
	}
	if kind, ok := p["type"].(string); ok && f.nullable {
		p["type"] = []any{kind, "null"}
		if enum, ok := p["enum"].([]any); ok {
			p["enum"] = append(enum, nil)
		}
	}
	return p
}

// repairOperation gives each answer its own media type, lists their arrays as
// they are sent, and says which operations need no credential.
func repairOperation(op map[string]any) {
	if op["security"] == nil {
		op["security"] = []any{}
	}
	responses := object(op, "responses")
	responses["500"] = problemResponse("Internal Server Error")
	if responses["401"] == nil { // a wrong token is refused where none is needed, too
		responses["401"] = problemResponse("Unauthorized")
	}
	for status, r := range responses {
		response, ok := r.(map[string]any)
		if !ok {
			continue
		}
		if response["description"] == "Unprocessable Entity" {
			response["description"] = "Unprocessable Content"
		}
		if status < "400" {
			continue
		}
		for _, media := range object(response, "content") {
			if isProblem(media) {
				response["content"] = map[string]any{"application/problem+json": media}
			}
		}
	}
	parameters, _ := op["parameters"].([]any)
	for _, p := range parameters {
		if parameter, ok := p.(map[string]any); ok {
			repairParameter(parameter)
		}
	}
	walk(op["requestBody"], func(m map[string]any) {
		if m["$ref"] != nil {
			delete(m, "summary")
			delete(m, "description")
		}
	})
}

func problemResponse(description string) map[string]any {
	return map[string]any{"description": description, "content": map[string]any{
		"application/problem+json": map[string]any{"schema": map[string]any{"$ref": "#/components/schemas/Problem"}},
	}}
}

func isProblem(media any) bool {
	m, ok := media.(map[string]any)
	return ok && object(m, "schema")["$ref"] == "#/components/schemas/Problem"
}

func repairParameter(p map[string]any) {
	schema := object(p, "schema")
	if example, ok := p["example"]; ok && p["in"] != "path" {
		// The explorer fills an example in and sends it.
		delete(p, "example")
		p["description"] = fmt.Sprintf("%v (such as %v)", p["description"], example)
	}
	if schema["type"] == "array" {
		p["style"], p["explode"] = "form", false // values with commas between them
	}
	if p["name"] == "label.*" {
		// No tool can send a parameter whose name is a pattern, but for a
		// free-form object in form style: each of its members is one.
		p["name"], p["style"], p["explode"] = "label", "form", true
		p["schema"] = map[string]any{
			"type": "object", "propertyNames": map[string]any{"pattern": `^label\..+`}, "additionalProperties": map[string]any{"type": "string"},
		}
		p["example"] = map[string]any{}
	}
}

// addExamples puts one worked example on each request.
func addExamples(schemas map[string]any) {
	for name, example := range map[string]any{
		"TaskSubmission":    map[string]any{"agent": "local", "kind": "core.echo", "args": map[string]any{"hello": "world"}, "timeout": "30s"},
		"TaskBatch":         map[string]any{"tasks": []any{map[string]any{"agent": "local", "kind": "core.ping"}}},
		"AgentChange":       map[string]any{"labels": map[string]any{"env": "prod"}},
		"SignIn":            map[string]any{"token": "hgt_..."},
		"NewToken":          map[string]any{"name": "nightly-report", "role": "viewer"},
		"PairRequest":       map[string]any{"address": "192.0.2.10:7442", "token": "..."},
		"NewEnrolmentToken": map[string]any{"expires_in": "1h", "max_uses": 1},
	} {
		if schema, ok := schemas[name].(map[string]any); ok {
			schema["examples"] = []any{example}
		}
	}
}

func checkReferences(doc, schemas map[string]any) error {
	var missing error
	walk(doc, func(m map[string]any) {
		ref, ok := m["$ref"].(string)
		if ok && schemas[strings.TrimPrefix(ref, "#/components/schemas/")] == nil {
			missing = errors.Join(missing, fmt.Errorf("%s is not defined", ref))
		}
	})
	return missing
}

// object gives a member that is an object, making it if need be.
func object(m map[string]any, name string) map[string]any {
	o, ok := m[name].(map[string]any)
	if !ok {
		o = map[string]any{}
		m[name] = o
	}
	return o
}

// walk visits every object inside v.
func walk(v any, visit func(map[string]any)) {
	switch x := v.(type) {
	case map[string]any:
		visit(x)
		for _, inner := range x {
			walk(inner, visit)
		}
	case []any:
		for _, inner := range x {
			walk(inner, visit)
		}
	}
}
