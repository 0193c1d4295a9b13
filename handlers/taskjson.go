package handlers

import (
	"encoding/base64"
	"encoding/json"
	"encoding/json/jsontext"
	"strconv"
	"strings"
	"time"
	"uuid"

	"headgate/tasks"
)

// timeLayout is RFC 3339 in UTC with microseconds, always of one length, so
// that times sort as text.
const timeLayout = "2006-01-02T15:04:05.000000Z"

// TaskBody describes a task for the API's documents. appendTask writes it by
// hand, because a batch of 10,000 tasks is answered in one body; a test
// compares the two.
type TaskBody struct {
	ID                string          `json:"id"` // decimal digits
	Agent             tasks.AgentRef  `json:"agent"`
	Kind              string          `json:"kind"`
	Args              json.RawMessage `json:"args"` // JSON, as submitted
	State             string          `json:"state" enums:"new,waiting-for-agent-response,completed"`
	Outcome           *string         `json:"outcome" enums:"succeeded,failed,timed-out,cancelled,expired,rejected,unknown"` // null until completed
	Reason            *string         `json:"reason"`                                                                        // stable code of the cause; null when succeeded
	Detail            *string         `json:"detail"`                                                                        // the cause as a sentence
	Result            json.RawMessage `json:"result"`                                                                        // any JSON; text in base64 when result_encoding says so
	ResultEncoding    *string         `json:"result_encoding" enums:"base64"`                                                // base64 when the agent gave bytes that are not JSON
	Exit              *tasks.Exit     `json:"exit"`                                                                          // of programs only
	OutputBytes       int64           `json:"output_bytes"`                                                                  // printed in all
	Output            *OutputBody     `json:"output"`                                                                        // what is kept of it; null in lists and while nothing was printed
	Delivery          string          `json:"delivery" enums:"once,repeatable"`                                              // once: in doubt the outcome is unknown, never a second run
	Attempt           int             `json:"attempt"`                                                                       // how often it was given to the agent
	Priority          int             `json:"priority" minimum:"0" maximum:"9"`                                              // lower first
	Timeout           string          `json:"timeout"`                                                                       // such as 30s
	NotBefore         *time.Time      `json:"not_before"`                                                                    // null: at once
	ExpiresAt         *time.Time      `json:"expires_at"`                                                                    // when it is given up if it has not started
	CreatedAt         time.Time       `json:"created_at"`
	StartedAt         *time.Time      `json:"started_at"`
	CompletedAt       *time.Time      `json:"completed_at"`
	CancelRequestedAt *time.Time      `json:"cancel_requested_at"` // when somebody first asked for its end; stays when it is completed
	CancelRequestedBy *string         `json:"cancel_requested_by"` // who asked
	Actor             string          `json:"actor"`               // who submitted it
	RetryOf           *string         `json:"retry_of"`            // id of the task that this one repeats
	RetriedAs         *string         `json:"retried_as"`          // id of the task that repeats this one
	RunID             *string         `json:"run_id"`
	LateResults       *[]LateBody     `json:"late_results"` // answers that came after the completion; null where they are not looked up: in lists, batches and events
	Waiting           *WaitingBody    `json:"waiting"`      // why it is not completed; null when it is
} //	@name	Task

// LateBody is an answer of the agent that came when the task was completed
// without it, as unknown or cancelled. It is kept and has changed nothing.
type LateBody struct {
	Attempt        int             `json:"attempt"`
	ReceivedAt     time.Time       `json:"received_at"`
	StartedAt      *time.Time      `json:"started_at"`      // by the agent's clock
	ChangedOutcome bool            `json:"changed_outcome"` // always false: a completed task never changes
	Outcome        *string         `json:"outcome" enums:"succeeded,failed,timed-out,cancelled,expired,rejected,unknown"`
	Reason         *string         `json:"reason"`
	Detail         *string         `json:"detail"`
	Result         json.RawMessage `json:"result"`
	ResultEncoding *string         `json:"result_encoding" enums:"base64"`
	Exit           *tasks.Exit     `json:"exit"`
	OutputBytes    int64           `json:"output_bytes"`
} //	@name	LateResult

// WaitingBody explains why a task is not completed.
type WaitingBody struct {
	Cause         string     `json:"cause"`     // stable code: agent_busy, agent_unreachable, agent_certificate_expired, agent_paused, agent_quarantined, agent_removed, agent_settling, agent_held, not_due, backing_off, starting, running, storing, cancel_requested, owner_elsewhere, no_owner, owner_silent, controller_stopping, database_unavailable
	Sentence      string     `json:"sentence"`  // the cause with its numbers
	NextStep      string     `json:"next_step"` // what Headgate, or the reader, does next
	Since         *time.Time `json:"since"`
	Position      int        `json:"position"`       // in the agent's order, 1 is next; 0 is not known
	Blocking      *string    `json:"blocking"`       // id of the task in the agent's slot
	BlockingKind  *string    `json:"blocking_kind"`  // its kind
	BlockingSince *time.Time `json:"blocking_since"` // when it was given to the agent
} //	@name	Waiting

// OutputBody says what is kept of a task's output.
type OutputBody struct {
	Attempt     int        `json:"attempt"`      // that printed it
	Bytes       int64      `json:"bytes"`        // printed, so far
	StoredBytes int64      `json:"stored_bytes"` // kept, so far; what is under way counts as neither while the task runs
	Truncated   bool       `json:"truncated"`    // something that was printed is not kept
	Stdout      StreamBody `json:"stdout"`
	Stderr      StreamBody `json:"stderr"`
	Gaps        []GapBody  `json:"gaps"` // what is missing before something that is kept, the first 20
} //	@name	Output

// StreamBody says what is kept of one stream.
type StreamBody struct {
	Bytes       int64 `json:"bytes"`
	StoredBytes int64 `json:"stored_bytes"`
} //	@name	OutputStream

// GapBody is a part of a stream that was not kept.
type GapBody struct {
	Stream string `json:"stream" enums:"stdout,stderr"`
	Offset int64  `json:"offset"` // in the stream, as printed
	Bytes  int64  `json:"bytes"`
} //	@name	OutputGap

func outputBody(f *tasks.OutputFacts, e *tasks.Ending) *OutputBody {
	if f == nil || f.Attempt == 0 && e.OutputBytes == 0 {
		return nil
	}
	b := &OutputBody{
		Attempt: f.Attempt, Bytes: f.Printed("", e), StoredBytes: f.Stored(""), Truncated: f.Missing("", e) > 0, Gaps: []GapBody{},
		Stdout: StreamBody{f.Printed(tasks.Stdout, e), f.Stored(tasks.Stdout)}, Stderr: StreamBody{f.Printed(tasks.Stderr, e), f.Stored(tasks.Stderr)},
	}
	for _, g := range f.Gaps {
		b.Gaps = append(b.Gaps, GapBody(g))
	}
	return b
}

// appendOutput writes what is kept of an output.
func appendOutput(b []byte, t *tasks.Task) []byte {
	body, _ := json.Marshal(outputBody(t.Output, &t.Ending)) // numbers and known words cannot fail
	return append(b, body...)
}

// appendTask writes a task as JSON.
func appendTask(b []byte, t *tasks.Task) []byte {
	b = append(b, `{"id":"`...)
	b = strconv.AppendInt(b, int64(t.ID), 10)
	b = append(b, `","agent":{"id":"`...)
	b = append(b, t.Agent.ID.String()...)
	b = append(b, `","name":`...)
	b = appendString(b, t.Agent.Name)
	b = append(b, `},"kind":`...)
	b = appendString(b, t.Kind)
	b = append(b, `,"args":`...)
	if len(t.Args) == 0 {
		b = append(b, "{}"...)
	}
	b = append(b, t.Args...)
	b = append(b, `,"state":"`...)
	b = append(b, t.State...)
	b = append(b, '"')
	b = appendEnding(b, &t.Ending)
	b = append(b, `,"output":`...)
	if t.Output == nil {
		b = append(b, "null"...)
	} else {
		b = appendOutput(b, t)
	}
	b = append(b, `,"delivery":`...)
	b = appendString(b, string(t.Delivery))
	b = append(b, `,"attempt":`...)
	b = strconv.AppendInt(b, int64(t.Attempt), 10)
	b = append(b, `,"priority":`...)
	b = strconv.AppendInt(b, int64(t.Priority), 10)
	b = append(b, `,"timeout":"`...)
	b = append(b, durationText(t.Timeout)...)
	b = append(b, '"')
	b = appendTimes(b, t)
	b = append(b, `,"cancel_requested_by":`...)
	b = appendOptional(b, t.CancelActor)
	b = append(b, `,"actor":`...)
	b = appendString(b, t.Actor)
	b = append(b, `,"retry_of":`...)
	b = appendTaskID(b, t.RetryOf)
	b = append(b, `,"retried_as":`...)
	b = appendTaskID(b, t.RetriedAs)
	b = append(b, `,"run_id":`...)
	if t.RunID == (uuid.UUID{}) {
		b = append(b, "null"...)
	} else {
		b = appendString(b, t.RunID.String())
	}
	b = appendLate(append(b, `,"late_results":`...), t.Late)
	b = append(b, `,"waiting":`...)
	return append(appendWaiting(b, t.Waiting), '}')
}

func appendLate(b []byte, late []tasks.LateResult) []byte {
	if late == nil {
		return append(b, "null"...)
	}
	b = append(b, '[')
	for i := range late {
		x := &late[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(b, `{"attempt":`...), int64(x.Attempt), 10)
		b = appendTime(append(b, `,"received_at":`...), x.ReceivedAt)
		b = appendTime(append(b, `,"started_at":`...), x.StartedAt)
		b = append(b, `,"changed_outcome":false`...)
		b = append(appendEnding(b, &x.Ending), '}')
	}
	return append(b, ']')
}

func appendEnding(b []byte, e *tasks.Ending) []byte {
	b = append(b, `,"outcome":`...)
	b = appendOptional(b, string(e.Outcome))
	b = append(b, `,"reason":`...)
	b = appendOptional(b, e.Reason)
	b = append(b, `,"detail":`...)
	b = appendOptional(b, e.Detail)
	switch {
	case len(e.Result) > 0:
		b = append(b, `,"result":`...)
		b = append(b, e.Result...)
		b = append(b, `,"result_encoding":null`...)
	case len(e.ResultBytes) > 0:
		b = append(b, `,"result":"`...)
		b = base64.StdEncoding.AppendEncode(b, e.ResultBytes)
		b = append(b, `","result_encoding":"base64"`...)
	default:
		b = append(b, `,"result":null,"result_encoding":null`...)
	}
	b = append(b, `,"exit":`...)
	b = appendExit(b, e.Exit)
	b = append(b, `,"output_bytes":`...)
	return strconv.AppendInt(b, e.OutputBytes, 10)
}

func appendExit(b []byte, e *tasks.Exit) []byte {
	if e == nil {
		return append(b, "null"...)
	}
	b = append(b, `{"code":`...)
	if e.Code == nil {
		b = append(b, "null"...)
	} else {
		b = strconv.AppendInt(b, int64(*e.Code), 10)
	}
	if e.Signal != "" {
		b = appendString(append(b, `,"signal":`...), e.Signal)
	}
	if e.SpawnError != "" {
		b = appendString(append(b, `,"spawn_error":`...), e.SpawnError)
	}
	b = strconv.AppendInt(append(b, `,"user_ms":`...), e.UserMS, 10)
	b = strconv.AppendInt(append(b, `,"system_ms":`...), e.SystemMS, 10)
	b = strconv.AppendInt(append(b, `,"max_rss_bytes":`...), e.MaxRSSBytes, 10)
	if e.KilledBy != "" {
		b = appendString(append(b, `,"killed_by":`...), e.KilledBy)
	}
	if e.GraceMS != 0 {
		b = strconv.AppendInt(append(b, `,"grace_ms":`...), e.GraceMS, 10)
	}
	if len(e.LeftBehind) > 0 {
		b = appendProcesses(append(b, `,"left_behind":`...), e.LeftBehind)
	}
	if e.Released {
		b = append(b, `,"released":true`...)
	}
	if len(e.Survivors) > 0 {
		b = appendProcesses(append(b, `,"survivors":`...), e.Survivors)
	}
	return append(b, '}')
}

func appendProcesses(b []byte, list []tasks.Process) []byte {
	for i := range list {
		b = append(b, "[,"[min(i, 1)])
		b = strconv.AppendInt(append(b, `{"pid":`...), int64(list[i].PID), 10)
		b = append(appendString(append(b, `,"name":`...), list[i].Name), '}')
	}
	return append(b, ']')
}

func appendTimes(b []byte, t *tasks.Task) []byte {
	b = appendTime(append(b, `,"not_before":`...), t.NotBefore)
	b = appendTime(append(b, `,"expires_at":`...), t.ExpiresAt)
	b = appendTime(append(b, `,"created_at":`...), t.CreatedAt)
	b = appendTime(append(b, `,"started_at":`...), t.StartedAt)
	b = appendTime(append(b, `,"completed_at":`...), t.CompletedAt)
	return appendTime(append(b, `,"cancel_requested_at":`...), t.CancelRequestedAt)
}

func appendWaiting(b []byte, w *tasks.Waiting) []byte {
	if w == nil {
		return append(b, "null"...)
	}
	b = appendString(append(b, `{"cause":`...), w.Cause)
	b = appendString(append(b, `,"sentence":`...), w.Sentence)
	b = appendString(append(b, `,"next_step":`...), w.NextStep)
	b = appendTime(append(b, `,"since":`...), w.Since)
	b = strconv.AppendInt(append(b, `,"position":`...), int64(w.Position), 10)
	b = appendTaskID(append(b, `,"blocking":`...), w.Blocking)
	b = appendOptional(append(b, `,"blocking_kind":`...), w.BlockingKind)
	b = appendTime(append(b, `,"blocking_since":`...), w.BlockingSince)
	return append(b, '}')
}

// appendString quotes text; what is not UTF-8 in it becomes U+FFFD.
func appendString(b []byte, text string) []byte {
	out, err := jsontext.AppendQuote(b, text)
	if err != nil {
		out, _ = jsontext.AppendQuote(b, strings.ToValidUTF8(text, "\uFFFD"))
	}
	return out
}

func appendOptional(b []byte, text string) []byte {
	if text == "" {
		return append(b, "null"...)
	}
	return appendString(b, text)
}

func appendTaskID(b []byte, id tasks.ID) []byte {
	if id == 0 {
		return append(b, "null"...)
	}
	b = append(b, '"')
	b = strconv.AppendInt(b, int64(id), 10)
	return append(b, '"')
}

func appendTime(b []byte, t time.Time) []byte {
	if t.IsZero() {
		return append(b, "null"...)
	}
	b = append(b, '"')
	b = t.UTC().AppendFormat(b, timeLayout)
	return append(b, '"')
}

// durationText writes a duration as people do: 30s, 5m, 1h30m.
func durationText(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// timeOrNil gives a time for bodies that json encodes, nil for none.
func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC().Truncate(time.Microsecond)
	return &t
}
