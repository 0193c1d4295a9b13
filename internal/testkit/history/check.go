package history

import (
	"fmt"
	"sort"
	"strings"
	"time"
)

// Options says what a Check may take for granted.
type Options struct {
	// Open allows tasks that are not completed in the final dump: a run that
	// was judged before its end.
	Open bool
	// Foreign allows tasks in the final dump that nobody in these files has
	// submitted.
	Foreign bool
	// Unlogged says that agents have not written down every execution.
	Unlogged bool
	// Settle is how long after the last Healed something may still wait or
	// begin; 0 = it is not looked at.
	Settle time.Duration
	// Pause is what a task may take longer whose run was interrupted before: it
	// is tried again only after a while.
	Pause time.Duration
	// MaxViolations is how many are told with their lines; the others are
	// counted. 0 = 50.
	MaxViolations int
}

// Line is one line of a file that proves a violation.
type Line struct {
	File string
	No   int
	Text string
}

// Violation is one promise that was not kept.
type Violation struct {
	Rule  string // as in the list of the package
	Text  string // a sentence with ids
	Proof []Line
}

// String gives the sentence and its lines.
func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", v.Rule, v.Text)
	for _, l := range v.Proof {
		fmt.Fprintf(&b, "\n    %s:%d: %s", l.File, l.No, l.Text)
	}
	return b.String()
}

// Report is what a Check has found.
type Report struct {
	Events     int
	Submitted  int // submissions, answered or not
	Acked      int // tasks that were acknowledged
	Unknown    int // submissions without an answer, or with one that left it open
	Runs       int // executions that began
	Dumped     int // tasks in the final dump
	Told       int // terminal events
	Faults     int
	Torn       int // lines that a killed process has left unfinished
	Violations []Violation
	More       int // violations beyond those listed
}

// String gives the figures in one line, and every violation after it.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d events: %d submitted, %d acknowledged, %d unknown, %d runs, %d terminal events, %d in the dump, %d faults, %d torn lines, %d violations",
		r.Events, r.Submitted, r.Acked, r.Unknown, r.Runs, r.Told, r.Dumped, r.Faults, r.Torn, len(r.Violations)+r.More)
	for _, v := range r.Violations {
		b.WriteString("\n" + v.String())
	}
	if r.More > 0 {
		fmt.Fprintf(&b, "\nand %d more", r.More)
	}
	return b.String()
}

// Err is nil when every promise was kept.
func (r Report) Err() error {
	if len(r.Violations) == 0 {
		return nil
	}
	return fmt.Errorf("history: %s", r)
}

// Broken gives the rules that were broken, each once.
func (r Report) Broken() []string {
	seen := map[string]bool{}
	var rules []string
	for _, v := range r.Violations {
		if !seen[v.Rule] {
			seen[v.Rule] = true
			rules = append(rules, v.Rule)
		}
	}
	sort.Strings(rules)
	return rules
}

// Check reads files, in any order, and judges them. An error means that a file
// could not be read; what was broken is in the Report.
func Check(files []string, o Options) (Report, error) {
	c := NewChecker(o)
	for _, f := range files {
		if err := c.AddFile(f); err != nil {
			return Report{}, err
		}
	}
	return c.Report()
}

// Checker collects events and judges them once all are there. A million tasks
// take about 0.5 GiB and a few seconds.
type Checker struct {
	opts  Options
	files []string
	mem   map[int][]Event // files that never were on disk

	report Report
	found  []finding

	tasks  map[int64]*task
	agents map[string]*agent
	names  []string // of agents, by number
	keys   map[string]*keyed
	ops    map[int64]*open // submissions of the file under way that have no answer yet
	vague  []*open         // submissions whose fate is unknown
	ends   []end           // ends whose begin was not seen before them
	waits  map[waitKey]*wait
	follow map[string]*follower
	shadow shadow
	words  map[string]string // outcomes, each kept once

	healed   int64 // when the last fault was over
	healedAt place
	dumpTime int64 // of the last line of the final dump
}

// NewChecker makes a Checker without events.
func NewChecker(o Options) *Checker {
	if o.MaxViolations == 0 {
		o.MaxViolations = 50
	}
	return &Checker{
		opts: o, mem: map[int][]Event{}, tasks: map[int64]*task{}, agents: map[string]*agent{}, keys: map[string]*keyed{},
		waits: map[waitKey]*wait{}, follow: map[string]*follower{}, shadow: shadow{tasks: map[int64]*shadowed{}}, words: map[string]string{},
	}
}

// AddFile takes the events of one process.
func (c *Checker) AddFile(path string) error {
	n := len(c.files)
	c.files = append(c.files, path)
	c.ops = map[int64]*open{}
	torn, err := read(path, func(e *Event, line int) { c.add(e, at(n, line)) })
	c.report.Torn += torn
	c.closeOps()
	return err
}

// AddEvents takes the events of one process that are only in memory.
func (c *Checker) AddEvents(name string, events []Event) {
	n := len(c.files)
	c.files, c.mem[n] = append(c.files, name), events
	c.ops = map[int64]*open{}
	for i := range events {
		c.add(&events[i], at(n, i+1))
	}
	c.closeOps()
}
