package tasks

import (
	"time"
	"uuid"
)

// Runner is the fleet as the Manager sees it. internal/fleet (gRPC) and
// tasktest.ScriptedRunner implement it and pass tasktest.RunRunnerTests.
//
// No method blocks on the network: each one hands over and returns. What
// becomes of it is told to the Manager by its Session methods, always in this
// order per agent: SessionUp, then any of Accepted, Output, Final, Refused,
// then SessionDown; nothing of an older session follows its SessionDown.
type Runner interface {
	// Own gives the complete set of shards held now. Agents of these shards
	// are connected with Hello(shard, epoch); sessions of other shards, or of
	// an older epoch, are ended.
	Own(leases []Lease)
	// Lookup finds an agent by id or unique name. Errors are fault.Error:
	// unknown_agent (Invalid) or ambiguous_agent (Conflict).
	Lookup(ref string) (Agent, error)
	// Execute sends a committed assignment on the agent's session. It is
	// dropped without a word when the session has just ended: the next
	// SessionUp then says that the agent has never seen it.
	Execute(a Assignment)
	// Cancel asks the agent to end a task; its Final follows.
	Cancel(agent AgentNum, ref Ref, reason string)
	// Forget releases ledger entries whose results are on disk.
	Forget(agent AgentNum, ids ...ID)
	// AckOutput says that output up to seq is on disk.
	AckOutput(agent AgentNum, ref Ref, seq int)
	// Reconnect ends the agent's session, for reconciling it anew.
	Reconnect(agent AgentNum, why string)
	// Quarantine stops dispatch to the agent until an operator decides.
	Quarantine(agent AgentNum, why string)
}

// Sessions is what the fleet tells the queue; *Manager implements it. No
// method blocks, save that SessionDown waits for an Execute that is under way:
// call it without a lock that Execute needs, and begin the next session only
// after it has returned. AgentChanged comes for every agent before its first
// SessionUp, and again whenever one of Agent's fields changes: paused, resumed,
// renamed, quarantined, approved, removed.
type Sessions interface {
	// AgentChanged tells what an agent is now. Quarantined going from true to
	// false is an operator's approval: whatever the agent had in hand is then
	// settled as interrupted, with the reason ledger_changed.
	AgentChanged(a Agent)
	// SessionUp begins a session with all that the agent says of itself.
	// Nothing is given to the agent before its started rows are settled.
	SessionUp(s Session)
	// SessionDown ends a session; why is a sentence for people.
	SessionDown(agent AgentNum, why string)
	// Accepted says that the agent has started the task.
	Accepted(agent AgentNum, ref Ref)
	// Output brings a piece of what the task prints. AckOutput answers it.
	Output(agent AgentNum, c OutputChunk)
	// Final is the agent's last word about a task. Forget answers it.
	Final(agent AgentNum, f Final)
	// Refused says that the agent will not start a task.
	Refused(agent AgentNum, r Refusal)
}

// Agent is what the queue needs to know of an agent.
type Agent struct {
	Num         AgentNum
	ID          uuid.UUID
	Name        string
	LedgerID    uuid.UUID // last one seen; Nil = none yet
	Paused      bool
	PausedBy    string
	PausedAt    time.Time
	Quarantined bool
	Removed     bool
	Expired     bool   // it cannot be reached because its certificate has expired
	Why         string // of quarantine, or of the last failed dial, as a sentence
}

// Shard gives the agent's shard.
func (a Agent) Shard() Shard { return ShardOf(a.ID) }

// Assignment is a task on its way to its agent; Queued.Attempt is the attempt
// that it has now.
type Assignment struct {
	Queued
	Epoch  int64
	Forget []ID // ids whose results are on disk; they ride along
}

// Ref gives the fence of the assignment.
func (a Assignment) Ref() Ref { return Ref{ID: a.ID, Attempt: a.Attempt} }

// Session is what an agent says of itself when a session begins.
type Session struct {
	Agent    AgentNum
	LedgerID uuid.UUID
	// LedgerNew says that the ledger differs from the one on record; false
	// while none is on record. It stays true, also after an approval, until
	// the first Execute of the session says that all earlier tasks are
	// settled; only then is the new ledger recorded. Recording it earlier
	// would let a crash in between hide that the agent cannot know them.
	LedgerNew bool
	// LedgerApproved says that an operator has approved this very ledger:
	// what was under way is settled as interrupted (ledger_changed).
	LedgerApproved bool
	Running        *Ref
	Finished       []Final
	Interrupted    []Ref
	// Found says what the agent found of interrupted tasks, as a sentence.
	Found map[Ref]string
}

// Final is the agent's last word about a task.
type Final struct {
	Ref
	Epoch     int64
	StartedAt time.Time // by the agent's clock
	EndedAt   time.Time
	Ending    Ending
	// Interrupted says that the agent was restarted while the task ran, and has
	// delivered what was left of its output; nobody knows its end.
	Interrupted bool
}

// Refusal says that the agent did not start a task and will not.
type Refusal struct {
	Ref
	Cause   string // busy, stale_epoch, ledger_full, disk
	Running *Ref
	Detail  string
}
