package web

import (
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"headgate/internal/auth"
	"headgate/tasks"
)

// overviewPage answers one question first: is all well?
type overviewPage struct {
	State  string // of the verdict: connected or degraded
	Title  string
	Lines  []string // because sentences
	Oldest *tasks.Task
	Health []healthLine
	Strip  []part
	Total  int
	Phases []phaseView
	Since  string // how long it has been stable

	Stats    *tasks.Stats
	Queue    []tile
	Causes   []causeLine
	Failed   int64 // since the counters began
	Failures []taskRow
	Chart    *chart
	First    *firstSteps
}

type healthLine struct {
	Word  string
	Text  string
	Count int
}

// tile is one number with its words.
type tile struct {
	State string // glyph and word above the number; "" = Label
	Label string
	Value string
	Text  string
	Href  string
}

type causeLine struct {
	State string
	Text  string
	Count int64
	Width string // of the bar, of 1000
	Href  string
}

// firstSteps guides through the first minutes.
type firstSteps struct {
	Agents int
	Tasks  bool
	Curl   string
	Agent  string
}

func (s *server) overview(w http.ResponseWriter, r *http.Request) error {
	p := s.newPage(r, "", "overview", nil)
	d := &overviewPage{Phases: phaseViews(p.Status, p.Now), Total: p.Agents}
	if p.Status.Ready && !p.Status.Since.IsZero() {
		d.Since = age(p.Now.Sub(p.Status.Since))
	}
	all := s.census.now(p.Now)
	d.Health, d.Strip = healthLines(all)
	s.overviewStats(p, d)
	if p.May[auth.ReadTasks] {
		if err := s.overviewTasks(r, d, p.Now); err != nil {
			return err
		}
	}
	d.verdict(all, p)
	p.Title, p.Data = d.Title, d
	return s.render(w, r, http.StatusOK, "overview", p.live("/", allTopics))
}

// overviewStats takes over the counters; without them the page is shorter.
func (s *server) overviewStats(p *page, d *overviewPage) {
	if s.cfg.Counters == nil {
		return
	}
	st := s.cfg.Counters.Stats()
	d.Stats = &st
	d.Queue = tiles(&st, p.Now)
	d.Causes, d.Failed = causeLines(&st)
	d.Chart = newChart(samples(s.cfg.Counters.Series(p.Now.Add(-chartSpan))))
}

func (s *server) overviewTasks(r *http.Request, d *overviewPage, now time.Time) error {
	failed, err := s.cfg.Tasks.List(r.Context(), tasks.Filter{Outcomes: outcomes()[1:], Limit: recentFailures})
	if err != nil {
		return err
	}
	d.Failures = taskRows(failed.Items, now)
	if d.Stats != nil && !d.Stats.Oldest.IsZero() && now.Sub(d.Stats.Oldest) > slowWait {
		oldest, err := s.cfg.Tasks.List(r.Context(), tasks.Filter{States: []tasks.State{tasks.StateNew}, Ascending: true, Limit: 1})
		if err != nil {
			return err
		}
		if len(oldest.Items) > 0 {
			d.Oldest = &oldest.Items[0]
		}
	}
	some, err := s.cfg.Tasks.List(r.Context(), tasks.Filter{Limit: 1})
	if err != nil {
		return err
	}
	if d.Total == 0 || len(some.Items) == 0 {
		d.First = &firstSteps{Agents: d.Total, Tasks: len(some.Items) > 0}
		if sorted := s.census.now(now).sorted; len(sorted) > 0 {
			d.First.Agent = sorted[0].Name
		}
		d.First.Curl = submitCurl(s.origin(r), submission{Agent: orElse(d.First.Agent, "NAME"), Kind: "core.ping"})
	}
	return nil
}

// allTopics are those of pages that show the whole.
const allTopics = tasks.TopicTasks + "," + tasks.TopicAgents + "," + tasks.TopicController

// recentFailures is how many of them the overview shows.
const recentFailures = 5

// slowWait is from when on a waiting task is worth a sentence.
const slowWait = 30 * time.Second

func (d *overviewPage) verdict(all *roll, p *page) {
	d.State, d.Title = "connected", "All is well"
	look := all.attention()
	gate := p.Status.gateBox(p.Now)
	switch {
	case all.total == 0 && gate != nil:
		d.State, d.Title = gate.State, "The gate is closed; no agent is paired yet"
		d.Lines = append(d.Lines, "Three steps to the first result, over the controller port also now.")
		return
	case all.total == 0:
		d.State, d.Title = "open", "The gate is open; no agent is paired yet"
		d.Lines = append(d.Lines, "The controller is stable and both ports accept. Three steps to the first result.")
		return
	case look == 1:
		d.State, d.Title = "degraded", "1 of "+plural(all.total, "agent")+" needs attention"
	case look > 1:
		d.State, d.Title = "degraded", count(look)+" of "+plural(all.total, "agent")+" need attention"
	case gate != nil:
		d.State, d.Title = "degraded", "The agents are well; the public port is not"
	}
	for i := range all.sorted {
		v := &all.sorted[i]
		if !needsAttention(healthOf(v)) || i == maxVerdictLines {
			break
		}
		d.Lines = append(d.Lines, v.Name+" is "+healthOf(v)+": "+lowerFirst(agentLine(v, 0)))
	}
	if d.Stats != nil {
		if line := queueLine(d.Stats, d.Oldest, p.Now); line != "" {
			d.Lines = append(d.Lines, line)
		}
	}
	if len(d.Lines) == 0 {
		d.Lines = append(d.Lines, verb(all.total, "The agent is", "All "+count(all.total)+" agents are")+" in touch and nothing is held up.")
	}
}

// maxVerdictLines is how many causes are named above; the list has them all.
const maxVerdictLines = 3

// queueLine says whether the queue moves.
func queueLine(st *tasks.Stats, oldest *tasks.Task, now time.Time) string {
	line := ""
	if st.PerMinute >= 0.5 {
		line = "The queue moves: " + trimZero(st.PerMinute, 0) + " tasks completed in the last minute."
	} else if st.New == 0 && st.Waiting == 0 {
		line = "The queue is empty."
	}
	if !st.Oldest.IsZero() && now.Sub(st.Oldest) > slowWait {
		line = strings.TrimSpace(line + " The oldest task has waited " + age(now.Sub(st.Oldest)))
		if oldest != nil && oldest.Waiting != nil {
			return line + ": " + strings.TrimPrefix(sentence(oldest.Waiting.Sentence), "Waits: ")
		}
		return line + "."
	}
	return line
}

func healthLines(all *roll) (lines []healthLine, strip []part) {
	x := 0
	for i := len(healths()) - 1; i >= 0; i-- {
		h := healths()[i]
		n := all.counts[h.Word]
		if n == 0 && h.Word != "connected" {
			continue
		}
		lines = append(lines, healthLine{h.Word, h.Text, n})
		if n > 0 {
			strip = append(strip, part{State: h.Word, X: strconv.Itoa(x), W: strconv.Itoa(n)})
		}
		x += n
	}
	return lines, strip
}

func tiles(st *tasks.Stats, now time.Time) []tile {
	var done int64
	for _, n := range st.Completed {
		done += n
	}
	good := st.Completed[tasks.Succeeded]
	held := plural(st.New-st.Later, "task") + " in line"
	if st.Later > 0 {
		held += ", " + count(st.Later) + " not due"
	}
	list := []tile{
		{State: "new", Value: count(st.New), Text: held, Href: "/tasks?state=new"},
		{State: "waiting-for-agent-response", Value: count(st.Waiting), Text: "on " + plural(st.Waiting, "agent"), Href: "/tasks?state=waiting-for-agent-response"},
		{Label: "completed", Value: trimZero(st.PerMinute, 0) + " / min", Text: doneText(good, done) + " since " + clockAt(st.Since, now), Href: "/tasks?state=completed"},
	}
	if st.Wait.Count > 0 {
		list = append(list, tile{Label: "Queue wait, p50", Value: took(st.Wait.P50), Text: "p95 " + took(st.Wait.P95) + ", p99 " + took(st.Wait.P99)})
	}
	oldest := tile{Label: "Oldest wait", Value: "none", Text: "nothing is held up"}
	if !st.Oldest.IsZero() {
		oldest.Value, oldest.Text, oldest.Href = age(now.Sub(st.Oldest)), "of the task whose turn is next", "/tasks?state=new"
	}
	return append(list, oldest)
}

func doneText(good, done int64) string {
	if done == 0 {
		return "none"
	}
	return count(done) + ", " + percent(good, done) + " succeeded,"
}

// causeLines lists how tasks ended that did not succeed, most frequent first.
func causeLines(st *tasks.Stats) (lines []causeLine, total int64) {
	var most int64
	for _, o := range outcomes()[1:] {
		n := st.Completed[o]
		total += n
		most = max(most, n)
		if n > 0 {
			lines = append(lines, causeLine{State: string(o), Text: outcomeTitle(o), Count: n, Href: "/tasks?outcome=" + string(o)})
		}
	}
	for i := range lines {
		lines[i].Width = strconv.Itoa(int(max(10, 1000*lines[i].Count/most)))
	}
	slices.SortStableFunc(lines, func(a, b causeLine) int { return cmp.Compare(b.Count, a.Count) })
	return lines, total
}

// chartSpan is how far back the chart goes.
const chartSpan = 24 * time.Hour

// chartSteps is how many steps it has at most; minutes are put together.
const chartSteps = 144

// samples puts the minutes of the series together into steps of the chart.
func samples(points []tasks.Point) []sample {
	per := max(1, (len(points)+chartSteps-1)/chartSteps)
	var out []sample
	for i, p := range points {
		var v tasks.MinutePoint
		if json.Unmarshal(p.Value, &v) != nil {
			continue
		}
		if i%per == 0 {
			out = append(out, sample{})
		}
		s := &out[len(out)-1]
		s.At = p.At
		for o, n := range v.Completed {
			s.Completed += n
			if o != tasks.Succeeded {
				s.Failed += n
			}
		}
		// The highest minute stands for the step: a peak must not vanish.
		s.RunTime.P50 = max(s.RunTime.P50, millis(v.RunP50))
		s.RunTime.P95 = max(s.RunTime.P95, millis(v.RunP95))
		s.RunTime.P99 = max(s.RunTime.P99, millis(v.RunP99))
	}
	return out
}

func millis(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
