package web

import (
	"encoding/base64"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

// taskPage is one task.
type taskPage struct {
	*tasks.Task
	Row      taskRow
	Why      *because
	Health   string // of its agent; "" when it is not enrolled any more
	Steps    []step
	Parts    []part // the strip above the timeline
	Total    string
	Moves    bool // it is not completed
	Args     template.HTML
	Result   template.HTML
	Bytes    string // the result, when it is not JSON
	Exit     []fact
	ExitText string // the one line beside the result's heading
	Out      window
	From     string // cursor that the shown output begins at
	Streams  bool   // its kind prints while it runs
	OutSize  string
	Later    []laterAnswer
	API      string
	Repeat   string
	Curl     string
}

// laterAnswer is one that came when the task was completed without it.
type laterAnswer struct {
	tasks.LateResult
	Word   string
	Result template.HTML
}

func laterAnswers(t *tasks.Task) []laterAnswer {
	var list []laterAnswer
	for _, l := range t.Late {
		list = append(list, laterAnswer{LateResult: l, Word: string(l.Ending.Outcome), Result: prettyJSON(l.Ending.Result)})
	}
	return list
}

// step is one entry of the timeline.
type step struct {
	State string
	Name  string
	Text  string // after the name
	At    time.Time
	By    bool // At is not yet reached
	Note  string
}

// part is a stretch of the strip: how long the task was in which state.
type part struct {
	State   string
	X, W    string
	Caption string
}

func noSuchTask(id string) error {
	return fault.Newf(fault.NotFound, "unknown_task", "There is no task %s.", clip(id, 40)).
		WithHint("It may have been removed because of its age: completed tasks are not kept for ever.")
}

func (s *server) pathTask(r *http.Request) (*tasks.Task, error) {
	text := chi.URLParam(r, "id")
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 {
		return nil, noSuchTask(text)
	}
	t, err := s.cfg.Tasks.Get(r.Context(), tasks.ID(n))
	return t, unknownTask(err, text)
}

func (s *server) task(w http.ResponseWriter, r *http.Request) error {
	t, err := s.pathTask(r)
	if err != nil {
		return err
	}
	var done *flash
	switch r.URL.Query().Get("done") {
	case "submitted":
		done = &flash{"succeeded", "Task " + t.ID.String() + " is submitted and on disk."}
	case "cancelled":
		done = &flash{"succeeded", "The end of task " + t.ID.String() + " is asked for."}
	case "retried":
		done = &flash{"succeeded", "Task " + t.ID.String() + " repeats task " + t.RetryOf.String() + " and is on disk."}
	case "retried-before":
		done = &flash{"succeeded", "Task " + t.RetryOf.String() + " had been retried before, as this task."}
	}
	return s.showTask(w, r, http.StatusOK, t, done)
}

func (s *server) showTask(w http.ResponseWriter, r *http.Request, status int, t *tasks.Task, done *flash) error {
	from, err := readCursor(r.URL.Query().Get("from"))
	if err != nil {
		return err
	}
	out, err := readWindow(r.Context(), s.cfg.Tasks.OutputChunks, t.ID, from)
	if err != nil {
		return err
	}
	p := s.newPage(r, wordOf(t)+": "+t.Kind+" on "+t.Agent.Name, "tasks", nil)
	d := &taskPage{
		Task: t, Row: newTaskRow(t, p.Now), Why: taskWhy(t), Moves: t.State != tasks.StateCompleted,
		Steps: steps(t, p.Now), Total: totalText(t, p.Now),
		Args: prettyJSON(t.Args), Result: prettyJSON(t.Ending.Result), Out: out, From: r.URL.Query().Get("from"),
		API: "/api/v1/tasks/" + t.ID.String(), Repeat: repeatAddress(t), Curl: taskCurl(s.origin(r), t),
	}
	d.Parts, d.Later = parts(t, p.Now), laterAnswers(t)
	d.Exit, d.ExitText = exitFacts(t.Ending.Exit)
	if len(t.Ending.ResultBytes) > 0 {
		d.Bytes = clip(base64.StdEncoding.EncodeToString(t.Ending.ResultBytes), maxShownJSON)
	}
	if k, err := s.cfg.Kinds.Lookup(t.Kind); err == nil {
		d.Streams = k.Streams
	}
	if t.Ending.OutputBytes > 0 {
		d.OutSize = size(t.Ending.OutputBytes)
		facts, err := s.cfg.Tasks.OutputFacts(r.Context(), t.ID)
		if err != nil {
			return err
		}
		if missing := facts.Missing("", &t.Ending); missing > 0 {
			d.OutSize += ", of which " + size(missing) + " are missing"
		}
	}
	var v fleet.View
	if v, err = s.cfg.Fleet.Get(t.Agent.ID); err == nil {
		d.Health = healthOf(&v)
	}
	p.Data, p.Flash = d, done
	p.Path = "/tasks/" + t.ID.String()
	refresh := p.Path
	if d.From != "" {
		refresh += "?from=" + d.From
	}
	return s.render(w, r, status, "task", p.live(refresh, tasks.TopicTask(t.ID)+","+tasks.TopicAgent(t.Agent.ID)))
}

// moreOutput gives the lines behind a place, for following.
func (s *server) moreOutput(w http.ResponseWriter, r *http.Request) error {
	t, err := s.pathTask(r)
	if err != nil {
		return err
	}
	from, err := readCursor(r.URL.Query().Get("from"))
	if err != nil {
		return err
	}
	out, err := readWindow(r.Context(), s.cfg.Tasks.OutputChunks, t.ID, from)
	if err != nil {
		return err
	}
	return s.view.fragment(w, r, "task", "lines", &taskPage{Task: t, Out: out, Moves: t.State != tasks.StateCompleted})
}

func (s *server) cancelTask(w http.ResponseWriter, r *http.Request) error {
	t, err := s.pathTask(r)
	if err != nil {
		return err
	}
	if _, err := s.cfg.Tasks.Cancel(r.Context(), t.ID, principal(r).Actor()); err != nil {
		p := problemOf(unknownTask(err, t.ID.String()))
		if p.Status >= http.StatusInternalServerError {
			return err
		}
		return s.showTask(w, r, p.Status, t, &flash{"failed", p.Text + " " + p.Hint})
	}
	s.redirect(w, r, "/tasks/"+t.ID.String()+"?done=cancelled")
	return nil
}

// retryTask repeats a completed task and leads to the new one.
func (s *server) retryTask(w http.ResponseWriter, r *http.Request) error {
	t, err := s.pathTask(r)
	if err != nil {
		return err
	}
	again, replayed, err := s.cfg.Tasks.Retry(r.Context(), t.ID, principal(r).Actor())
	if err != nil {
		p := problemOf(unknownTask(err, t.ID.String()))
		if p.Status >= http.StatusInternalServerError {
			return err
		}
		return s.showTask(w, r, p.Status, t, &flash{"failed", p.Text + " " + p.Hint})
	}
	done := "retried"
	if replayed {
		done = "retried-before"
	}
	s.redirect(w, r, "/tasks/"+again.ID.String()+"?done="+done)
	return nil
}

// steps tells the task's life so far, and what is to come.
func steps(t *tasks.Task, now time.Time) []step {
	list := []step{{State: "succeeded", Name: "Submitted", Text: "by " + actorName(t.Actor), At: t.CreatedAt, Note: "On disk before it was acknowledged."}}
	if !t.NotBefore.IsZero() && t.Attempt > 0 && t.State == tasks.StateNew {
		list = append(list, step{State: "new", Name: "Attempt " + strconv.Itoa(t.Attempt) + " interrupted", Text: "the next one follows", At: t.NotBefore, By: true})
	} else if !t.NotBefore.IsZero() {
		list = append(list, step{State: "succeeded", Name: "Not before", At: t.NotBefore, By: t.NotBefore.After(now)})
	}
	started, done := !t.StartedAt.IsZero(), t.State == tasks.StateCompleted
	waiting := step{State: "succeeded", Name: "new", Text: "for " + took(waitOf(t, now)), At: t.CreatedAt}
	if !started && !done {
		waiting.State, waiting.Text = "new", "for "+age(waitOf(t, now))
		if t.Waiting != nil {
			waiting.Note = taskLine(t)
		}
	}
	list = append(list, waiting)
	if started {
		running, _ := runOf(t, now)
		st := step{State: "succeeded", Name: "waiting-for-agent-response", Text: "for " + took(running) + ", attempt " + strconv.Itoa(t.Attempt), At: t.StartedAt}
		if !done {
			st.State, st.Text = "waiting-for-agent-response", "for "+age(running)+", attempt "+strconv.Itoa(t.Attempt)
			if t.Waiting != nil {
				st.Note = sentence(t.Waiting.Sentence)
			}
		}
		list = append(list, st)
	}
	if !t.CancelRequestedAt.IsZero() {
		list = append(list, step{State: "cancelled", Name: "Cancel asked for", Text: "by " + actorName(t.CancelActor), At: t.CancelRequestedAt})
	}
	last := step{State: "new", Name: "completed", At: t.ExpiresAt, By: true}
	switch {
	case done:
		last = step{State: wordOf(t), Name: "completed", Text: string(t.Ending.Outcome), At: t.CompletedAt, Note: "Stored before anybody was told."}
	case started:
		last.At = t.StartedAt.Add(t.Timeout)
	case !t.ExpiresAt.IsZero():
		last.Note = "It expires then if it has not started."
	}
	return append(list, last)
}

func totalText(t *tasks.Task, now time.Time) string {
	if t.State == tasks.StateCompleted {
		return took(t.CompletedAt.Sub(t.CreatedAt)) + " in all"
	}
	return age(now.Sub(t.CreatedAt)) + " since it was submitted"
}

// parts draws the two stretches of a task's life to scale.
func parts(t *tasks.Task, now time.Time) []part {
	run, started := runOf(t, now)
	wait := waitOf(t, now)
	total := wait + run
	if !started || total <= 0 {
		return nil
	}
	const width = 1000
	w := int(width * float64(wait) / float64(total))
	state := "waiting-for-agent-response"
	if t.State == tasks.StateCompleted {
		state = wordOf(t)
	}
	return []part{
		{"new", "0", strconv.Itoa(w), "new " + took(wait)},
		{state, strconv.Itoa(w), strconv.Itoa(width - w), "waiting-for-agent-response " + took(run)},
	}
}

// processNames names processes with their numbers.
func processNames(list []tasks.Process) string {
	var names []string
	for _, p := range list {
		names = append(names, fmt.Sprintf("%s (%d)", clip(p.Name, 40), p.PID))
	}
	return strings.Join(names, ", ")
}

// exitFacts puts the end of a program into words.
func exitFacts(e *tasks.Exit) (list []fact, text string) {
	if e == nil {
		return nil, ""
	}
	switch {
	case e.SpawnError != "":
		text = "not started"
		list = append(list, fact{"Not started", clip(e.SpawnError, 300)})
	case e.Signal != "":
		signal := clip(e.Signal, 40)
		text = "ended by " + signal
		if e.KilledBy == "" {
			signal += ", not requested here"
		}
		list = append(list, fact{"Signal", signal})
	case e.Code != nil:
		text = "exit code " + strconv.Itoa(*e.Code)
		list = append(list, fact{"Exit code", strconv.Itoa(*e.Code)})
	}
	switch e.KilledBy {
	case tasks.KilledByTerm:
		list = append(list, fact{"Ended by the agent", "SIGTERM was enough"})
	case tasks.KilledByKill:
		list = append(list, fact{"Ended by the agent", "SIGKILL was needed, " + took(time.Duration(e.GraceMS)*time.Millisecond) + " after SIGTERM"})
	}
	if len(e.LeftBehind) > 0 {
		name := "Left behind, and ended"
		if e.Released {
			name = "Left behind, and let go on"
		}
		list = append(list, fact{name, processNames(e.LeftBehind)})
	}
	if len(e.Survivors) > 0 {
		list = append(list, fact{"Could not be ended", processNames(e.Survivors)})
	}
	cpu := time.Duration(e.UserMS+e.SystemMS) * time.Millisecond
	list = append(list, fact{"Processor time", took(cpu)})
	if e.MaxRSSBytes > 0 {
		list = append(list, fact{"Most memory", binarySize(e.MaxRSSBytes)})
	}
	return list, text
}
