package tasks

import (
	"fmt"
	"strings"
	"time"
	"uuid"
)

// Causes of waiting. They are stable codes; the sentence beside them is for
// people.
const (
	CauseBusy        = "agent_busy"
	CauseUnreachable = "agent_unreachable"
	CausePaused      = "agent_paused"
	CauseQuarantined = "agent_quarantined"
	CauseRemoved     = "agent_removed"
	CauseSettling    = "agent_settling" // a session has begun; what it had in hand is settled first
	CauseHeld        = "agent_held"     // it refused a task a moment ago
	CauseNotDue      = "not_due"
	CauseStarting    = "starting"
	CauseRunning     = "running"
	CauseCancel      = "cancel_requested"
	CauseElsewhere   = "owner_elsewhere"
	CauseNoOwner     = "no_owner"     // no controller owns the agent
	CauseOwnerSilent = "owner_silent" // the one that owns it does not answer this one
)

// situation is what a loop knows of an agent at one moment, as values.
type situation struct {
	info      Agent
	session   bool
	ready     bool
	changed   time.Time
	downWhy   string
	hold      time.Time
	depth     int
	position  int // 0 = behind what is in memory
	busy      bool
	blocking  Queued
	ghost     bool
	since     time.Time
	accepted  time.Time
	heard     time.Time
	cancelled time.Time
}

// Explain says why a task is not completed: the cause with its numbers, then
// what Headgate or the reader does next. It is nil for completed tasks.
func (m *Manager) Explain(t *Task) *Waiting {
	if t.State == StateCompleted {
		return nil
	}
	now := time.Now()
	s, ok := m.situation(t)
	if s.info.Removed {
		return removedWaiting(t, now, m.cfg.Limits.ForcedGrace)
	}
	if t.State == StateNew && t.NotBefore.After(now) {
		return notDue(t, now)
	}
	if !ok {
		return &Waiting{
			Cause: CauseElsewhere, Since: t.CreatedAt,
			Sentence: "Another controller owns this agent, or ownership is changing hands just now.",
			NextStep: "Ask that controller; a take-over ends within 20 s.",
		}
	}
	if t.State == StateWaiting {
		return s.started(t, now)
	}
	w := s.waiting(t, now)
	w.Position = s.position
	if w.Position == 0 && s.depth > 0 {
		w.Position = s.depth // at the end, as far as memory knows
	}
	if s.busy {
		w.Blocking = s.blocking.ID
	}
	w.Sentence += fmt.Sprintf("; position %d.", max(1, w.Position))
	return w
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

func notDue(t *Task, now time.Time) *Waiting {
	w := &Waiting{
		Cause: CauseNotDue, Since: t.CreatedAt,
		Sentence: fmt.Sprintf("Waits: not before %s, in %s.", clock(t.NotBefore, now), span(t.NotBefore.Sub(now))),
		NextStep: "Headgate starts it by itself then. Cancel it if it is no longer wanted.",
	}
	if t.Attempt > 0 {
		w.Sentence = fmt.Sprintf("Waits: attempt %d was interrupted; the next one follows in %s.", t.Attempt, span(t.NotBefore.Sub(now)))
	}
	return w
}

func (m *Manager) situation(t *Task) (situation, bool) {
	l, shard, ok := m.loopOfAgent(t.Agent.Num)
	if !ok {
		return situation{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.agents[t.Agent.Num]
	if _, ours := l.epoch(shard); !ours || a == nil {
		return situation{}, false
	}
	s := situation{
		info: a.info, session: a.session, ready: a.reconciled, changed: a.changed, downWhy: a.downWhy,
		hold: a.hold, depth: a.depth,
	}
	s.info.Quarantined = s.info.Quarantined || a.foreign
	for i := range a.next {
		if a.next[i].ID == t.ID {
			s.position = i + 1
		}
	}
	if len(a.flights) > 0 {
		f := a.flights[0]
		if own := a.task(t.ID); own != nil {
			f = own
		}
		s.busy, s.blocking, s.ghost = true, f.q, f.ghost
		s.since, s.accepted, s.heard, s.cancelled = f.since, f.accepted, f.heard, f.cancelAsked
	}
	return s, true
}

// waiting explains a task in state new.
func (s *situation) waiting(t *Task, now time.Time) *Waiting {
	w := &Waiting{Since: t.CreatedAt}
	switch {
	case s.info.Quarantined:
		w.Cause, w.Sentence = CauseQuarantined, "Waits: the agent is quarantined"+why(s.info.Why)
		w.NextStep = "An operator must look at the agent and approve or remove it."
	case s.info.Paused:
		w.Cause, w.Since = CausePaused, later(t.CreatedAt, s.info.PausedAt)
		w.Sentence = fmt.Sprintf("Waits: the agent was paused by %s at %s", s.info.PausedBy, clock(s.info.PausedAt, now))
		w.NextStep = "Tasks start in order when it is resumed."
	case !s.session:
		w.Cause, w.Since = CauseUnreachable, later(t.CreatedAt, s.changed)
		w.Sentence = fmt.Sprintf("Waits: the agent is unreachable for %s", span(now.Sub(s.changed))) + why(first(s.downWhy, s.info.Why))
		w.NextStep = "Headgate keeps trying by itself and starts the task when the agent answers. Look at the agent's machine, or cancel the task."
	case s.busy && s.ghost:
		w.Cause, w.Since = CauseBusy, later(t.CreatedAt, s.since)
		w.Sentence = fmt.Sprintf("Waits: the agent still runs %d, which is completed here, for %s", s.blocking.ID, span(now.Sub(s.since)))
		w.NextStep = "The agent has been asked to end it; this task starts then."
	case s.busy:
		w.Cause, w.Since = CauseBusy, later(t.CreatedAt, s.since)
		w.Sentence = fmt.Sprintf("Waits: the agent is busy with %d %s for %s", s.blocking.ID, s.blocking.Kind, span(now.Sub(s.since)))
		w.NextStep = fmt.Sprintf("It starts by itself in its turn; the running task ends within %s at the latest.",
			span(max(0, s.blocking.Timeout-now.Sub(s.since))))
	case !s.ready:
		w.Cause, w.Since = CauseSettling, later(t.CreatedAt, s.changed)
		w.Sentence = "Waits: the agent has just connected, and what it had in hand is settled first"
		w.NextStep = "It starts by itself within seconds."
	case now.Before(s.hold):
		w.Cause = CauseHeld
		w.Sentence = fmt.Sprintf("Waits: the agent refused a task; it is asked again in %s", span(s.hold.Sub(now)))
		w.NextStep = "If this goes on, look at the disk and the log of the agent."
	default:
		w.Cause, w.Sentence = CauseStarting, "Waits: it is about to be handed to the agent"
		w.NextStep = "It starts by itself within 2 s."
	}
	return w
}

// started explains a task that its agent has.
func (s *situation) started(t *Task, now time.Time) *Waiting {
	w := &Waiting{Since: t.StartedAt, Cause: CauseRunning}
	age := span(max(0, now.Sub(t.StartedAt)))
	left := t.Timeout - now.Sub(t.StartedAt)
	switch {
	case s.info.Quarantined:
		w.Cause = CauseQuarantined
		w.Sentence = fmt.Sprintf("The agent has had it for %s and is quarantined%s.", age, why(s.info.Why))
		w.NextStep = "An operator must look at the agent and approve or remove it; then the task is settled."
	case !s.session:
		w.Cause, w.Since = CauseUnreachable, s.changed
		w.Sentence = fmt.Sprintf("The connection was lost %s ago%s.", span(now.Sub(s.changed)), why(first(s.downWhy, s.info.Why)))
		w.NextStep = "Headgate asks the agent what became of it first; it is not sent again blindly."
	case !s.cancelled.IsZero():
		w.Cause, w.Since = CauseCancel, s.cancelled
		w.Sentence = fmt.Sprintf("The agent was asked %s ago to end it.", span(now.Sub(s.cancelled)))
		w.NextStep = "It is completed with the agent's answer."
	case s.accepted.IsZero():
		w.Cause = CauseStarting
		w.Sentence = fmt.Sprintf("It was handed to the agent %s ago, which has not yet said that it has begun.", age)
		w.NextStep = "Nothing is to be done; if the agent never got it, it goes back to its place."
	case left < 0:
		w.Sentence = fmt.Sprintf("The agent has had it for %s, %s longer than its timeout.", age, span(-left))
		w.NextStep = "The agent has been asked to end it; without a word its outcome becomes unknown."
	default:
		w.Sentence = fmt.Sprintf("The agent has had it for %s and spoke %s ago.", age, span(now.Sub(s.heard)))
		w.NextStep = fmt.Sprintf("It ends by %s at the latest; then the agent ends it and says so.", clock(t.StartedAt.Add(t.Timeout), now))
	}
	return w
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// why appends a reason to a sentence, without its own full stop.
func why(s string) string {
	if s = strings.TrimRight(s, ". "); s == "" {
		return ""
	}
	return ": " + s
}

// span shows a duration as people say it: 41 s, 2 min 14 s, 6 h 25 min, 3 d 4 h.
func span(d time.Duration) string {
	d = max(0, d)
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour:
		return pair(int(d.Minutes()), "min", int(d.Seconds())%60, "s")
	case d < 24*time.Hour:
		return pair(int(d.Hours()), "h", int(d.Minutes())%60, "min")
	}
	return pair(int(d.Hours())/24, "d", int(d.Hours())%24, "h")
}

func pair(a int, unitA string, b int, unitB string) string {
	if b == 0 {
		return fmt.Sprintf("%d %s", a, unitA)
	}
	return fmt.Sprintf("%d %s %d %s", a, unitA, b, unitB)
}

// clock shows a moment in UTC, with the date when it is another day.
func clock(t, now time.Time) string {
	t, now = t.UTC(), now.UTC()
	if t.YearDay() == now.YearDay() && t.Year() == now.Year() {
		return t.Format("15:04:05 UTC")
	}
	return t.Format("2006-01-02 15:04:05 UTC")
}
