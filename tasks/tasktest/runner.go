package tasktest

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/tasks"
)

// Answer is what a scripted agent does with an assignment.
type Answer struct {
	Refuse  *tasks.Refusal      // it does not start it
	Silent  bool                // it starts it and never says a word until Finish, Cancel or Restart
	After   time.Duration       // it runs that long; 0 = it answers at once
	Output  []tasks.OutputChunk // printed at the start; Ref is filled in
	Ending  tasks.Ending        // zero = succeeded with the arguments as the result
	Deaf    bool                // Cancel does not end it
	Instead *tasks.Final        // a lie that is told besides, before the truth
}

// entry is a task in a scripted agent's ledger.
type entry struct {
	ref         tasks.Ref
	final       *tasks.Final
	interrupted bool
	deaf        bool
	epoch       int64
}

// simAgent is one agent of a ScriptedRunner.
type simAgent struct {
	info    tasks.Agent
	link    *ScriptedRunner // the controller of the session
	lossy   bool            // the next message that matters is lost, and the session with it
	session int             // counts; odd = up
	epoch   int64
	script  func(tasks.Assignment) Answer
	ledger  map[tasks.ID]*entry
	running *entry
	starts  []tasks.Ref // in order, over all its life
	broken  bool        // its ledger is not the one on record
	blessed bool        // an operator has approved this ledger
}

// ScriptedRunner is tasks.Runner with agents that do what a script says. It
// keeps the rules of real agents: one slot, a ledger that survives restarts,
// nothing from an older session. What breaks the rules is noted in Violations.
type ScriptedRunner struct {
	*ground
	ice      ice
	sessions tasks.Sessions
	leases   map[tasks.Shard]tasks.Lease
	connect  bool // agents come up by themselves when owned

	cancels    []tasks.Ref
	acks       []int
	owns       int
	quarantine []tasks.AgentNum
}

// ground is what the runners of several controllers share: the agents. Its
// mutex guards the runners, too.
type ground struct {
	turns      sync.Mutex // one session begins or ends at a time
	mu         sync.Mutex
	agents     map[tasks.AgentNum]*simAgent
	runners    []*ScriptedRunner
	violations []string

	// Trace, when set before the start, is told what happens at the agents.
	Trace func(format string, args ...any)
	// Watch, when set before the start, is told each step of the agents as it
	// happens: what an agent would write down itself.
	Watch func(s Step)
}

// Step is something that an agent does. What: start, end, boot, up, superseded
// (a newer owner's session ends the present one), stale (an older owner is
// refused), lost (a message), ledger (another one), quarantined, running, finished,
// interrupted (what it says when a session begins).
type Step struct {
	What    string
	Agent   tasks.AgentNum
	Ref     tasks.Ref
	Epoch   int64
	Once    bool
	Outcome tasks.Outcome
}

func (g *ground) trace(format string, args ...any) {
	if g.Trace != nil {
		g.Trace(format, args...)
	}
}

func (g *ground) step(s Step) {
	if g.Watch != nil {
		g.Watch(s)
	}
}

// NewScriptedRunner makes a runner whose agents connect as soon as their shard
// is owned.
func NewScriptedRunner() *ScriptedRunner {
	return (&ScriptedRunner{ground: &ground{agents: map[tasks.AgentNum]*simAgent{}}}).Twin()
}

// Twin makes the runner of another controller for the same agents.
func (r *ScriptedRunner) Twin() *ScriptedRunner {
	t := &ScriptedRunner{ground: r.ground, leases: map[tasks.Shard]tasks.Lease{}, connect: true}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runners = append(r.runners, t)
	return t
}

// Attach names who is told; call it before the Manager runs.
func (r *ScriptedRunner) Attach(s tasks.Sessions) {
	r.ice.mu.Lock()
	r.sessions = s
	r.ice.mu.Unlock()
	r.mu.Lock()
	infos := make([]tasks.Agent, 0, len(r.agents))
	for _, a := range r.agents {
		infos = append(infos, a.info)
	}
	r.mu.Unlock()
	for _, i := range infos {
		s.AgentChanged(i)
	}
}

// Add makes an agent known. A nil script answers every task at once.
func (r *ScriptedRunner) Add(info tasks.Agent, script func(tasks.Assignment) Answer) {
	if script == nil {
		script = func(tasks.Assignment) Answer { return Answer{} }
	}
	if info.LedgerID == uuid.Nil() {
		info.LedgerID = uuid.NewV4()
	}
	r.mu.Lock()
	r.agents[info.Num] = &simAgent{info: info, script: script, ledger: map[tasks.ID]*entry{}}
	r.mu.Unlock()
	r.changed(info)
}

// Script changes what an agent does.
func (r *ScriptedRunner) Script(agent tasks.AgentNum, script func(tasks.Assignment) Answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.agents[agent].script = script
}

// Change changes what is known of an agent and tells the Manager.
func (r *ScriptedRunner) Change(agent tasks.AgentNum, f func(*tasks.Agent)) {
	r.mu.Lock()
	a := r.agents[agent]
	f(&a.info)
	info := a.info
	r.mu.Unlock()
	r.changed(info)
}

// changed tells every controller what an agent is now.
func (r *ScriptedRunner) changed(info tasks.Agent) {
	r.mu.Lock()
	all := slices.Clone(r.runners)
	r.mu.Unlock()
	for _, x := range all {
		x.tell(func(s tasks.Sessions) { s.AgentChanged(info) })
	}
}

// Violations gives what broke a rule: two tasks at once, a task without a
// lease, an assignment of an attempt that was done.
func (r *ScriptedRunner) Violations() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.violations)
}

// Starts gives every execution that an agent has begun, in order.
func (r *ScriptedRunner) Starts(agent tasks.AgentNum) []tasks.Ref {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.agents[agent].starts)
}

// Cancels gives every Cancel that was asked for.
func (r *ScriptedRunner) Cancels() []tasks.Ref {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.cancels)
}

// Acks gives the numbers of the output chunks that were acknowledged.
func (r *ScriptedRunner) Acks() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.acks)
}

// Remembered counts the entries in an agent's ledger.
func (r *ScriptedRunner) Remembered(agent tasks.AgentNum) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.agents[agent].ledger)
}

// Running gives the task in an agent's slot.
func (r *ScriptedRunner) Running(agent tasks.AgentNum) (tasks.Ref, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.agents[agent].running; e != nil {
		return e.ref, true
	}
	return tasks.Ref{}, false
}

func (r *ScriptedRunner) violate(format string, args ...any) {
	r.violations = append(r.violations, fmt.Sprintf(format, args...))
}

// Own implements tasks.Runner.
func (r *ScriptedRunner) Own(leases []tasks.Lease) {
	r.mu.Lock()
	r.owns++
	old := r.leases
	r.leases = map[tasks.Shard]tasks.Lease{}
	for _, l := range leases {
		r.leases[l.Shard] = l
	}
	var down, up []tasks.AgentNum
	for num, a := range r.agents {
		sh := a.info.Shard()
		now, owned := r.leases[sh]
		if was, had := old[sh]; had && (!owned || was.Epoch != now.Epoch) && a.link == r {
			down = append(down, num)
		}
		if owned && r.connect {
			up = append(up, num)
		}
	}
	r.mu.Unlock()
	for _, n := range down {
		r.Disconnect(n, "the shard is held elsewhere")
	}
	for _, n := range up {
		r.Connect(n)
	}
}

// Connect begins a session, if the agent's shard is owned and none is up here.
// A session of an older owner ends first; a newer owner's stays.
func (r *ScriptedRunner) Connect(agent tasks.AgentNum) {
	r.turns.Lock()
	defer r.turns.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.agents[agent]
	lease, owned := r.leases[a.info.Shard()]
	if a.up() && a.link == r || !owned || a.info.Removed || r.ice.frozen() {
		return
	}
	if lease.Epoch < a.epoch {
		r.step(Step{What: "stale", Agent: agent, Epoch: lease.Epoch})
		return
	}
	if a.up() {
		r.step(Step{What: "superseded", Agent: agent, Epoch: lease.Epoch})
		r.end(a, "a newer owner has connected")
	}
	a.epoch, a.link, a.lossy = lease.Epoch, r, false
	a.session++
	s := a.welcome()
	r.trace("agent %d up: %+v, running %+v", agent, s, s.Running)
	r.step(Step{What: "up", Agent: agent, Epoch: lease.Epoch})
	r.tell(func(to tasks.Sessions) { to.SessionUp(s) })
}

func (a *simAgent) up() bool { return a.session%2 == 1 }

// welcome is what the agent says of itself when a session begins.
func (a *simAgent) welcome() tasks.Session {
	s := tasks.Session{Agent: a.info.Num, LedgerID: a.info.LedgerID, LedgerNew: a.broken, LedgerApproved: a.blessed}
	say := func(what string, ref tasks.Ref) { a.link.step(Step{What: what, Agent: a.info.Num, Ref: ref}) }
	if a.running != nil {
		ref := a.running.ref
		s.Running = &ref
		say("running", ref)
	}
	for _, e := range a.ledger {
		switch {
		case e.final != nil:
			s.Finished = append(s.Finished, *e.final)
			say("finished", e.ref)
		case e.interrupted:
			s.Interrupted = append(s.Interrupted, e.ref)
			say("interrupted", e.ref)
		}
	}
	return s
}

// end ends a session. The caller holds turns and mu; mu is let go while the
// controller is told, since SessionDown waits for Execute.
func (r *ScriptedRunner) end(a *simAgent, why string) {
	link := a.link
	a.session++
	r.trace("agent %d down: %s", a.info.Num, why)
	r.mu.Unlock()
	link.tell(func(s tasks.Sessions) { s.SessionDown(a.info.Num, why) })
	r.mu.Lock()
}

// Disconnect ends the session, whoever's it is; the agent goes on with what it
// does.
func (r *ScriptedRunner) Disconnect(agent tasks.AgentNum, why string) {
	r.turns.Lock()
	defer r.turns.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.agents[agent]; a.up() {
		r.end(a, why)
	}
}

// Hangup ends the sessions with this controller, as its death does.
func (r *ScriptedRunner) Hangup(why string) {
	r.turns.Lock()
	defer r.turns.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leases = map[tasks.Shard]tasks.Lease{}
	for _, a := range r.agents {
		if a.up() && a.link == r {
			r.end(a, why)
		}
	}
}

// LoseNext says whether the next assignment or answer of the agent is lost, and
// its session with it.
func (r *ScriptedRunner) LoseNext(agent tasks.AgentNum, lose bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.agents[agent].lossy = lose
}

// lost says whether this message is the one that is lost.
func (r *ScriptedRunner) lost(a *simAgent) bool {
	if !a.lossy {
		return false
	}
	a.lossy = false
	r.step(Step{What: "lost", Agent: a.info.Num})
	go r.Disconnect(a.info.Num, "a message was lost")
	return true
}

// Restart kills the agent: its session ends and what it ran is interrupted. It
// stays away until Connect.
func (r *ScriptedRunner) Restart(agent tasks.AgentNum) {
	r.Disconnect(agent, "the agent went away")
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.agents[agent]
	if a.running != nil {
		a.running.interrupted, a.running = true, nil
	}
	r.step(Step{What: "boot", Agent: agent})
}

// LoseLedger restarts the agent with an empty ledger of another id.
func (r *ScriptedRunner) LoseLedger(agent tasks.AgentNum) {
	r.Restart(agent)
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.agents[agent]
	r.trace("agent %d loses its ledger", agent)
	r.step(Step{What: "ledger", Agent: agent})
	a.ledger, a.broken, a.blessed, a.info.LedgerID = map[tasks.ID]*entry{}, true, false, uuid.NewV4()
}

// PutBack lets an agent that is away have an older copy of its ledger, which
// does not know a task that was interrupted.
func (r *ScriptedRunner) PutBack(agent tasks.AgentNum, id tasks.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.trace("agent %d has a ledger without %d", agent, id)
	r.agents[agent].forget(id)
}

// Approve is the operator's decision about a quarantined agent; it does
// nothing to another one.
func (r *ScriptedRunner) Approve(agent tasks.AgentNum) {
	r.mu.Lock()
	a := r.agents[agent]
	quarantined := a.info.Quarantined
	a.blessed = a.blessed || quarantined
	r.mu.Unlock()
	if !quarantined {
		return
	}
	r.trace("agent %d is approved", agent)
	r.Change(agent, func(a *tasks.Agent) { a.Quarantined, a.Why = false, "" })
}

// Lookup implements tasks.Runner.
func (r *ScriptedRunner) Lookup(ref string) (tasks.Agent, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found []tasks.Agent
	for _, a := range r.agents {
		if (a.info.Name == ref || a.info.ID.String() == ref) && !a.info.Removed {
			found = append(found, a.info)
		}
	}
	switch len(found) {
	case 0:
		return tasks.Agent{}, fault.Newf(fault.Invalid, "unknown_agent", "There is no agent %q.", ref)
	case 1:
		return found[0], nil
	}
	return tasks.Agent{}, fault.Newf(fault.Conflict, "ambiguous_agent", "%d agents are named %q.", len(found), ref)
}

// Execute implements tasks.Runner.
func (r *ScriptedRunner) Execute(x tasks.Assignment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.agents[x.Agent]
	if !a.up() || a.link != r || x.Epoch < a.epoch || r.lost(a) {
		return
	}
	a.broken = false // all earlier tasks are settled: the new ledger is recorded
	for _, id := range x.Forget {
		a.forget(id)
	}
	if e := a.ledger[x.ID]; e != nil && e.ref.Attempt >= x.Attempt {
		r.violate("agent %d was given task %d attempt %d again", x.Agent, x.ID, x.Attempt)
		return
	}
	if a.running != nil {
		r.violate("agent %d was given task %d while it runs %d", x.Agent, x.ID, a.running.ref.ID)
		ref := a.running.ref
		r.tell(func(s tasks.Sessions) { s.Refused(x.Agent, tasks.Refusal{Ref: x.Ref(), Cause: "busy", Running: &ref}) })
		return
	}
	ans := a.script(x)
	r.trace("agent %d is given %d attempt %d epoch %d (%s) and does %+v", x.Agent, x.ID, x.Attempt, x.Epoch, x.Delivery, ans)
	if ans.Refuse != nil {
		refusal := *ans.Refuse
		refusal.Ref = x.Ref()
		r.tell(func(s tasks.Sessions) { s.Refused(x.Agent, refusal) })
		return
	}
	r.start(a, x, ans)
}

func (r *ScriptedRunner) start(a *simAgent, x tasks.Assignment, ans Answer) {
	e := &entry{ref: x.Ref(), deaf: ans.Deaf, epoch: x.Epoch}
	a.ledger[x.ID], a.running = e, e
	a.starts = append(a.starts, x.Ref())
	r.step(Step{What: "start", Agent: x.Agent, Ref: x.Ref(), Epoch: x.Epoch, Once: x.Delivery == kinds.DeliveryOnce})
	for _, c := range ans.Output {
		c.Ref = x.Ref()
		r.tell(func(s tasks.Sessions) { s.Output(x.Agent, c) })
	}
	if ans.Instead != nil {
		r.tell(func(s tasks.Sessions) { s.Final(x.Agent, *ans.Instead) })
	}
	ending := ans.Ending
	if ending.Outcome == "" {
		ending = tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(x.Args)}
	}
	switch {
	case ans.Silent:
		r.tell(func(s tasks.Sessions) { s.Accepted(x.Agent, x.Ref()) })
	case ans.After > 0:
		r.tell(func(s tasks.Sessions) { s.Accepted(x.Agent, x.Ref()) })
		time.AfterFunc(ans.After, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.finish(a, e, ending)
		})
	default:
		r.finish(a, e, ending)
	}
}

// finish ends what runs and says so, if anybody listens.
func (r *ScriptedRunner) finish(a *simAgent, e *entry, ending tasks.Ending) {
	if a.running != e {
		return // killed or cancelled before
	}
	now := time.Now()
	e.final = &tasks.Final{Ref: e.ref, Epoch: e.epoch, StartedAt: now, EndedAt: now, Ending: ending}
	a.running = nil
	r.step(Step{What: "end", Agent: a.info.Num, Ref: e.ref, Epoch: e.epoch, Outcome: ending.Outcome})
	if a.up() && !r.lost(a) {
		f := *e.final
		a.link.tell(func(s tasks.Sessions) { s.Final(a.info.Num, f) })
	}
}

// Finish ends the task that an agent runs.
func (r *ScriptedRunner) Finish(agent tasks.AgentNum, ending tasks.Ending) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.agents[agent]; a.running != nil {
		r.finish(a, a.running, ending)
	}
}

// Say tells the Manager anything, true or not, on the agent's session.
func (r *ScriptedRunner) Say(f func(s tasks.Sessions)) {
	r.tell(f)
}

// Cancel implements tasks.Runner.
func (r *ScriptedRunner) Cancel(agent tasks.AgentNum, ref tasks.Ref, _ string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cancels = append(r.cancels, ref)
	a := r.agents[agent]
	if a.up() && a.link == r && a.running != nil && a.running.ref == ref && !a.running.deaf {
		r.finish(a, a.running, tasks.Ending{Outcome: tasks.Cancelled, Reason: "cancelled", Detail: "Ended on request."})
	}
}

func (a *simAgent) forget(id tasks.ID) {
	if e := a.ledger[id]; e != nil && e != a.running {
		delete(a.ledger, id)
	}
}

// Forget implements tasks.Runner.
func (r *ScriptedRunner) Forget(agent tasks.AgentNum, ids ...tasks.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.agents[agent]; a != nil && a.up() && a.link == r {
		for _, id := range ids {
			a.forget(id)
		}
	}
}

// AckOutput implements tasks.Runner.
func (r *ScriptedRunner) AckOutput(_ tasks.AgentNum, _ tasks.Ref, seq int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.acks = append(r.acks, seq)
}

// Reconnect implements tasks.Runner.
func (r *ScriptedRunner) Reconnect(agent tasks.AgentNum, why string) {
	r.Disconnect(agent, why)
	r.Connect(agent)
}

// Quarantine implements tasks.Runner.
func (r *ScriptedRunner) Quarantine(agent tasks.AgentNum, why string) {
	r.mu.Lock()
	r.quarantine = append(r.quarantine, agent)
	r.step(Step{What: "quarantined", Agent: agent})
	r.mu.Unlock()
	r.Change(agent, func(a *tasks.Agent) { a.Quarantined, a.Why = true, why })
}

// AutoConnect says whether agents come up by themselves when their shard is
// owned; it is on in the beginning.
func (r *ScriptedRunner) AutoConnect(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connect = on
}
