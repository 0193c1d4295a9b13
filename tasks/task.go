package tasks

import (
	"encoding/json"
	"strconv"
	"time"
	"uuid"

	"headgate/internal/kinds"
)

// ID numbers a task. Ids are given in order by the controller that owns the
// agent's shard; on the wire they are decimal strings.
type ID int64

// String gives the decimal form used in REST, pages and logs.
func (id ID) String() string { return strconv.FormatInt(int64(id), 10) }

// AgentNum is the dense key of an agent inside the queue tables; people and
// programs outside see the agent's UUID.
type AgentNum int32

// Shard is one of NumShards fixed groups of agents.
type Shard int16

// NumShards is the fixed number of shards: enough to spread over more
// controllers than anybody runs, few enough to renew in one statement.
const NumShards = 16

// ShardOf gives the shard of an agent: the last byte of its id, modulo 16.
func ShardOf(agent uuid.UUID) Shard { return Shard(agent[15] % NumShards) }

// State is where a task stands. The strings are the product's words in REST,
// pages and the SQL view.
type State string

// The three states.
const (
	StateNew       State = "new"
	StateWaiting   State = "waiting-for-agent-response"
	StateCompleted State = "completed"
)

// Outcome says how a completed task ended.
type Outcome string

// The outcomes. Unknown is said only when the agent's word cannot be had.
const (
	Succeeded Outcome = "succeeded"
	Failed    Outcome = "failed"
	TimedOut  Outcome = "timed-out"
	Cancelled Outcome = "cancelled"
	Expired   Outcome = "expired"
	Rejected  Outcome = "rejected"
	Unknown   Outcome = "unknown"
)

// Reasons that the controller itself gives; the agent's own come with its
// Final. A reason is a stable code, Detail beside it is the sentence.
const (
	ReasonCancelled     = "cancelled_by_user"
	ReasonExpired       = "expired_before_start"
	ReasonAgentRemoved  = "agent_removed"
	ReasonSuperseded    = "superseded"           // a newer task like it has taken its place
	ReasonAgentRestart  = "agent_restarted"      // delivery once, interrupted by a restart of the agent
	ReasonNoWord        = "no_word_from_agent"   // the forced deadline passed
	ReasonCancelNoWord  = "cancel_not_confirmed" // cancelled, and the agent gave no word in time
	ReasonAttempts      = "attempts_exhausted"
	ReasonLedgerChanged = "ledger_changed" // operator approved an agent whose ledger was replaced
)

// Limits of a submission.
const (
	MinPriority     = 0
	MaxPriority     = 9
	DefaultPriority = 5 // in the middle, so that both directions are free

	DefaultExpiry = 24 * time.Hour      // no task waits for ever behind a dead agent
	MaxExpiry     = 30 * 24 * time.Hour // longer plans belong into a schedule

	MaxArgsBytes   = 1 << 20 // 1 MiB, the agent's message limit allows for it
	MaxResultBytes = 1 << 20 // 1 MiB of JSON; bulk belongs into the output
	MaxBatch       = 10_000  // tasks in one batch; larger ones are several calls
	MaxAttempts    = 5       // of a repeatable task whose agent restarts each time
)

// AgentRef names an agent in answers.
type AgentRef struct {
	Num  AgentNum  `json:"-"`
	ID   uuid.UUID `json:"id"`
	Name string    `json:"name"`
}

// Task is one piece of work for one agent, as REST, pages and events show it.
type Task struct {
	ID       ID
	Agent    AgentRef
	Kind     string
	Args     json.RawMessage
	Delivery kinds.Delivery
	Priority int
	Timeout  time.Duration
	Attempt  int

	State  State
	Ending Ending // zero until completed

	CreatedAt         time.Time
	NotBefore         time.Time // zero = at once
	ExpiresAt         time.Time
	StartedAt         time.Time // zero while new
	CompletedAt       time.Time // zero until completed
	CancelRequestedAt time.Time // zero = nobody asked; stays when it is completed
	CancelActor       string    // who asked first; "" = nobody

	Actor     string // who submitted it, for example "token:up" or "user:admin"
	RetryOf   ID     // the task that this one repeats; 0 = none
	RetriedAs ID     // the task that repeats this one; 0 = none
	RunID     uuid.UUID
	Late      []LateResult // answers after its completion; nil = not looked up, which Service.Get does
	Waiting   *Waiting     // why it is not completed; filled by Service, nil when completed
	Output    *OutputFacts // filled where one task is shown, nil in lists
}

// Ending is how a task ended.
type Ending struct {
	Outcome     Outcome
	Reason      string          // stable code, empty when succeeded
	Detail      string          // one sentence with the cause
	Result      json.RawMessage // checked JSON text, or nil
	ResultBytes []byte          // set instead of Result when it was not JSON
	Exit        *Exit           // programs only
	OutputBytes int64           // printed in all
}

// LateResult is an answer of the agent that came when the task was completed
// without it. It is kept and shown, and has changed nothing.
type LateResult struct {
	Attempt    int
	StartedAt  time.Time // by the agent's clock, zero = not said
	ReceivedAt time.Time
	Ending     Ending
}

// MaxLateShown bounds the late answers of one task that are shown; agents
// give one for each attempt.
const MaxLateShown = 20

// Exit tells how a program ended; each cause has its own field.
type Exit struct {
	Code        *int   `json:"code"`
	Signal      string `json:"signal,omitempty"`
	SpawnError  string `json:"spawn_error,omitempty"`
	UserMS      int64  `json:"user_ms"`
	SystemMS    int64  `json:"system_ms"`
	MaxRSSBytes int64  `json:"max_rss_bytes"` // 0 when it was less than the agent itself has had

	// KilledBy is what it took the agent to end the program and all that it had
	// started: KilledByTerm, KilledByKill, or "" when it did not end it: a signal
	// then came from somebody else.
	KilledBy   string    `json:"killed_by,omitempty"`
	GraceMS    int64     `json:"grace_ms,omitempty"`    // between the two
	LeftBehind []Process `json:"left_behind,omitempty"` // alive after the program had ended by itself
	Released   bool      `json:"released,omitempty"`    // they were let go on, as the policy allows; otherwise they were ended
	Survivors  []Process `json:"survivors,omitempty"`   // could not be ended
}

// The values of Exit.KilledBy.
const (
	KilledByTerm = "term" // SIGTERM was enough
	KilledByKill = "kill" // SIGKILL was needed after the grace
)

// MaxProcesses is how many processes an Exit names in a list at most.
const MaxProcesses = 20

// Process is a process of an agent's machine.
type Process struct {
	PID  int    `json:"pid"`
	Name string `json:"name"` // as the kernel has it, at most 15 bytes
}

// Waiting explains why a task is not completed.
type Waiting struct {
	Cause    string    `json:"cause"`              // one of the Cause constants
	Sentence string    `json:"sentence"`           // the cause in plain words with its numbers
	NextStep string    `json:"next_step"`          // what Headgate, or the reader, does next
	Since    time.Time `json:"since"`              // of the cause
	Position int       `json:"position,omitempty"` // in the agent's order, 1 = next, 0 = not known or not in it

	Blocking      ID        `json:"blocking,omitzero"` // the task in the slot, 0 = none
	BlockingKind  string    `json:"blocking_kind,omitempty"`
	BlockingSince time.Time `json:"blocking_since,omitzero"` // when it was given to the agent
}

// Ref names one execution of a task: the fence that every write and every
// answer carries.
type Ref struct {
	ID      ID
	Attempt int
}

// Submission is what a person or program asks for.
type Submission struct {
	Agent     string // id or unique name
	Kind      string
	Args      json.RawMessage
	Timeout   time.Duration  // 0 = the kind's default
	Priority  *int           // nil = DefaultPriority
	NotBefore time.Time      // zero = at once
	ExpiresAt time.Time      // zero = DefaultExpiry from now
	Delivery  kinds.Delivery // "" = the kind's; may only turn repeatable into once
}

// Idempotency makes a submission safe to send again. The zero value means that
// the caller gave no key.
type Idempotency struct {
	Principal string // who; keys of different principals never meet
	Route     string // for example "POST /tasks"
	Key       string
	Hash      [32]byte // of what is asked for; zero = made from the submissions
	Lasting   bool     // holds for as long as there is the task it speaks of, not for 24 h
}

// OutputChunk is a piece of what a task printed.
type OutputChunk struct {
	Ref
	Seq    int    // counts the chunks of both streams from 0
	Stream string // "stdout" or "stderr"
	Offset int64  // in bytes, within its own stream
	At     time.Time
	Data   []byte
}
