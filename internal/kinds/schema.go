package kinds

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"headgate/internal/fault"
)

// maxFields bounds how many wrong places one fault lists.
const maxFields = 20

// noLoader keeps the compiler from opening files or addresses.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("a schema may not refer to %s", url)
}

func compile(name string, schema json.RawMessage) *jsonschema.Schema {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		panic("kinds: schema of " + name + ": " + err.Error())
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	url := "urn:headgate:kind:" + name
	if err := c.AddResource(url, doc); err != nil {
		panic("kinds: schema of " + name + ": " + err.Error())
	}
	s, err := c.Compile(url)
	if err != nil {
		panic("kinds: schema of " + name + ": " + err.Error())
	}
	return s
}

// checkSchema expects args that scan has accepted.
func (k *Kind) checkSchema(args json.RawMessage) error {
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(args)) // numbers stay text
	if err != nil {
		return invalid(argsPointer, "is not valid JSON")
	}
	err = k.compiled.Validate(value)
	if err == nil {
		return nil
	}
	v, ok := errors.AsType[*jsonschema.ValidationError](err)
	if !ok {
		return fault.Wrap(err, fault.Internal, "args_not_checked", "The arguments could not be compared with the schema of "+k.Name+".")
	}
	fields := k.fields(nil, v)
	slices.SortFunc(fields, func(a, b fault.Field) int {
		return strings.Compare(a.Pointer+"\x00"+a.Detail, b.Pointer+"\x00"+b.Detail)
	})
	fields = slices.Compact(fields)
	out := invalid(fields[0].Pointer, fields[0].Detail)
	if more := len(fields) - 1; more > 0 {
		out.Message = strings.TrimSuffix(out.Message, ".") + fmt.Sprintf(", and %d more.", more)
	}
	out.Fields = fields[:min(len(fields), maxFields)]
	return out
}

// fields collects the innermost findings, which are the ones that name a place.
func (k *Kind) fields(out []fault.Field, v *jsonschema.ValidationError) []fault.Field {
	at := argsPointer
	for _, step := range v.InstanceLocation {
		at += "/" + escape(step)
	}
	add := func(pointer, detail string) { out = append(out, fault.Field{Pointer: pointer, Detail: detail}) }
	switch e := v.ErrorKind.(type) {
	case *kind.Required:
		for _, name := range e.Missing {
			add(at+"/"+escape(name), "is missing")
		}
		return out
	case *kind.AdditionalProperties:
		for _, name := range e.Properties {
			add(at+"/"+escape(name), k.unknownArgument(name, len(v.InstanceLocation)))
		}
		return out
	case *kind.PropertyNames:
		add(placeOf(v.SchemaURL)+"/"+escape(e.Property), "is not a possible name: "+namesForm)
		return out
	}
	if len(v.Causes) == 0 {
		add(at, sentence(v.ErrorKind))
	}
	for _, cause := range v.Causes {
		out = k.fields(out, cause)
	}
	return out
}

// placeOf gives the place in the arguments that a schema's propertyNames is
// about, from its own place in the schema of a kind. The validator's
// InstanceLocation is no use there: it is not a copy, and the checks of the
// members that follow, in random order, write over it.
func placeOf(schemaURL string) string {
	_, path, _ := strings.Cut(schemaURL, "#")
	path = strings.TrimSuffix(path, "/propertyNames")
	return argsPointer + strings.ReplaceAll(path, "/properties/", "/")
}

// namesForm puts the pattern of parameter names in runSchema into words.
const namesForm = "names begin with a letter and have up to 64 letters, digits, _ and -"

func (k *Kind) unknownArgument(name string, depth int) string {
	known := make([]string, 0, len(k.compiled.Properties))
	for p := range k.compiled.Properties {
		known = append(known, p)
	}
	slices.Sort(known)
	if near := nearest(name, known); near != "" && depth == 0 {
		return "is not an argument of " + k.Name + "; did you mean " + near + "?"
	}
	return "is not an argument of " + k.Name
}

// sentence says what is wrong with one value, to be read after its pointer.
func sentence(e jsonschema.ErrorKind) string {
	switch e := e.(type) {
	case *kind.Type:
		want := make([]string, len(e.Want))
		for i, w := range e.Want {
			want[i] = article(w)
		}
		return "must be " + strings.Join(want, " or ") + ", not " + article(e.Got)
	case *kind.Minimum:
		return "must be at least " + e.Want.RatString()
	case *kind.Maximum:
		return "must be at most " + e.Want.RatString()
	case *kind.MaxLength:
		return fmt.Sprintf("has %d characters; at most %d are allowed", e.Got, e.Want)
	case *kind.MaxProperties:
		return fmt.Sprintf("has %d members; at most %d are allowed", e.Got, e.Want)
	case *kind.Pattern:
		if strings.Contains(e.Got, "\x00") {
			return "contains a NUL character, which cannot be passed to a program"
		}
		return "must match the pattern " + e.Want
	}
	return e.LocalizedString(message.NewPrinter(language.English))
}

func article(jsonType string) string {
	switch jsonType {
	case "null":
		return "null"
	case "array", "integer", "object":
		return "an " + jsonType
	}
	return "a " + jsonType
}

// escape makes a name a step of a JSON pointer (RFC 6901).
func escape(step string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(step)
}
