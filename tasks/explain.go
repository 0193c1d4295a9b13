package tasks

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"uuid"
)

// Causes of waiting. They are stable codes; the sentence beside them is for
// people.
const (
	CauseBusy        = "agent_busy"
	CauseUnreachable = "agent_unreachable"
	CauseCertificate = "agent_certificate_expired"
	CausePaused      = "agent_paused"
	CauseQuarantined = "agent_quarantined"
	CauseRemoved     = "agent_removed"
	CauseSettling    = "agent_settling" // a session has begun; what it had in hand is settled first
	CauseHeld        = "agent_held"     // it refused a task a moment ago
	CauseNotDue      = "not_due"
	CauseBackingOff  = "backing_off" // an attempt was interrupted; the next one follows
	CauseStarting    = "starting"
	CauseRunning     = "running"
	CauseStoring     = "storing" // the agent has answered; the result is on its way to disk
	CauseCancel      = "cancel_requested"
	CauseElsewhere   = "owner_elsewhere"
	CauseNoOwner     = "no_owner"     // no controller owns the agent
	CauseOwnerSilent = "owner_silent" // the one that owns it does not answer this one
	CauseStopping    = "controller_stopping"
	CauseDatabase    = "database_unavailable"
)

// situation is what a loop knows of an agent at one moment, as values.
type situation struct {
	info      Agent
	session   bool
	ready     bool
	changed   time.Time
	downWhy   string
	hold      time.Time
	order     []ID // the first that wait for it, in order
	flights   []flight
	stopping  bool      // this controller hands nothing out any more
	failing   time.Time // since when the database takes no writes; zero = it does
	removedAt time.Time // when its removal was learned of
	limits    *Limits
}

// Explain says why a task is not completed: the cause with its numbers, then
// what Headgate or the reader does next. It is nil for completed tasks.
func (m *Manager) Explain(t *Task) *Waiting {
	if t.State == StateCompleted {
		return nil
	}
	s, ok := m.situation(t.Agent.Num)
	return explain(t, &s, ok, time.Now())
}

// explainAll fills in why tasks wait, looking at each agent once: a batch may
// hold ten thousand tasks of one. What is explained already stays.
func (m *Manager) explainAll(list []*Task) {
	type seen struct {
		s  situation
		ok bool
	}
	known := map[AgentNum]*seen{}
	now := time.Now()
	for _, t := range list {
		if t.State == StateCompleted || t.Waiting != nil {
			continue
		}
		k := known[t.Agent.Num]
		if k == nil {
			k = new(seen)
			k.s, k.ok = m.situation(t.Agent.Num)
			known[t.Agent.Num] = k
		}
		t.Waiting = explain(t, &k.s, k.ok, now)
	}
}

// situation looks at an agent; false when it is not held here.
func (m *Manager) situation(num AgentNum) (situation, bool) {
	s, ok := m.look(num)
	if ok && !s.session && !s.info.Quarantined && !s.info.Removed {
		// The fleet knows how its dials fare; the loop hears of changes only.
		if now, err := m.cfg.Runner.Lookup(s.info.ID.String()); err == nil && now.Num == num {
			s.info.Why, s.info.Expired = now.Why, now.Expired
		}
	}
	return s, ok
}

// elsewhere says what is known of the owner while it has not answered.
func (m *Manager) elsewhere(t *Task, l Lease) {
	quiet, silent := m.routes.silence(l.Owner)
	w := &Waiting{Cause: CauseNoOwner, Since: t.CreatedAt}
	switch {
	case l.Owner == uuid.Nil():
		w.Sentence = "No controller owns this agent at the moment."
		w.NextStep = "A controller that runs takes it within 20 s. If this stays so, look at the logs of the controllers."
	case l.Left <= 0:
		w.Since = later(t.CreatedAt, l.Until)
		w.Sentence = fmt.Sprintf("No controller owns this agent: the lease of %s ended at %s.", l.called(), clock(l.Until, time.Now()))
		w.NextStep = "Another controller takes it within seconds; it asks the agent first what became of its task."
	case silent:
		w.Cause, w.Since = CauseOwnerSilent, quiet.since
		w.Sentence = fmt.Sprintf("The controller %s owns this agent and does not answer since %s.", l.called(), clock(quiet.since, time.Now()))
		w.NextStep = "If it has ended, another one takes over within 20 s. If it runs, look at the way to its controller port (controller-advertise)."
	default:
		return
	}
	t.Waiting = w
}

func (m *Manager) look(num AgentNum) (situation, bool) {
	l, shard, ok := m.loopOfAgent(num)
	if !ok {
		return situation{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.agents[num]
	if _, ours := l.epoch(shard); !ours || a == nil {
		return situation{}, false
	}
	s := situation{
		info: a.info, session: a.session, ready: a.reconciled, changed: a.changed, downWhy: a.downWhy,
		hold: a.hold, stopping: m.draining.Load(), failing: l.failing, removedAt: a.removedAt, limits: &m.cfg.Limits,
		order: make([]ID, len(a.next)),
	}
	s.info.Quarantined = s.info.Quarantined || a.foreign
	for i := range a.next {
		s.order[i] = a.next[i].ID
	}
	for _, f := range a.flights {
		s.flights = append(s.flights, *f)
	}
	return s, true
}

// explain chooses the sentence for a task that is not completed; ours says
// whether its agent is held by this controller.
func explain(t *Task, s *situation, ours bool, now time.Time) *Waiting {
	switch {
	case ours && s.info.Removed:
		return removedWaiting(t, s, now)
	case t.State == StateNew && t.NotBefore.After(now):
		return notDue(t, now)
	case !ours:
		return &Waiting{
			Cause: CauseElsewhere, Since: t.CreatedAt,
			Sentence: "Another controller owns this agent, or ownership is changing hands just now.",
			NextStep: "Ask that controller; a take-over ends within 20 s.",
		}
	case t.State == StateWaiting:
		return s.started(t, now)
	}
	w := s.waiting(t, now)
	if i := slices.Index(s.order, t.ID); i >= 0 {
		w.place(i + 1)
	} else {
		w.Sentence += "."
	}
	if f := s.blocking(); f != nil {
		w.Blocking, w.BlockingKind, w.BlockingSince = f.q.ID, f.q.Kind, f.since.UTC()
	}
	return w
}

// place adds the place in the agent's order.
func (w *Waiting) place(n int) {
	w.Position = n
	w.Sentence = trimStop(w.Sentence) + "; position " + itoa(n) + "."
}

// queued says whether the cause holds tasks in the agent's order.
func (w *Waiting) queued() bool {
	switch w.Cause {
	case CauseBusy, CauseUnreachable, CauseCertificate, CausePaused, CauseQuarantined, CauseSettling, CauseHeld, CauseStarting,
		CauseStopping, CauseDatabase:
		return strings.HasPrefix(w.Sentence, "Waits: ")
	}
	return false
}

// justHanded explains a task that has started in the turn that stored it.
func justHanded(at time.Time) *Waiting {
	return &Waiting{
		Cause: CauseStarting, Since: at, Sentence: "It was handed to the agent a moment ago.",
		NextStep: "Nothing is to be done; if the agent never got it, it goes back to its place.",
	}
}

// blocking gives what is in the agent's slot.
func (s *situation) blocking() *flight {
	if len(s.flights) == 0 {
		return nil
	}
	return &s.flights[0]
}

// own gives the execution of a started task.
func (s *situation) own(id ID) *flight {
	for i := range s.flights {
		if f := &s.flights[i]; f.q.ID == id && !f.ghost {
			return f
		}
	}
	return nil
}
