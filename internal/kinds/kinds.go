// Package kinds provides what Headgate knows about the kinds of tasks: their
// names, the JSON schemas of their arguments, how they are delivered, their
// time limits, and the validation that controller and agent share. It does not
// execute anything and does not know which kinds or programs an agent allows.
package kinds

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"headgate/internal/fault"
)

// Delivery says what becomes of a task when nobody can know whether it ran.
type Delivery string

// The deliveries. The strings are those of the API and of the database.
const (
	// DeliveryOnce: in doubt the outcome is unknown; there is no second run.
	DeliveryOnce Delivery = "once"
	// DeliveryRepeatable: in doubt it runs again under the same id.
	DeliveryRepeatable Delivery = "repeatable"
)

// Codes of the faults of this package.
const (
	CodeUnknownKind = "unknown_kind"
	CodeInvalidArgs = "invalid_args"
)

// Kind is one sort of task. It is not changed after its registry was made.
type Kind struct {
	Name    string
	Title   string // for a menu
	Summary string // one sentence
	// Schema is the JSON schema (draft 2020-12) of the arguments, with titles
	// and descriptions from which a form can be made.
	Schema   json.RawMessage
	Delivery Delivery
	// Timeout is the time to run in when the task names none; MaxTimeout is
	// the most that a task may name. An agent's policy may allow less.
	Timeout    time.Duration
	MaxTimeout time.Duration
	Streams    bool // prints output while it runs
	// Supersedes: a newer task replaces those like it that have not started,
	// because only the newest answer is of use.
	Supersedes bool

	compiled *jsonschema.Schema
	// anyObject: the schema admits every object, so it need not be consulted.
	// core.echo is on the hot path of submissions.
	anyObject bool
}

// Registry is a fixed set of kinds, safe for concurrent use.
type Registry struct {
	kinds []*Kind // by name
}

// NewRegistry compiles the schemas of the kinds. It panics when a schema is
// wrong or a name is given twice, since both are mistakes in the program.
func NewRegistry(list ...Kind) *Registry {
	r := &Registry{}
	for _, k := range list {
		k.compiled = compile(k.Name, k.Schema)
		k.anyObject = string(k.Schema) == anyObjectSchema
		r.kinds = append(r.kinds, &k)
	}
	slices.SortFunc(r.kinds, func(a, b *Kind) int { return strings.Compare(a.Name, b.Name) })
	for i := 1; i < len(r.kinds); i++ {
		if r.kinds[i].Name == r.kinds[i-1].Name {
			panic("kinds: " + r.kinds[i].Name + " is registered twice")
		}
	}
	return r
}

// Lookup gives the kind of that name, or a fault that suggests a similar one.
func (r *Registry) Lookup(name string) (*Kind, error) {
	i, ok := slices.BinarySearchFunc(r.kinds, name, func(k *Kind, n string) int { return strings.Compare(k.Name, n) })
	if !ok {
		return nil, r.unknown(name)
	}
	return r.kinds[i], nil
}

// Names gives all names in order.
func (r *Registry) Names() []string {
	names := make([]string, len(r.kinds))
	for i, k := range r.kinds {
		names[i] = k.Name
	}
	return names
}

// All gives all kinds in the order of their names.
func (r *Registry) All() []*Kind { return slices.Clone(r.kinds) }

// maxShownName bounds how much of a wrong name is repeated to its author.
const maxShownName = 64

func (r *Registry) unknown(name string) error {
	shown := name
	if len(shown) > maxShownName {
		shown = shown[:maxShownName] + "..."
	}
	err := fault.Newf(fault.Invalid, CodeUnknownKind, "There is no kind of task named %q.", shown)
	if near := nearest(name, r.Names()); near != "" {
		return err.WithHint("Did you mean "+near+"?").WithField("/kind", "is not known; did you mean "+near+"?")
	}
	return err.WithHint("The kinds are: "+strings.Join(r.Names(), ", ")+".").WithField("/kind", "is not known")
}
