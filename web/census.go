package web

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"headgate/internal/fleet"
)

// census shares one look at all agents among all tabs: at 10,000 agents a
// look costs milliseconds, and a hundred open tabs must not cost a hundred.
type census struct {
	fleet Fleet

	mu   sync.Mutex // guards all below; held while the fleet is read, which is memory only
	at   time.Time
	last *roll
}

// roll is the fleet at one moment. It is not changed after it was made.
type roll struct {
	total   int
	counts  map[string]int // by health
	sorted  []fleet.View   // by attention, then name
	version map[string]int // how many agents run which version
}

// now gives the fleet as of at most a second ago.
func (c *census) now(now time.Time) *roll {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == nil || now.Sub(c.at) >= censusTerm || now.Before(c.at) {
		c.last, c.at = newRoll(allAgents(c.fleet, fleet.Filter{})), now
	}
	return c.last
}

// stale makes the next look a fresh one, after an agent was changed here.
func (c *census) stale() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = nil
}

// allAgents reads the whole list that matches a filter.
func allAgents(f Fleet, filter fleet.Filter) []fleet.View {
	filter.Limit = fleet.MaxPage
	var all []fleet.View
	for {
		page, err := f.List(filter)
		if err != nil {
			return all // only a broken cursor fails, and ours are not
		}
		all = append(all, page...)
		if len(page) < fleet.MaxPage {
			return all
		}
		filter.After = fleet.Cursor(page[len(page)-1])
	}
}

func newRoll(views []fleet.View) *roll {
	r := &roll{total: len(views), counts: map[string]int{}, sorted: views, version: map[string]int{}}
	ranks := make(map[string]int, len(healths()))
	for i, h := range healths() {
		ranks[h.Word] = i
	}
	for i := range views {
		r.counts[healthOf(&views[i])]++
		if v := views[i].Version; v != "" {
			r.version[v]++
		}
	}
	slices.SortStableFunc(r.sorted, func(a, b fleet.View) int {
		if d := ranks[healthOf(&a)] - ranks[healthOf(&b)]; d != 0 {
			return d
		}
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.ID.String(), b.ID.String()))
	})
	return r
}

// attention counts the agents that somebody should look at.
func (r *roll) attention() int {
	n := 0
	for health, count := range r.counts {
		if needsAttention(health) {
			n += count
		}
	}
	return n
}
