package fleet

import (
	"testing"

	"headgate/tasks"
)

// Only what the queue says counts as an answer: a question after the agent's
// status is asked while the queue stands still, too.
func TestOnlyTheQueueHeedsAnAgent(t *testing.T) {
	t.Parallel()
	ref := tasks.Ref{ID: 1, Attempt: 1}
	for name, c := range map[string]struct {
		put    func(*box)
		heeded bool
	}{
		"a status request":   {func(b *box) { b.status = true }, false},
		"an acknowledgement": {func(b *box) { b.acknowledge(ref, 1) }, true},
		"an assignment":      {func(b *box) { b.put(item{assignment: tasks.Assignment{}}) }, true},
	} {
		s := &session{}
		s.box.writing = true // somebody else sends what is put
		if s.box.hear(ref, maxUnheeded).tooMuch {
			t.Errorf("%s: too much at the limit", name)
		}
		if !s.box.hear(ref, 1).tooMuch {
			t.Errorf("%s: one byte above the limit is not too much", name)
		}
		s.post(c.put)
		if got := !s.box.hear(ref, 1).tooMuch; got != c.heeded {
			t.Errorf("after %s the agent is heeded: %v, want %v", name, got, c.heeded)
		}
	}
}
