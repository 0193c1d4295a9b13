package web

import (
	"encoding/json"
	"net/url"
	"slices"
	"strings"

	"headgate/internal/fault"
)

// A form is made from a JSON schema on the server: one field for each simple
// member, a box for JSON where a member is not simple.

// schema is the part of JSON Schema that the product's kinds and policies use.
type schema struct {
	Title       string            `json:"title"`
	Description string            `json:"description"`
	Type        any               `json:"type"`
	Properties  map[string]schema `json:"properties"`
	Required    []string          `json:"required"`
	Enum        []any             `json:"enum"`
	Default     any               `json:"default"`
	Examples    []any             `json:"examples"`
	Minimum     json.Number       `json:"minimum"`
	Maximum     json.Number       `json:"maximum"`
	MaxLength   int               `json:"maxLength"`
	Additional  any               `json:"additionalProperties"`
}

func readSchema(raw json.RawMessage) schema {
	var s schema
	d := json.NewDecoder(strings.NewReader(string(raw)))
	d.UseNumber() // defaults and limits keep their text
	if d.Decode(&s) != nil {
		return schema{}
	}
	return s
}

// open says whether an object takes members that no schema names.
func (s schema) open() bool {
	allowed, isBool := s.Additional.(bool)
	return len(s.Properties) == 0 && (!isBool || allowed)
}

// field is one input of a form.
type field struct {
	Name     string // of the input
	Label    string
	Help     string
	Sort     string // text, number, choice, yesno or json
	Value    string
	Options  []option
	Required bool
	Min, Max string
	Length   int
	Error    string
	pointer  string // in the arguments
	member   string
}

// option is one entry of a choice.
type option struct {
	Value    string
	Text     string
	Selected bool
}

// ID makes a name that fits an id attribute.
func (f field) ID() string { return "f-" + strings.ReplaceAll(f.Name, ".", "-") }

// fieldsOf gives the fields of an object's members, required ones first.
func fieldsOf(s schema, prefix, pointer string, values url.Values) []field {
	names := make([]string, 0, len(s.Properties))
	for name := range s.Properties {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		ra, rb := slices.Contains(s.Required, a), slices.Contains(s.Required, b)
		if ra != rb {
			if ra {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
	fields := make([]field, 0, len(names))
	for _, name := range names {
		f := fieldOf(s.Properties[name], name, slices.Contains(s.Required, name))
		f.Name, f.pointer, f.member = prefix+name, pointer+"/"+escapePointer(name), name
		if values.Has(f.Name) {
			f.Value = values.Get(f.Name)
		}
		f.choose()
		fields = append(fields, f)
	}
	return fields
}

func fieldOf(p schema, name string, required bool) field {
	f := field{Label: orElse(p.Title, name), Help: p.Description, Required: required, Min: p.Minimum.String(), Max: p.Maximum.String(), Length: p.MaxLength}
	kind, _ := p.Type.(string)
	switch {
	case len(p.Enum) > 0 && kind == "string":
		f.Sort = "choice"
		for _, v := range p.Enum {
			if text, ok := v.(string); ok {
				f.Options = append(f.Options, option{Value: text, Text: text})
			}
		}
	case kind == "string":
		f.Sort = "text"
	case kind == "number", kind == "integer":
		f.Sort = "number"
	case kind == "boolean":
		f.Sort = "yesno"
		f.Options = []option{{Value: "true", Text: "yes"}, {Value: "false", Text: "no"}}
	default:
		f.Sort = "json"
	}
	switch {
	case p.Default != nil:
		f.Value = scalarText(p.Default)
	case required && len(p.Examples) > 0:
		f.Value = scalarText(p.Examples[0])
	}
	return f
}

func scalarText(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case json.Number:
		return v.String()
	case bool:
		if v {
			return "true"
		}
		return "false"
	}
	b, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	return string(b)
}

// choose marks the selected option.
func (f *field) choose() {
	if f.Options == nil {
		return
	}
	if !f.Required || f.Value == "" {
		text := "not given"
		if f.Required {
			text = "choose one"
		}
		f.Options = append([]option{{Value: "", Text: text}}, f.Options...)
	}
	for i := range f.Options {
		f.Options[i].Selected = f.Options[i].Value == f.Value
	}
}

// isNumber says whether text is a number as JSON writes it; it is passed on
// as it stands, so no digit is lost.
func isNumber(text string) bool {
	return text != "" && (text[0] == '-' || text[0] >= '0' && text[0] <= '9') && json.Valid([]byte(text))
}

// encode gives the field's value as JSON text; "" when it is left out.
func (f *field) encode() (string, string) {
	if f.Value == "" {
		if f.Required && f.Sort != "text" {
			return "", "is missing"
		}
		if f.Required {
			return `""`, ""
		}
		return "", ""
	}
	switch f.Sort {
	case "number":
		text := strings.TrimSpace(f.Value)
		if !isNumber(text) {
			return "", "must be a number"
		}
		return text, ""
	case "yesno":
		if f.Value != "true" && f.Value != "false" {
			return "", "must be yes or no"
		}
		return f.Value, ""
	case "json":
		if !json.Valid([]byte(f.Value)) {
			return "", "is not valid JSON"
		}
		return f.Value, ""
	}
	b, err := json.Marshal(f.Value)
	if err != nil {
		return "", "cannot be written as JSON"
	}
	return string(b), ""
}

// object puts the fields' values together; extra are members whose JSON text
// is known already. Wrong fields are marked.
func object(fields []field, extra ...[2]string) (string, bool) {
	good := true
	var members []string
	for _, e := range extra {
		name, _ := json.Marshal(e[0]) // of a text it cannot fail
		members = append(members, string(name)+":"+e[1])
	}
	for i := range fields {
		f := &fields[i]
		text, wrong := f.encode()
		if wrong != "" {
			f.Error, good = wrong, false
			continue
		}
		if text == "" {
			continue
		}
		name, _ := json.Marshal(f.member)
		members = append(members, string(name)+":"+text)
	}
	return "{" + strings.Join(members, ",") + "}", good
}

// blame puts what a fault says of places beside the fields; what belongs to
// none is returned.
func blame(fields []field, wrong []fault.Field) (rest []fault.Field) {
next:
	for _, w := range wrong {
		for i := range fields {
			if fields[i].pointer == w.Pointer {
				fields[i].Error = w.Detail
				continue next
			}
		}
		rest = append(rest, w)
	}
	return rest
}

func escapePointer(name string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
}
