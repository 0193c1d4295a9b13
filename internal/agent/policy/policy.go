package policy

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	"gopkg.in/yaml.v3"

	"headgate/internal/fault"
	"headgate/internal/kinds"
)

// maxFile bounds what is read of a policy file.
const maxFile = 1 << 20

// Policy is what an agent may do. It is not changed after it was loaded.
type Policy struct {
	Version  int                 `yaml:"version"`
	Kinds    []string            `yaml:"kinds"`
	Programs map[string]*Program `yaml:"programs"`
}

// None is the policy of an agent without a policy file: the core kinds, which
// change nothing, and no program.
func None() *Policy { return &Policy{Version: 1} }

// Load reads and checks a policy file; all that is wrong is reported together.
func Load(path string) (*Policy, error) {
	// O_NONBLOCK: a named pipe in its place must not hang the start.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fault.Wrap(err, fault.NotFound, "policy_unreadable", "The policy file "+path+" cannot be opened.")
	}
	defer f.Close() // read only
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fault.Wrap(err, fault.Invalid, "policy_unreadable", "The policy file "+path+" is not a regular file of at most 1 MiB.")
	}
	if err := trusted("The policy file "+path, info); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "policy_unreadable", "The policy file "+path+" cannot be read.")
	}
	p, err := Parse(data)
	if e, ok := errors.AsType[*fault.Error](err); ok {
		c := *e
		c.Message = "The policy file " + path + " is not acceptable: " + e.Message
		return nil, &c
	}
	return p, err
}

// Parse reads the text of a policy.
func Parse(data []byte) (*Policy, error) {
	p := &Policy{}
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(p); err != nil {
		return nil, invalid([]string{strings.TrimPrefix(err.Error(), "yaml: ")})
	}
	if err := d.Decode(&struct{}{}); !errors.Is(err, io.EOF) {
		return nil, invalid([]string{"there is more than one document in it"})
	}
	var bad []string
	if p.Version != 1 {
		bad = append(bad, "version must be 1")
	}
	known := kinds.Default().Names()
	for _, k := range p.Kinds {
		if !slices.Contains(known, k) {
			bad = append(bad, "the kind "+k+" is not known; the kinds are "+strings.Join(known, ", "))
		}
	}
	for _, name := range p.Names() {
		prog := p.Programs[name]
		if prog == nil || len(name) > 64 || !plainProgramName(name) {
			bad = append(bad, "program "+name+": the name must be of letters, digits, . _ and -, and needs an entry")
			continue
		}
		bad = append(bad, prog.prepare(name)...)
	}
	if len(bad) > 0 {
		slices.Sort(bad)
		return nil, invalid(bad)
	}
	return p, nil
}

func plainProgramName(s string) bool {
	const first = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	return s != "" && strings.Contains(first, s[:1]) && strings.Trim(s, first+"._-") == ""
}

func invalid(bad []string) *fault.Error {
	return fault.New(fault.Invalid, "policy_invalid", strings.Join(bad, "; ")+".").
		WithHint("Run headgate-agent policy check FILE after each change.")
}

// Names gives the names of the programs in order.
func (p *Policy) Names() []string { return slices.Sorted(maps.Keys(p.Programs)) }

// Allows says whether tasks of the kind may run.
func (p *Policy) Allows(kind string) bool {
	if kind == kinds.Run && len(p.Programs) == 0 {
		return false
	}
	return p.Kinds == nil || slices.Contains(p.Kinds, kind)
}

// Program finds a program, or says that the policy has none of that name.
func (p *Policy) Program(name string) (*Program, error) {
	if prog := p.Programs[name]; prog != nil {
		return prog, nil
	}
	return nil, fault.Newf(fault.NotFound, "unknown_program", "The agent's policy has no program named %q.", name).
		WithHint("The policy allows: " + strings.Join(p.Names(), ", ") + ".")
}
