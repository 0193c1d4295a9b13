package history

// Kind says what an Event is about.
type Kind string

// The kinds of events.
const (
	KindOpen     Kind = "open"     // a process has opened its file; a torn line before it was its predecessor's last
	KindSubmit   Kind = "submit"   // a submission is about to be sent
	KindAcked    Kind = "acked"    // its answer has come
	KindStart    Kind = "start"    // the agent begins to run a task
	KindEnd      Kind = "end"      // the agent has ended it
	KindBoot     Kind = "boot"     // the agent begins anew: whatever ran there before has ended by now
	KindWait     Kind = "wait"     // a waiter asks for the end of one task
	KindLeft     Kind = "left"     // it gives up without having been told
	KindFollow   Kind = "follow"   // a follower asks for the ends of all tasks from now on
	KindReset    Kind = "reset"    // it was told that events were dropped
	KindUnfollow Kind = "unfollow" // it stops
	KindTold     Kind = "told"     // a waiter or follower has got a terminal event
	KindSeen     Kind = "seen"     // somebody has read the state of a task
	KindFault    Kind = "fault"    // something was broken on purpose
	KindHealed   Kind = "healed"   // all that was broken works again
	KindFinal    Kind = "final"    // a task in the database at the end
	KindRow      Kind = "row"      // a line of the shadow table
)

// Event is one line. Which fields count depends on the kind.
type Event struct {
	T        int64  `json:"t"` // CLOCK_MONOTONIC, ns
	Kind     Kind   `json:"k"`
	Op       int64  `json:"op,omitempty"`    // pairs submit and acked within a file; the transaction of a row
	Since    int64  `json:"since,omitempty"` // it happened between Since and T: an end that nobody saw, the begin of a read
	ID       int64  `json:"id,omitempty"`    // of the task
	Agent    string `json:"a,omitempty"`
	Key      string `json:"key,omitempty"` // idempotency key
	Priority int    `json:"p,omitempty"`
	Once     bool   `json:"once,omitempty"` // delivery
	Free     bool   `json:"free,omitempty"` // outside of the order: for later, or a retry
	Status   int    `json:"http,omitempty"` // 0 = no answer
	Attempt  int    `json:"n,omitempty"`
	Epoch    int64  `json:"e,omitempty"`
	State    string `json:"s,omitempty"`
	Outcome  string `json:"o,omitempty"`
	Waiter   string `json:"w,omitempty"`
	Table    string `json:"tab,omitempty"` // of a row: agent_task, agent_queue, agent_later, agent_result
	Action   string `json:"act,omitempty"` // of a row: INSERT, UPDATE, DELETE
	Places   int    `json:"at,omitempty"`  // of a final: in how many of queue, later and result it is
	Text     string `json:"text,omitempty"`
}

// StateCompleted is the state of a task that is over.
const StateCompleted = "completed"
