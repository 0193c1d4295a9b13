package main

import "runtime/debug"

// gcPercent is how much garbage the controller lets pile up before it
// collects, in percent of what is alive. A busy queue throws away many times
// what it keeps, so that collections come often. Half as many save a fifth of
// the processor time of the write loops (BenchmarkCycle in tasks). The price is
// memory: about 100 MB more at the peak of a full load on 1,000 agents. Set
// GOGC=100 where memory is scarcer than processors.
const gcPercent = 200

// tuneMemory sets the pace of the collector for a command that runs the
// controller, unless the environment does by GOGC.
func tuneMemory(lookup func(string) (string, bool)) {
	if v, ok := lookup("GOGC"); !ok || v == "" {
		debug.SetGCPercent(gcPercent)
	}
}
