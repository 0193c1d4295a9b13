package store

import (
	"encoding/json"
	"fmt"
	"testing"

	"headgate/internal/fleet"
	"headgate/tasks"
)

// BenchmarkFullCycles measures insert, start and finish of single submissions:
// 256 waiting submitters in all, each with one task on an idle agent, whose
// finish and next submission ride in the loop's next turn.
func BenchmarkFullCycles(b *testing.B) {
	for _, loops := range []int{1, 2} {
		b.Run(fmt.Sprintf("loops=%d", loops), func(b *testing.B) { benchCycles(b, loops, 256/loops) })
	}
}

func BenchmarkIdleTurn(b *testing.B) { benchCycles(b, 1, 1) }

func benchCycles(b *testing.B, loops, perTurn int) {
	r := newRig(b, 1000)
	byLoop := make([][]fleet.Agent, loops)
	for _, a := range r.agents {
		l := int(tasks.ShardOf(a.ID)) % loops
		byLoop[l] = append(byLoop[l], a)
	}
	b.ResetTimer()
	done := make(chan error, loops)
	for l := range loops {
		go func() { done <- runLoop(b, r, byLoop[l], l, loops, perTurn) }()
	}
	for range loops {
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "cycles/s")
	b.StopTimer()
	if open, done := r.count(`SELECT count(*) FROM agent_queue`), r.count(`SELECT count(*) FROM agent_result`); open != 0 || done != b.N/loops*loops {
		b.Errorf("%d tasks open and %d completed after %d cycles", open, done, b.N)
	}
}

// runLoop works its share of b.N cycles.
func runLoop(b *testing.B, r *rig, agents []fleet.Agent, loop, loops, perTurn int) error {
	mine := *r
	mine.next, mine.left, mine.leases = 0, 0, nil
	for _, l := range r.leases {
		if int(l.Shard)%loops == loop {
			mine.leases = append(mine.leases, l)
		}
	}
	args, err := json.Marshal(map[string]string{"text": fmt.Sprintf("%0185d", 7)})
	if err != nil {
		return err
	}
	result := json.RawMessage(args)
	var ends []tasks.Finish
	at := 0
	for todo := b.N / loops; todo > 0 || len(ends) > 0; {
		turn := &tasks.Turn{Finishes: ends}
		ends = nil
		for range min(perTurn, todo) {
			in := mine.insert(agents[at%len(agents)], true)
			in.Args = string(args)
			at++
			todo--
			turn.Inserts = append(turn.Inserts, in)
			f := mine.finish(in, 1)
			f.Ending.Result = result
			ends = append(ends, f)
		}
		if _, err := mine.tryTurn(turn); err != nil {
			return err
		}
	}
	return nil
}
