package store

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/tasks"
)

// stringConsts gives every string constant of the package's shipped files.
func stringConsts(t *testing.T) map[string]string {
	t.Helper()
	fset := token.NewFileSet()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	exprs := map[string]ast.Expr{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			v, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, name := range v.Names {
				if i < len(v.Values) {
					exprs[name.Name] = v.Values[i]
				}
			}
			return true
		})
	}
	var value func(e ast.Expr) (string, bool)
	value = func(e ast.Expr) (string, bool) {
		switch x := e.(type) {
		case *ast.BasicLit:
			s, err := strconv.Unquote(x.Value)
			return s, err == nil && x.Kind == token.STRING
		case *ast.Ident:
			return value(exprs[x.Name])
		case *ast.BinaryExpr:
			a, okA := value(x.X)
			b, okB := value(x.Y)
			return a + b, okA && okB
		}
		return "", false
	}
	consts := map[string]string{}
	for name, e := range exprs {
		if !strings.HasPrefix(name, "sql") || name == "sqlPinPlan" { // two settings, which cannot be prepared
			continue
		}
		s, ok := value(e)
		if !ok {
			t.Fatalf("the text of %s cannot be read", name)
		}
		consts[name] = s
	}
	return consts
}

// TestEverySQLTextFitsTheSchema has the server parse and analyse every
// statement of the product.
func TestEverySQLTextFitsTheSchema(t *testing.T) {
	t.Parallel()
	d := open(t)
	texts := stringConsts(t)
	if len(texts) < 50 {
		t.Fatalf("found only %d statements", len(texts))
	}
	for _, s := range turnShapes() {
		texts[fmt.Sprintf("turn %06b", s)] = s.sql()
	}
	for name, query := range listQueries() {
		texts[name] = query
	}
	tx, err := d.loops.Beginx()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	for i, name := range slices.Sorted(maps.Keys(texts)) {
		if _, err := tx.Exec("SAVEPOINT s"); err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(fmt.Sprintf("PREPARE p%d AS %s", i, texts[name])); err != nil {
			t.Errorf("%s: %v\n%s", name, err, texts[name])
			if _, err := tx.Exec("ROLLBACK TO SAVEPOINT s"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// listFilters are filters that together take every way of a list.
func listFilters() map[string]tasks.Filter {
	many := make([]tasks.AgentNum, manyAgents+1)
	for i := range many {
		many[i] = tasks.AgentNum(i + 1)
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	base := map[string]tasks.Filter{
		"none":           {},
		"new":            {States: []tasks.State{tasks.StateNew}},
		"waiting":        {States: []tasks.State{tasks.StateWaiting}},
		"open":           {States: []tasks.State{tasks.StateNew, tasks.StateWaiting}},
		"completed":      {States: []tasks.State{tasks.StateCompleted}},
		"new+completed":  {States: []tasks.State{tasks.StateNew, tasks.StateCompleted}},
		"wait+completed": {States: []tasks.State{tasks.StateWaiting, tasks.StateCompleted}},
		"failed":         {Outcomes: []tasks.Outcome{tasks.Failed, tasks.TimedOut}},
		"succeeded":      {Outcomes: []tasks.Outcome{tasks.Succeeded}},
	}
	out := map[string]tasks.Filter{}
	for name, f := range base {
		for _, part := range []string{"", "agent", "agents", "kind", "query", "created", "all"} {
			g := f
			all := part == "all"
			if part == "agent" || all {
				g.Agents = many[:1]
			}
			if part == "agents" {
				g.Agents = many
			}
			if part == "kind" || all {
				g.Kinds = []string{"core.echo", "core.ping"}
			}
			if part == "query" || all {
				g.Query = "1"
			}
			if part == "created" || all {
				g.CreatedAfter, g.CreatedBefore = now, now.Add(time.Hour)
			}
			out[name+" "+part] = g
			g.After, g.Ascending = 5, true
			out[name+" "+part+" ascending"] = g
		}
	}
	return out
}

// listQueries are the statements of those filters.
func listQueries() map[string]string {
	out := map[string]string{}
	for name, f := range listFilters() {
		l := &list{f: f, limit: 50}
		if f.Agents != nil {
			l.agents = ints(f.Agents, func(n tasks.AgentNum) int64 { return int64(n) })
		}
		if f.Query != "" {
			l.byQuery = &queryMeaning{agents: []int64{1}, kinds: []string{"core.echo"}, idRanges: idRanges(f.Query), idPrefix: likePrefix(f.Query)}
		}
		for i, t := range l.plan() {
			l.args, l.known = nil, nil
			out[fmt.Sprintf("list %s, try %d", name, i)] = t.build(l)
		}
	}
	return out
}

// TestListsAgreeWithThePlainWay compares every way of a list with a simple
// statement over the view.
func TestListsAgreeWithThePlainWay(t *testing.T) {
	t.Parallel()
	r := newRig(t, 3)
	fill(t, r)
	for name, f := range listFilters() {
		f.CreatedAfter, f.CreatedBefore = time.Time{}, time.Time{}
		if strings.Contains(name, "created") || strings.Contains(name, "all") {
			f.CreatedAfter, f.CreatedBefore = fillTime(20), fillTime(60)
		}
		f.Limit = 7
		got, err := r.Tasks(t.Context(), f)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var ids []int64
		for _, x := range got {
			ids = append(ids, int64(x.ID))
		}
		if want := plainList(t, r, f); !slices.Equal(ids, want) {
			t.Errorf("%s: got %v, want %v", name, ids, want)
		}
	}
}

func fillTime(i int) time.Time { return time.Date(2026, 1, 1, 0, 0, i, 0, time.UTC) }

// fill stores 90 tasks of three agents and two kinds in all states.
func fill(t *testing.T, r *rig) {
	t.Helper()
	var ins []tasks.Insert
	var ends []tasks.Finish
	waiting := map[tasks.AgentNum]bool{}
	for i := range 90 {
		a := r.agents[i%3]
		in := r.insert(a, false)
		in.Kind = []string{"core.echo", "core.ping", "cmd.run"}[i%7%3]
		in.Priority = i % 4
		in.CreatedAt = fillTime(i)
		if i%11 == 0 {
			in.NotBefore = in.CreatedAt.Add(time.Hour)
		} else if i%5 != 0 {
			f := r.finish(in, 0)
			f.Ending.Outcome = []tasks.Outcome{tasks.Succeeded, tasks.Failed, tasks.TimedOut}[i%3]
			ends = append(ends, f)
		} else if !waiting[a.Num] {
			waiting[a.Num] = true
			in.Started = true
		}
		ins = append(ins, in)
	}
	r.turn(&tasks.Turn{Inserts: ins})
	if res := r.turn(&tasks.Turn{Finishes: ends}); len(res.Finished) != len(ends) {
		t.Fatalf("finished %d of %d", len(res.Finished), len(ends))
	}
	checkInvariant(t, r.DB)
}

func plainList(t *testing.T, r *rig, f tasks.Filter) []int64 {
	t.Helper()
	order, cmp := "DESC", "<"
	if f.Ascending {
		order, cmp = "ASC", ">"
	}
	query := fmt.Sprintf(`SELECT id FROM agent_task_view
WHERE ($1 = 0 OR id %s $1)
  AND ($2::text[] IS NULL OR state = ANY ($2::text[]))
  AND ($3::text[] IS NULL OR outcome = ANY ($3::text[]))
  AND ($4::int[] IS NULL OR agent_num = ANY ($4::int[]))
  AND ($5::text[] IS NULL OR kind = ANY ($5::text[]))
  AND ($6::text = '' OR id::text LIKE $6 || '%%' OR agent_name LIKE $6 || '%%' OR kind LIKE $6 || '%%')
  AND ($7::timestamptz IS NULL OR created_at >= $7) AND ($8::timestamptz IS NULL OR created_at < $8)
ORDER BY id %s LIMIT %d`, cmp, order, f.Limit)
	var states, outcomes, agents, kinds any
	if f.States != nil {
		states = texts(f.States, func(s tasks.State) string { return string(s) })
	}
	if f.Outcomes != nil {
		outcomes = texts(f.Outcomes, text)
	}
	if f.Agents != nil {
		agents = ints(f.Agents, func(n tasks.AgentNum) int64 { return int64(n) })
	}
	if f.Kinds != nil {
		kinds = texts(f.Kinds, same)
	}
	var ids []int64
	if err := r.general.Select(&ids, query, int64(f.After), states, outcomes, agents, kinds, f.Query,
		timeOrNull(f.CreatedAfter), timeOrNull(f.CreatedBefore)); err != nil {
		t.Fatal(err)
	}
	return ids
}
