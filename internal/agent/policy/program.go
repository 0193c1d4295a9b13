package policy

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"headgate/internal/fault"
)

const (
	// DefaultMaxOutput is the most bytes of both streams that are kept of one
	// run; what is printed beyond is counted and dropped.
	DefaultMaxOutput = 64 << 20
	// DefaultTimeout is the longest run of a program whose policy says nothing.
	DefaultTimeout = 10 * time.Minute
	// MostGrace is the longest time between SIGTERM and SIGKILL: the controller
	// waits for an agent's word a minute beyond the task's time limit.
	MostGrace = 30 * time.Second
	// mostTimeout: longer work belongs into a service of its own.
	mostTimeout = 24 * time.Hour
)

// Program is a program that cmd.run may start.
type Program struct {
	Path        string            `yaml:"path"`
	Description string            `yaml:"description"`
	Args        []string          `yaml:"args"` // template, see the package comment
	Params      map[string]*Param `yaml:"params"`
	User        string            `yaml:"user"`
	Group       string            `yaml:"group"`  // instead of the user's own
	Groups      []string          `yaml:"groups"` // instead of the user's further ones
	Cwd         string            `yaml:"cwd"`
	Umask       string            `yaml:"umask"` // octal
	Env         map[string]string `yaml:"env"`
	Timeout     time.Duration     `yaml:"timeout"`
	Grace       *time.Duration    `yaml:"grace"` // nil = the agent's default
	SuccessCode []int             `yaml:"success_codes"`
	MaxOutput   int64             `yaml:"max_output_bytes"`
	// LeaveChildren lets what the program starts go on after its end.
	LeaveChildren bool `yaml:"leave_children"`

	template []element
	umask    *int
}

// element is one element of the argument list: text and parameters by turns.
type element []piece

type piece struct {
	text  string
	param string // set instead of text
}

// prepare checks the entry and fills in the defaults.
func (p *Program) prepare(name string) []string {
	var bad []string
	say := func(format string, args ...any) {
		bad = append(bad, fmt.Sprintf("program %s: ", name)+fmt.Sprintf(format, args...))
	}
	if !filepath.IsAbs(p.Path) || filepath.Clean(p.Path) != p.Path {
		say("path must be absolute and plain, not %q", p.Path)
	}
	if p.Cwd != "" && !filepath.IsAbs(p.Cwd) {
		say("cwd must be absolute")
	}
	if (p.User != "" || p.Group != "" || len(p.Groups) > 0) && os.Geteuid() != 0 {
		say("user, group and groups need an agent that runs as root")
	}
	if p.Umask != "" {
		n, err := strconv.ParseUint(p.Umask, 8, 9)
		if err != nil {
			say("umask must be octal, from 000 to 777, not %q", p.Umask)
		}
		umask := int(n)
		p.umask = &umask
	}
	if p.Grace != nil && (*p.Grace < 0 || *p.Grace > MostGrace) {
		say("grace must be from 0s to %s", MostGrace)
	}
	for _, code := range p.SuccessCode {
		if code < 0 || code > 255 {
			say("success_codes must be from 0 to 255, not %d", code)
		}
	}
	if p.Timeout < 0 || p.Timeout > mostTimeout {
		say("timeout must be from 1ns to %s", mostTimeout)
	}
	if p.MaxOutput < 0 {
		say("max_output_bytes must not be negative")
	}
	for key, v := range p.Env {
		if key == "" || strings.ContainsAny(key, "=\x00") || strings.HasPrefix(key, "HEADGATE_") || strings.Contains(v, "\x00") {
			say("env %q cannot be set", key)
		}
	}
	p.Timeout = orDefault(p.Timeout, DefaultTimeout)
	p.MaxOutput = orDefault(p.MaxOutput, DefaultMaxOutput)
	if len(p.SuccessCode) == 0 {
		p.SuccessCode = []int{0}
	}
	if p.Cwd == "" {
		p.Cwd = "/"
	}
	for key, param := range p.Params {
		if param == nil || !plainName(key) {
			say("parameter %q needs a name of letters, digits, _ and - and a declaration", key)
			continue
		}
		for _, b := range param.prepare(key) {
			say("%s", b)
		}
	}
	return append(bad, p.parseTemplate(name)...)
}

func orDefault[T comparable](v, d T) T {
	var zero T
	if v == zero {
		return d
	}
	return v
}

func plainName(s string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	return s != "" && len(s) <= 64 && strings.Contains(letters, s[:1]) && strings.Trim(s, letters+"0123456789_-") == ""
}

func (p *Program) parseTemplate(name string) []string {
	var bad []string
	used := map[string]bool{}
	for _, arg := range p.Args {
		e, err := parseElement(arg)
		if err != "" {
			bad = append(bad, fmt.Sprintf("program %s: argument %q %s", name, arg, err))
		}
		for _, part := range e {
			if part.param != "" && p.Params[part.param] == nil {
				bad = append(bad, fmt.Sprintf("program %s: argument %q uses the undeclared parameter %q", name, arg, part.param))
			}
			used[part.param] = true
		}
		p.template = append(p.template, e)
	}
	for key := range p.Params {
		if !used[key] {
			bad = append(bad, fmt.Sprintf("program %s: parameter %s is not used by any argument", name, key))
		}
	}
	return bad
}

func parseElement(arg string) (element, string) {
	var e element
	var text strings.Builder
	for rest := arg; rest != ""; {
		switch {
		case strings.HasPrefix(rest, "{{") || strings.HasPrefix(rest, "}}"):
			text.WriteByte(rest[0])
			rest = rest[2:]
		case rest[0] == '{':
			name, after, ok := strings.Cut(rest[1:], "}")
			if !ok || !plainName(name) {
				return nil, "has a { without a parameter's name and }; write {{ for a brace"
			}
			e = append(e, piece{text: text.String()}, piece{param: name})
			text.Reset()
			rest = after
		case rest[0] == '}':
			return nil, "has a } without a {; write }} for a brace"
		case rest[0] == 0:
			return nil, "contains a NUL"
		default:
			text.WriteByte(rest[0])
			rest = rest[1:]
		}
	}
	return append(e, piece{text: text.String()}), ""
}

// Arguments gives the argument list for the values, without the program's own
// name at its beginning. A fault has the code invalid_args.
func (p *Program) Arguments(values map[string]any) ([]string, error) {
	texts := map[string]string{}
	for name, value := range values {
		param := p.Params[name]
		if param == nil {
			return nil, refused("/args/args/"+name, "is not declared as a parameter of this program")
		}
		text, bad := param.text(value)
		if bad != "" {
			return nil, refused("/args/args/"+name, bad)
		}
		texts[name] = text
	}
	for name, param := range p.Params {
		if _, given := texts[name]; given {
			continue
		}
		if param.Required {
			return nil, refused("/args/args/"+name, "is required")
		}
		if param.Default != nil {
			texts[name] = *param.Default
		}
	}
	var argv []string
	for _, e := range p.template {
		if arg, ok := e.fill(texts); ok {
			argv = append(argv, arg)
		}
	}
	return argv, nil
}

func (e element) fill(texts map[string]string) (string, bool) {
	var b strings.Builder
	for _, part := range e {
		text := part.text
		if part.param != "" {
			v, ok := texts[part.param]
			if !ok {
				return "", false
			}
			text = v
		}
		b.WriteString(text)
	}
	return b.String(), true
}

// UmaskOr gives the umask of the entry, or the given one when it has none.
func (p *Program) UmaskOr(other int) int {
	if p.umask == nil {
		return other
	}
	return *p.umask
}

// Succeeded says whether the exit code counts as success.
func (p *Program) Succeeded(code int) bool { return slices.Contains(p.SuccessCode, code) }

// CheckFile says whether the program's file may be trusted now: a regular,
// executable file of root or of our own user that nobody else can change.
func (p *Program) CheckFile() error {
	info, err := os.Stat(p.Path)
	if err != nil {
		return fault.Wrap(err, fault.NotFound, "spawn_failed", "The program "+p.Path+" does not exist or cannot be examined.")
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return fault.New(fault.Invalid, "spawn_failed", p.Path+" is not an executable file.")
	}
	return trusted(p.Path, info)
}

// trusted refuses what another user than root or ourselves could have written.
func trusted(path string, info fs.FileInfo) error {
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fault.Newf(fault.Forbidden, "policy_denied", "%s can be changed by other users (mode %04o).", path, mode).
			WithHint("Run chmod go-w on it after making sure that it is what it should be.")
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fault.Newf(fault.Forbidden, "policy_denied", "%s belongs to user %d, neither to root nor to the agent's own user.", path, st.Uid).
			WithHint("Run chown root on it after making sure that it is what it should be.")
	}
	return nil
}

// Schema gives the JSON schema of the program's parameters, for forms.
func (p *Program) Schema() json.RawMessage {
	properties := map[string]any{}
	required := []string{}
	for name, param := range p.Params {
		properties[name] = param.schema()
		if param.Required {
			required = append(required, name)
		}
	}
	slices.Sort(required)
	b, err := json.Marshal(map[string]any{
		"type": "object", "properties": properties, "required": required, "additionalProperties": false,
	})
	if err != nil {
		panic("policy: schema of parameters: " + err.Error()) // strings and numbers only
	}
	return b
}
