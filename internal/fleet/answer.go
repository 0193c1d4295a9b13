package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"headgate/internal/agentpb"
	"headgate/tasks"
)

const (
	maxName     = 200  // bytes of a name that an agent gives
	maxReason   = 64   // bytes of a reason; it is a code
	maxSentence = 4096 // bytes of a sentence
	// maxChunk is what the protocol allows for one piece of output.
	maxChunk = 64 << 10
	// maxJSONDepth keeps deeply nested text from the database's parser, which
	// gives up at some thousands.
	maxJSONDepth = 500
	// reasonInvalid marks an answer that breaks the protocol's rules.
	reasonInvalid = "invalid_answer"
)

// finalOf reads an agent's last word. Nothing in it can make a turn fail:
// text is cleaned, results are checked, and what the protocol does not know is
// a failure that says so.
func finalOf(p *agentpb.Final) tasks.Final {
	f := tasks.Final{
		Ref:       tasks.Ref{ID: tasks.ID(p.GetTaskId()), Attempt: int(p.GetAttempt())},
		Epoch:     p.GetEpoch(),
		StartedAt: timeOf(p.GetStartedUnixNano()),
		EndedAt:   timeOf(p.GetEndedUnixNano()),

		Interrupted: p.GetInterrupted(),
	}
	e := &f.Ending
	e.Outcome = tasks.Outcome(p.GetOutcome())
	e.Reason = clean(p.GetReason(), maxReason)
	e.Detail = clean(p.GetDetail(), maxSentence)
	e.Exit = exitOf(p.GetExit())
	e.OutputBytes = max(0, p.GetOutputBytes())
	switch e.Outcome {
	case tasks.Succeeded, tasks.Failed, tasks.TimedOut, tasks.Cancelled, tasks.Rejected, tasks.Unknown:
	default:
		invalidate(e, fmt.Sprintf("the agent gave the outcome %q, which does not exist", clean(p.GetOutcome(), maxReason)))
	}
	switch result := p.GetResult(); {
	case len(result) == 0:
	case len(result) > tasks.MaxResultBytes:
		invalidate(e, fmt.Sprintf("the agent said %q and gave a result of %d bytes; %d are allowed", clean(p.GetOutcome(), maxReason), len(result), tasks.MaxResultBytes))
	case checkedJSON(result):
		e.Result = json.RawMessage(result)
	default:
		e.ResultBytes = result
	}
	return f
}

func invalidate(e *tasks.Ending, why string) {
	e.Outcome, e.Reason = tasks.Failed, reasonInvalid
	if e.Detail != "" {
		why += "; it also said: " + e.Detail
	}
	e.Detail = why
}

func exitOf(p *agentpb.Exit) *tasks.Exit {
	if p == nil {
		return nil
	}
	e := &tasks.Exit{
		Signal:      clean(p.GetSignal(), maxName),
		SpawnError:  clean(p.GetSpawnError(), maxSentence),
		UserMS:      p.GetUserMs(),
		SystemMS:    p.GetSystemMs(),
		MaxRSSBytes: p.GetMaxRssBytes(),
		GraceMS:     max(0, p.GetGraceMs()),
		LeftBehind:  processesOf(p.GetLeftBehind()),
		Released:    p.GetReleased(),
		Survivors:   processesOf(p.GetSurvivors()),
	}
	if by := p.GetKilledBy(); by == tasks.KilledByTerm || by == tasks.KilledByKill {
		e.KilledBy = by
	}
	if p.Code != nil {
		code := int(p.GetCode())
		e.Code = &code
	}
	return e
}

func processesOf(list []*agentpb.Process) []tasks.Process {
	var all []tasks.Process
	for _, p := range list[:min(len(list), tasks.MaxProcesses)] {
		all = append(all, tasks.Process{PID: int(p.GetPid()), Name: clean(p.GetName(), maxReason)})
	}
	return all
}

func refOf(p *agentpb.TaskRef) *tasks.Ref {
	if p == nil {
		return nil
	}
	return &tasks.Ref{ID: tasks.ID(p.GetTaskId()), Attempt: int(p.GetAttempt())}
}

func timeOf(unixNano int64) time.Time {
	if unixNano <= 0 {
		return time.Time{}
	}
	return time.Unix(0, unixNano)
}

// refusals are the words of tasks.Refusal.Cause.
func refusalOf(p *agentpb.Refused) tasks.Refusal {
	cause := "unspecified"
	switch p.GetCause() {
	case agentpb.Refusal_REFUSAL_BUSY:
		cause = "busy"
	case agentpb.Refusal_REFUSAL_STALE_EPOCH:
		cause = "stale_epoch"
	case agentpb.Refusal_REFUSAL_LEDGER_FULL:
		cause = "ledger_full"
	case agentpb.Refusal_REFUSAL_DISK:
		cause = "disk"
	}
	return tasks.Refusal{
		Ref:     tasks.Ref{ID: tasks.ID(p.GetTaskId()), Attempt: int(p.GetAttempt())},
		Cause:   cause,
		Running: refOf(p.GetRunning()),
		Detail:  clean(p.GetDetail(), maxSentence),
	}
}

// outputOf reads a piece of output; false means that it breaks the protocol.
func outputOf(p *agentpb.Output, at time.Time) (tasks.OutputChunk, bool) {
	c := tasks.OutputChunk{
		Ref: tasks.Ref{ID: tasks.ID(p.GetTaskId()), Attempt: int(p.GetAttempt())},
		Seq: int(p.GetSeq()), Offset: p.GetOffset(), At: at, Data: p.GetData(),
	}
	switch p.GetStream() {
	case agentpb.Stream_STREAM_STDOUT:
		c.Stream = "stdout"
	case agentpb.Stream_STREAM_STDERR:
		c.Stream = "stderr"
	}
	return c, c.Stream != "" && c.Seq >= 0 && c.Offset >= 0 && len(c.Data) <= maxChunk
}

// checkedJSON says whether the bytes are JSON text that every reader of it
// accepts: valid UTF-8, no NUL, not nested without measure.
func checkedJSON(b []byte) bool {
	return len(b) > 0 && utf8.Valid(b) && depth(b) <= maxJSONDepth && json.Valid(b)
}

// depth counts how deeply brackets nest, outside strings.
func depth(b []byte) int {
	deepest, now := 0, 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '[', '{':
			now++
			deepest = max(deepest, now)
		case ']', '}':
			now--
		case '"':
			for i++; i < len(b) && b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
		}
	}
	return deepest
}

// clean makes text of an agent fit for the database and for pages: valid
// UTF-8, no NUL, cut to a length. Text that is fine is returned as it is.
func clean(s string, limit int) string {
	if len(s) <= limit && utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 {
		return s
	}
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) > limit {
		s = string(bytes.ToValidUTF8([]byte(s[:limit]), nil))
	}
	return s
}
