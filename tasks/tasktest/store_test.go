package tasktest_test

import (
	"testing"

	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func TestStoreInMemory(t *testing.T) {
	t.Parallel()
	tasktest.RunStoreTests(t, func(*testing.T) tasktest.Env {
		s := tasktest.NewStore()
		return tasktest.Env{
			Store: s, NewAgent: s.NewAgent, ExpireLeases: s.ExpireLeases,
			RemoveAgent: s.RemoveAgent, ExpireKeys: s.ExpireKeys,
			Late: func(id tasks.ID) int {
				n := 0
				for _, f := range s.Late() {
					if f.ID == id {
						n++
					}
				}
				return n
			},
		}
	})
}
