package fleet

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"headgate/internal/agentpb"
	"headgate/tasks"
)

// FuzzAgentMessage reads bytes as a message of an agent and looks at what would
// be handed to the queue: whatever an agent says, it fits what is stored.
func FuzzAgentMessage(f *testing.F) {
	code := int32(-1)
	for _, m := range []*agentpb.AgentMessage{
		{},
		{Msg: &agentpb.AgentMessage_Final{Final: &agentpb.Final{
			TaskId: 1, Attempt: 1 << 30, Outcome: "succeeded", Result: []byte(`{"a":"\u0000"}`), StartedUnixNano: -5,
			Exit: &agentpb.Exit{Code: &code, Signal: "a\x00b", KilledBy: "x"},
		}}},
		{Msg: &agentpb.AgentMessage_Final{Final: &agentpb.Final{TaskId: -1, Outcome: "great", Reason: strings.Repeat("ä", 99), Result: []byte(strings.Repeat("[", 9000))}}},
		{Msg: &agentpb.AgentMessage_Output{Output: &agentpb.Output{TaskId: 1, Attempt: 1, Seq: -1, Offset: -1, Stream: agentpb.Stream_STREAM_STDOUT, Data: []byte("x")}}},
		{Msg: &agentpb.AgentMessage_Refused{Refused: &agentpb.Refused{TaskId: 1, Cause: 99, Detail: "a\x00b", Running: &agentpb.TaskRef{TaskId: 2}}}},
		{Msg: &agentpb.AgentMessage_Welcome{Welcome: &agentpb.Welcome{AgentId: "x"}}},
		{Msg: &agentpb.AgentMessage_Status{Status: &agentpb.Status{}}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m agentpb.AgentMessage
		if proto.Unmarshal(b, &m) != nil {
			return // the session ends
		}
		if p := m.GetFinal(); p != nil {
			checkFinal(t, finalOf(p))
		}
		if p := m.GetRefused(); p != nil {
			r := refusalOf(p)
			checkText(t, "detail of a refusal", r.Detail, maxSentence)
			if r.Cause == "" {
				t.Error("a refusal without a cause")
			}
		}
		if p := m.GetOutput(); p != nil {
			c, ok := outputOf(p, time.Now())
			if ok && (c.Seq < 0 || c.Offset < 0 || len(c.Data) > maxChunk || c.Stream != "stdout" && c.Stream != "stderr") {
				t.Errorf("a piece of output %+v was let through", c)
			}
		}
	})
}

func checkFinal(t *testing.T, f tasks.Final) {
	t.Helper()
	e := f.Ending
	switch e.Outcome {
	case tasks.Succeeded, tasks.Failed, tasks.TimedOut, tasks.Cancelled, tasks.Rejected, tasks.Unknown:
	default:
		t.Errorf("outcome %q", e.Outcome)
	}
	checkText(t, "reason", e.Reason, maxReason)
	// What the agent said goes behind our own sentence when its answer is invalid.
	checkText(t, "detail", e.Detail, 2*maxSentence)
	if len(e.Result) > 0 && (!checkedJSON(e.Result) || len(e.Result) > tasks.MaxResultBytes) {
		t.Errorf("a result of %d bytes was let through", len(e.Result))
	}
	if len(e.Result) > 0 && len(e.ResultBytes) > 0 {
		t.Error("a result is both JSON and bytes")
	}
	if e.OutputBytes < 0 || f.StartedAt.Before(time.Time{}) {
		t.Errorf("%d bytes of output, started at %s", e.OutputBytes, f.StartedAt)
	}
	if x := e.Exit; x != nil {
		checkText(t, "signal", x.Signal, maxName)
		checkText(t, "spawn error", x.SpawnError, maxSentence)
	}
}

func checkText(t *testing.T, what, s string, limit int) {
	t.Helper()
	if len(s) > limit || !utf8.ValidString(s) || strings.Contains(s, "\x00") {
		t.Errorf("%s: %q of %d bytes", what, s, len(s))
	}
}
