package tasks

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// notDue explains a task for later: one with a not_before, or one that was
// interrupted and is given to its agent again after a pause.
func notDue(t *Task, now time.Time) *Waiting {
	in := span(t.NotBefore.Sub(now))
	if t.Attempt == 0 {
		return &Waiting{
			Cause: CauseNotDue, Since: t.CreatedAt,
			Sentence: fmt.Sprintf("Waits: not before %s, in %s.", clock(t.NotBefore, now), in),
			NextStep: "Headgate starts it by itself then. Cancel it if it is no longer wanted.",
		}
	}
	return &Waiting{
		Cause: CauseBackingOff, Since: t.CreatedAt,
		Sentence: fmt.Sprintf("Waits: attempt %d of %d was interrupted; the next one follows in %s, at %s.",
			t.Attempt, MaxAttempts, in, clock(t.NotBefore, now)),
		NextStep: "Headgate gives it to the agent again by itself; the agent's other tasks go on meanwhile. Cancel it if it is no longer wanted.",
	}
}

// waiting explains a task in state new that is due. Its sentence has no full
// stop yet.
func (s *situation) waiting(t *Task, now time.Time) *Waiting {
	w := &Waiting{Since: t.CreatedAt}
	switch {
	case !s.failing.IsZero():
		w.Cause, w.Since = CauseDatabase, later(t.CreatedAt, s.failing)
		w.Sentence = fmt.Sprintf("Waits: the database takes no writes for %s, and nothing is started without a record", span(now.Sub(s.failing)))
		w.NextStep = "It starts by itself when the database works again; look at the controller's log and at the database."
	case s.info.Quarantined:
		w.Cause, w.Sentence = CauseQuarantined, "Waits: the agent is quarantined"+why(s.info.Why)
		w.NextStep = "An operator must look at the agent and approve or remove it."
	case s.info.Paused:
		w.Cause, w.Since = CausePaused, later(t.CreatedAt, s.info.PausedAt)
		w.Sentence = fmt.Sprintf("Waits: the agent was paused by %s at %s", s.info.PausedBy, clock(s.info.PausedAt, now))
		w.NextStep = "Tasks start in order when it is resumed."
	case !s.session && s.info.Expired:
		w.Cause, w.Since = CauseCertificate, later(t.CreatedAt, s.changed)
		w.Sentence = "Waits: " + first(s.info.Why, "the agent's certificate has expired")
		w.NextStep = "Pair the agent again, or set the clock of the controller's machine if it is wrong."
	case !s.session:
		w.Cause, w.Since = CauseUnreachable, later(t.CreatedAt, s.changed)
		w.Sentence = fmt.Sprintf("Waits: the agent is unreachable for %s", span(now.Sub(s.changed))) + why(first(s.info.Why, s.downWhy))
		w.NextStep = "Headgate keeps trying by itself and starts the task when the agent answers. Look at the agent's machine, or cancel the task."
	case len(s.flights) > 0:
		s.busy(w, t, now)
	case !s.ready:
		w.Cause, w.Since = CauseSettling, later(t.CreatedAt, s.changed)
		w.Sentence = "Waits: the agent has just connected, and what it had in hand is settled first"
		w.NextStep = "It starts by itself within seconds."
	case now.Before(s.hold):
		w.Cause = CauseHeld
		w.Sentence = fmt.Sprintf("Waits: the agent refused a task; it is asked again in %s", span(s.hold.Sub(now)))
		w.NextStep = "If this goes on, look at the disk and the log of the agent."
	case s.stopping:
		w.Cause, w.Sentence = CauseStopping, "Waits: this controller is stopping and hands nothing out any more"
		w.NextStep = "The next controller that owns the agent starts it, at the latest 20 s after that one runs."
	default:
		w.Cause, w.Sentence = CauseStarting, "Waits: it is about to be handed to the agent"
		w.NextStep = "It starts by itself within 2 s."
	}
	return w
}

// busy explains a task whose agent has another one in its slot.
func (s *situation) busy(w *Waiting, t *Task, now time.Time) {
	f := s.blocking()
	age := now.Sub(f.since)
	w.Cause, w.Since = CauseBusy, later(t.CreatedAt, f.since)
	if f.ghost {
		w.Sentence = fmt.Sprintf("Waits: the agent still runs %d, which is completed here, for %s", f.q.ID, span(age))
		w.NextStep = "The agent has been asked to end it; this task starts then."
		return
	}
	w.Sentence = fmt.Sprintf("Waits: the agent is busy with %d %s for %s", f.q.ID, f.q.Kind, span(age))
	if !f.cancelAsked.IsZero() {
		w.Sentence += ", which is being cancelled"
	}
	end := s.limits.forcedEnd(f, f.since.Add(f.q.Timeout))
	if !f.cancelAsked.IsZero() {
		end = earlier(end, s.limits.cancelEnd(f, s.session, s.changed))
	}
	w.NextStep = fmt.Sprintf("It starts by itself in its turn; the slot is free again within %s at the latest.", span(end.Sub(now)))
}

// started explains a task that its agent has.
func (s *situation) started(t *Task, now time.Time) *Waiting {
	f := s.own(t.ID)
	if f == nil { // it has ended, or gone back, since the table was read
		f = &flight{accepted: now, heard: now}
	}
	w := &Waiting{Since: t.StartedAt, Cause: CauseRunning}
	age := span(max(0, now.Sub(t.StartedAt)))
	left := t.Timeout - now.Sub(t.StartedAt)
	switch {
	case !f.cancelAsked.IsZero():
		s.cancelling(w, t, f, now)
	case f.finishing:
		w.Cause, w.Since, w.Sentence = CauseStoring, f.heard, "The agent has done with it; what it said is on its way to disk."
		w.NextStep = "Nothing is to be done."
		if !s.failing.IsZero() {
			w.Sentence = fmt.Sprintf("The agent has done with it, but the database takes no writes for %s.", span(now.Sub(s.failing)))
			w.NextStep = "It is stored when the database works again; the agent keeps it until then."
		}
	case s.info.Quarantined:
		w.Cause = CauseQuarantined
		w.Sentence = fmt.Sprintf("The agent has had it for %s and is quarantined%s.", age, why(s.info.Why))
		w.NextStep = "An operator must look at the agent and approve or remove it; then the task is settled."
	case !s.session:
		w.Cause, w.Since = CauseUnreachable, s.changed
		w.Sentence = fmt.Sprintf("The connection was lost %s ago%s.", span(now.Sub(s.changed)), why(first(s.info.Why, s.downWhy)))
		w.NextStep = fmt.Sprintf("Headgate asks the agent what became of it first; it is not sent again blindly. Without a word its outcome becomes unknown at %s.",
			clock(s.limits.forcedEnd(f, t.StartedAt.Add(t.Timeout)), now))
	case f.accepted.IsZero():
		w.Cause = CauseStarting
		w.Sentence = fmt.Sprintf("It was handed to the agent %s ago, which has not yet said that it has begun.", age)
		w.NextStep = "Nothing is to be done; if the agent never got it, it goes back to its place."
	case left < 0:
		w.Sentence = fmt.Sprintf("The agent has had it for %s, %s longer than its timeout.", age, span(-left))
		w.NextStep = fmt.Sprintf("The agent has been asked to end it; without a word its outcome becomes unknown at %s.",
			clock(s.limits.forcedEnd(f, t.StartedAt.Add(t.Timeout)), now))
	default:
		w.Sentence = fmt.Sprintf("The agent has had it for %s and spoke %s ago.", age, span(now.Sub(f.heard)))
		w.NextStep = fmt.Sprintf("It ends by %s at the latest; then the agent ends it and says so.", clock(t.StartedAt.Add(t.Timeout), now))
	}
	return w
}

// cancelling explains a started task that somebody wants to end.
func (s *situation) cancelling(w *Waiting, t *Task, f *flight, now time.Time) {
	w.Cause, w.Since = CauseCancel, f.markedAt
	w.Sentence = fmt.Sprintf("Being cancelled: %s asked for it at %s", first(f.markedBy, t.CancelActor), clock(f.markedAt, now))
	switch {
	case f.finishing:
		w.Sentence += "; what the agent said is on its way to disk."
		w.NextStep = "It is completed with that."
		return
	case s.info.Quarantined:
		w.Sentence += "; the agent is quarantined, and what it says does not count."
	case !s.session:
		w.Sentence += fmt.Sprintf(", but the connection to the agent was lost %s ago%s.", span(now.Sub(s.changed)), why(first(s.info.Why, s.downWhy)))
	default:
		w.Sentence += fmt.Sprintf("; the agent was told %s ago.", span(now.Sub(later(f.cancelAsked, s.changed))))
	}
	at := s.limits.cancelEnd(f, s.session && !s.info.Quarantined, s.changed)
	w.NextStep = fmt.Sprintf("It is completed with the agent's answer; without one its outcome becomes unknown at %s.", clock(at, now))
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func itoa(n int) string { return strconv.Itoa(n) }

func trimStop(s string) string { return strings.TrimRight(s, ". ") }

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// why appends a reason to a sentence, without its own full stop.
func why(s string) string {
	if s = trimStop(s); s == "" {
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
