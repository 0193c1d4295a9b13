package fleettest

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"headgate/internal/fleet"
	"headgate/tasks"
)

// Call is one call of fleet.Tasks.
type Call struct {
	Method  string // "up", "down", "accepted", "output", "final", "refused", "changed"
	Agent   tasks.AgentNum
	Session tasks.Session
	Why     string
	Ref     tasks.Ref
	Output  tasks.OutputChunk
	Final   tasks.Final
	Refusal tasks.Refusal
	Changed tasks.Agent
}

// Queue is a fleet.Tasks that writes down every call.
type Queue struct {
	// On, if set, is called with each call after it was written down.
	On func(Call)

	mu    sync.Mutex
	calls []Call
	more  chan struct{} // closed and replaced with each call
}

var _ fleet.Tasks = (*Queue)(nil)

// NewQueue makes an empty one.
func NewQueue() *Queue { return &Queue{more: make(chan struct{})} }

func (q *Queue) add(c Call) {
	q.mu.Lock()
	q.calls = append(q.calls, c)
	close(q.more)
	q.more = make(chan struct{})
	q.mu.Unlock()
	if q.On != nil {
		q.On(c)
	}
}

// Calls gives all calls so far that match.
func (q *Queue) Calls(match func(Call) bool) []Call {
	q.mu.Lock()
	defer q.mu.Unlock()
	var found []Call
	for _, c := range q.calls {
		if match(c) {
			found = append(found, c)
		}
	}
	return found
}

// Wait waits for the n-th call that matches and gives it.
func (q *Queue) Wait(t testing.TB, n int, what string, match func(Call) bool) Call {
	t.Helper()
	const patience = 30 * time.Second // far above what anything here takes
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	for {
		q.mu.Lock()
		more := q.more
		q.mu.Unlock()
		if found := q.Calls(match); len(found) >= n {
			return found[n-1]
		}
		select {
		case <-more:
		case <-timeout.C:
			t.Fatalf("waited %s in vain for %s (number %d); calls: %s", patience, what, n, q)
		}
	}
}

// String lists the calls, for failures.
func (q *Queue) String() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	text := ""
	for _, c := range q.calls {
		text += fmt.Sprintf("\n%s agent=%d ref=%v %s", c.Method, c.Agent, c.Ref, c.Why)
	}
	return text
}

// Is matches calls of a method about an agent.
func Is(method string, agent tasks.AgentNum) func(Call) bool {
	return func(c Call) bool { return c.Method == method && c.Agent == agent }
}

// SessionUp implements fleet.Tasks.
func (q *Queue) SessionUp(s tasks.Session) { q.add(Call{Method: "up", Agent: s.Agent, Session: s}) }

// SessionDown implements fleet.Tasks.
func (q *Queue) SessionDown(agent tasks.AgentNum, why string) {
	q.add(Call{Method: "down", Agent: agent, Why: why})
}

// Accepted implements fleet.Tasks.
func (q *Queue) Accepted(agent tasks.AgentNum, ref tasks.Ref) {
	q.add(Call{Method: "accepted", Agent: agent, Ref: ref})
}

// Output implements fleet.Tasks.
func (q *Queue) Output(agent tasks.AgentNum, c tasks.OutputChunk) {
	q.add(Call{Method: "output", Agent: agent, Ref: c.Ref, Output: c})
}

// Final implements fleet.Tasks.
func (q *Queue) Final(agent tasks.AgentNum, f tasks.Final) {
	q.add(Call{Method: "final", Agent: agent, Ref: f.Ref, Final: f})
}

// Refused implements fleet.Tasks.
func (q *Queue) Refused(agent tasks.AgentNum, r tasks.Refusal) {
	q.add(Call{Method: "refused", Agent: agent, Ref: r.Ref, Refusal: r})
}

// AgentChanged implements fleet.Tasks.
func (q *Queue) AgentChanged(a tasks.Agent) { q.add(Call{Method: "changed", Agent: a.Num, Changed: a}) }
