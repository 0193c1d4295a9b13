package policy

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"headgate/internal/fault"
)

// The types of parameters.
const (
	typeString = "string"
	typeInt    = "int"
	typeBool   = "bool"
	typeEnum   = "enum"
)

const (
	// defaultMaxLength of a string value, in bytes: room for a path or a
	// domain name (255) and nothing that needs thought.
	defaultMaxLength = 256
	// mostMaxLength keeps one argument far below the system's limit.
	mostMaxLength = 4096
)

// Param is a typed parameter of a program.
type Param struct {
	Type        string   `yaml:"type"`
	Description string   `yaml:"description"`
	Pattern     string   `yaml:"pattern"`    // string: RE2, must match the whole value
	MaxLength   int      `yaml:"max_length"` // string: bytes
	Min         *int64   `yaml:"min"`        // int
	Max         *int64   `yaml:"max"`        // int
	Values      []string `yaml:"values"`     // enum
	Required    bool     `yaml:"required"`
	Default     *string  `yaml:"default"`
	// AllowLeadingDash admits values that begin with "-" and could be taken
	// for an option.
	AllowLeadingDash bool `yaml:"allow_leading_dash"`

	pattern *regexp.Regexp
}

// prepare checks the declaration itself.
func (p *Param) prepare(name string) []string {
	var bad []string
	say := func(format string, args ...any) {
		bad = append(bad, fmt.Sprintf("parameter %s: ", name)+fmt.Sprintf(format, args...))
	}
	if !slices.Contains([]string{typeString, typeInt, typeBool, typeEnum}, p.Type) {
		say("type must be string, int, bool or enum, not %q", p.Type)
		return bad
	}
	if p.Type != typeString && (p.Pattern != "" || p.MaxLength != 0) {
		say("pattern and max_length are for strings")
	}
	if p.Type != typeInt && (p.Min != nil || p.Max != nil) {
		say("min and max are for ints")
	}
	if (p.Type == typeEnum) != (len(p.Values) > 0) {
		say("values belong to an enum and an enum needs them")
	}
	if p.Min != nil && p.Max != nil && *p.Min > *p.Max {
		say("min is above max")
	}
	if p.MaxLength < 0 || p.MaxLength > mostMaxLength {
		say("max_length must be from 1 to %d", mostMaxLength)
	}
	if p.MaxLength == 0 {
		p.MaxLength = defaultMaxLength
	}
	if p.Pattern != "" {
		var err error
		if p.pattern, err = regexp.Compile(`\A(?:` + p.Pattern + `)\z`); err != nil {
			say("pattern: %v", err)
		}
	}
	if p.Required && p.Default != nil {
		say("a required parameter has no default")
	}
	if len(bad) == 0 {
		bad = append(bad, p.checkOwnValues(name)...)
	}
	return bad
}

// checkOwnValues holds the policy's own values to its rules.
func (p *Param) checkOwnValues(name string) []string {
	own := slices.Clone(p.Values)
	if p.Default != nil {
		own = append(own, *p.Default)
	}
	var bad []string
	for _, v := range own {
		if err := p.check(v); err != "" {
			bad = append(bad, fmt.Sprintf("parameter %s: its value %q %s", name, v, err))
		}
	}
	return bad
}

// text turns a JSON value into the text of an argument.
func (p *Param) text(value any) (string, string) {
	switch v := value.(type) {
	case string:
		if p.Type == typeString || p.Type == typeEnum {
			return v, p.check(v)
		}
	case json.Number:
		if p.Type == typeInt {
			return v.String(), p.check(v.String())
		}
	case bool:
		if p.Type == typeBool {
			return strconv.FormatBool(v), ""
		}
	}
	want := map[string]string{typeString: "a string", typeEnum: "one of " + strings.Join(p.Values, ", "), typeInt: "a whole number", typeBool: "true or false"}
	return "", "must be " + want[p.Type]
}

// check says what is wrong with a value, "" when it is acceptable.
func (p *Param) check(v string) string {
	if strings.HasPrefix(v, "-") && !p.AllowLeadingDash {
		return "begins with -, which the program could take for an option; the policy does not allow that here"
	}
	switch p.Type {
	case typeInt:
		return p.checkInt(v)
	case typeBool:
		if v != "true" && v != "false" {
			return "must be true or false"
		}
	case typeEnum:
		if !slices.Contains(p.Values, v) {
			return "must be one of " + strings.Join(p.Values, ", ")
		}
	}
	return p.checkText(v)
}

func (p *Param) checkInt(v string) string {
	n, err := strconv.ParseInt(v, 10, 64)
	switch {
	case err != nil || strconv.FormatInt(n, 10) != v:
		return "must be a whole number"
	case p.Min != nil && n < *p.Min:
		return fmt.Sprintf("must be at least %d", *p.Min)
	case p.Max != nil && n > *p.Max:
		return fmt.Sprintf("must be at most %d", *p.Max)
	}
	return ""
}

func (p *Param) checkText(v string) string {
	switch {
	case p.Type == typeString && len(v) > p.MaxLength:
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(v), p.MaxLength)
	case !utf8.ValidString(v) || strings.ContainsFunc(v, unicode.IsControl):
		return "contains control characters or is not valid UTF-8"
	case p.pattern != nil && !p.pattern.MatchString(v):
		return "does not match the pattern " + p.Pattern
	}
	return ""
}

// schema describes the parameter to a form.
func (p *Param) schema() map[string]any {
	s := map[string]any{}
	if p.Description != "" {
		s["description"] = p.Description
	}
	switch p.Type {
	case typeInt:
		s["type"] = "integer"
		if p.Min != nil {
			s["minimum"] = *p.Min
		}
		if p.Max != nil {
			s["maximum"] = *p.Max
		}
	case typeBool:
		s["type"] = "boolean"
	case typeEnum:
		s["type"], s["enum"] = "string", p.Values
	default:
		s["type"], s["maxLength"] = "string", p.MaxLength
		if p.Pattern != "" {
			s["pattern"] = "^(?:" + p.Pattern + ")$"
		}
	}
	if p.Default != nil {
		s["default"] = p.defaultValue()
	}
	return s
}

func (p *Param) defaultValue() any {
	switch p.Type {
	case typeInt:
		return json.Number(*p.Default)
	case typeBool:
		return *p.Default == "true"
	}
	return *p.Default
}

// refused is the fault for parameters that the policy does not admit.
func refused(pointer, detail string) *fault.Error {
	return fault.Newf(fault.Invalid, "invalid_args", "The value of %s %s.", strings.TrimPrefix(pointer, "/args/args/"), detail).
		WithField(pointer, detail)
}
