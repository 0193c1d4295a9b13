package kinds_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"headgate/internal/fault"
	"headgate/internal/kinds"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDefaultKindsAreComplete(t *testing.T) {
	t.Parallel()
	r := kinds.Default()
	want := []string{"cmd.run", "core.echo", "core.inventory", "core.ping", "core.sleep"}
	if diff := cmp.Diff(want, r.Names()); diff != "" {
		t.Fatal(diff)
	}
	for _, k := range r.All() {
		got, err := r.Lookup(k.Name)
		if err != nil || got != k {
			t.Errorf("%s: %v", k.Name, err)
		}
		if k.Title == "" || k.Summary == "" || k.Timeout < time.Second || k.MaxTimeout < k.Timeout || k.Streams != (k.Name == kinds.Run) {
			t.Errorf("%+v", k)
		}
		delivery := kinds.DeliveryRepeatable
		if k.Name == kinds.Run {
			delivery = kinds.DeliveryOnce
		}
		if k.Delivery != delivery {
			t.Errorf("%s is %s", k.Name, k.Delivery)
		}
		var schema struct {
			Title      string
			Properties map[string]struct{ Title, Description string }
		}
		if err := json.Unmarshal(k.Schema, &schema); err != nil || schema.Title == "" {
			t.Errorf("%s: schema %+v, %v", k.Name, schema, err)
		}
		for name, p := range schema.Properties {
			if p.Title == "" || p.Description == "" {
				t.Errorf("%s: a form cannot name %s", k.Name, name)
			}
		}
	}
}

func TestUnknownKindSuggestsASimilarOne(t *testing.T) {
	t.Parallel()
	r := kinds.Default()
	for name, want := range map[string]string{
		"core.pong": "core.ping", "echo": "core.echo", "Core.Echo": "core.echo", "cmd.rnu": "cmd.run",
		"core.inventry": "core.inventory", "sleep": "core.sleep",
		"": "", "kea.command": "", "x": "", "\xff\x00": "", strings.Repeat("core.ping", 50): "",
	} {
		_, err := r.Lookup(name)
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || f.Kind != fault.Invalid || f.Code != "unknown_kind" || len(f.Fields) != 1 || f.Fields[0].Pointer != "/kind" || len(f.Message) > 200 {
			t.Fatalf("%q: %v", name, err)
		}
		if got := strings.Contains(f.Hint, "Did you mean "); got != (want != "") || !strings.Contains(f.Hint, want) {
			t.Errorf("%q: hint %q, want %q", name, f.Hint, want)
		}
	}
	if err := r.Validate("nope", json.RawMessage(`{}`)); fault.CodeOf(err) != "unknown_kind" {
		t.Error(err)
	}
}

func TestRegistryPanicsOnProgrammersMistakes(t *testing.T) {
	t.Parallel()
	good := kinds.Kind{Name: "a", Schema: json.RawMessage(`{}`)}
	for name, list := range map[string][]kinds.Kind{
		"twice":       {good, good},
		"not JSON":    {{Name: "a", Schema: json.RawMessage(`{`)}},
		"no schema":   {{Name: "a", Schema: json.RawMessage(`{"type": "objekt"}`)}},
		"network":     {{Name: "a", Schema: json.RawMessage(`{"$ref": "http://127.0.0.1:1/x"}`)}},
		"file system": {{Name: "a", Schema: json.RawMessage(`{"$ref": "file:///etc/passwd"}`)}},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			kinds.NewRegistry(list...)
		}()
	}
}

// nested gives an object that is depth levels deep, its own level included.
func nested(depth int) string {
	return strings.Repeat(`{"a":`, depth-1) + `{}` + strings.Repeat(`}`, depth-1)
}

func TestAcceptedArgs(t *testing.T) {
	t.Parallel()
	r := kinds.Default()
	for _, tc := range []struct{ kind, args string }{
		{"core.ping", `{}`},
		{"core.ping", " \n{ }\t"},
		{"core.inventory", `{}`},
		{"core.echo", `{}`},
		{"core.echo", `{"a":9007199254740993,"b":1e99999,"c":-0.10,"d":` + strings.Repeat("9", 500) + `}`},
		{"core.echo", `{"nul":"\u0000","pair":"\ud83d\ude00","text":"äöü 😀","":1}`},
		{"core.echo", nested(kinds.MaxArgsDepth)},
		{"core.echo", `{"a":[` + strings.Repeat(`{},`, 1000) + `{}]}`},
		{"core.echo", `{"a":{"x":1},"b":{"x":1},"text":"` + strings.Repeat("{[", 100) + `"}`},
		{"core.echo", `{"a":"` + strings.Repeat("x", kinds.MaxArgsSize-8) + `"}`},
		{"core.sleep", `{"seconds":0}`},
		{"core.sleep", `{"seconds":3600}`},
		{"core.sleep", `{"seconds":0.25}`},
		{"core.sleep", `{"seconds":1e-300}`},
		{"cmd.run", `{"program":"uname"}`},
		{"cmd.run", `{"program":"uname","args":{}}`},
		{"cmd.run", `{"program":"df","args":{"path":"/\nvar","human":true,"depth":9007199254740993,"name":""}}`},
	} {
		before := strings.Clone(tc.args)
		if err := r.Validate(tc.kind, json.RawMessage(tc.args)); err != nil {
			t.Errorf("%s %.80s: %v", tc.kind, tc.args, err)
		}
		if tc.args != before {
			t.Errorf("%s: the arguments were changed", tc.kind)
		}
	}
}

func TestRefusedArgs(t *testing.T) {
	t.Parallel()
	r := kinds.Default()
	for _, tc := range []struct{ kind, args, pointer, detail string }{
		{"core.echo", ``, "/args", "is empty; write {} for no arguments"},
		{"core.echo", ` `, "/args", "is empty"},
		{"core.echo", `[]`, "/args", "must be an object, not an array"},
		{"core.echo", `null`, "/args", "must be an object, not null"},
		{"core.echo", `"x"`, "/args", "must be an object, not a string"},
		{"core.echo", `12`, "/args", "must be an object, not a number"},
		{"core.echo", `nope`, "/args", "is not valid JSON at byte 1"},
		{"core.echo", `x`, "/args", "is not valid JSON at byte 0"},
		{"core.echo", `{"a":1`, "/args", "ends in the middle of a value"},
		{"core.echo", `{"a":"x`, "/args/a", "ends in the middle of a value"},
		{"core.echo", `{"a":1}{}`, "/args", "is followed by more text"},
		{"core.echo", `{"a":1} x`, "/args", "is followed by more text"},
		{"core.echo", `{"a":1,}`, "/args", "is not valid JSON at byte 6"},
		{"core.echo", `{"a":01}`, "/args", "is not valid JSON at byte 6"},
		{"core.echo", `{"a":NaN}`, "/args/a", "is not valid JSON at byte 5"},
		{"core.echo", "{\"a\":\"\x00\"}", "/args/a", "is not valid JSON at byte 6"},
		{"core.echo", "{\"a\":\"\xff\"}", "/args/a", "not valid Unicode at byte 6"},
		{"core.echo", "{\"\xc3\x28\":1}", "/args", "not valid Unicode at byte 2"},
		{"core.echo", `{"a":"\ud800"}`, "/args/a", "not valid Unicode"},
		{"core.echo", `{"a":1,"b":2,"a":3}`, "/args/a", "is given twice"},
		{"core.echo", `{"a":1,"\u0061":3}`, "/args/a", "is given twice"},
		{"core.echo", `{"x":[{"a/b":1,"a/b":3}]}`, "/args/x/0/a~1b", "is given twice"},
		{"core.echo", nested(kinds.MaxArgsDepth + 1), "/args" + strings.Repeat("/a", kinds.MaxArgsDepth), "lies deeper than 64 levels"},
		{"core.echo", `{"a":` + strings.Repeat("[", 500000), "", "lies deeper than 64 levels"},
		{"core.ping", `{"x":1}`, "/args/x", "is not an argument of core.ping"},
		{"core.ping", `{"a":1,"a":2}`, "/args/a", "is given twice"},
		{"core.sleep", `{}`, "/args/seconds", "is missing"},
		{"core.sleep", `{"second":1,"seconds":1}`, "/args/second", "did you mean seconds?"},
		{"core.sleep", `{"seconds":"5"}`, "/args/seconds", "must be a number, not a string"},
		{"core.sleep", `{"seconds":null}`, "/args/seconds", "must be a number, not null"},
		{"core.sleep", `{"seconds":-1}`, "/args/seconds", "must be at least 0"},
		{"core.sleep", `{"seconds":3600.0000000000000000001}`, "/args/seconds", "must be at most 3600"},
		{"core.sleep", `{"seconds":1e999999999}`, "/args/seconds", "too large an exponent"},
		{"core.sleep", `{"seconds":1e-999999999}`, "/args/seconds", "too large an exponent"},
		{"core.sleep", `{"seconds":1e99999999999999999999}`, "/args/seconds", "too large an exponent"},
		{"core.sleep", `{"seconds":` + strings.Repeat("1", 65) + `}`, "/args/seconds", "too many digits"},
		{"cmd.run", `{}`, "/args/program", "is missing"},
		{"cmd.run", `{"program":"/bin/sh"}`, "/args/program", "must match the pattern"},
		{"cmd.run", `{"program":""}`, "/args/program", "must match the pattern"},
		{"cmd.run", `{"program":"a\n"}`, "/args/program", "must match the pattern"},
		{"cmd.run", `{"program":"` + strings.Repeat("a", 65) + `"}`, "/args/program", "has 65 characters; at most 64 are allowed"},
		{"cmd.run", `{"program":"x","args":[]}`, "/args/args", "must be an object, not an array"},
		{"cmd.run", `{"program":"x","args":{"a":{}}}`, "/args/args/a", "not an object"},
		{"cmd.run", `{"program":"x","args":{"a":"b\u0000c"}}`, "/args/args/a", "contains a NUL character"},
		{"cmd.run", `{"program":"x","args":{"a b/c":1}}`, "/args/args/a b~1c", "is not a possible name"},
		{"cmd.run", `{"program":"x","shell":true}`, "/args/shell", "is not an argument of cmd.run"},
	} {
		err := r.Validate(tc.kind, json.RawMessage(tc.args))
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || f.Kind != fault.Invalid || f.Code != "invalid_args" || len(f.Fields) != 1 {
			t.Errorf("%s %.60q: %v, %+v", tc.kind, tc.args, err, f)
			continue
		}
		if (tc.pointer != "" && f.Fields[0].Pointer != tc.pointer) || !strings.Contains(f.Fields[0].Detail, tc.detail) {
			t.Errorf("%s %.60q:\n got %q %q\nwant %q %q", tc.kind, tc.args, f.Fields[0].Pointer, f.Fields[0].Detail, tc.pointer, tc.detail)
		}
		if !strings.Contains(f.Message, f.Fields[0].Detail) {
			t.Errorf("%q does not stand alone", f.Message)
		}
	}
}

func TestTooLargeArgsAreRefusedUnread(t *testing.T) {
	t.Parallel()
	err := kinds.Default().Validate(kinds.Echo, json.RawMessage(`{"a":"`+strings.Repeat("x", kinds.MaxArgsSize)+`"}`))
	if fault.KindOf(err) != fault.TooLarge || fault.CodeOf(err) != "invalid_args" {
		t.Fatal(err)
	}
}

func TestEveryWrongPlaceIsNamed(t *testing.T) {
	t.Parallel()
	err := kinds.Default().Validate(kinds.Run, json.RawMessage(`{"args":{"b":[],"a":null},"extra":1}`))
	f, ok := errors.AsType[*fault.Error](err)
	if !ok {
		t.Fatal(err)
	}
	var at []string
	for _, field := range f.Fields {
		at = append(at, field.Pointer)
	}
	if diff := cmp.Diff([]string{"/args/args/a", "/args/args/b", "/args/extra", "/args/program"}, at); diff != "" {
		t.Error(diff)
	}
	if !strings.HasSuffix(f.Message, ", and 3 more.") {
		t.Error(f.Message)
	}
	many := `{"program":"x","args":{` + strings.Repeat(`"a`, 1) + `":1`
	for i := range 100 {
		many += `,"` + strings.Repeat("b", i+1) + `":[]`
	}
	f, ok = errors.AsType[*fault.Error](kinds.Default().Validate(kinds.Run, json.RawMessage(many+`}}`)))
	if !ok || len(f.Fields) != 20 {
		t.Errorf("%+v", f)
	}
}

// FuzzValidate compares the quick check of core.echo with the standard
// decoder, and looks for input that makes a schema panic.
func FuzzValidate(f *testing.F) {
	for _, seed := range []string{`{}`, hundredBytes, `{"seconds":1e400}`, `{"program":"x","args":{"a":1}}`, "{\"a\":\"\xff\"}", `{"a":1,"a":2}`, `[`, nested(70)} {
		f.Add(seed)
	}
	r := kinds.Default()
	f.Fuzz(func(t *testing.T, args string) {
		for _, k := range r.All() {
			err := k.Validate(json.RawMessage(args))
			if err == nil && !json.Valid([]byte(args)) {
				t.Fatalf("%s accepts what is no JSON", k.Name)
			}
			if err != nil && fault.CodeOf(err) != kinds.CodeInvalidArgs {
				t.Fatalf("%s: %v", k.Name, err)
			}
			if k.Name == kinds.Echo && err == nil {
				var object map[string]any
				if err := json.Unmarshal([]byte(args), &object); err != nil && !strings.Contains(err.Error(), "cannot unmarshal number") || object == nil {
					t.Fatalf("accepted, but %v", err)
				}
			}
		}
	})
}

// TestTheNameThatIsRefusedIsAlwaysFound makes sure that the order in which the
// members of args are checked, which is random, does not show.
func TestTheNameThatIsRefusedIsAlwaysFound(t *testing.T) {
	t.Parallel()
	r := kinds.Default()
	for range 200 {
		err := r.Validate("cmd.run", json.RawMessage(`{"args":{"a b/c":1},"program":"x"}`))
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || len(f.Fields) != 1 || f.Fields[0].Pointer != "/args/args/a b~1c" {
			t.Fatalf("got %v, %+v", err, f)
		}
	}
}
