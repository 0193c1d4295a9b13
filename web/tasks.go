package web

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"headgate/internal/fault"
	"headgate/tasks"
)

// taskRow is one task in a list.
type taskRow struct {
	*tasks.Task
	Word   string // its outcome, or its state while it has none
	Line   string
	Args   string // the beginning
	Wait   string
	Run    string // "–" when it has not started
	Moves  bool   // its times go on
	Cancel bool   // it can be cancelled
}

// rowArgs is how much of the arguments a row shows, in characters.
const rowArgs = 160

// maxNews is how many new tasks are counted; beyond that a page says "more".
const maxNews = 99

func taskRows(list []tasks.Task, now time.Time) []taskRow {
	rows := make([]taskRow, len(list))
	for i := range list {
		rows[i] = newTaskRow(&list[i], now)
	}
	return rows
}

func newTaskRow(t *tasks.Task, now time.Time) taskRow {
	row := taskRow{Task: t, Word: wordOf(t), Line: clip(taskLine(t), 240), Wait: took(waitOf(t, now)), Run: "–", Moves: t.State != tasks.StateCompleted}
	if args := compactJSON(t.Args, rowArgs); args != "{}" {
		row.Args = args
	}
	if d, ok := runOf(t, now); ok {
		row.Run = took(d)
	}
	if row.Moves { // a moving number in tenths would only flicker
		row.Wait = age(waitOf(t, now))
		if !t.StartedAt.IsZero() {
			row.Wait, row.Run = took(waitOf(t, now)), age(now.Sub(t.StartedAt))
		}
	}
	row.Cancel = row.Moves && t.CancelRequestedAt.IsZero()
	return row
}

// wordOf gives the one word for a task.
func wordOf(t *tasks.Task) string {
	if t.State == tasks.StateCompleted && t.Ending.Outcome != "" {
		return string(t.Ending.Outcome)
	}
	return string(t.State)
}

// tasksPage is the list of tasks.
type tasksPage struct {
	Rows  []taskRow
	Tabs  []tab
	Chips []tab
	Box   string
	Text  string // what is shown, in words
	Clear string // address without filters, "" when there is none
	Drops []drop // filters that can be dropped, when nothing matches
	News  string // "12 new tasks, show them"
	Top   string // address of the list as it is now
	Older string
	Curl  string
	Empty bool // there is no task at all
}

type drop struct{ Text, Href string }

func (s *server) tasks(w http.ResponseWriter, r *http.Request) error {
	q := expand(r.URL.Query(), taskQuery())
	p := s.newPage(r, "Tasks", "tasks", nil)
	f, err := s.taskFilter(q, p.Now)
	if err != nil {
		return err
	}
	before, err := placeOf(q, "before")
	if err != nil {
		return err
	}
	at, err := placeOf(q, "at")
	if err != nil {
		return err
	}
	if f.After = before; before == 0 && at != 0 {
		f.After = at + 1 // the list as it was, from its newest task on
	}
	list, err := s.cfg.Tasks.List(r.Context(), f)
	if err != nil {
		return err
	}
	items := list.Items
	d := &tasksPage{Tabs: stateTabs(q), Chips: outcomeChips(q), Box: boxText(q, taskQuery()), Text: filterText(q), Top: with("/tasks", q, "", "")}
	if list.Next != 0 {
		d.Older = placed(q, "before", list.Next)
	}
	d.Rows = taskRows(items, p.Now)
	d.describe(q, before)
	if d.News, err = s.news(r, f, at, before); err != nil {
		return err
	}
	d.Curl = listCurl(s.origin(r), q)
	p.Data = d
	refresh := r.URL.RequestURI()
	if before == 0 && len(items) > 0 {
		if at == 0 {
			at = items[0].ID
		}
		refresh = placed(q, "at", at)
	}
	p.Path = d.Top
	return s.render(w, r, http.StatusOK, "tasks", p.live(refresh, tasks.TopicTasks))
}

// describe says what to do with an empty list.
func (d *tasksPage) describe(q url.Values, before tasks.ID) {
	filters := 0
	for name := range q {
		if name != "before" && name != "at" && name != "limit" {
			filters++
			d.Drops = append(d.Drops, drop{name + "=" + q.Get(name), with("/tasks", q, name, "")})
		}
	}
	if filters > 0 {
		d.Clear = "/tasks"
	}
	d.Empty = len(d.Rows) == 0 && filters == 0 && before == 0
}

// placed gives the list's address with a place in it.
func placed(q url.Values, name string, id tasks.ID) string {
	out := url.Values{}
	for n, v := range q {
		if n != "before" && n != "at" && n != "done" {
			out[n] = v
		}
	}
	out.Set(name, id.String())
	return "/tasks?" + out.Encode()
}

// news says how many tasks have come since the list was first shown.
func (s *server) news(r *http.Request, f tasks.Filter, at, before tasks.ID) (string, error) {
	if at == 0 || before != 0 {
		return "", nil
	}
	f.Ascending, f.After, f.Limit = true, at, maxNews+1
	fresh, err := s.cfg.Tasks.List(r.Context(), f)
	switch n := len(fresh.Items); {
	case err != nil:
		return "", err
	case n == 0:
		return "", nil
	case n > maxNews:
		return "More than " + strconv.Itoa(maxNews) + " new tasks, show them", nil
	default:
		return plural(n, "new task") + ", show " + verb(n, "it", "them"), nil
	}
}

func stateTabs(q url.Values) []tab {
	tabs := []tab{{Word: "All", Count: -1, Href: with("/tasks", q, "state", ""), Current: q.Get("state") == ""}}
	for _, st := range states() {
		tabs = append(tabs, tab{Word: string(st), Count: -1, Href: with("/tasks", q, "state", string(st)), Current: q.Get("state") == string(st)})
	}
	return tabs
}

func outcomeChips(q url.Values) []tab {
	var chips []tab
	for _, o := range outcomes() {
		value := string(o)
		if q.Get("outcome") == value {
			value = ""
		}
		chips = append(chips, tab{Word: string(o), Href: with("/tasks", q, "outcome", value), Current: q.Get("outcome") == string(o)})
	}
	return chips
}

// filterText puts the time range into words; the rest is in the filter box.
func filterText(q url.Values) string {
	text := "All that are kept, newest first."
	after, before := q.Get("created_after"), q.Get("created_before")
	switch {
	case after != "" && before != "":
		text = "Created between " + after + " and " + before + ", newest first."
	case strings.HasPrefix(after, "-"):
		text = "Created in the last " + after[1:] + ", newest first."
	case after != "":
		text = "Created after " + after + ", newest first."
	case before != "":
		text = "Created before " + before + ", newest first."
	}
	return text
}

// unknownTask says so when there is no such task.
func unknownTask(err error, id string) error {
	if fault.Is(err, fault.NotFound) {
		return noSuchTask(id)
	}
	return err
}
