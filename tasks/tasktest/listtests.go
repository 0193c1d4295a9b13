package tasktest

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"headgate/tasks"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func (b *bench) list(f tasks.Filter) []tasks.ID {
	b.Helper()
	got, err := b.e.Tasks(b.ctx, f)
	if err != nil {
		b.Fatalf("list %+v: %v", f, err)
	}
	var ids []tasks.ID
	for _, t := range got {
		ids = append(ids, t.ID)
	}
	return ids
}

func testLists(b *bench) {
	kind := func(k string) func(*tasks.Insert) { return func(x *tasks.Insert) { x.Kind = k } }
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(time.Minute) }
	ids := b.put(
		b.insert(0), b.insert(0, started), b.insert(1, kind("cmd.run"), started),
		b.insert(1, later), b.insert(2, ago), b.insert(2, started, kind("cmd.run")), b.insert(2),
	)
	b.turn(tasks.Turn{Finishes: []tasks.Finish{
		b.finish(1, ids[2], 1, func(f *tasks.Finish) {
			f.Ending = tasks.Ending{Outcome: tasks.Failed, Reason: "exit_code", Detail: "3."}
		}),
		b.finish(2, ids[5], 1),
	}})
	pick := func(at ...int) (out []tasks.ID) {
		for _, i := range at {
			out = append(out, ids[i])
		}
		return out
	}
	now := time.Now()
	for name, c := range map[string]struct {
		f    tasks.Filter
		want []tasks.ID
	}{
		"all, newest first":       {tasks.Filter{}, pick(6, 5, 4, 3, 2, 1, 0)},
		"all, oldest first":       {tasks.Filter{Ascending: true}, pick(0, 1, 2, 3, 4, 5, 6)},
		"new":                     {tasks.Filter{States: []tasks.State{tasks.StateNew}}, pick(6, 4, 3, 0)},
		"waiting":                 {tasks.Filter{States: []tasks.State{tasks.StateWaiting}}, pick(1)},
		"completed":               {tasks.Filter{States: []tasks.State{tasks.StateCompleted}}, pick(5, 2)},
		"new or waiting":          {tasks.Filter{States: []tasks.State{tasks.StateNew, tasks.StateWaiting}, Ascending: true}, pick(0, 1, 3, 4, 6)},
		"waiting or completed":    {tasks.Filter{States: []tasks.State{tasks.StateWaiting, tasks.StateCompleted}}, pick(5, 2, 1)},
		"failed":                  {tasks.Filter{Outcomes: []tasks.Outcome{tasks.Failed}}, pick(2)},
		"succeeded or unknown":    {tasks.Filter{Outcomes: []tasks.Outcome{tasks.Succeeded, tasks.Unknown}}, pick(5)},
		"failed but new":          {tasks.Filter{States: []tasks.State{tasks.StateNew}, Outcomes: []tasks.Outcome{tasks.Failed}}, nil},
		"one agent":               {tasks.Filter{Agents: []tasks.AgentNum{b.agents[1]}}, pick(3, 2)},
		"two agents":              {tasks.Filter{Agents: []tasks.AgentNum{b.agents[0], b.agents[1]}}, pick(3, 2, 1, 0)},
		"agent and state":         {tasks.Filter{Agents: []tasks.AgentNum{b.agents[0]}, States: []tasks.State{tasks.StateWaiting}}, pick(1)},
		"kind":                    {tasks.Filter{Kinds: []string{"cmd.run"}}, pick(5, 2)},
		"kind and outcome":        {tasks.Filter{Kinds: []string{"cmd.run"}, Outcomes: []tasks.Outcome{tasks.Failed}}, pick(2)},
		"created after":           {tasks.Filter{CreatedAfter: now.Add(-10 * time.Minute), Agents: []tasks.AgentNum{b.agents[2]}}, pick(6, 5)},
		"created before":          {tasks.Filter{CreatedBefore: now.Add(-10 * time.Minute)}, pick(4)},
		"label":                   {tasks.Filter{Labels: map[string]string{"site": "g"}}, pick(6, 5, 4)},
		"two labels":              {tasks.Filter{Labels: map[string]string{"site": "b", "tier": "edge"}}, pick(3, 2)},
		"unknown label":           {tasks.Filter{Labels: map[string]string{"site": "x"}}, nil},
		"query by agent name":     {tasks.Filter{Query: "gam"}, pick(6, 5, 4)},
		"query by kind":           {tasks.Filter{Query: "cmd"}, pick(5, 2)},
		"query by id":             {tasks.Filter{Query: ids[3].String()}, pick(3)},
		"query is no pattern":     {tasks.Filter{Query: "%"}, nil},
		"query never in args":     {tasks.Filter{Query: `{"n`}, nil},
		"limit":                   {tasks.Filter{Limit: 2}, pick(6, 5)},
		"cursor, newest first":    {tasks.Filter{After: ids[5], Limit: 2}, pick(4, 3)},
		"cursor, oldest first":    {tasks.Filter{After: ids[1], Ascending: true, Limit: 2}, pick(2, 3)},
		"cursor with state":       {tasks.Filter{After: ids[4], States: []tasks.State{tasks.StateNew}}, pick(3, 0)},
		"cursor at the end":       {tasks.Filter{After: ids[0]}, nil},
		"agent, cursor, up":       {tasks.Filter{Agents: []tasks.AgentNum{b.agents[2]}, After: ids[4], Ascending: true}, pick(5, 6)},
		"completed, cursor, up":   {tasks.Filter{States: []tasks.State{tasks.StateCompleted}, After: ids[2], Ascending: true}, pick(5)},
		"outcome, cursor":         {tasks.Filter{Outcomes: []tasks.Outcome{tasks.Failed, tasks.Succeeded}, After: ids[5]}, pick(2)},
		"several queries at odds": {tasks.Filter{Query: "gam", Kinds: []string{"core.echo"}, States: []tasks.State{tasks.StateNew}}, pick(6, 4)},
	} {
		if got := b.list(c.f); !slices.Equal(got, c.want) {
			b.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
	got, err := b.e.Tasks(b.ctx, tasks.Filter{Limit: 3, States: []tasks.State{tasks.StateCompleted}})
	if err != nil || len(got) != 2 || got[0].Agent.Name != "gamma" || got[0].Agent.ID != b.ids[2] || got[1].Ending.Reason != "exit_code" {
		b.Errorf("a page shows %+v, %v", got, err)
	}
}

func testPoints(b *bench) {
	at := time.Now().UTC().Truncate(time.Minute)
	p := func(name string, ago time.Duration, v string) tasks.Point {
		return tasks.Point{Name: name, At: at.Add(-ago), Value: json.RawMessage(v)}
	}
	all := []tasks.Point{p("a", 2*time.Minute, `{"n":1}`), p("a", time.Minute, `{"n":2}`), p("b", 0, `3`)}
	for range 2 {
		if err := b.e.SavePoints(b.ctx, all); err != nil {
			b.Fatal(err)
		}
	}
	if err := b.e.SavePoints(b.ctx, []tasks.Point{p("a", time.Minute, `{"n":4}`)}); err != nil {
		b.Fatal(err)
	}
	got, err := b.e.Points(b.ctx, "a", at.Add(-time.Hour))
	if err != nil || len(got) != 2 || !got[0].At.Equal(all[0].At) || string(got[1].Value) != `{"n":4}` {
		b.Errorf("points: %v, %v", got, err)
	}
	if got, err := b.e.Points(b.ctx, "a", at.Add(-90*time.Second)); err != nil || len(got) != 1 {
		b.Errorf("points since: %v, %v", got, err)
	}
	under := []tasks.Point{p("a/1", time.Minute, `1`), p("a/2", time.Minute, `2`), p("ab/1", time.Minute, `3`)}
	if err := b.e.SavePoints(b.ctx, under); err != nil {
		b.Fatal(err)
	}
	if got, err := b.e.Points(b.ctx, "a", at.Add(-90*time.Second)); err != nil || len(got) != 3 {
		b.Errorf("points under the name: %v, %v", got, err)
	}
}

func testNoTask(b *bench) {
	id := b.id()
	if _, err := b.e.Task(b.ctx, id); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("task: %v", err)
	}
	if _, err := b.e.Find(b.ctx, id); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("find: %v", err)
	}
	done := b.put(b.insert(0, started))[0]
	b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, done, 1)}})
	if _, err := b.e.Find(b.ctx, done); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("find of a completed task: %v", err)
	}
}

func testHardStrings(b *bench) {
	hard := "a'b\"c\\d{e},f%_ \u2028 é 日本 \U0001F9EA $1 --"
	args, err := json.Marshal(map[string]string{"s": hard, "nul": "\x00"})
	if err != nil {
		b.Fatal(err)
	}
	x := b.insert(0, started, func(x *tasks.Insert) { x.Args, x.Actor, x.Kind = string(args), hard, hard })
	b.put(x)
	ending := tasks.Ending{Outcome: tasks.Failed, Reason: hard, Detail: hard, Result: args}
	b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, x.ID, 1, func(f *tasks.Finish) { f.Ending = ending })}})
	got := b.task(x.ID)
	if string(got.Args) != x.Args || got.Actor != hard || got.Kind != hard {
		b.Errorf("read back %+v", got)
	}
	if d := cmp.Diff(ending, got.Ending, cmpopts.EquateEmpty()); d != "" {
		b.Errorf("ending (-want +got):\n%s", d)
	}
}

func testContext(b *bench) {
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	x := b.insert(0)
	t := tasks.Turn{Owner: b.me.ID, Leases: slices.Collect(maps.Values(b.leases)), Inserts: []tasks.Insert{x}}
	if _, err := b.e.Turn(ctx, &t); err == nil {
		b.Error("a turn with an ended context succeeded")
	}
	if _, err := b.e.Tasks(ctx, tasks.Filter{}); err == nil {
		b.Error("a list with an ended context succeeded")
	}
	if _, err := b.e.Task(b.ctx, x.ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("a turn that was never begun wrote: %v", err)
	}
}
