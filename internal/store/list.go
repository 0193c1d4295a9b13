package store

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"headgate/tasks"
)

// Limits of how a list looks for its page.
const (
	// manyAgents is from when on an agent filter is tried as a test on the
	// newest tasks before it is tried agent by agent.
	manyAgents = 100
	// window is how many tasks such a first try looks at: some 20 ms.
	window = 20_000
	// openWindow is the same for open tasks, each of which costs a probe.
	openWindow = 2_000
	// maxQueryAgents bounds the agents that a query text may mean.
	maxQueryAgents = 10_000
)

// Tasks implements tasks.Reader: first the ids of the page, found through the
// index that fits the filter best, then the tasks themselves. The way is
// chosen here and not by the planner, which knows nothing about the queue.
func (d *DB) Tasks(ctx context.Context, f tasks.Filter) ([]tasks.Task, error) {
	l := &list{db: d, f: f, limit: f.Limit}
	if l.limit <= 0 {
		l.limit = tasks.DefaultPage
	}
	l.limit = min(l.limit, tasks.MaxPage+1)
	found, err := l.find(ctx)
	if err != nil {
		return nil, asFault(ctx, err, "list tasks")
	}
	if len(found) == 0 {
		return nil, nil
	}
	return d.tasksByID(ctx, found)
}

// list is one look-up of a page of ids.
type list struct {
	db    *DB
	f     tasks.Filter
	limit int

	agents  []int64 // of Agents and Labels together; nil = any
	byQuery *queryMeaning

	args  []any
	known map[string]string // argument placeholders by what they stand for
}

func (l *list) arg(name string, v any) string {
	if p, ok := l.known[name]; ok {
		return p
	}
	if l.known == nil {
		l.known = map[string]string{}
	}
	l.args = append(l.args, v)
	p := "$" + strconv.Itoa(len(l.args))
	l.known[name] = p
	return p
}

func (l *list) find(ctx context.Context) ([]int64, error) {
	if none, err := l.resolve(ctx); none || err != nil {
		return nil, err
	}
	tries := l.plan()
	for i, t := range tries {
		l.args, l.known = nil, nil
		query := t.build(l)
		found, err := l.db.selectIDs(ctx, t.pinned, query, l.args)
		if err != nil {
			return nil, err
		}
		if i == len(tries)-1 || len(found) >= l.limit {
			return found, nil
		}
	}
	return nil, nil
}

// try is one way to a page. All but the last may come back short, and then
// the next is tried. pinned keeps the planner to the order of the index: it
// takes the queue, of which it has no statistics, for nearly empty, and would
// sort a dead agent's whole backlog.
type try struct {
	build  func(*list) string
	pinned bool
}

const sqlPinPlan = `SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off`

func (d *DB) selectIDs(ctx context.Context, pinned bool, query string, args []any) (found []int64, err error) {
	if !pinned {
		err := d.pages.SelectContext(ctx, &found, query, args...)
		return found, err
	}
	tx, err := d.pages.BeginTxx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback() //nolint:errcheck // nothing was written
	if _, err := tx.ExecContext(ctx, sqlPinPlan); err != nil {
		return nil, err
	}
	err = tx.SelectContext(ctx, &found, query, args...)
	return found, err
}

func (l *list) plan() []try {
	newOnly, waiting, completed := l.states()
	switch {
	case len(l.f.Outcomes) > 0 && !completed:
		return nil // an outcome and no completed state: nothing can match
	case len(l.f.Outcomes) > 0 || completed && !newOnly && !waiting:
		return l.completedPlan()
	case (newOnly || waiting) && !completed:
		return l.openPlan(newOnly, waiting)
	}
	if newOnly && waiting && completed {
		return l.intakePlan(func(*list) string { return "" })
	}
	return l.intakePlan(func(*list) string { return mixedStates(newOnly) })
}

// states says which states may match.
func (l *list) states() (isNew, waiting, completed bool) {
	if len(l.f.States) == 0 {
		return true, true, true
	}
	return slices.Contains(l.f.States, tasks.StateNew), slices.Contains(l.f.States, tasks.StateWaiting),
		slices.Contains(l.f.States, tasks.StateCompleted)
}

// The conditions on the state of a row t of agent_task are scalar look-ups and
// not EXISTS, which the planner may turn into one scan of the whole queue.
const (
	condOpen = `coalesce((SELECT true FROM agent_queue q
      WHERE q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id LIMIT 1), false)`
	condStarted = `coalesce((SELECT q.started_at IS NOT NULL FROM agent_queue q
      WHERE q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id LIMIT 1), false)`
	condFresh = `coalesce((SELECT q.started_at IS NULL FROM agent_queue q
      WHERE q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id LIMIT 1), false)`
	condLater = `coalesce((SELECT true FROM agent_later l WHERE l.task_id = t.id LIMIT 1), false)`
)

// mixedStates is the condition of completed together with one open state:
// whatever is not in the other one.
func mixedStates(isNew bool) string {
	if isNew {
		return "NOT " + condStarted
	}
	return "NOT " + condFresh + " AND NOT " + condLater
}

// resultCond is the condition of completed and of the outcomes asked for.
func resultCond(l *list) string {
	outcome := ""
	if len(l.f.Outcomes) > 0 {
		outcome = " AND r.outcome = ANY (" + l.arg("outcomes", texts(l.f.Outcomes, text)) + "::text[])"
	}
	return "coalesce((SELECT true FROM agent_result r WHERE r.task_id = t.id" + outcome + " LIMIT 1), false)"
}

// dir gives the comparison of the cursor and the order.
func (l *list) dir() (cmp, order string) {
	if l.f.Ascending {
		return ">", "ASC"
	}
	return "<", "DESC"
}

// after is the condition of the cursor on a column, "" at the start.
func (l *list) after(column string) []string {
	if l.f.After == 0 {
		return nil
	}
	cmp, _ := l.dir()
	return []string{column + " " + cmp + " " + l.arg("after", int64(l.f.After))}
}

// taskConds are the conditions on a row t of agent_task, but for the cursor;
// agents is left out where the way itself goes by agent.
func (l *list) taskConds(byAgent, byKind bool) []string {
	var c []string
	if l.agents != nil && !byAgent {
		c = append(c, "t.agent_num = ANY ("+l.arg("agents", intArray(l.agents))+"::integer[])")
	}
	if len(l.f.Kinds) > 0 && !byKind {
		c = append(c, "t.kind = ANY ("+l.arg("kinds", texts(l.f.Kinds, same))+"::text[])")
	}
	c = append(c, l.createdConds()...)
	if q := l.byQuery; q != nil {
		c = append(c, "("+strings.Join([]string{
			"t.agent_num = ANY (" + l.arg("q_agents", intArray(q.agents)) + "::integer[])",
			"t.kind = ANY (" + l.arg("q_kinds", texts(q.kinds, same)) + "::text[])",
			"t.id::text LIKE " + l.arg("q_id", q.idPrefix),
		}, " OR ")+")")
	}
	return c
}

func (l *list) createdConds() (c []string) {
	if !l.f.CreatedAfter.IsZero() {
		c = append(c, "t.created_at >= "+l.arg("created_after", l.f.CreatedAfter))
	}
	if !l.f.CreatedBefore.IsZero() {
		c = append(c, "t.created_at < "+l.arg("created_before", l.f.CreatedBefore))
	}
	return c
}

// branch writes one ordered, limited look-up. lateral is "" or an unnest to go
// through with one look-up for each of its items.
func (l *list) branch(id, from, lateral string, conds []string) string {
	_, order := l.dir()
	where := ""
	if len(conds) > 0 {
		where = "\nWHERE " + strings.Join(conds, "\n  AND ")
	}
	q := fmt.Sprintf("SELECT %s AS id FROM %s%s\nORDER BY %s %s LIMIT %d", id, from, where, id, order, l.limit)
	if lateral == "" {
		return q
	}
	return fmt.Sprintf("SELECT x.id FROM %s CROSS JOIN LATERAL (%s) x\nORDER BY x.id %s LIMIT %d", lateral, q, order, l.limit)
}

// union puts look-ups together; the same id may come from several.
func (l *list) union(branches ...string) string {
	if len(branches) == 1 {
		return branches[0]
	}
	_, order := l.dir()
	for i, b := range branches {
		branches[i] = "(" + b + ")"
	}
	return fmt.Sprintf("SELECT u.id FROM (\n%s\n) u GROUP BY u.id ORDER BY u.id %s LIMIT %d",
		strings.Join(branches, "\nUNION ALL\n"), order, l.limit)
}

// intakePlan goes through agent_task; state is a further condition or "".
func (l *list) intakePlan(state func(*list) string) []try {
	conds := func(l *list, byAgent, byKind bool) []string {
		c := append(l.after("t.id"), l.taskConds(byAgent, byKind)...)
		if s := state(l); s != "" {
			c = append(c, s)
		}
		return c
	}
	byAgent := try{build: func(l *list) string {
		return l.branch("t.id", "agent_task t", l.eachAgent(), append(conds(l, true, false), "t.agent_num = g.num"))
	}}
	switch {
	case l.fewAgents():
		return []try{byAgent}
	case l.created():
		return []try{l.windowed(conds, window), {build: func(l *list) string {
			// OFFSET 0 keeps the planner from walking by id: it goes by the
			// range of times, whose index is small and good enough.
			inner := "(SELECT t.* FROM agent_task t WHERE " + strings.Join(l.createdConds(), " AND ") + " OFFSET 0) t"
			return l.branch("t.id", inner, "", conds(l, false, false))
		}}}
	case l.agents != nil:
		return []try{l.windowed(conds, window), byAgent}
	case len(l.f.Kinds) > 0:
		return []try{{build: func(l *list) string {
			each := "unnest(" + l.arg("kinds", texts(l.f.Kinds, same)) + "::text[]) g (kind)"
			return l.branch("t.id", "agent_task t", each, append(conds(l, false, true), "t.kind = g.kind"))
		}}}
	case l.byQuery != nil:
		return []try{l.windowed(conds, window), {build: func(l *list) string { return l.queryBranches(state(l)) }}}
	}
	return []try{{build: func(l *list) string { return l.branch("t.id", "agent_task t", "", conds(l, false, false)) }}}
}

func (l *list) fewAgents() bool { return l.agents != nil && len(l.agents) <= manyAgents }

func (l *list) created() bool { return !l.f.CreatedAfter.IsZero() || !l.f.CreatedBefore.IsZero() }

func (l *list) eachAgent() string {
	return "unnest(" + l.arg("agents", intArray(l.agents)) + "::integer[]) g (num)"
}

// windowed tests the conditions on the next n tasks only: enough when many
// match, and cheap when few do.
func (l *list) windowed(conds func(l *list, byAgent, byKind bool) []string, n int) try {
	return try{build: func(l *list) string {
		_, order := l.dir()
		inner := "SELECT t.* FROM agent_task t"
		if c := l.after("t.id"); c != nil {
			inner += " WHERE " + c[0]
		}
		inner += fmt.Sprintf(" ORDER BY t.id %s LIMIT %d", order, n)
		return l.branch("t.id", "("+inner+") t", "", conds(l, false, false))
	}}
}

// queryBranches looks by each meaning of the query text.
func (l *list) queryBranches(cond string) string {
	q := l.byQuery
	base := func() []string {
		c := l.after("t.id")
		saved := l.byQuery
		l.byQuery = nil
		c = append(c, l.taskConds(false, false)...)
		l.byQuery = saved
		if cond != "" {
			c = append(c, cond)
		}
		return c
	}
	var b []string
	if len(q.agents) > 0 {
		each := "unnest(" + l.arg("q_agents", intArray(q.agents)) + "::integer[]) g (num)"
		b = append(b, l.branch("t.id", "agent_task t", each, append(base(), "t.agent_num = g.num")))
	}
	if len(q.kinds) > 0 {
		each := "unnest(" + l.arg("q_kinds", texts(q.kinds, same)) + "::text[]) g (kind)"
		b = append(b, l.branch("t.id", "agent_task t", each, append(base(), "t.kind = g.kind")))
	}
	if len(q.idRanges) > 0 {
		each := "unnest(" + l.arg("q_from", ints(q.idRanges, func(r [2]int64) int64 { return r[0] })) + "::bigint[], " +
			l.arg("q_to", ints(q.idRanges, func(r [2]int64) int64 { return r[1] })) + "::bigint[]) g (first, last)"
		b = append(b, l.branch("t.id", "agent_task t", each, append(base(), "t.id BETWEEN g.first AND g.last")))
	}
	if len(b) == 0 {
		return "SELECT NULL::bigint AS id WHERE false"
	}
	return l.union(b...)
}

// completedPlan goes through agent_result where its indexes help: by agent, by
// an outcome that is not the usual one, or without any other condition.
func (l *list) completedPlan() []try {
	rare := len(l.f.Outcomes) > 0 && !slices.Contains(l.f.Outcomes, tasks.Succeeded)
	needTask := len(l.f.Kinds) > 0 || l.created() || l.byQuery != nil || l.agents != nil
	from := "agent_result r"
	if needTask {
		from += ` CROSS JOIN LATERAL (
    SELECT t.id, t.agent_num, t.kind, t.created_at FROM agent_task t WHERE t.id = r.task_id LIMIT 1) t`
	}
	outcomes := func(l *list) []string {
		if len(l.f.Outcomes) == 0 {
			return nil
		}
		return []string{"r.outcome = ANY (" + l.arg("outcomes", texts(l.f.Outcomes, text)) + "::text[])"}
	}
	switch {
	case l.fewAgents():
		return []try{{build: func(l *list) string {
			c := append(append(l.after("r.task_id"), outcomes(l)...), l.taskConds(true, false)...)
			return l.branch("r.task_id", from, l.eachAgent(), append(c, "r.agent_num = g.num"))
		}}}
	case rare:
		return []try{{build: func(l *list) string {
			each := "unnest(" + l.arg("outcomes", texts(l.f.Outcomes, text)) + "::text[]) g (outcome)"
			c := append(l.after("r.task_id"), l.taskConds(false, false)...)
			return l.branch("r.task_id", from, each, append(c, "r.outcome = g.outcome", "r.outcome <> 'succeeded'"))
		}}}
	case needTask:
		return l.intakePlan(resultCond)
	}
	return []try{{build: func(l *list) string {
		return l.branch("r.task_id", from, "", append(l.after("r.task_id"), outcomes(l)...))
	}}}
}

// openPlan goes through agent_queue, which has no index by id: with few agents
// by their own order, otherwise first by testing the newest tasks, and then by
// one scan of the queue, which is small or full of what is looked for.
func (l *list) openPlan(isNew, waiting bool) []try {
	if l.fewAgents() {
		return []try{{build: func(l *list) string { return l.openBranches(isNew, waiting, l.eachAgent()) }, pinned: true}}
	}
	scan := try{build: func(l *list) string { return l.openBranches(isNew, waiting, "") }}
	if !isNew {
		return []try{scan}
	}
	queued := condFresh
	if waiting {
		queued = condOpen
	}
	conds := func(l *list, byAgent, byKind bool) []string {
		return append(l.taskConds(byAgent, byKind), "("+queued+" OR "+condLater+")")
	}
	return []try{l.windowed(conds, openWindow), scan}
}

// openBranches looks into agent_queue, and into agent_later for new tasks.
func (l *list) openBranches(isNew, waiting bool, each string) string {
	needTask := len(l.f.Kinds) > 0 || l.created() || l.byQuery != nil
	row := "t"
	if needTask {
		row = "o"
	}
	from := func(table string) string {
		if !needTask {
			return table + " t"
		}
		return table + ` o CROSS JOIN LATERAL (
    SELECT t.id, t.agent_num, t.kind, t.created_at FROM agent_task t WHERE t.id = o.task_id LIMIT 1) t`
	}
	conds := func(extra ...string) []string {
		c := append(l.after(row+".task_id"), l.taskConds(each != "", false)...)
		if each != "" {
			c = append(c, row+".agent_num = g.num")
		}
		return append(c, extra...)
	}
	var state []string
	if !waiting {
		state = append(state, row+".started_at IS NULL")
	} else if !isNew {
		state = append(state, row+".started_at IS NOT NULL")
	}
	eachPriority := each
	if each != "" {
		// Within one priority the key gives the order of ids.
		eachPriority += fmt.Sprintf(" CROSS JOIN generate_series(%d, %d) p (priority)", tasks.MinPriority, tasks.MaxPriority)
		state = append(state, row+".priority = p.priority")
	}
	b := []string{l.branch(row+".task_id", from("agent_queue"), eachPriority, conds(state...))}
	if isNew {
		b = append(b, l.branch(row+".task_id", from("agent_later"), each, conds()))
	}
	return l.union(b...)
}

func same(s string) string { return s }

func text(o tasks.Outcome) string { return string(o) }

func intArray(v []int64) any { return ints(v, func(i int64) int64 { return i }) }
