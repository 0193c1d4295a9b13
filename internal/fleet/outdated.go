package fleet

import (
	"fmt"
	"strconv"
	"time"

	"headgate/tasks"
)

// outdatedAfter is how long an agent must have refused the epoch of a lease that
// still holds: had another controller of this database taken over, the next
// renewal of the lease would have said so.
const outdatedAfter = 2 * tasks.RenewEvery

// refusal is that of an agent that obeys a newer epoch.
type refusal struct {
	highest, epoch int64 // that it obeys, and that was refused
	since          time.Time
}

// refused notes that the agent obeys a newer epoch than that of the lease.
func (m *member) refused(highest string, epoch int64, now time.Time) {
	n, err := strconv.ParseInt(highest, 10, 64)
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refusal.epoch != epoch {
		m.refusal = refusal{epoch: epoch, since: now}
	}
	m.refusal.highest = n
}

// obeyed forgets a refusal: the agent has greeted.
func (m *member) obeyed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refusal = refusal{}
}

// Outdated says that the database is older than the fleet: it calls this
// controller the owner, and agents have obeyed later ones. It was restored from
// a backup, or is a copy of one that goes on elsewhere.
type Outdated struct {
	Agents  int   // that say so
	Highest int64 // epoch that one of them obeys
	Epoch   int64 // that the database has for its shard
	Shard   tasks.Shard
}

// Sentence says what an operator has to know; "" when there is nothing.
func (o Outdated) Sentence() string {
	if o.Agents == 0 {
		return ""
	}
	return fmt.Sprintf("the database is older than the fleet: %d agent(s) have obeyed a newer owner (epoch %d of shard %d, the database has %d) and take no tasks. "+
		"It was restored from a backup, or is a copy of one that goes on elsewhere. When no controller runs on a newer one any more: headgate raise-epoch",
		o.Agents, o.Highest, o.Shard, o.Epoch)
}

// Outdated looks at what the agents of this controller's shards say.
func (f *Fleet) Outdated(now time.Time) Outdated {
	var o Outdated
	for _, p := range f.reg.all() {
		m := p.m
		m.mu.Lock()
		h, r := f.holdingOf(m), m.refusal
		m.mu.Unlock()
		if !h.owned || r.highest <= h.lease.Epoch || r.epoch != h.lease.Epoch || now.Sub(r.since) < outdatedAfter {
			continue
		}
		if o.Agents++; r.highest > o.Highest {
			o.Highest, o.Epoch, o.Shard = r.highest, h.lease.Epoch, h.lease.Shard
		}
	}
	return o
}
