package fleet_test

import (
	"testing"
	"time"

	"headgate/internal/fleet"
	"headgate/internal/fleet/fleettest"
	"headgate/tasks"
)

// TestAClockThatIsWrongIsShownAndHindersNothing runs a task on agents whose
// clocks are far off, before and behind.
// Cases P35.
func TestAClockThatIsWrongIsShownAndHindersNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, quick(), nil)
	skews := []time.Duration{0, time.Second, -time.Second, 5 * time.Minute, -5 * time.Minute, 24 * time.Hour, -24 * time.Hour}
	var nums []tasks.AgentNum
	for i, skew := range skews {
		_, row := h.agent(string(rune('a'+i)), func(a *fleettest.Agent) { a.Skew = skew })
		nums = append(nums, row.Num)
	}
	h.run()
	for i, num := range nums {
		h.up(num, 1)
		h.give(num, tasks.ID(i+1), `{}`)
		if f := h.final(num, 1).Final; f.Ending.Outcome != tasks.Succeeded {
			t.Errorf("with a clock %s before: %+v", skews[i], f)
		}
	}
	list, err := h.List(fleet.Filter{})
	if err != nil || len(list) != len(skews) {
		t.Fatalf("%d agents, %v", len(list), err)
	}
	for _, v := range list {
		i := int(v.Name[0] - 'a')
		// What is measured is late by what the machine takes to look.
		const most = 30 * time.Second
		if got := v.Live.ClockSkew; got == nil || *got > skews[i]+most || *got < skews[i]-most {
			t.Errorf("a clock %s before is shown as %v", skews[i], got)
		}
	}
}
