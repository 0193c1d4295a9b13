package handlers_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/tasks"
)

func TestLateAnswersStandBesideTheOutcome(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	old := submit(t, rig, `{"agent":"alpha","kind":"core.echo","args":{}}`)
	await(t, rig, old.ID)
	get := func() (fields map[string]json.RawMessage, etag string) {
		res := rig.do(t, "GET", "/api/v1/tasks/"+old.ID, "", auth.Viewer, nil)
		return decode[map[string]json.RawMessage](t, res, http.StatusOK), res.Header.Get("ETag")
	}
	before, etag := get()
	if string(before["late_results"]) != "[]" {
		t.Errorf("late results of a task without: %s", before["late_results"])
	}
	id, err := strconv.ParseInt(old.ID, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	row, err := rig.queue.Task(t.Context(), tasks.ID(id))
	if err != nil {
		t.Fatal(err)
	}
	began, code := time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), 3
	ending := tasks.Ending{
		Outcome: tasks.Failed, Reason: "exit_nonzero", Detail: "It \"broke\".", Result: json.RawMessage(`{"n":1.50}`),
		Exit: &tasks.Exit{Code: &code}, OutputBytes: 7,
	}
	late := []tasks.Finish{
		{Agent: row.Agent.Num, Ref: tasks.Ref{ID: row.ID, Attempt: 7}, StartedAt: began, Ending: ending},
		{Agent: row.Agent.Num, Ref: tasks.Ref{ID: row.ID, Attempt: 8}, Ending: tasks.Ending{Outcome: tasks.Succeeded, ResultBytes: []byte{0, 255}}},
	}
	if kept, err := rig.queue.RecordLate(t.Context(), late); err != nil || len(kept) != 2 {
		t.Fatalf("kept %v, %v", kept, err)
	}
	after, changed := get()
	var got []handlers.LateBody
	if err := json.Unmarshal(after["late_results"], &got); err != nil || len(got) != 2 {
		t.Fatalf("late results %s, %v", after["late_results"], err)
	}
	if got[0].ReceivedAt.IsZero() || changed == etag {
		t.Errorf("received at %s, ETag %s, then %s", got[0].ReceivedAt, etag, changed)
	}
	failed, reason, succeeded, base64 := "failed", ending.Reason, "succeeded", "base64"
	want := []handlers.LateBody{
		{
			Attempt: 7, ReceivedAt: got[0].ReceivedAt, StartedAt: &began, Outcome: &failed, Reason: &reason, Detail: &ending.Detail,
			Result: ending.Result, Exit: ending.Exit, OutputBytes: 7,
		},
		{Attempt: 8, ReceivedAt: got[1].ReceivedAt, Outcome: &succeeded, Result: json.RawMessage(`"AP8="`), ResultEncoding: &base64},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("late results (-want +got):\n%s", d)
	}
	delete(before, "late_results")
	delete(after, "late_results")
	if d := cmp.Diff(before, after); d != "" {
		t.Errorf("the late answers changed the task (-before +after):\n%s", d)
	}
	list := rig.do(t, "GET", "/api/v1/tasks?limit=1", "", auth.Viewer, nil)
	defer list.Body.Close()
	text, err := io.ReadAll(list.Body)
	if err != nil {
		t.Fatal(err)
	}
	var page struct {
		Items []struct {
			Late json.RawMessage `json:"late_results"`
		} `json:"items"`
	}
	if err := json.Unmarshal(text, &page); err != nil || len(page.Items) != 1 || string(page.Items[0].Late) != "null" {
		t.Errorf("the list says %s, %v", text, err)
	}
}
