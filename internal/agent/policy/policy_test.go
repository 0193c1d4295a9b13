package policy_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/agent/policy"
	"headgate/internal/fault"
)

const example = `
version: 1
kinds: [core.ping, cmd.run]
programs:
  tail-log:
    path: /usr/bin/tail
    description: Show the last lines of a log.
    args: ["-n", "{lines}", "--", "/var/log/{log}.log", "{extra}", "{{braces}}", "--user={who}:{flag}"]
    params:
      lines: {type: int, min: 1, max: 100, default: "10"}
      log: {type: enum, values: [kea, named], required: true}
      extra: {type: string, pattern: "[a-z]+", max_length: 8}
      who: {type: string, allow_leading_dash: true, default: nobody}
      flag: {type: bool, default: "false"}
    env: {TZ: UTC}
    timeout: 10s
    success_codes: [0, 3]
    max_output_bytes: 1000
`

func load(t *testing.T, text string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestArgumentsAreFilledIntoTheTemplate(t *testing.T) {
	t.Parallel()
	prog, err := load(t, example).Program("tail-log")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		values map[string]any
		want   []string
		bad    string // part of the message
	}{
		"defaults": {
			map[string]any{"log": "kea"},
			[]string{"-n", "10", "--", "/var/log/kea.log", "{braces}", "--user=nobody:false"},
			"",
		},
		"all given": {
			map[string]any{"log": "named", "lines": json.Number("100"), "extra": "abc", "who": "-x", "flag": true},
			[]string{"-n", "100", "--", "/var/log/named.log", "abc", "{braces}", "--user=-x:true"},
			"",
		},
		"required missing":       {map[string]any{}, nil, "log is required"},
		"not declared":           {map[string]any{"log": "kea", "file": "/etc/shadow"}, nil, "not declared"},
		"not in enum":            {map[string]any{"log": "../../etc/shadow"}, nil, "one of kea, named"},
		"enum of another type":   {map[string]any{"log": true}, nil, "one of kea, named"},
		"int as string":          {map[string]any{"log": "kea", "lines": "5"}, nil, "whole number"},
		"int with exponent":      {map[string]any{"log": "kea", "lines": json.Number("1e1")}, nil, "whole number"},
		"int with fraction":      {map[string]any{"log": "kea", "lines": json.Number("1.5")}, nil, "whole number"},
		"int beyond 64 bits":     {map[string]any{"log": "kea", "lines": json.Number("99999999999999999999")}, nil, "whole number"},
		"int negative":           {map[string]any{"log": "kea", "lines": json.Number("-9")}, nil, "begins with -"},
		"int too large":          {map[string]any{"log": "kea", "lines": json.Number("101")}, nil, "at most 100"},
		"int too small":          {map[string]any{"log": "kea", "lines": json.Number("0")}, nil, "at least 1"},
		"leading dash":           {map[string]any{"log": "kea", "extra": "-f"}, nil, "begins with -"},
		"pattern":                {map[string]any{"log": "kea", "extra": "a b"}, nil, "pattern"},
		"pattern, second line":   {map[string]any{"log": "kea", "extra": "abc\n"}, nil, "control characters"},
		"pattern matches a part": {map[string]any{"log": "kea", "extra": "abc;"}, nil, "pattern"},
		"too long":               {map[string]any{"log": "kea", "extra": "abcdefghi"}, nil, "at most 8"},
		"NUL":                    {map[string]any{"log": "kea", "who": "a\x00b"}, nil, "control characters"},
		"not UTF-8":              {map[string]any{"log": "kea", "who": "a\xff"}, nil, "UTF-8"},
		"a list":                 {map[string]any{"log": "kea", "who": []any{"a", "b"}}, nil, "must be a string"},
		"null":                   {map[string]any{"log": "kea", "who": nil}, nil, "must be a string"},
		"bool as string":         {map[string]any{"log": "kea", "flag": "true"}, nil, "true or false"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := prog.Arguments(c.values)
			if c.bad != "" {
				if err == nil || fault.CodeOf(err) != "invalid_args" || !strings.Contains(err.Error(), c.bad) {
					t.Fatalf("got %q and %v, want invalid_args with %q", got, err, c.bad)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestNoValueMakesASecondArgument is the heart of the matter: whatever a value
// holds, it stays within one argument.
func TestNoValueMakesASecondArgument(t *testing.T) {
	t.Parallel()
	prog, err := load(t, "version: 1\nprograms: {echo: {path: /bin/echo, args: ['{a}', 'x{b}y'], params: {a: {type: string, max_length: 4096}, b: {type: string, max_length: 4096}}}}").Program("echo")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"a b", "a; rm -rf /", "$(id)", "`id`", "a|b", "a&&b", `a"b`, "a'b", "{b}", "{{", "$HOME", "*", "~", "a\u00a0b", "%s", "\\", "=", "a=b"} {
		got, err := prog.Arguments(map[string]any{"a": v, "b": v})
		if err != nil {
			t.Fatalf("%q: %v", v, err)
		}
		if diff := cmp.Diff([]string{v, "x" + v + "y"}, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", v, diff)
		}
	}
}

func TestAPolicyIsReadStrictly(t *testing.T) {
	t.Parallel()
	entry := func(s string) string { return "version: 1\nprograms: {p: {path: /bin/true, " + s + "}}" }
	for name, c := range map[string]struct{ text, want string }{
		"empty":               {"", "EOF"},
		"no version":          {"programs: {}", "version must be 1"},
		"other version":       {"version: 2", "version must be 1"},
		"unknown key":         {"version: 1\nshell: true", "shell"},
		"unknown program key": {entry("shell: true"), "shell"},
		"unknown param key":   {entry("args: ['{a}'], params: {a: {type: string, regex: x}}"), "regex"},
		"two documents":       {"version: 1\n---\nversion: 1", "more than one document"},
		"unknown kind":        {"version: 1\nkinds: [core.pong]", "core.pong is not known"},
		"key given twice":     {"version: 1\nversion: 1", "already defined"},
		"relative path":       {"version: 1\nprograms: {p: {path: true}}", "absolute"},
		"path with dots":      {"version: 1\nprograms: {p: {path: /bin/../bin/true}}", "plain"},
		"program's name":      {"version: 1\nprograms: {'../p': {path: /bin/true}}", "the name must be"},
		"no entry":            {"version: 1\nprograms: {p: }", "needs an entry"},
		"unknown type":        {entry("args: ['{a}'], params: {a: {type: path}}"), "type must be"},
		"bad pattern":         {entry("args: ['{a}'], params: {a: {type: string, pattern: '('}}"), "pattern"},
		"pattern on int":      {entry("args: ['{a}'], params: {a: {type: int, pattern: x}}"), "for strings"},
		"min on string":       {entry("args: ['{a}'], params: {a: {type: string, min: 1}}"), "for ints"},
		"min above max":       {entry("args: ['{a}'], params: {a: {type: int, min: 2, max: 1}}"), "above max"},
		"enum without values": {entry("args: ['{a}'], params: {a: {type: enum}}"), "values"},
		"default not allowed": {entry("args: ['{a}'], params: {a: {type: int, max: 5, default: '6'}}"), "at most 5"},
		"default is option":   {entry("args: ['{a}'], params: {a: {type: string, default: '-x'}}"), "begins with -"},
		"required + default":  {entry("args: ['{a}'], params: {a: {type: string, required: true, default: x}}"), "no default"},
		"undeclared":          {entry("args: ['{a}']"), "undeclared parameter"},
		"unused":              {entry("params: {a: {type: string}}"), "not used"},
		"open brace":          {entry("args: ['{a']"), "without a parameter"},
		"closing brace":       {entry("args: ['a}']"), "without a {"},
		"brace with a space":  {entry("args: ['{a b}']"), "without a parameter"},
		"reserved env":        {entry("env: {HEADGATE_TASK_ID: '1'}"), "cannot be set"},
		"negative timeout":    {entry("timeout: -1s"), "timeout"},
		"relative cwd":        {entry("cwd: tmp"), "cwd"},
		"umask not octal":     {entry("umask: '089'"), "umask must be octal"},
		"umask too large":     {entry("umask: '1000'"), "umask must be octal"},
		"negative grace":      {entry("grace: -1s"), "grace must be from 0s"},
		"grace too long":      {entry("grace: 31s"), "grace must be from 0s to 30s"},
		"code out of range":   {entry("success_codes: [0, 256]"), "success_codes must be"},
		"children by a word":  {entry("leave_children: maybe"), "cannot unmarshal"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := policy.Parse([]byte(c.text))
			if err == nil || fault.CodeOf(err) != "policy_invalid" || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want policy_invalid with %q", err, c.want)
			}
		})
	}
}

func TestHowAProgramRunsAndEndsIsRead(t *testing.T) {
	t.Parallel()
	p := load(t, "version: 1\nprograms: {a: {path: /bin/true}, b: {path: /bin/true, umask: 027, grace: 0s, leave_children: true, success_codes: [0, 2]}}")
	a, b := p.Programs["a"], p.Programs["b"]
	if a.UmaskOr(0o022) != 0o022 || a.Grace != nil || a.LeaveChildren || !a.Succeeded(0) || a.Succeeded(2) {
		t.Errorf("defaults: %+v", a)
	}
	if b.UmaskOr(0o022) != 0o027 || b.Grace == nil || *b.Grace != 0 || !b.LeaveChildren || !b.Succeeded(2) || b.Succeeded(1) {
		t.Errorf("as written: %+v", b)
	}
}

func TestAllMistakesAreReportedTogether(t *testing.T) {
	t.Parallel()
	_, err := policy.Parse([]byte("version: 3\nkinds: [a.b]\nprograms: {p: {path: x, cwd: y}}"))
	for _, want := range []string{"version must", "a.b is not", "path must", "cwd must"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not reported: %v", want, err)
		}
	}
}

func TestAPolicyThatOthersCanWriteIsRefused(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	for mode, ok := range map[os.FileMode]bool{0o600: true, 0o644: true, 0o640: true, 0o660: false, 0o666: false, 0o602: false} {
		if err := os.WriteFile(path, []byte("version: 1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		_, err := policy.Load(path)
		if ok != (err == nil) || (!ok && fault.CodeOf(err) != "policy_denied") {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	if _, err := policy.Load(filepath.Join(t.TempDir(), "absent")); fault.CodeOf(err) != "policy_unreadable" {
		t.Errorf("absent file: %v", err)
	}
	if _, err := policy.Load(t.TempDir()); fault.CodeOf(err) != "policy_unreadable" {
		t.Errorf("a folder: %v", err)
	}
}

func TestAPolicyOfAnotherUserIsRefused(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root to give a file away")
	}
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte("version: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(path, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if _, err := policy.Load(path); fault.CodeOf(err) != "policy_denied" {
		t.Errorf("got %v", err)
	}
}

func TestKindsAreAllowedAsTheFileSays(t *testing.T) {
	t.Parallel()
	p := load(t, example)
	got := map[string]bool{}
	for _, k := range []string{"core.ping", "core.echo", "cmd.run"} {
		got[k] = p.Allows(k)
	}
	if diff := cmp.Diff(map[string]bool{"core.ping": true, "core.echo": false, "cmd.run": true}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	none := policy.None()
	if !none.Allows("core.echo") || none.Allows("cmd.run") {
		t.Error("without a policy the core kinds are allowed and no program")
	}
	if _, err := p.Program("sh"); fault.CodeOf(err) != "unknown_program" {
		t.Errorf("unknown program: %v", err)
	}
}

func TestTheSchemaDescribesTheParameters(t *testing.T) {
	t.Parallel()
	prog, err := load(t, example).Program("tail-log")
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"additionalProperties":false,"properties":{` +
		`"extra":{"maxLength":8,"pattern":"^(?:[a-z]+)$","type":"string"},` +
		`"flag":{"default":false,"type":"boolean"},` +
		`"lines":{"default":10,"maximum":100,"minimum":1,"type":"integer"},` +
		`"log":{"enum":["kea","named"],"type":"string"},` +
		`"who":{"default":"nobody","maxLength":256,"type":"string"}},"required":["log"],"type":"object"}`
	if diff := cmp.Diff(want, string(prog.Schema())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTheDevelopmentPolicyIsAcceptable(t *testing.T) {
	t.Parallel()
	data, err := policy.Development("/usr/local/bin/headgate-agent", "/var/lib/{odd}/ids")
	if err != nil {
		t.Fatal(err)
	}
	prog, err := load(t, string(data)).Program(policy.AppendName)
	if err != nil {
		t.Fatal(err)
	}
	got, err := prog.Arguments(nil)
	if diff := cmp.Diff([]string{"append-id", "/var/lib/{odd}/ids"}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
