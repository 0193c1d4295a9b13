package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// verdict is what a campaign found; all but the last few must be zero.
type verdict struct {
	lost       int // acknowledged and not there, or not completed
	doubled    int // tasks that are there twice
	twiceRun   int // of delivery once, begun more than once
	atOnce     int // begun while another ran on the same agent
	inversions int // begun after one that was sent after they were acknowledged
	unrun      int // succeeded without having been begun
	torn       int // in none, or in more than one of the tables
	changed    int // waiters were told another outcome than the one on disk
	odd        int // outcomes that no fault explains

	outcomes map[string]int
	reasons  map[string]int
	again    int // runs beyond the first, of repeatable tasks
	unsure   int // never acknowledged, and there
	examples []string
}

func (v *verdict) example(format string, args ...any) {
	if len(v.examples) < oddKept {
		v.examples = append(v.examples, fmt.Sprintf(format, args...))
	}
}

// runs is what the agents' own records say.
type runs struct {
	starts map[int]int  // by token
	order  [][]firstRun // in order, by agent
}

// firstRun is the first start of a task on its agent.
type firstRun struct {
	token int
	// late: it had been given before, and the agent was killed before it began.
	// Such a task is tried again after a pause, in which others run.
	late bool
}

// judge looks whether the promises were kept and prints it.
func (c *campaign) judge(ctx context.Context, end finish) error {
	v := &verdict{outcomes: map[string]int{}, reasons: map[string]int{}}
	r, err := c.readEffects(v)
	if err != nil {
		return err
	}
	if err := c.readTasks(ctx, v, r); err != nil {
		return err
	}
	c.checkOrder(v, r)
	if v.torn, err = c.tornTasks(ctx); err != nil {
		return err
	}
	if err := c.book.save(c.path("book.jsonl")); err != nil {
		return err
	}
	return c.print(v, end)
}

// readEffects reads what ran, in the order in which it did.
func (c *campaign) readEffects(v *verdict) (*runs, error) {
	r := &runs{starts: map[int]int{}, order: make([][]firstRun, len(c.agents))}
	for i, n := range c.crews {
		base := i * c.plan.agents
		if err := r.read(filepath.Join(n.dir, effectsFile), base, c.plan.agents, c.book.entries, v); err != nil {
			return nil, err
		}
	}
	for i, n := range c.reals {
		if err := r.read(filepath.Join(n.dir, effectsFile), len(c.crews)*c.plan.agents+i, 1, c.book.entries, v); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// read reads one record. B says that the process has begun anew, and with it
// that nothing of the one before runs any more.
func (r *runs) read(file string, base, agents int, entries []entry, v *verdict) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	running := make([]int, agents)
	const none = -1
	idle := func() {
		for i := range running {
			running[i] = none
		}
	}
	idle()
	in := bufio.NewScanner(f)
	booted := 0 // when the process began, nanoseconds
	for in.Scan() {
		var what string
		var agent, token, id, attempt int
		n, _ := fmt.Sscan(in.Text(), &what, &agent, &token, &id, &attempt) // what it lacks is seen by n
		switch {
		case n == 2 && what == "B":
			idle()
			booted = agent
		case n < 3 || agent < 0 || agent >= agents || token < 0 || token >= len(entries):
			return fmt.Errorf("%s has the line %q", file, in.Text())
		case what == "S":
			if running[agent] != none {
				v.atOnce++
				v.example("token %d began while token %d ran on the same agent (%s)", token, running[agent], file)
			}
			running[agent] = token
			if r.starts[token]++; r.starts[token] == 1 {
				late := attempt > 1 && int64(booted) > entries[token].Sent
				r.order[base+agent] = append(r.order[base+agent], firstRun{token, late})
			}
		case running[agent] == token:
			running[agent] = none
		case running[agent] != none:
			v.atOnce++
			v.example("token %d ended while token %d ran on the same agent (%s)", token, running[agent], file)
		}
	}
	return in.Err()
}

// stored is one task on disk.
type stored struct {
	id                      int64
	args                    string
	state                   string
	outcome, reason, result *string
	attempt                 int
}

// readTasks compares every task on disk with the clients' book and with what
// ran, and then the book with what is on disk.
func (c *campaign) readTasks(ctx context.Context, v *verdict, r *runs) error {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return err
	}
	defer release(db)
	rows, err := db.QueryContext(ctx, `SELECT id, args, state, outcome, reason, convert_from(coalesce(result_bytes, ''), 'UTF8') || coalesce(result::text, ''), attempt FROM agent_task_view`)
	if err != nil {
		return err
	}
	defer rows.Close()
	completed := make([]bool, len(c.book.entries))
	there := make([]bool, len(c.book.entries))
	for rows.Next() {
		var s stored
		if err := rows.Scan(&s.id, &s.args, &s.state, &s.outcome, &s.reason, &s.result, &s.attempt); err != nil {
			return err
		}
		token, err := tokenOf(s.args)
		if err != nil || token < 0 || token >= len(there) {
			return fmt.Errorf("task %d has the arguments %s", s.id, s.args)
		}
		if there[token] {
			v.doubled++
			v.example("token %d is there twice, once as task %d", token, s.id)
		}
		there[token] = true
		completed[token] = s.state == "completed"
		c.checkTask(v, r, token, &s)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for token, e := range c.book.entries {
		if e.Acked != 0 && !completed[token] {
			v.lost++
			v.example("task %d (token %d) was acknowledged; on disk: %v, completed: %v", e.ID, token, there[token], completed[token])
		}
		if e.Acked == 0 && there[token] {
			v.unsure++
		}
	}
	return nil
}

func tokenOf(args string) (int, error) {
	var a struct {
		T    *int `json:"t"`
		Args struct {
			Token int `json:"token"`
		} `json:"args"`
	}
	if err := json.Unmarshal([]byte(args), &a); err != nil {
		return 0, err
	}
	if a.T != nil {
		return *a.T, nil
	}
	return a.Args.Token, nil
}

// checkTask checks one task on disk.
func (c *campaign) checkTask(v *verdict, r *runs, token int, s *stored) {
	e := &c.book.entries[token]
	if e.Acked != 0 && e.ID != s.id {
		v.changed++
		v.example("token %d was acknowledged as task %d and is task %d", token, e.ID, s.id)
	}
	if s.state != "completed" || s.outcome == nil {
		return
	}
	outcome := *s.outcome
	v.outcomes[outcome]++
	if s.reason != nil && *s.reason != "" {
		v.reasons[outcome+" "+*s.reason]++
	}
	if e.Outcome != "" && e.Outcome != outcome {
		v.changed++
		v.example("a waiter for task %d was told %s, on disk it is %s", s.id, e.Outcome, outcome)
	}
	real, started := c.agents[e.Agent].real, r.starts[token]
	if (e.Once || real) && started > 1 {
		v.twiceRun++
		v.example("task %d (token %d) of delivery once began %d times", s.id, token, started)
	}
	if !e.Once && !real && started > 1 {
		v.again += started - 1
	}
	switch outcome {
	case "succeeded":
		if started == 0 {
			v.unrun++
			v.example("task %d (token %d) succeeded, but never began", s.id, token)
		}
		if !real && (s.result == nil || *s.result != s.args) {
			v.changed++
			v.example("task %d gave not its arguments back", s.id)
		}
	case "unknown", "timed-out":
	default:
		v.odd++
		v.example("task %d has the outcome %s %s", s.id, outcome, *s.reason)
	}
}

// checkOrder looks for tasks that began after one of the same agent that was
// sent only after they had been acknowledged.
func (c *campaign) checkOrder(v *verdict, r *runs) {
	for _, order := range r.order {
		latest, by := int64(0), 0
		for _, run := range order {
			e := &c.book.entries[run.token]
			if e.Acked != 0 && e.Acked < latest && !run.late {
				v.inversions++
				v.example("token %d was acknowledged before token %d was sent, but began after it", run.token, by)
			}
			if e.Sent > latest {
				latest, by = e.Sent, run.token
			}
		}
	}
}

// tornTasks counts those that are not in exactly one of the tables for what is
// open, what is for later and what has ended.
func (c *campaign) tornTasks(ctx context.Context) (n int, err error) {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return 0, err
	}
	defer release(db)
	err = db.QueryRowContext(ctx, `SELECT count(*) FROM (
		SELECT id FROM agent_task
		LEFT JOIN (SELECT task_id FROM agent_queue UNION ALL SELECT task_id FROM agent_later UNION ALL SELECT task_id FROM agent_result) AS place ON task_id = id
		GROUP BY id HAVING count(task_id) <> 1) AS torn`).Scan(&n)
	return n, err
}

// print tells what was found, each promise in a line of its own.
func (c *campaign) print(v *verdict, end finish) error {
	b, f := c.b, &c.faults
	named := func(name string) string { return c.plan.name + "_" + name }
	var crashes []string
	for _, n := range c.nodes() {
		crashes = append(crashes, n.crashed()...)
	}
	for _, x := range slices.Concat(v.examples, c.book.odd, crashes) {
		b.note("%s: %s", c.plan.name, x)
	}
	b.note("%s: outcomes %v; reasons %v; %d repeated runs of repeatable tasks; %d stored without their submitter knowing", c.plan.name,
		v.outcomes, v.reasons, v.again, v.unsure)
	b.note("%s: %d freezes among the kills, %d of a controller across its leases; a controller that was started again served after %s at most",
		c.plan.name, f.freezes.Load(), f.overLease.Load(), f.slowest.Round(time.Millisecond))
	return errors.Join(
		b.reach(named("kills"), float64(f.kills.Load()), float64(c.plan.kills), "kills and freezes"),
		b.reach(named("acknowledged_tasks"), float64(c.book.acknowledged()), float64(c.plan.tasks), "tasks"),
		b.hold(named("lost"), float64(v.lost), 0, "tasks"),
		b.hold(named("doubled"), float64(v.doubled+v.twiceRun), 0, "tasks"),
		b.hold(named("two_at_once"), float64(v.atOnce), 0, "tasks"),
		b.hold(named("order_inversions"), float64(v.inversions), 0, "tasks"),
		b.hold(named("changed"), float64(v.changed+v.unrun), 0, "tasks"),
		b.hold(named("torn"), float64(v.torn), 0, "tasks"),
		b.hold(named("odd_outcomes"), float64(v.odd), 0, "tasks"),
		b.hold(named("odd_answers"), float64(len(c.book.odd)), 0, "answers"),
		b.hold(named("left_waiting"), float64(end.open), 0, "tasks"),
		b.hold(named("settled_s"), end.settled.Seconds(), c.plan.settle.Seconds(), "s"),
		b.hold(named("stop_s"), end.stopped.Seconds(), stopLimit.Seconds(), "s"),
		b.hold(named("crashes"), float64(len(crashes)), 0, "processes"),
	)
}

// reach prints a figure beside what is demanded of the run itself.
func (b *bench) reach(name string, value, least float64, unit string) error {
	word := "kept"
	var err error
	if value < least {
		word, err = "BROKEN", fmt.Errorf("%s is %s %s, less than %s", name, decimal(value), unit, decimal(least))
	}
	b.line(strings.Join([]string{"CHAOS", name, decimal(value), unit, "(at least " + decimal(least) + ")", word}, " "))
	return err
}
