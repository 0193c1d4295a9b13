package web

import (
	"strings"
	"time"

	"headgate/internal/auth"
	"headgate/internal/fleet"
	"headgate/tasks"
)

// The sentences of the pages: cause first, then what Headgate does by itself,
// then what a person can do. The stable code comes last.

// because is what a page says of something that is not well.
type because struct {
	State    string // of the box: an outcome, a state or a health
	Title    string // the cause
	Does     string // what Headgate does by itself
	Next     string // what the reader can do
	Code     string
	Blocking tasks.ID // the task that is in the way, 0 = none
}

// Healths of pages that are not fleet.Health: paused is what an operator did.
const healthPaused = "paused"

// healthOf gives the one word for an agent. Trouble comes before a pause,
// which is on purpose.
func healthOf(v *fleet.View) string {
	switch {
	case v.Status == fleet.Quarantined || v.Live.Health == fleet.HealthQuarantined:
		return string(fleet.HealthQuarantined)
	case v.Live.Health == fleet.HealthUnreachable:
		return string(fleet.HealthUnreachable)
	case !v.PausedAt.IsZero():
		return healthPaused
	}
	return string(v.Live.Health)
}

// healths lists the words in the order of attention, with what each means.
func healths() []struct{ Word, Text string } {
	return []struct{ Word, Text string }{
		{string(fleet.HealthUnreachable), "no answer; Headgate keeps trying"},
		{string(fleet.HealthQuarantined), "an operator must decide"},
		{healthPaused, "by an operator; its tasks wait"},
		{string(fleet.HealthConnecting), "the first call is on its way"},
		{string(fleet.HealthElsewhere), "another controller looks after it"},
		{string(fleet.HealthConnected), "in touch, ready for tasks"},
	}
}

// needsAttention says whether somebody should look at an agent.
func needsAttention(health string) bool {
	return health == string(fleet.HealthUnreachable) || health == string(fleet.HealthQuarantined)
}

// rank orders healths by attention.
func rank(health string) int {
	for i, h := range healths() {
		if h.Word == health {
			return i
		}
	}
	return len(healths())
}

// agentLine is the one line under an agent's row; "" when all is well.
func agentLine(v *fleet.View, waiting int) string {
	switch healthOf(v) {
	case string(fleet.HealthUnreachable), string(fleet.HealthConnecting):
		return sentence(v.Live.Sentence)
	case string(fleet.HealthQuarantined):
		return sentence(orElse(v.StatusWhy, v.Live.Sentence)) + " Nothing is sent until an operator decides."
	case healthPaused:
		line := "Paused by " + actorName(v.PausedBy) + " at " + v.PausedAt.UTC().Format("15:04") + "."
		if waiting > 0 {
			line += " " + plural(waiting, "task") + " " + verb(waiting, "waits and starts", "wait and start in order") + " when it is resumed."
		}
		return line
	case string(fleet.HealthElsewhere):
		return "Another controller is connected to it; what you do here is passed on."
	}
	return ""
}

// agentWhy is the box on an agent's page; nil when all is well.
func agentWhy(v *fleet.View) *because {
	health := healthOf(v)
	b := &because{State: health, Title: strings.TrimSuffix(agentLine(v, 0), "."), Code: v.Live.Cause}
	switch health {
	case string(fleet.HealthUnreachable):
		b.Title = strings.TrimSuffix(sentence(v.Live.Sentence), ".")
		b.Does = "Headgate keeps trying by itself. Tasks for this agent wait in order; nothing is lost and nothing is sent twice."
		b.Next = nextForCause(v)
	case string(fleet.HealthQuarantined):
		b.Title = strings.TrimSuffix(sentence(orElse(v.StatusWhy, "It is quarantined")), ".")
		b.Does = "Nothing is sent to it until an operator decides; its tasks wait."
		b.Next = "If you know why this happened, approve the agent as it is now. Tasks that nobody can vouch for then end as unknown."
		b.Code = "quarantined"
	case healthPaused:
		b.Title = "Paused by " + actorName(v.PausedBy)
		b.Does = "A task that was running goes on to its end. New ones wait in order until the agent is resumed."
		b.Code = ""
	case string(fleet.HealthConnecting):
		b.Title = "Connecting for the first time"
		b.Does = orElse(sentence(v.Live.Sentence), "This usually takes less than a second.")
		b.Code = ""
	case string(fleet.HealthElsewhere):
		b.Title = "Another controller looks after this agent"
		b.Does = "What you ask for here is passed on to it."
		b.Code = ""
	default:
		return nil
	}
	return b
}

// nextForCause says what to look at on the agent's machine.
func nextForCause(v *fleet.View) string {
	switch v.Live.Cause {
	case fleet.CauseRefused:
		return "The machine answers, but nothing listens on that port: see whether headgate-agent runs there, and on which port."
	case fleet.CauseTimeout, fleet.CauseUnreachable, fleet.CauseSilent:
		return "See whether the machine is up and whether a firewall lies between it and this controller."
	case fleet.CauseNoSuchHost, fleet.CauseNoAddress, fleet.CauseAddressRefused:
		return "Correct its address; the agent's identity stays the same."
	case fleet.CauseNotAnAgent, fleet.CauseOtherAgent:
		return "Check its address: the machine may have got another one, or another program uses that port."
	case fleet.CauseKeyChanged, fleet.CauseUnknownCA, fleet.CauseControllerDenied:
		return "If the agent was installed anew, pair it again. If not, find out who answers there before anything else."
	case fleet.CauseExpired, fleet.CauseNotYetValid:
		return "Compare the clocks of both machines; if they agree, pair the agent again."
	}
	return "See what headgate-agent says in its log on that machine."
}

// taskLine is the one line under a task's row; "" when all is well.
func taskLine(t *tasks.Task) string {
	if t.State != tasks.StateCompleted {
		if t.Waiting == nil {
			return ""
		}
		line := sentence(t.Waiting.Sentence)
		if t.State == tasks.StateNew && !strings.HasPrefix(line, "Waits") {
			return "Waits: " + lowerFirst(line)
		}
		return line
	}
	if t.Ending.Outcome == tasks.Succeeded {
		return ""
	}
	return sentence(orElse(t.Ending.Detail, reasonTitle(t.Ending.Outcome, t.Ending.Reason)))
}

// taskWhy is the box on a task's page; nil when there is nothing to explain.
func taskWhy(t *tasks.Task) *because {
	if t.State != tasks.StateCompleted {
		return waitingWhy(t)
	}
	e := &t.Ending
	b := &because{State: string(e.Outcome), Title: strings.TrimSuffix(taskLine(t), "."), Code: e.Reason}
	once := t.Delivery == "once"
	switch e.Outcome {
	case tasks.Succeeded:
		return nil
	case tasks.Failed:
		b.Does = "The agent ran it and reported this end. It is not run again by itself."
		b.Next = "Look at the output and the result below; then repeat it, with changes if need be."
	case tasks.TimedOut:
		b.Does = "The agent ended it after " + took(t.Timeout) + "; it is not run again by itself."
		b.Next = "If it needs more time, repeat it with a longer timeout."
	case tasks.Cancelled:
		b.Does = ""
	case tasks.Expired:
		b.Does = "Nothing was run."
		b.Next = "If it is still wanted, repeat it."
	case tasks.Rejected:
		b.Does = "Nothing was run. Only the agent's own policy file decides what it allows; it cannot be widened from here."
		b.Next = "Choose something that the agent allows, or change the policy file on its machine."
	case tasks.Unknown:
		b.Does = "Nobody can know whether it ran to its end, so it is not run again."
		if !once {
			b.Does = "Nobody can know how it ended."
		}
		b.Next = "Look at the machine, then decide whether to repeat it."
	}
	return b
}

func waitingWhy(t *tasks.Task) *because {
	w := t.Waiting
	if w == nil {
		return nil
	}
	b := &because{State: string(t.State), Title: strings.TrimSuffix(sentence(w.Sentence), "."), Next: w.NextStep, Code: w.Cause, Blocking: w.Blocking}
	switch w.Cause {
	case "agent_unreachable":
		b.State = "unreachable"
	case "agent_paused", "agent_quarantined":
		b.State = strings.TrimPrefix(w.Cause, "agent_")
	}
	return b
}

// outcomeTitle says what an outcome means, for lists of them.
func outcomeTitle(o tasks.Outcome) string {
	return map[tasks.Outcome]string{
		tasks.Failed: "It ran and reported failure", tasks.TimedOut: "It did not end within its timeout",
		tasks.Rejected: "The agent refused to run it", tasks.Unknown: "Nobody can know how it ended",
		tasks.Expired: "Its time ran out before it started", tasks.Cancelled: "It was cancelled or was not needed any more",
	}[o]
}

// reasonTitle puts a reason code into words, for lists of causes.
func reasonTitle(o tasks.Outcome, reason string) string {
	titles := map[string]string{
		"exit_nonzero": "The program ended with a code other than 0", "killed_by_signal": "The program was ended by a signal",
		"spawn_failed": "The program could not be started", "deadline_exceeded": "It did not end within its timeout",
		"agent_stopped": "The agent was stopped in the middle", "policy_denied": "The agent’s policy does not allow it",
		"invalid_args": "The arguments are not acceptable", "task_id_reused": "The agent has seen its number with other content",
		"result_too_large": "The result was too large", "agent_defect": "The agent met a defect of its own",
		"collection_failed": "The facts could not be collected", "invalid_answer": "The agent’s answer made no sense",
		tasks.ReasonCancelled: "Cancelled by a person", tasks.ReasonExpired: "Its time ran out before it could start",
		tasks.ReasonAgentRemoved: "Its agent was removed", tasks.ReasonAgentRestart: "The agent restarted in the middle",
		tasks.ReasonNoWord: "The agent never said how it ended", tasks.ReasonAttempts: "The agent restarted each time that it ran",
		tasks.ReasonLedgerChanged: "The agent came back with another ledger", tasks.ReasonSuperseded: "A newer task took its place",
	}
	if text := titles[reason]; text != "" {
		return text
	}
	if reason != "" {
		return upperFirst(strings.ReplaceAll(reason, "_", " "))
	}
	return "It ended as " + string(o)
}

// actorName writes who did something: the name alone, or token and name.
func actorName(actor string) string {
	kind, name, ok := strings.Cut(actor, ":")
	if !ok {
		return orElse(actor, "somebody")
	}
	if kind == auth.KindUser {
		return name
	}
	return kind + " " + name
}

// sentence makes text of others a sentence of ours: a capital and a full stop.
func sentence(text string) string {
	text = strings.TrimSpace(text)
	if text == "" {
		return ""
	}
	if !strings.ContainsAny(text[len(text)-1:], ".!?") {
		text += "."
	}
	return upperFirst(text)
}

// upperFirst leaves words alone that are names: those with a dot or a digit.
func upperFirst(text string) string {
	word, _, _ := strings.Cut(text, " ")
	if text == "" || text[0] < 'a' || text[0] > 'z' || strings.ContainsAny(strings.TrimRight(word, ".,:"), ".:/0123456789") {
		return text
	}
	return string(text[0]-'a'+'A') + text[1:]
}

// lowerFirst is for a sentence that goes on behind a colon; an abbreviation
// or a name of more than one capital stays.
func lowerFirst(text string) string {
	if len(text) < 2 || text[0] < 'A' || text[0] > 'Z' || text[1] >= 'A' && text[1] <= 'Z' {
		return text
	}
	return string(text[0]-'A'+'a') + text[1:]
}

func orElse(text, other string) string {
	if text == "" {
		return other
	}
	return text
}

func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// waitOf gives how long a task waited before it started, or waits now.
func waitOf(t *tasks.Task, now time.Time) time.Duration {
	switch {
	case !t.StartedAt.IsZero():
		return t.StartedAt.Sub(t.CreatedAt)
	case !t.CompletedAt.IsZero():
		return t.CompletedAt.Sub(t.CreatedAt)
	}
	return now.Sub(t.CreatedAt)
}

// runOf gives how long a task ran, or runs now; false when it has not started.
func runOf(t *tasks.Task, now time.Time) (time.Duration, bool) {
	switch {
	case t.StartedAt.IsZero():
		return 0, false
	case !t.CompletedAt.IsZero():
		return t.CompletedAt.Sub(t.StartedAt), true
	}
	return now.Sub(t.StartedAt), true
}
