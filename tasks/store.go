package tasks

import (
	"context"
	"encoding/json"
	"errors"
	"time"
	"uuid"

	"headgate/internal/kinds"
)

// Store is the durable queue. PostgreSQL (internal/store) and memory
// (tasks/tasktest) implement it and pass tasktest.RunStoreTests.
//
// Every method that writes is atomic: it happened as a whole or not at all.
type Store interface {
	Queue
	Leases
	Reader
}

// Queue is what the write loop uses. One loop per shard calls it; nobody else
// writes queue rows of that shard.
type Queue interface {
	// TakeIDs reserves IDBlock consecutive ids and gives the first. It also
	// makes sure that the partitions for them exist.
	TakeIDs(ctx context.Context) (ID, error)

	// Turn writes everything in t in one transaction, or nothing.
	// Errors: ErrFenced when a lease of the turn is not ours any more;
	// *UnknownError when the connection ended during the commit (ask Settle
	// before anything else); *PoisonError when the data of the turn itself was
	// refused (class 22 or 23: split the turn); any other error means that
	// nothing was written and the same turn may be tried again.
	Turn(ctx context.Context, t *Turn) (*TurnResult, error)

	// Settle says whether a turn with an unknown commit took place, by reading
	// back what it wrote. It first waits, on the lease rows, for the old
	// transaction to end, so that its answer is final.
	Settle(ctx context.Context, t *Turn, r *TurnResult) (bool, error)

	// Load gives what a shard holds when its owner starts: the started rows
	// and the number of waiting tasks per agent.
	Load(ctx context.Context, shards []Shard) (*Loaded, error)

	// Refill gives, per request, the agent's next tasks that have not started,
	// in order (priority, id), after a given place.
	Refill(ctx context.Context, reqs []RefillRequest) ([]Queued, error)

	// Due gives up to limit tasks of the shards whose not_before or back-off
	// has passed; the caller moves them by Turn.Due.
	Due(ctx context.Context, shards []Shard, limit int) ([]DueTask, error)

	// Overdue gives up to limit tasks of the shards that have not started and
	// whose expires_at has passed; the caller ends them by Turn.Finishes.
	Overdue(ctx context.Context, shards []Shard, limit int) ([]Finish, error)

	// Removed gives the agents of the shards that were removed within that
	// time (0 = ever) and still have tasks that are not completed. It is how a
	// removal at another controller, or before this start, is learned of.
	Removed(ctx context.Context, shards []Shard, within time.Duration) ([]Agent, error)

	// Abandoned gives up to limit tasks of the agents that have not started,
	// also those for later; the caller ends them by Turn.Finishes.
	Abandoned(ctx context.Context, agents []AgentNum, limit int) ([]Finish, error)

	// Alike gives, for each of the inserts, the tasks that it would replace, in
	// their order: due, not started, with the same agent, kind, arguments,
	// delivery, priority and timeout, and not to expire later than it.
	Alike(ctx context.Context, inserts []Insert) ([][]Like, error)

	// RecordLate keeps answers that came after completion and gives the tasks of
	// those that are new. Repeating it is harmless. Not late, and left out: the
	// answer that is itself stored (same attempt and epoch, and the stored
	// outcome is not unknown), an answer about a task of another agent, and one
	// about a task that is not completed.
	// *PoisonError when an answer cannot be stored, for example with an attempt
	// that is none; then nothing is kept.
	RecordLate(ctx context.Context, late []Finish) ([]ID, error)

	// Find gives the queue row of a task that is not completed: what a cancel
	// or a removed agent needs. ErrNoTask when there is none.
	Find(ctx context.Context, id ID) (*QueueRow, error)
}

// Leases hands shards to controllers.
type Leases interface {
	// Acquire takes every listed shard that is free, expired, ours already, or
	// held by one of the owners in former (earlier starts from this data
	// directory, known to be dead because we hold its lock). It gives the
	// shards now held with their new epochs.
	Acquire(ctx context.Context, me Owner, former []uuid.UUID, shards []Shard) ([]Lease, error)
	// Renew prolongs leases that still carry our id and epoch and gives those
	// that do; a shard that is missing in the answer is lost.
	Renew(ctx context.Context, me Owner, held []Lease) ([]Lease, error)
	// Release gives shards back so that others need not wait for expiry.
	Release(ctx context.Context, me Owner, held []Lease) error
	// Owners tells who holds which shard, and how many controllers live.
	Owners(ctx context.Context) (Owners, error)
}

// Reader is what pages and REST use. It never locks and never counts rows.
type Reader interface {
	// Task gives one task; ErrNoTask when there is none.
	Task(ctx context.Context, id ID) (*Task, error)
	// TasksByID gives those of the listed tasks that exist, in no certain order.
	TasksByID(ctx context.Context, ids []ID) ([]Task, error)
	// Tasks gives a page in the filter's order.
	Tasks(ctx context.Context, f Filter) ([]Task, error)
	// Position gives the place of a task in its agent's order, 1 = next; 0
	// when it does not stand there. It reads as many rows as stand before it.
	Position(ctx context.Context, agent AgentNum, priority int, id ID) (int, error)
	// LateResults gives the answers that came after the task was completed, in
	// the order in which they came, at most MaxLateShown.
	LateResults(ctx context.Context, id ID) ([]LateResult, error)
	// Output gives the chunks of the task's newest attempt from seq on, at
	// most limit of them.
	Output(ctx context.Context, id ID, fromSeq, limit int) ([]OutputChunk, error)
	// OutputPart gives chunks of one attempt, of one stream or of both ("").
	OutputPart(ctx context.Context, id ID, attempt int, stream string, fromSeq, limit int) ([]OutputChunk, error)
	// OutputAt finds the chunk that has the byte at pos of what is stored, and
	// where in it the chunk begins; seq lies behind all chunks when there is none.
	OutputAt(ctx context.Context, id ID, attempt int, stream string, pos int64) (seq int, start int64, err error)
	// OutputFacts sums up the output of the task's newest attempt without
	// reading it.
	OutputFacts(ctx context.Context, id ID) (OutputFacts, error)
	// Replay gives the tasks stored under an idempotency key, by index in the
	// request; empty when the key is new.
	Replay(ctx context.Context, key Idempotency) ([]DedupRow, error)
	// SavePoints and Points keep the dashboard's series. Points gives those of
	// the name and those under it (name, slash and more), oldest first.
	SavePoints(ctx context.Context, points []Point) error
	Points(ctx context.Context, name string, since time.Time) ([]Point, error)
}

// IDBlock is how many ids one TakeIDs reserves: one round trip for a thousand
// submissions; a restart skips at most as many.
const IDBlock = 1000

// IDLife is how long ids that were taken beforehand are used: a store may drop
// the room for them when they have long been passed by.
const IDLife = 10 * time.Minute

// LeaseTerm is how long a lease lasts by the database's clock, RenewEvery how
// often it is renewed, LeaseMargin how much earlier local trust ends on the
// monotonic clock.
const (
	LeaseTerm   = 15 * time.Second
	RenewEvery  = 4 * time.Second
	LeaseMargin = 3 * time.Second
)

// Owner is one start of one controller process.
type Owner struct {
	ID   uuid.UUID // random, new at each start
	Addr string    // of its controller port, for peers
	Name string
}

// Lease says that a shard is held under an epoch.
type Lease struct {
	Shard Shard
	Epoch int64
	Owner uuid.UUID
	Addr  string
	Until time.Time // by the database's clock; for display only

	// Owners alone fills in what follows.
	Left time.Duration // until the lease ends, counted by the database; not above 0 = it has ended
	Name string        // of the owner, for people
	Peer uuid.UUID     // of the owner, in its certificates; Nil = not known
}

// Owners is who holds what, as the database has it.
type Owners struct {
	Leases []Lease // in the order of shards; those that ended too, but none that was given back
	Alive  int     // controllers that are registered and not silent; 0 = nobody registers here
}

// Turn is one pass of a write loop. All parts are optional; the order inside a
// part is kept.
//
// The caller uses the lists again after the call: a Store keeps no part of a
// turn. A turn touches a task at most once, save that output and a finish of the
// same task may ride together.
type Turn struct {
	Owner    uuid.UUID
	Leases   []Lease // every shard that the turn touches; checked under a row lock
	Inserts  []Insert
	Due      []DueTask
	Output   []OutputRow
	Finishes []Finish
	Requeues []Requeue
	Claims   []Claim
	Cancels  []CancelMark
}

// Insert is a new task. Started means that it begins in
// waiting-for-agent-response with attempt 1, because its agent is idle.
type Insert struct {
	ID        ID
	Agent     AgentNum
	Epoch     int64 // of the agent's shard
	Kind      string
	Args      string // JSON text
	Delivery  kinds.Delivery
	Priority  int
	Timeout   time.Duration
	CreatedAt time.Time
	NotBefore time.Time // later than CreatedAt: goes to agent_later
	ExpiresAt time.Time
	Actor     string
	RetryOf   ID
	RunID     uuid.UUID
	Started   bool
	Key       *Idempotency // nil = none
	KeyIndex  int          // place in the batch
}

// Claim starts a task that waits in the queue. Attempt is the one it gets.
type Claim struct {
	Agent    AgentNum
	Priority int
	ID       ID
	Epoch    int64
	Attempt  int
}

// Finish completes a task. It names the row it saw; when that row is gone or
// differs, nothing happens and the id is missing in TurnResult.Finished.
type Finish struct {
	Agent     AgentNum
	Priority  int
	Ref             // Attempt as in the row; 0 = has never started
	Epoch     int64 // as in the row; 0 when it has not started
	Later     bool  // the row is in agent_later, not in agent_queue
	StartedAt time.Time
	Ending    Ending
	// CancelActor is who asked for the end of a task that has not started; for
	// others the row carries a CancelMark. "" = nobody.
	CancelActor string
}

// Requeue puts a started task back to new in its old place. NotBefore later
// than now sends it to agent_later instead (back-off).
type Requeue struct {
	Agent    AgentNum
	Priority int
	Ref
	Epoch     int64
	NotBefore time.Time
}

// CancelMark records on a started row that somebody asked for its end.
type CancelMark struct {
	Agent    AgentNum
	Priority int
	Ref
	Actor string
}

// OutputRow stores a chunk; storing the same one again is harmless.
type OutputRow struct {
	Agent AgentNum
	OutputChunk
}

// DueTask is a task of agent_later that moves to agent_queue.
type DueTask struct {
	Agent    AgentNum
	Priority int
	ID       ID
	RunAt    time.Time
}

// TurnResult lists what really happened, by id.
type TurnResult struct {
	At       time.Time // the transaction's time by the database's clock
	Inserted []ID      // an Insert with a Key that is missing here was a replay
	Finished []ID
	Claimed  []ID
	Requeued []ID
	Moved    []ID // Due
	Marked   []ID // Cancels
}

// QueueRow is a task that is not completed, as the queue holds it.
type QueueRow struct {
	Agent     AgentNum
	Priority  int
	Ref       // Attempt 0 = never started
	Epoch     int64
	StartedAt time.Time // zero = not started
	Later     bool
}

// Queued is what is needed to hand a waiting task to its agent.
type Queued struct {
	Agent     AgentNum
	Priority  int
	ID        ID
	Attempt   int // attempts so far
	Kind      string
	Args      string
	Delivery  kinds.Delivery
	Timeout   time.Duration
	CreatedAt time.Time
	ExpiresAt time.Time
}

// Started is a task that was handed out and has no result.
type Started struct {
	Queued
	Epoch             int64
	StartedAt         time.Time
	CancelRequestedAt time.Time
	CancelActor       string
}

// Like is a task that a newer one may replace.
type Like struct {
	Ref
	// Behind is how many tasks of its agent and priority stand behind it, alike
	// or not.
	Behind int
}

// Loaded is what a shard holds when its owner starts.
type Loaded struct {
	Started []Started
	Depth   map[AgentNum]int // not started, agent_later not counted
	Later   int
}

// RefillRequest asks for the next tasks of an agent after a place in its order.
type RefillRequest struct {
	Agent         AgentNum
	AfterPriority int // -1 = from the front
	AfterID       ID
	Limit         int
}

// DedupRow is one task stored under an idempotency key.
type DedupRow struct {
	Index int
	ID    ID
	Hash  [32]byte
}

// Point is one value of a series, for example a minute of counters.
type Point struct {
	Name  string
	At    time.Time
	Value json.RawMessage
}

// ErrFenced says that a lease of the turn is held by somebody else or has
// expired: stop the shard and forget its memory.
var ErrFenced = errors.New("tasks: lease lost")

// ErrNoTask says that no such task exists (any more) where it was looked for.
var ErrNoTask = errors.New("tasks: no such task")

// ErrDropped comes with ErrNoTask when a task with such an id would have been
// removed by retention.
var ErrDropped = errors.New("tasks: removed by retention")

// UnknownError says that the connection ended while a commit was on its way.
// Result is what the turn would have done.
type UnknownError struct {
	Result *TurnResult
	Err    error
}

// Error says so.
func (e *UnknownError) Error() string { return "tasks: commit outcome unknown: " + e.Err.Error() }

// Unwrap gives the connection's error.
func (e *UnknownError) Unwrap() error { return e.Err }

// PoisonError says that the database refused the turn's own data.
type PoisonError struct{ Err error }

// Error says so.
func (e *PoisonError) Error() string { return "tasks: data refused: " + e.Err.Error() }

// Unwrap gives the database's error.
func (e *PoisonError) Unwrap() error { return e.Err }
