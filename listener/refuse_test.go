package listener_test

import (
	"testing"
)

// A refusal allocates what a connection is made of and nothing that a flood
// could drive up. Not parallel: other tests allocate in the same process.
// Acceptance 63.
func TestRefusingAllocatesNoMoreThanTheConnection(t *testing.T) {
	refuse := refusePath(t)
	for range 100 { // maps and buffers have their size then
		refuse()
	}
	// Other tests that are still ending can only add: the least of some rounds counts.
	const limit = 2
	least := 1e9
	for range 5 {
		if least = min(least, testing.AllocsPerRun(1000, refuse)); least <= limit {
			return
		}
	}
	t.Errorf("a refused connection costs %v allocations, want at most %d", least, limit)
}
