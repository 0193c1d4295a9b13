package handlers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"headgate/internal/fault"
	"headgate/tasks"
)

// maxKey is how long an Idempotency-Key may be, in characters.
const maxKey = 200

// TaskPage is a list of tasks.
type TaskPage struct {
	Items      []TaskBody `json:"items"`
	NextCursor *string    `json:"next_cursor"`
} //	@name	TaskPage

// submitTask takes one task.
//
//	@Summary		Submit a task
//	@Description	The task is on disk when this answers. With wait (or the header Prefer: wait=30) the answer comes when the task is completed, with status 200, or after that time, with status 202 and the task as it is then.
//	@ID				submitTask
//	@Tags			tasks
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			Idempotency-Key	header		string		false	"Makes it safe to send again: the same key gives the same task (24 h)"	maxLength(200)
//	@Param			Prefer			header		string		false	"wait=30: as the query parameter, but only a wish"
//	@Param			wait			query		string		false	"How long to wait for the end, 0s to 120s"	example(30s)
//	@Param			body			body		SubmitBody	true	"the task"
//	@Success		200				{object}	TaskBody	"completed within wait"
//	@Success		202				{object}	TaskBody	"stored"
//	@Header			200,202			{string}	Location	"path of the task"
//	@Header			200,202			{string}	Idempotent-Replayed	"true when the key was known"
//	@Failure		400				{object}	Problem
//	@Failure		401				{object}	Problem
//	@Failure		403				{object}	Problem
//	@Failure		409				{object}	Problem
//	@Failure		413				{object}	Problem
//	@Failure		415				{object}	Problem
//	@Failure		421				{object}	Problem
//	@Failure		422				{object}	Problem
//	@Failure		429				{object}	Problem
//	@Failure		503				{object}	Problem
//	@Router			/api/v1/tasks [post]
func (s *server) submitTask(w http.ResponseWriter, r *http.Request) error {
	wait, preferred, err := waitOf(r)
	if err != nil {
		return err
	}
	sub, key, err := s.readSubmission(r)
	if err != nil {
		return err
	}
	begin := time.Now()
	var t *tasks.Task
	if wait > 0 {
		t, err = s.wait(w, r, tasks.DefaultSubmitWait+wait, func(ctx context.Context) (*tasks.Task, error) {
			return s.cfg.Tasks.SubmitAndWait(ctx, sub, principal(r).Actor(), key, wait)
		})
	} else {
		t, err = s.cfg.Tasks.Submit(r.Context(), sub, principal(r).Actor(), key)
	}
	if err != nil {
		return err
	}
	h := w.Header()
	h["Location"] = []string{s.at(base + "/tasks/" + t.ID.String())}
	noteReplay(h, key, begin, t)
	status := http.StatusAccepted
	if wait > 0 {
		if preferred {
			h.Set("Preference-Applied", "wait="+strconv.Itoa(int(wait.Seconds())))
		}
		if t.State == tasks.StateCompleted {
			status = http.StatusOK
		}
	}
	s.writeTask(w, status, t)
	return nil
}

func (s *server) readSubmission(r *http.Request) (sub tasks.Submission, key tasks.Idempotency, err error) {
	buf, err := s.readBody(r)
	if err != nil {
		return sub, key, err
	}
	defer s.bodies.put(buf)
	if key, err = idempotency(r, "POST /tasks"); err != nil {
		return sub, key, err
	}
	var body SubmitBody
	if err := decodeJSON(buf.Bytes(), &body); err != nil {
		return sub, key, err
	}
	sub, err = body.submission("")
	return sub, key, err
}

// submitBatch takes many tasks.
//
//	@Summary		Submit up to 10,000 tasks
//	@Description	All are checked first; one wrong task means 422 with its index and nothing is stored. If the call breaks off while it stores, what is stored stays; sending it again with the same Idempotency-Key completes it and returns the same tasks.
//	@ID				submitBatch
//	@Tags			tasks
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			Idempotency-Key	header		string		false	"Makes it safe to send again (24 h)"	maxLength(200)
//	@Param			body			body		BatchBody	true	"the tasks"
//	@Success		202				{object}	TaskPage	"stored, in the order given"
//	@Header			202				{string}	Idempotent-Replayed	"true when the key was known"
//	@Failure		400				{object}	Problem
//	@Failure		401				{object}	Problem
//	@Failure		403				{object}	Problem
//	@Failure		409				{object}	Problem
//	@Failure		413				{object}	Problem
//	@Failure		415				{object}	Problem
//	@Failure		421				{object}	Problem
//	@Failure		422				{object}	Problem
//	@Failure		429				{object}	Problem
//	@Failure		503				{object}	Problem
//	@Router			/api/v1/tasks/batch [post]
func (s *server) submitBatch(w http.ResponseWriter, r *http.Request) error {
	subs, key, err := s.readBatch(r)
	if err != nil {
		return err
	}
	begin := time.Now()
	items, err := s.cfg.Tasks.SubmitBatch(r.Context(), subs, principal(r).Actor(), key)
	if err != nil {
		return err
	}
	noteReplay(w.Header(), key, begin, &items[0])
	s.writeTasks(w, http.StatusAccepted, items, "")
	return nil
}

func (s *server) readBatch(r *http.Request) (subs []tasks.Submission, key tasks.Idempotency, err error) {
	buf, err := s.readBody(r)
	if err != nil {
		return nil, key, err
	}
	defer s.bodies.put(buf)
	if key, err = idempotency(r, "POST /tasks/batch"); err != nil {
		return nil, key, err
	}
	var body BatchBody
	if err := decodeJSON(buf.Bytes(), &body); err != nil {
		return nil, key, err
	}
	if len(body.Tasks) == 0 {
		return nil, key, fault.New(fault.Invalid, "empty_batch", "The batch holds no task.").WithField("/tasks", "at least one item")
	}
	subs = make([]tasks.Submission, len(body.Tasks))
	for i := range body.Tasks {
		if subs[i], err = body.Tasks[i].submission(""); err != nil {
			return nil, key, inBatch(err, i)
		}
	}
	return subs, key, nil
}

// listTasks gives a page of tasks.
//
//	@Summary		List tasks
//	@Description	Newest first. A page may be shorter than its limit; next_cursor is null at the end. Also for agents that match by label (label.env=prod).
//	@ID				listTasks
//	@Tags			tasks
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			state			query		[]string	false	"states"	Enums(new,waiting-for-agent-response,completed)	collectionFormat(csv)
//	@Param			outcome			query		[]string	false	"outcomes"	Enums(succeeded,failed,timed-out,cancelled,expired,rejected,unknown)	collectionFormat(csv)
//	@Param			agent			query		[]string	false	"ids or unique names of agents"	collectionFormat(csv)
//	@Param			kind			query		[]string	false	"kinds"	collectionFormat(csv)
//	@Param			q				query		string		false	"beginning of an id, of an agent's name or of a kind"
//	@Param			created_after	query		string		false	"time, or relative to now"	example(-24h)
//	@Param			created_before	query		string		false	"time, or relative to now"
//	@Param			label.*			query		string		false	"value of an agent's label, for example label.env=prod"
//	@Param			sort			query		string		false	"order by id: -id is newest first"	Enums(id,-id)
//	@Param			limit			query		int			false	"page size; larger ones are cut to 500"	minimum(1)	default(50)
//	@Param			cursor			query		string		false	"next_cursor of the page before"
//	@Success		200				{object}	TaskPage
//	@Header			200				{string}	Link	"the next page, rel=next"
//	@Failure		400				{object}	Problem
//	@Failure		401				{object}	Problem
//	@Failure		403				{object}	Problem
//	@Failure		409				{object}	Problem
//	@Failure		421				{object}	Problem
//	@Failure		422				{object}	Problem
//	@Failure		429				{object}	Problem
//	@Failure		503				{object}	Problem
//	@Router			/api/v1/tasks [get]
func (s *server) listTasks(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	f, err := s.taskFilter(q, time.Now())
	if err != nil {
		return err
	}
	page, err := s.cfg.Tasks.List(r.Context(), f)
	if err != nil {
		return err
	}
	next := ""
	if page.Next != 0 {
		next = makeCursor(q, page.Next.String())
		setNext(w, r, q, next)
	}
	s.writeTasks(w, http.StatusOK, page.Items, next)
	return nil
}

// taskFilter reads the filter of a list from its address.
func (s *server) taskFilter(q url.Values, now time.Time) (f tasks.Filter, err error) {
	place, err := readCursor(q)
	if err != nil {
		return f, err
	}
	after, err := strconv.ParseInt(place, 10, 64)
	if place != "" && err != nil {
		return f, badParameter("cursor", "is not one that this list gave", "Begin again without it.")
	}
	f = tasks.Filter{Kinds: list(q, "kind"), Query: q.Get("q"), Labels: labels(q), After: tasks.ID(after)}
	if f.Limit, err = limitOf(q); err != nil {
		return f, err
	}
	if f.States, err = oneOf(q, "state", tasks.StateNew, tasks.StateWaiting, tasks.StateCompleted); err != nil {
		return f, err
	}
	f.Outcomes, err = oneOf(q, "outcome", tasks.Succeeded, tasks.Failed, tasks.TimedOut, tasks.Cancelled, tasks.Expired, tasks.Rejected, tasks.Unknown)
	if err != nil {
		return f, err
	}
	if f.CreatedAfter, err = instant(q, "created_after", now); err != nil {
		return f, err
	}
	if f.CreatedBefore, err = instant(q, "created_before", now); err != nil {
		return f, err
	}
	order, err := oneOf(q, "sort", "id", "-id")
	if err != nil {
		return f, err
	}
	f.Ascending = len(order) > 0 && order[0] == "id"
	for _, ref := range list(q, "agent") {
		a, err := s.cfg.Fleet.Lookup(ref)
		if err != nil {
			return f, err
		}
		f.Agents = append(f.Agents, a.Num)
	}
	return f, nil
}

// getTask gives one task.
//
//	@Summary		Read a task, or wait for its end
//	@Description	With wait the answer comes when the task is completed or after that time, always with status 200 and the task as it is then.
//	@ID				getTask
//	@Tags			tasks
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id				path		string	true	"id of the task"	example(1001)
//	@Param			wait			query		string	false	"How long to wait for the end, 0s to 120s"	example(30s)
//	@Param			If-None-Match	header		string	false	"ETag of the version that is known"
//	@Success		200				{object}	TaskBody
//	@Success		304				"not changed"
//	@Header			200,304			{string}	ETag	"version of the answer"
//	@Failure		400				{object}	Problem
//	@Failure		401				{object}	Problem
//	@Failure		403				{object}	Problem
//	@Failure		404				{object}	Problem
//	@Failure		421				{object}	Problem
//	@Failure		429				{object}	Problem
//	@Failure		503				{object}	Problem
//	@Router			/api/v1/tasks/{id} [get]
func (s *server) getTask(w http.ResponseWriter, r *http.Request) error {
	id, err := pathTask(r)
	if err != nil {
		return err
	}
	wait, _, err := waitOf(r)
	if err != nil {
		return err
	}
	var t *tasks.Task
	if wait > 0 {
		t, err = s.wait(w, r, wait, func(ctx context.Context) (*tasks.Task, error) { return s.cfg.Tasks.Wait(ctx, id, wait) })
	} else {
		t, err = s.cfg.Tasks.Get(r.Context(), id)
	}
	if err != nil {
		return err
	}
	if t.Attempt > 0 && (t.Ending.OutputBytes > 0 || s.prints(t.Kind)) {
		// That they cannot be read now is no reason to give no answer.
		t.Output, _ = s.cfg.Tasks.OutputFacts(r.Context(), id)
	}
	buf := s.bodies.get(taskSize(t))
	defer s.bodies.put(buf)
	buf.Write(append(appendTask(buf.AvailableBuffer(), t), '\n'))
	if notModified(w, r, etagOf(buf.Bytes())) {
		return nil
	}
	s.writeBody(w, http.StatusOK, buf.Bytes())
	return nil
}

// prints says whether tasks of the kind have output, also when the agent's last
// word does not tell.
func (s *server) prints(kind string) bool {
	k, err := s.cfg.Kinds.Lookup(kind)
	return err == nil && k.Streams
}

// cancelTask asks for the end of a task.
//
//	@Summary		Cancel a task
//	@Description	A task that has not started ends at once; a running one is asked to end, and its outcome follows. A completed task is not changed.
//	@ID				cancelTask
//	@Tags			tasks
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id	path		string	true	"id of the task"	example(1001)
//	@Success		202	{object}	TaskBody
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		409	{object}	Problem	"completed already"
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem
//	@Router			/api/v1/tasks/{id}/cancel [post]
func (s *server) cancelTask(w http.ResponseWriter, r *http.Request) error {
	id, err := pathTask(r)
	if err != nil {
		return err
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	t, err := s.cfg.Tasks.Cancel(ctx, id, principal(r).Actor())
	if err != nil {
		return err
	}
	s.writeTask(w, http.StatusAccepted, t)
	return nil
}

// retryTask repeats a completed task.
//
//	@Summary		Retry a task
//	@Description	Stores a new task with the agent, kind, arguments, delivery, priority and timeout of a completed one, and as much time to start as that one had. It can be done once: every further call, whoever makes it and whenever, gives the same task and says so in Idempotent-Replayed. To run it another time, retry the newer task.
//	@ID				retryTask
//	@Tags			tasks
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id	path		string		true	"id of the completed task"	example(1001)
//	@Success		202	{object}	TaskBody	"the task that repeats it, as it is now"
//	@Header			202	{string}	Location	"path of that task"
//	@Header			202	{string}	Idempotent-Replayed	"true when it had been retried before"
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		409	{object}	Problem	"not completed, or its agent was removed"
//	@Failure		421	{object}	Problem
//	@Failure		422	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem
//	@Router			/api/v1/tasks/{id}/retry [post]
func (s *server) retryTask(w http.ResponseWriter, r *http.Request) error {
	id, err := pathTask(r)
	if err != nil {
		return err
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	t, replayed, err := s.cfg.Tasks.Retry(ctx, id, principal(r).Actor())
	if err != nil {
		return err
	}
	w.Header().Set("Location", s.at(base+"/tasks/"+t.ID.String()))
	if replayed {
		w.Header().Set("Idempotent-Replayed", "true")
	}
	s.writeTask(w, http.StatusAccepted, t)
	return nil
}

func pathTask(r *http.Request) (tasks.ID, error) {
	text := chi.URLParam(r, "id")
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 || strconv.FormatInt(n, 10) != text {
		return 0, fault.Newf(fault.NotFound, "unknown_task", "There is no task %q; ids of tasks are numbers.", clip(text))
	}
	return tasks.ID(n), nil
}

// noteReplay tells the client that its key was known: the task is older than
// this request.
func noteReplay(h http.Header, key tasks.Idempotency, begin time.Time, t *tasks.Task) {
	if key.Key != "" && t.CreatedAt.Before(begin.Truncate(time.Microsecond)) {
		h.Set("Idempotent-Replayed", "true")
	}
}

// idempotency reads the Idempotency-Key; the zero value means none.
func idempotency(r *http.Request, route string) (key tasks.Idempotency, err error) {
	values := r.Header["Idempotency-Key"]
	if len(values) == 0 {
		return key, nil
	}
	text := values[0]
	bad := func(c rune) bool { return c < 0x21 || c > 0x7e }
	if len(values) > 1 || text == "" || len(text) > maxKey || strings.ContainsFunc(text, bad) {
		return key, fault.Newf(fault.Malformed, "bad_idempotency_key", "The Idempotency-Key must be one text of 1 to %d visible ASCII characters.", maxKey).
			WithHint("A UUID is a good one.")
	}
	p := principal(r)
	return tasks.Idempotency{Principal: p.Kind + ":" + p.ID.String(), Route: route, Key: text}, nil
}

// inBatch puts the pointers of a fault below the task of a batch that it is
// about.
func inBatch(err error, i int) error {
	f, ok := errors.AsType[*fault.Error](err)
	if !ok {
		return err
	}
	c := *f
	c.Message = "Task " + strconv.Itoa(i) + " of the batch: " + f.Message
	c.Fields = nil
	for _, field := range f.Fields {
		c.Fields = append(c.Fields, fault.Field{Pointer: "/tasks/" + strconv.Itoa(i) + field.Pointer, Detail: field.Detail})
	}
	return &c
}

func etagOf(body []byte) string {
	sum := sha256.Sum256(body)
	return `"` + hex.EncodeToString(sum[:8]) + `"`
}

// notModified sets the ETag and answers 304 when the client has that version.
func notModified(w http.ResponseWriter, r *http.Request, etag string) bool {
	w.Header().Set("ETag", etag)
	for _, line := range r.Header["If-None-Match"] {
		for part := range strings.SplitSeq(line, ",") {
			part = strings.TrimPrefix(strings.TrimSpace(part), "W/")
			if part == etag || part == "*" {
				w.WriteHeader(http.StatusNotModified)
				return true
			}
		}
	}
	return false
}
