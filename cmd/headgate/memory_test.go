package main

import (
	"runtime/debug"
	"testing"
)

//nolint:paralleltest // the pace of the collector belongs to the process
func TestMemoryIsTunedUnlessTheEnvironmentSays(t *testing.T) {
	const given = 150
	before := debug.SetGCPercent(given)
	defer debug.SetGCPercent(before)
	for _, c := range []struct {
		value string
		set   bool
		want  int
	}{{"50", true, given}, {"off", true, given}, {"", true, gcPercent}, {"", false, gcPercent}} {
		debug.SetGCPercent(given)
		tuneMemory(func(name string) (string, bool) { return c.value, c.set && name == "GOGC" })
		if got := debug.SetGCPercent(given); got != c.want {
			t.Errorf("GOGC=%q (set: %t): the collector runs at %d%%, want %d%%", c.value, c.set, got, c.want)
		}
	}
}
