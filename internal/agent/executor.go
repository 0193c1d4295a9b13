package agent

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"headgate/internal/agent/policy"
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/kinds"
)

// The outcomes that an agent gives. Unknown is its word only about a task of
// delivery once that a restart has interrupted and that is asked for again.
const (
	succeeded = "succeeded"
	failed    = "failed"
	timedOut  = "timed-out"
	cancelled = "cancelled"
	rejected  = "rejected"
	unknown   = "unknown"
)

// The reasons that an agent gives; fault codes join them for rejections.
const (
	reasonExit       = "exit_nonzero"
	reasonSignal     = "killed_by_signal"
	reasonSpawn      = "spawn_failed"
	reasonDeadline   = "deadline_exceeded"
	reasonCancelled  = "cancelled_by_user"
	reasonStopped    = "agent_stopped"
	reasonRestarted  = "agent_restarted"
	reasonPolicy     = "policy_denied"
	reasonReused     = "task_id_reused"
	reasonTooLarge   = "result_too_large"
	reasonDefect     = "agent_defect"
	reasonCollection = "collection_failed"
)

// Task is one piece of work as an executor sees it.
type Task struct {
	ID      int64
	Attempt int32
	Kind    string
	Args    []byte // JSON text that fits the kind's schema
	Output  Output // what the task prints
}

// Ending is how a task ended.
type Ending struct {
	Outcome string
	Reason  string // stable code, empty when succeeded
	Detail  string // a sentence
	Result  []byte // JSON text, or nil
	Exit    *agentpb.Exit
}

// Executor runs the tasks of one kind. Execute returns soon after ctx is done;
// what it then reports is what has really happened.
type Executor interface {
	Execute(ctx context.Context, t Task) Ending
}

// errStopping is the cause with which the context of a task ends when the agent
// is stopped.
var errStopping = errors.New("the agent is stopping")

// cancelError is the cause when a user has cancelled the task.
type cancelError struct{ why string }

func (e cancelError) Error() string { return "cancelled: " + e.why }

// endingOf says how a task ended whose context is done.
func endingOf(ctx context.Context) Ending {
	cause := context.Cause(ctx)
	if c, ok := errors.AsType[cancelError](cause); ok {
		detail := "The task was cancelled while it ran."
		if c.why != "" {
			detail = "The task was cancelled while it ran: " + c.why
		}
		return Ending{Outcome: cancelled, Reason: reasonCancelled, Detail: detail}
	}
	if errors.Is(cause, errStopping) {
		return Ending{Outcome: failed, Reason: reasonStopped, Detail: "The agent was stopped while the task ran, and ended it."}
	}
	return Ending{Outcome: timedOut, Reason: reasonDeadline, Detail: "The task did not end within its time limit and was ended by the agent."}
}

// rejection turns a fault into the ending of a task that was not run.
func rejection(err error) Ending {
	if e, ok := errors.AsType[*fault.Error](err); ok {
		detail := e.Message
		if e.Hint != "" {
			detail += " " + e.Hint
		}
		return Ending{Outcome: rejected, Reason: e.Code, Detail: detail}
	}
	return Ending{Outcome: rejected, Reason: fault.CodeOf(err), Detail: err.Error()}
}

// executors finds who runs a task, after the checks that every kind needs.
type executors struct {
	registry *kinds.Registry
	policy   *policy.Policy
	byKind   map[string]Executor
}

func newExecutors(c Config, p *policy.Policy, k *program.Keeper) *executors {
	x := &executors{registry: kinds.Default(), policy: p, byKind: map[string]Executor{
		kinds.Ping:      ping{version: c.Version},
		kinds.Echo:      echo{},
		kinds.Sleep:     sleep{},
		kinds.Inventory: &inventory{keeper: k},
		kinds.Run:       &runProgram{policy: p, keeper: k, termGrace: c.Limits.TermGrace, stopGrace: c.Limits.StopGrace},
	}}
	if c.Around != nil {
		for name, e := range x.byKind {
			x.byKind[name] = c.Around(e)
		}
	}
	return x
}

// Execute checks the task and runs it. A panic of an executor ends its task
// alone: restarting the agent for it would bring the same task again.
func (x *executors) Execute(ctx context.Context, t Task) (end Ending) {
	defer func() {
		if v := recover(); v != nil {
			end = Ending{Outcome: failed, Reason: reasonDefect, Detail: fmt.Sprintf("The agent has a defect: %v. %s", v, firstFrames(debug.Stack()))}
		}
	}()
	kind, err := x.registry.Lookup(t.Kind)
	if err != nil {
		return rejection(err)
	}
	if !x.policy.Allows(t.Kind) || x.byKind[t.Kind] == nil {
		return Ending{Outcome: rejected, Reason: reasonPolicy, Detail: "The agent's policy file does not allow the kind " + t.Kind + "."}
	}
	if err := kind.Validate(t.Args); err != nil {
		return rejection(err)
	}
	end = x.byKind[t.Kind].Execute(ctx, t)
	if len(end.Result) > maxResult {
		return Ending{
			Outcome: failed, Reason: reasonTooLarge, Exit: end.Exit,
			Detail: fmt.Sprintf("The result has %d bytes, at most %d are allowed.", len(end.Result), maxResult),
		}
	}
	return end
}

// firstFrames keeps a stack trace short enough for a detail.
func firstFrames(stack []byte) string {
	const most = 2000
	return string(stack[:min(len(stack), most)])
}

// once says whether a task must not be run twice: when either the controller
// or the kind says so.
func (x *executors) once(m *agentpb.Execute) bool {
	kind, err := x.registry.Lookup(m.GetKind())
	return err != nil || !m.GetRepeatable() || kind.Delivery == kinds.DeliveryOnce
}

// offers lists what the policy allows, for the Welcome.
func (x *executors) offers() []*agentpb.KindInfo {
	var all []*agentpb.KindInfo
	for _, name := range x.registry.Names() {
		if !x.policy.Allows(name) || x.byKind[name] == nil {
			continue
		}
		info := &agentpb.KindInfo{Name: name}
		if name == kinds.Run {
			for _, p := range x.policy.Names() {
				prog := x.policy.Programs[p]
				info.Programs = append(info.Programs, &agentpb.Program{Name: p, Description: prog.Description, ParamsSchema: prog.Schema()})
			}
		}
		all = append(all, info)
	}
	return all
}
