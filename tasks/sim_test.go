package tasks_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "replay the simulation of one seed, and shorten it when it fails")
	simCount = flag.Int("sim.count", 0, "how many seeds the simulation tries (default 200, with -short 40)")
)

// A simulation is a program: steps drawn from a seed beforehand, so that it can
// be run again, and shortened. What is left to chance are the pauses that the
// Manager itself draws and the order of goroutines within one instant.

// simStep is one step of a program.
type simStep struct {
	do    string
	agent int
	node  int
	n     int
	d     time.Duration
	seed  uint64 // of what the step draws itself
}

func (s simStep) String() string {
	return fmt.Sprintf("{%q, agent %d, node %d, %d, %s}", s.do, s.agent, s.node, s.n, s.d)
}

// program is one simulation.
type program struct {
	seed  uint64
	nodes int // controllers on the one store
	loops int // of each
	items int // in one turn
	steps []simStep
}

const (
	simAgents = 4
	simSteps  = 130
)

// simWeights says how often each step is drawn.
var simWeights = []struct {
	do     string
	weight int
}{
	{"send", 38},
	{"cancel", 6},
	{"retry", 3},
	{"lie", 3},
	{"cable", 4},
	{"connect", 9},
	{"lose", 4},
	{"crash", 4},
	{"ledger", 2},
	{"approve", 4},
	{"pause", 2},
	{"remove", 1},
	{"turns", 6},
	{"down", 1},
	{"expire", 2},
	{"freeze", 4},
	{"stop", 2},
	{"kill", 2},
	{"pass", 12},
	{"long", 1},
}

func programOf(seed uint64) program {
	rnd := rand.New(rand.NewPCG(seed, 1))
	p := program{seed: seed, nodes: 1 + rnd.IntN(4)/2, loops: 1 + rnd.IntN(3), items: []int{3, 20, 1000}[rnd.IntN(3)]}
	if rnd.IntN(4) == 0 {
		p.nodes = 2
	}
	sum := 0
	for _, w := range simWeights {
		sum += w.weight
	}
	for range simSteps {
		n, i := rnd.IntN(sum), 0
		for n >= simWeights[i].weight {
			n -= simWeights[i].weight
			i++
		}
		p.steps = append(p.steps, simStep{
			do: simWeights[i].do, agent: rnd.IntN(simAgents), node: rnd.IntN(p.nodes), n: rnd.IntN(100),
			d: time.Duration(rnd.IntN(3000)) * time.Millisecond, seed: rnd.Uint64(),
		})
	}
	return p
}

// simTransitions must nearly all happen over the seeds: a simulation that does
// not get somewhere proves nothing about it.
var simTransitions = []string{
	"insert new", "insert started", "insert later", "key known", "claim", "due", "back to its place", "back for later", "cancel marked",
	"new: cancelled cancelled_by_user", "new: expired expired_before_start", "new: cancelled superseded", "new: cancelled agent_removed",
	"later: cancelled cancelled_by_user", "later: expired expired_before_start", "later: cancelled agent_removed",
	"started: succeeded", "started: failed", "started: timed-out timeout", "started: failed invalid_answer", "started: cancelled cancelled",
	"started: cancelled cancelled_by_user", "started: unknown agent_restarted", "started: unknown no_word_from_agent", "started: unknown ledger_changed",
	"started: unknown agent_removed",
	"turn broken", "turn unknown and done", "turn unknown and not done", "turn fenced", "turn slow", "turn refused for its lease", "late answer",
	"agent up", "agent superseded", "agent stale", "agent lost", "agent boot", "agent ledger", "agent running", "agent finished", "agent interrupted",
	"second attempt", "third attempt", "controller stopped", "controller killed", "controller frozen", "shards changed hands", "retry stored", "retry known", "told", "agent quarantined",
}

// TestSimulation lets everything happen at random, in simulated time: one or
// two controllers on one store, stopped, killed and frozen; turns that are lost,
// slow, unknown or fenced; agents that crash, lie, refuse, lose messages and
// ledgers. The history checker judges what the agents and clients have seen;
// the store is checked after every step. `make sim SEED=n` replays one seed.
//
// Cases R2, R14, R17.
func TestSimulation(t *testing.T) {
	t.Parallel()
	hits := &simHits{n: map[string]int{}}
	if *simSeed != 0 {
		replay(t, programOf(*simSeed), hits)
		return
	}
	count := *simCount
	switch {
	case count > 0:
	case testing.Short():
		count = 40
	default:
		count = 200
	}
	base := rand.Uint64()
	t.Run("seeds", func(t *testing.T) {
		work := make(chan uint64)
		for range 2 {
			t.Run("lane", func(t *testing.T) {
				t.Parallel()
				for seed := range work {
					if !t.Failed() {
						runProgram(t, programOf(seed), hits)
					}
				}
			})
		}
		go func() {
			defer close(work)
			for i := range uint64(count) {
				work <- base + i
			}
		}()
	})
	if !t.Failed() && count >= 100 {
		hits.judge(t)
	}
}

// runProgram runs one simulation and says how it failed.
func runProgram(t *testing.T, p program, hits *simHits) bool {
	fails, trace := simulate(t, p, hits)
	if len(fails) == 0 {
		return true
	}
	t.Errorf("seed %d (make sim SEED=%d): %d controllers, %d loops, %d items a turn, %d steps:\n%s\nwhat the first of it is about:\n%s",
		p.seed, p.seed, p.nodes, p.loops, p.items, len(p.steps), strings.Join(fails, "\n"), strings.Join(about(fails[0], trace), "\n"))
	return false
}

// about gives the lines of a trace that name a task of a failure, and the steps
// around them.
func about(fail string, trace []string) []string {
	ids := regexp.MustCompile(`\b(?:tasks?|runs|agent) (\d+)`).FindAllStringSubmatch(fail, -1)
	var lines []string
	step := ""
	for _, l := range trace {
		if strings.Contains(l, " step {") {
			step = l
			continue
		}
		if slices.ContainsFunc(ids, func(id []string) bool {
			return regexp.MustCompile(`\b`+id[0]+`\b`).MatchString(l) || len(id[1]) > 1 && regexp.MustCompile(`\b`+id[1]+`\b`).MatchString(l)
		}) {
			if step != "" {
				lines, step = append(lines, step), ""
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// replay runs a seed until it fails, up to 20 times, and looks for the shortest
// part of its program that still does.
func replay(t *testing.T, p program, hits *simHits) {
	fails := func(p program, tries int) bool {
		for range tries {
			if f, _ := simulate(t, p, hits); len(f) > 0 {
				return true
			}
		}
		return false
	}
	if !fails(p, 20) {
		t.Logf("seed %d kept every promise 20 times", p.seed)
		return
	}
	for size := len(p.steps) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(p.steps); {
			shorter := p
			shorter.steps = slices.Delete(slices.Clone(p.steps), at, at+size)
			if fails(shorter, 5) {
				p = shorter
			} else {
				at += size
			}
		}
	}
	t.Logf("%d steps are enough: %v", len(p.steps), p.steps)
	for range 20 {
		if !runProgram(t, p, hits) {
			return
		}
	}
	t.Errorf("seed %d fails now and then, but not just now", p.seed)
}

// simulate runs a program in a bubble of its own.
func simulate(t *testing.T, p program, hits *simHits) (fails, trace []string) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, p, hits)
		w.run()
		fails, trace = w.fails, w.trace
	})
	return fails, trace
}

// simHits counts which transitions have happened.
type simHits struct {
	mu sync.Mutex
	n  map[string]int
}

func (h *simHits) hit(what string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.n[what]++
}

// judge fails when fewer than 95 % of the transitions have happened.
func (h *simHits) judge(t *testing.T) {
	var missed []string
	for _, x := range simTransitions {
		if h.n[x] == 0 {
			missed = append(missed, x)
		}
	}
	t.Logf("%d of %d transitions happened; missed: %q", len(simTransitions)-len(missed), len(simTransitions), missed)
	if len(missed)*20 > len(simTransitions) {
		t.Errorf("the simulation does not get everywhere any more: %q", missed)
	}
}
