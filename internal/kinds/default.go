package kinds

import (
	"encoding/json"
	"time"
)

// Names of the kinds that every agent of this version knows.
const (
	Ping      = "core.ping"
	Echo      = "core.echo"
	Sleep     = "core.sleep"
	Inventory = "core.inventory"
	Run       = "cmd.run"
)

const (
	// quickTimeout is for kinds that answer at once on a healthy machine.
	quickTimeout    = 10 * time.Second
	quickMaxTimeout = time.Minute
	// sleepTimeout is the longest sleep of the schema (an hour) and a reserve.
	sleepTimeout    = 65 * time.Minute
	sleepMaxTimeout = 2 * time.Hour
	// runTimeout: most administrative commands end within seconds; a command
	// that hangs should be noticed soon. Longer ones name their own time.
	runTimeout    = 30 * time.Second
	runMaxTimeout = time.Hour
)

// Default gives the registry of the product. It compiles the schemas; make it
// once, when the program is put together.
func Default() *Registry {
	return NewRegistry(
		Kind{
			Name: Ping, Title: "Ping", Summary: "Answers at once, to show that tasks get through.",
			Schema: json.RawMessage(noArgsSchema), Delivery: DeliveryRepeatable,
			Timeout: quickTimeout, MaxTimeout: quickMaxTimeout,
		},
		Kind{
			Name: Echo, Title: "Echo", Summary: "Gives its arguments back as its result, unchanged.",
			Schema: json.RawMessage(anyObjectSchema), Delivery: DeliveryRepeatable,
			Timeout: quickTimeout, MaxTimeout: quickMaxTimeout,
		},
		Kind{
			Name: Sleep, Title: "Sleep", Summary: "Keeps the agent busy for a while, to try out waiting and cancelling.",
			Schema: json.RawMessage(sleepSchema), Delivery: DeliveryRepeatable,
			Timeout: sleepTimeout, MaxTimeout: sleepMaxTimeout,
		},
		Kind{
			Name: Inventory, Title: "Inventory", Summary: "Collects facts about the machine: host, system, processors, memory, disks and addresses.",
			Schema: json.RawMessage(noArgsSchema), Delivery: DeliveryRepeatable,
			Timeout: quickTimeout, MaxTimeout: quickMaxTimeout, Supersedes: true,
		},
		Kind{
			Name: Run, Title: "Run a program", Summary: "Runs one of the programs that the agent's policy file allows, without a shell, and streams what it prints.",
			Schema: json.RawMessage(runSchema), Delivery: DeliveryOnce,
			Timeout: runTimeout, MaxTimeout: runMaxTimeout, Streams: true,
		},
	)
}

const noArgsSchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "title": "No arguments",
  "description": "This kind takes no arguments.",
  "properties": {},
  "additionalProperties": false
}`

const anyObjectSchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "title": "Anything",
  "description": "Any JSON object; it comes back as the result.",
  "additionalProperties": true
}`

const sleepSchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "title": "Sleep",
  "properties": {
    "seconds": {
      "type": "number",
      "title": "Seconds",
      "description": "How long to sleep; fractions are allowed.",
      "minimum": 0,
      "maximum": 3600,
      "examples": [5]
    }
  },
  "required": ["seconds"],
  "additionalProperties": false
}`

// runSchema bounds only what no policy could allow: a NUL cannot be part of a
// process's arguments, and the sizes keep argv far below the system's limit.
const runSchema = `{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "title": "Run a program",
  "properties": {
    "program": {
      "type": "string",
      "title": "Program",
      "description": "Name of a program in the agent's policy file; not a path and not a command line.",
      "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]*$",
      "maxLength": 64,
      "examples": ["uname"]
    },
    "args": {
      "type": "object",
      "title": "Parameters",
      "description": "Values for the parameters that the policy file declares for the program, by name.",
      "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_-]{0,63}$"},
      "maxProperties": 64,
      "additionalProperties": {
        "type": ["string", "number", "boolean"],
        "maxLength": 4096,
        "pattern": "^[^\\x00]*$"
      }
    },
    "grace_seconds": {
      "type": "number",
      "title": "Grace in seconds",
      "description": "Time between SIGTERM and SIGKILL when it is ended; at most what the policy file gives. Without it: that.",
      "minimum": 0,
      "maximum": 30
    }
  },
  "required": ["program"],
  "additionalProperties": false
}`
