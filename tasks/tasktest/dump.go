package tasktest

import (
	"fmt"
	"slices"

	"headgate/tasks"
)

// Kept is a task as the store holds it.
type Kept struct {
	ID      tasks.ID
	Agent   tasks.AgentNum
	State   tasks.State
	Outcome tasks.Outcome
	Attempt int
	Key     string // of its submitter; "" = none
}

// Dump gives every task, in the order of their ids.
func (s *Store) Dump() []Kept {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Kept, 0, len(s.order))
	for _, id := range s.order {
		r := s.rows[id]
		k := Kept{ID: id, Agent: r.ins.Agent, State: tasks.StateNew, Attempt: r.attempt}
		switch {
		case r.place == completed:
			k.State, k.Outcome = tasks.StateCompleted, r.ending.Outcome
		case r.started():
			k.State = tasks.StateWaiting
		}
		if r.ins.Key != nil && r.ins.Key.Route != tasks.RetryRoute {
			k.Key = r.ins.Key.Key
		}
		all = append(all, k)
	}
	return all
}

// Verify checks what must hold after every turn: each task has exactly one
// place, each agent at most one that is started, and its order is kept.
func (s *Store) Verify() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	places := map[tasks.ID]int{}
	for num, a := range s.agents {
		started := 0
		for _, r := range a.queue {
			places[r.ins.ID]++
			if r.started() {
				started++
			}
		}
		if started > 1 {
			return fmt.Errorf("agent %d has %d started tasks", num, started)
		}
		if !slices.IsSortedFunc(a.queue, compareRows) {
			return fmt.Errorf("the queue of agent %d is out of order", num)
		}
	}
	for id := range s.later {
		places[id]++
	}
	for id, r := range s.rows {
		if r.place == completed {
			places[id]++
		}
		if places[id] != 1 {
			return fmt.Errorf("task %d has %d places", id, places[id])
		}
	}
	return nil
}
