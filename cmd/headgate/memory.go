package main

import (
	"os"
	"runtime/debug"
)

// gcPercent is how much garbage the controller lets pile up before it
// collects, in percent of what is alive. What is alive is small beside what a
// busy queue throws away, so collections come often; half as many save about a
// tenth of the processor time of a task, for at most one more heap of memory.
const gcPercent = 200

// tuneMemory sets the collector's pace for a command that runs the controller.
// Whoever sets GOGC, or bounds the memory by GOMEMLIMIT, knows better.
func tuneMemory(lookup func(string) (string, bool)) (restore func()) {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		if v, ok := lookup(name); ok && v != "" {
			return func() {}
		}
	}
	before := debug.SetGCPercent(gcPercent)
	return func() { debug.SetGCPercent(before) }
}

// tuneMemoryOfProcess does so by the environment, to the end of the process.
func tuneMemoryOfProcess() { tuneMemory(os.LookupEnv) }
