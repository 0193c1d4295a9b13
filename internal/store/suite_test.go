package store

import (
	"context"
	"testing"
	"uuid"

	"headgate/internal/fleet"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func TestContractOfTheQueue(t *testing.T) {
	t.Parallel()
	tasktest.RunStoreTests(t, func(t *testing.T) tasktest.Env {
		d := open(t)
		ctx := context.WithoutCancel(t.Context())
		return tasktest.Env{
			Store: d,
			NewAgent: func(id uuid.UUID, name string, labels map[string]string) tasks.AgentNum {
				a := fleet.Agent{ID: id, Name: name, Labels: labels}
				copy(a.SPKI[:], id[:])
				a, err := d.InsertAgent(ctx, a)
				if err != nil {
					t.Fatal(err)
				}
				return a.Num
			},
			ExpireLeases: func() {
				if _, err := d.general.Exec(`UPDATE shard_lease SET expires_at = now() - interval '1 second'`); err != nil {
					t.Fatal(err)
				}
			},
			RemoveAgent: func(num tasks.AgentNum) {
				if _, err := d.general.Exec(`UPDATE agent SET status = 'removed', removed_at = now() WHERE num = $1`, int32(num)); err != nil {
					t.Fatal(err)
				}
			},
			ExpireKeys: func() {
				if _, err := d.general.Exec(`UPDATE task_dedup SET expires_at = expires_at - interval '25 hours'`); err != nil {
					t.Fatal(err)
				}
			},
			Late: func(id tasks.ID) int {
				return countOn(t, d, `SELECT count(*) FROM late_result WHERE task_id = $1`, int64(id))
			},
		}
	})
}
