package store

import (
	"testing"

	"headgate/internal/kinds"
	"headgate/tasks"
)

// TestMissedFacts: an inventory whose hook was lost is found until it has
// become its agent's facts, and an older one never takes the place of a newer.
func TestMissedFacts(t *testing.T) {
	t.Parallel()
	r := newRig(t, 2)
	run := func(agent int, kind, result string, outcome tasks.Outcome) {
		t.Helper()
		x := r.insert(r.agents[agent], true)
		x.Kind, x.Args = kind, "{}"
		r.turn(&tasks.Turn{Inserts: []tasks.Insert{x}})
		f := r.finish(x, 1)
		f.Ending = tasks.Ending{Outcome: outcome, Result: []byte(result)}
		r.turn(&tasks.Turn{Finishes: []tasks.Finish{f}})
	}
	missed := func(want ...string) []MissedFact {
		t.Helper()
		got, err := r.MissedFacts(t.Context())
		if err != nil || len(got) != len(want) {
			t.Fatalf("missed %+v, %v; want %v", got, err, want)
		}
		for i := range got {
			if string(got[i].Facts) != want[i] {
				t.Errorf("missed %s, want %s", got[i].Facts, want[i])
			}
		}
		return got
	}
	missed()
	run(0, kinds.Inventory, `{"n":1}`, tasks.Succeeded)
	run(0, kinds.Echo, `{"n":2}`, tasks.Succeeded)
	run(0, kinds.Inventory, `{"n":3}`, tasks.Failed)
	run(1, kinds.Inventory, `{"n":4}`, tasks.Succeeded)
	first := missed(`{"n":1}`, `{"n":4}`)[0]
	run(0, kinds.Inventory, `{"n":5}`, tasks.Succeeded)
	newest := missed(`{"n":5}`, `{"n":4}`)
	for _, f := range append(newest, first) {
		if err := r.SetFacts(t.Context(), f.Agent, f.Facts, f.At); err != nil {
			t.Fatal(err)
		}
	}
	missed()
	if n := r.count(`SELECT count(*) FROM agent WHERE facts::text = '{"n":5}'`); n != 1 {
		t.Errorf("the newest facts are those of %d agents", n)
	}
}
