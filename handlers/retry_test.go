package handlers_test

import (
	"encoding/json"
	"net/http"
	"sync"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
)

func TestRetryIsOneTaskForEverybody(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	body := `{"agent":"alpha","kind":"core.echo","args":{"n":1.50},"timeout":"20s","priority":2,"delivery":"once"}`
	old := submit(t, rig, body)
	await(t, rig, old.ID)
	path := "/api/v1/tasks/" + old.ID + "/retry"
	const callers = 12
	var mu sync.Mutex
	var wg sync.WaitGroup
	ids, fresh := map[string]bool{}, 0
	for i := range callers {
		role := auth.Operator
		if i%2 == 1 {
			role = auth.Admin
		}
		wg.Go(func() {
			res := rig.do(t, "POST", path, "", role, nil)
			replayed := res.Header.Get("Idempotent-Replayed")
			location := res.Header.Get("Location")
			got := decode[handlers.TaskBody](t, res, http.StatusAccepted)
			mu.Lock()
			defer mu.Unlock()
			if ids[got.ID] = true; replayed == "" {
				fresh++
			}
			if location != "/api/v1/tasks/"+got.ID {
				t.Errorf("Location %q of task %s", location, got.ID)
			}
		})
	}
	wg.Wait()
	if len(ids) != 1 || fresh != 1 {
		t.Fatalf("%d callers got the tasks %v, %d of them a new one", callers, ids, fresh)
	}
	var id string
	for id = range ids {
		await(t, rig, id)
	}
	got := decode[handlers.TaskBody](t, rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, nil), http.StatusOK)
	if got.RetryOf == nil || *got.RetryOf != old.ID || got.Kind != "core.echo" || string(got.Args) != `{"n":1.50}` ||
		got.Timeout != "20s" || got.Priority != 2 || got.Delivery != "once" || got.RetriedAs != nil {
		t.Errorf("the retry: %+v", got)
	}
	first := decode[handlers.TaskBody](t, rig.do(t, "GET", "/api/v1/tasks/"+old.ID, "", auth.Viewer, nil), http.StatusOK)
	if first.RetriedAs == nil || *first.RetriedAs != id {
		t.Errorf("the first task: %+v", first)
	}
	if p := readProblem(t, rig.do(t, "POST", path, "", auth.Viewer, nil)); p.Code != "permission_missing" {
		t.Errorf("a viewer who retries: %+v", p)
	}
	if p := readProblem(t, rig.do(t, "POST", "/api/v1/tasks/999999/retry", "", auth.Operator, nil)); p.Code != "unknown_task" || p.Status != 404 {
		t.Errorf("retry of no task: %+v", p)
	}
}

func TestRetryAndRemovalAreExplained(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	done := submit(t, rig, `{"agent":"beta","kind":"core.echo"}`)
	await(t, rig, done.ID)
	release := rig.agents.hold()
	defer release()
	running := submit(t, rig, `{"agent":"beta","kind":"core.echo"}`)
	behind := submit(t, rig, `{"agent":"beta","kind":"core.echo"}`)
	at, err := json.Marshal(time.Now().Add(20 * time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	later := submit(t, rig, `{"agent":"beta","kind":"core.echo","not_before":`+string(at)+`}`)
	if p := readProblem(t, rig.do(t, "POST", "/api/v1/tasks/"+running.ID+"/retry", "", auth.Operator, nil)); p.Status != 409 || p.Code != "task_not_completed" || p.Hint == "" {
		t.Errorf("retry of a task that runs: %+v", p)
	}
	if res := rig.do(t, "DELETE", "/api/v1/agents/beta", "", auth.Admin, nil); res.StatusCode != http.StatusNoContent {
		t.Fatalf("removing the agent: %d %s", res.StatusCode, readBody(t, res))
	}
	for _, id := range []string{behind.ID, later.ID} {
		await(t, rig, id)
		got := decode[handlers.TaskBody](t, rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, nil), http.StatusOK)
		if got.Outcome == nil || *got.Outcome != "cancelled" || got.Reason == nil || *got.Reason != "agent_removed" {
			t.Errorf("task %s of the removed agent: %+v", id, got)
		}
	}
	now := decode[task](t, rig.do(t, "GET", "/api/v1/tasks/"+running.ID, "", auth.Viewer, nil), http.StatusOK)
	if now.State == "completed" || now.Waiting == nil || now.Waiting.Cause != "agent_removed" {
		t.Errorf("the running task of the removed agent: %+v", now)
	}
	if p := readProblem(t, rig.do(t, "POST", "/api/v1/tasks/"+done.ID+"/retry", "", auth.Operator, nil)); p.Status != 409 || p.Code != "agent_removed" || p.Hint == "" {
		t.Errorf("retry of a task of the removed agent: %+v", p)
	}
}

func TestWhoCancelledIsShownInTheEnd(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	release := rig.agents.hold()
	defer release()
	running := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`)
	behind := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`)
	for _, id := range []string{running.ID, behind.ID} {
		decode[task](t, rig.do(t, "POST", "/api/v1/tasks/"+id+"/cancel", "", auth.Operator, nil), http.StatusAccepted)
	}
	release()
	for _, id := range []string{running.ID, behind.ID} {
		await(t, rig, id)
		got := decode[handlers.TaskBody](t, rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, nil), http.StatusOK)
		if got.State != "completed" || got.CancelRequestedAt == nil || got.CancelRequestedBy == nil || *got.CancelRequestedBy != "token:operator" {
			t.Errorf("task %s in the end: %+v", id, got)
		}
	}
}
