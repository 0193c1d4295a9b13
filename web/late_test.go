package web_test

import (
	"strings"
	"testing"

	"headgate/internal/auth"
	"headgate/internal/kinds"
	"headgate/tasks"
)

func TestLateAnswersAreOnThePageOfTheTask(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("dns-1")
	r.ready()
	done := r.done("dns-1", kinds.Echo, `{"n":1}`)
	path := "/tasks/" + done.ID.String()
	if page := r.get(auth.Viewer, path).Body.String(); strings.Contains(page, "Answers that came later") {
		t.Error("a task without late answers has a place for them")
	}
	kept, err := r.store.RecordLate(t.Context(), []tasks.Finish{{
		Agent: done.Agent.Num, Ref: tasks.Ref{ID: done.ID, Attempt: 7},
		Ending: tasks.Ending{Outcome: tasks.Failed, Detail: "It broke <afterwards>.", Result: []byte(`{"late":true}`)},
	}})
	if err != nil || len(kept) != 1 {
		t.Fatalf("kept %v, %v", kept, err)
	}
	page := r.get(auth.Viewer, path).Body.String()
	for _, want := range []string{"Answers that came later", "the outcome stays as it is", "attempt 7: It broke &lt;afterwards&gt;.", "late"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
}
