package handlers_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
)

// task is a task as a client reads it; raw parts stay text.
type task struct {
	ID      string
	Agent   struct{ ID, Name string }
	Kind    string
	Args    json.RawMessage
	State   string
	Outcome *string
	Result  json.RawMessage
	Attempt int
	Timeout string
	Actor   string
	Waiting *struct{ Cause, Sentence string }
}

type page struct {
	Items      []task
	NextCursor *string `json:"next_cursor"`
}

func submit(t testing.TB, rig *rig, body string) task {
	t.Helper()
	return decode[task](t, rig.do(t, "POST", "/api/v1/tasks", body, auth.Operator, nil), http.StatusAccepted)
}

func await(t testing.TB, rig *rig, id string) task {
	t.Helper()
	done := decode[task](t, rig.do(t, "GET", "/api/v1/tasks/"+id+"?wait=30s", "", auth.Viewer, nil), http.StatusOK)
	if done.State != "completed" {
		t.Fatalf("task %s is %s after 30 s", id, done.State)
	}
	return done
}

func TestSubmitAndWait(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	const args = `{"big":9007199254740993,"precise":1.00,"text":"a\u0000b"}`
	body := `{"agent":"alpha","kind":"core.echo","args":` + args + `,"timeout":"60s","priority":3}`
	res := rig.do(t, "POST", "/api/v1/tasks?wait=30s", body, auth.Operator, nil)
	done := decode[task](t, res, http.StatusOK)
	if done.State != "completed" || done.Outcome == nil || *done.Outcome != "succeeded" || done.Waiting != nil {
		t.Errorf("%+v", done)
	}
	if string(done.Args) != args || string(done.Result) != args {
		t.Errorf("args %s, result %s, want both %s", done.Args, done.Result, args)
	}
	if done.Agent.Name != "alpha" || done.Timeout != "1m" || done.Actor != "token:operator" || done.Attempt != 1 {
		t.Errorf("%+v", done)
	}
	if got := res.Header.Get("Location"); got != "/api/v1/tasks/"+done.ID {
		t.Errorf("Location %q", got)
	}
}

func TestSubmitAnswersAtOnceWithoutWait(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	release := rig.agents.hold()
	defer release()
	first := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`)
	if first.State == "completed" || string(first.Args) != "{}" || first.Outcome != nil {
		t.Fatalf("%+v", first)
	}
	second := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`)
	now := decode[task](t, rig.do(t, "GET", "/api/v1/tasks/"+second.ID, "", auth.Viewer, nil), http.StatusOK)
	if now.State != "new" || now.Waiting == nil || now.Waiting.Sentence == "" {
		t.Errorf("a task behind another one: %+v", now)
	}
	release()
	await(t, rig, first.ID)
	await(t, rig, second.ID)
}

func TestPreferWaitIsAWish(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	res := rig.do(t, "POST", "/api/v1/tasks", `{"agent":"beta","kind":"core.ping"}`, auth.Operator, map[string]string{"Prefer": "respond-async, wait=30"})
	if res.StatusCode != http.StatusOK || res.Header.Get("Preference-Applied") != "wait=30" {
		t.Errorf("%d %v", res.StatusCode, res.Header)
	}
}

// A wait that is shorter than the task says so: a status that is no success, the
// state, and where to ask again; asking again in the same way gets the end.
//
// Cases P44.
func TestAWaitThatEndsIsNoError(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	release := rig.agents.hold()
	defer release()
	open := func(task task) bool {
		return task.State != "completed" && task.State != "" && task.Outcome == nil && (task.Result == nil || string(task.Result) == "null")
	}
	var id string
	for _, wait := range []string{"50ms", "1s", "1500ms"} {
		began := time.Now()
		res := rig.do(t, "POST", "/api/v1/tasks?wait="+wait, `{"agent":"alpha","kind":"core.echo","args":{"n":1}}`, auth.Operator, map[string]string{"Idempotency-Key": "waited-for"})
		got := decode[task](t, res, http.StatusAccepted)
		if !open(got) || id != "" && got.ID != id || res.Header.Get("Location") != "/api/v1/tasks/"+got.ID {
			t.Errorf("after %s: %+v, %v", wait, got, res.Header)
		}
		id = got.ID
		if same := decode[task](t, rig.do(t, "GET", res.Header.Get("Location")+"?wait="+wait, "", auth.Viewer, nil), http.StatusOK); same.ID != id || !open(same) {
			t.Errorf("after %s: read %+v", wait, same)
		}
		if least, err := time.ParseDuration(wait); err != nil || time.Since(began) < 2*least {
			t.Errorf("two waits of %s took %s", wait, time.Since(began))
		}
	}
	release()
	if end := await(t, rig, id); end.Outcome == nil || *end.Outcome != "succeeded" || string(end.Result) != `{"n":1}` {
		t.Errorf("ended as %+v", end)
	}
}

func TestIdempotencyKeys(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	key := map[string]string{"Idempotency-Key": "k-1"}
	body := `{"agent":"alpha","kind":"core.echo","args":{"n":1}}`
	first := decode[task](t, rig.do(t, "POST", "/api/v1/tasks", body, auth.Operator, key), http.StatusAccepted)
	res := rig.do(t, "POST", "/api/v1/tasks", body, auth.Operator, key)
	replayed := res.Header.Get("Idempotent-Replayed")
	if again := decode[task](t, res, http.StatusAccepted); again.ID != first.ID || replayed != "true" {
		t.Errorf("second call: task %s, replayed %q, want task %s", again.ID, replayed, first.ID)
	}
	if other := decode[task](t, rig.do(t, "POST", "/api/v1/tasks", body, auth.Admin, key), http.StatusAccepted); other.ID == first.ID {
		t.Error("another principal's key gave the same task")
	}
	if res := rig.do(t, "POST", "/api/v1/tasks", strings.Replace(body, "1", "2", 1), auth.Operator, key); res.StatusCode != http.StatusUnprocessableEntity {
		t.Errorf("same key with another body: %d", res.StatusCode)
	}
}

func batchOf(n int, agents ...string) string {
	items := make([]string, n)
	for i := range items {
		items[i] = fmt.Sprintf(`{"agent":%q,"kind":"core.echo","args":{"n":%d}}`, agents[i%len(agents)], i)
	}
	return `{"tasks":[` + strings.Join(items, ",") + `]}`
}

func TestBatchKeepsItsOrder(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	const n = 500
	key := map[string]string{"Idempotency-Key": "batch-1"}
	body := batchOf(n, "alpha", "beta", "gamma")
	got := decode[page](t, rig.do(t, "POST", "/api/v1/tasks/batch", body, auth.Operator, key), http.StatusAccepted)
	if len(got.Items) != n {
		t.Fatalf("%d items", len(got.Items))
	}
	for i, item := range got.Items {
		if want := fmt.Sprintf(`{"n":%d}`, i); string(item.Args) != want {
			t.Fatalf("item %d has %s", i, item.Args)
		}
	}
	again := decode[page](t, rig.do(t, "POST", "/api/v1/tasks/batch", body, auth.Operator, key), http.StatusAccepted)
	for i := range again.Items {
		if again.Items[i].ID != got.Items[i].ID {
			t.Fatalf("item %d came back as another task", i)
		}
	}
	for _, item := range got.Items {
		if done := await(t, rig, item.ID); string(done.Result) != string(item.Args) {
			t.Fatalf("task %s: %s became %s", item.ID, item.Args, done.Result)
		}
	}
}

func TestAWrongTaskInABatchStoresNothing(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	body := strings.Replace(batchOf(20, "alpha"), `"n":13}}`, `"n":13},"delivery":"maybe"}`, 1)
	p := readProblem(t, rig.do(t, "POST", "/api/v1/tasks/batch", body, auth.Operator, nil))
	if p.Status != 422 || len(p.Errors) != 1 || p.Errors[0].Pointer != "/tasks/13/delivery" {
		t.Errorf("%+v", p)
	}
	if all := decode[page](t, rig.do(t, "GET", "/api/v1/tasks", "", auth.Viewer, nil), http.StatusOK); len(all.Items) != 0 {
		t.Errorf("%d tasks were stored", len(all.Items))
	}
}

func TestListPagesThroughEverythingOnce(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	made := decode[page](t, rig.do(t, "POST", "/api/v1/tasks/batch", batchOf(25, "alpha", "beta"), auth.Operator, nil), http.StatusAccepted)
	for _, item := range made.Items {
		await(t, rig, item.ID)
	}
	for query, want := range map[string]int{
		"": 25, "agent=alpha": 13, "agent=alpha,beta": 25, "state=completed&outcome=succeeded": 25, "state=new": 0, "kind=core.echo": 25, "kind=core.ping": 0,
		"q=alp": 13, "sort=id": 25, "created_after=-1h": 25, "created_before=-1h": 0, "label.env=test": 25, "label.env=prod": 0,
	} {
		seen := map[string]bool{}
		next := "/api/v1/tasks?limit=7&" + query
		for pages := 0; next != ""; pages++ {
			if pages > 10 {
				t.Fatalf("%q does not end", query)
			}
			res := rig.do(t, "GET", next, "", auth.Viewer, nil)
			link := res.Header.Get("Link")
			got := decode[page](t, res, http.StatusOK)
			last := int64(0)
			for _, item := range got.Items {
				if seen[item.ID] {
					t.Errorf("%q gave task %s twice", query, item.ID)
				}
				seen[item.ID] = true
				n, _ := strconv.ParseInt(item.ID, 10, 64)
				if last != 0 && (n < last) != (query != "sort=id") {
					t.Errorf("%q is out of order", query)
				}
				last = n
			}
			next, _, _ = strings.Cut(strings.TrimPrefix(link, "<"), ">")
			if (next == "") != (got.NextCursor == nil) {
				t.Errorf("%q: Link %q, next_cursor %v", query, link, got.NextCursor)
			}
		}
		if len(seen) != want {
			t.Errorf("%q gave %d tasks, want %d", query, len(seen), want)
		}
	}
}

func TestACursorBelongsToItsFilter(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	decode[page](t, rig.do(t, "POST", "/api/v1/tasks/batch", batchOf(3, "alpha"), auth.Operator, nil), http.StatusAccepted)
	first := decode[page](t, rig.do(t, "GET", "/api/v1/tasks?limit=1", "", auth.Viewer, nil), http.StatusOK)
	p := readProblem(t, rig.do(t, "GET", "/api/v1/tasks?limit=1&state=new&cursor="+*first.NextCursor, "", auth.Viewer, nil))
	if p.Status != 400 || !strings.Contains(p.Detail, "other filters") {
		t.Errorf("%+v", p)
	}
}

func TestETagSavesTheBody(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	id := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID
	await(t, rig, id)
	res := rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, nil)
	etag := res.Header.Get("ETag")
	again := rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, map[string]string{"If-None-Match": etag})
	if etag == "" || again.StatusCode != http.StatusNotModified || readBody(t, again) != "" {
		t.Errorf("ETag %q: %d", etag, again.StatusCode)
	}
	if res := rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, map[string]string{"If-None-Match": `"other"`}); res.StatusCode != http.StatusOK {
		t.Errorf("another ETag: %d", res.StatusCode)
	}
}

func TestCancelOfATaskThatWaits(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	release := rig.agents.hold()
	defer release()
	submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`)
	behind := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`)
	decode[task](t, rig.do(t, "POST", "/api/v1/tasks/"+behind.ID+"/cancel", "", auth.Operator, nil), http.StatusAccepted)
	done := await(t, rig, behind.ID)
	if done.Outcome == nil || *done.Outcome != "cancelled" || done.Attempt != 0 {
		t.Errorf("%+v", done)
	}
}

func TestOutputIsGivenAsPrinted(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	id := submit(t, rig, `{"agent":"alpha","kind":"core.sleep","args":{"seconds":0}}`).ID
	await(t, rig, id)
	path := "/api/v1/tasks/" + id + "/output"
	for query, want := range map[string]string{"": "first\noops\nsecond\n", "?stream=stdout": "first\nsecond\n", "?stream=stderr": "oops\n"} {
		res := rig.do(t, "GET", path+query, "", auth.Viewer, nil)
		if got := readBody(t, res); got != want || res.StatusCode != http.StatusOK || res.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d %q", query, res.StatusCode, got)
		}
	}
	for spec, want := range map[string]string{"bytes=6-9": "oops", "bytes=-7": "second\n", "bytes=11-": "second\n"} {
		res := rig.do(t, "GET", path, "", auth.Viewer, map[string]string{"Range": spec})
		if got := readBody(t, res); got != want || res.StatusCode != http.StatusPartialContent {
			t.Errorf("%s: %d %q, want %q", spec, res.StatusCode, got, want)
		}
	}
	if p := readProblem(t, rig.do(t, "GET", path, "", auth.Viewer, map[string]string{"Range": "bytes=100-"})); p.Status != 416 {
		t.Errorf("beyond the end: %+v", p)
	}
	if res := rig.do(t, "HEAD", path, "", auth.Viewer, nil); res.StatusCode != http.StatusOK || readBody(t, res) != "" {
		t.Errorf("HEAD: %d", res.StatusCode)
	}
	empty := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID
	await(t, rig, empty)
	if res := rig.do(t, "GET", "/api/v1/tasks/"+empty+"/output", "", auth.Viewer, nil); res.StatusCode != http.StatusOK || readBody(t, res) != "" {
		t.Errorf("no output: %d", res.StatusCode)
	}
}

func TestStatsCountWhatHappened(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	await(t, rig, submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID)
	st := decode[handlers.StatsBody](t, rig.do(t, "GET", "/api/v1/stats", "", auth.Viewer, nil), http.StatusOK)
	if st.Tasks.Submitted != 1 || st.Tasks.Completed["succeeded"] != 1 {
		t.Errorf("%+v", st.Tasks)
	}
	if time.Since(st.Tasks.Since) > time.Hour {
		t.Errorf("since %v", st.Tasks.Since)
	}
}
