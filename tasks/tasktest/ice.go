package tasktest

import (
	"sync"

	"headgate/tasks"
)

// ice holds up what reaches a frozen controller: it hears it when it thaws, in
// the order in which it was said.
type ice struct {
	mu   sync.Mutex // guards the runner's sessions, too
	hold bool
	held []func(s tasks.Sessions)
}

func (i *ice) frozen() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.hold
}

// keep holds f back; false when nothing is frozen.
func (i *ice) keep(f func(s tasks.Sessions)) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.hold {
		i.held = append(i.held, f)
	}
	return i.hold
}

// next gives what was held back longest; when nothing is left, nothing is
// frozen any more.
func (i *ice) next() func(s tasks.Sessions) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.held) == 0 {
		i.hold = false
		return nil
	}
	f := i.held[0]
	i.held = i.held[1:]
	return f
}

// Freeze stops the controller's ears, as SIGSTOP does; Faults.Freeze stops its
// hands.
func (r *ScriptedRunner) Freeze() {
	r.ice.mu.Lock()
	defer r.ice.mu.Unlock()
	r.ice.hold = true
}

// Thaw lets it hear everything that was said meanwhile.
func (r *ScriptedRunner) Thaw() {
	for f := r.ice.next(); f != nil; f = r.ice.next() {
		f(r.controller())
	}
}

func (r *ScriptedRunner) controller() tasks.Sessions {
	r.ice.mu.Lock()
	defer r.ice.mu.Unlock()
	return r.sessions
}

// tell says something to the controller of this runner, as soon as it listens.
// Without a controller nobody is told.
func (r *ScriptedRunner) tell(f func(s tasks.Sessions)) {
	if r.ice.keep(f) {
		return
	}
	if s := r.controller(); s != nil {
		f(s)
	}
}
