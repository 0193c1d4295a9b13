package tasktest_test

import (
	"testing"
	"uuid"

	"headgate/internal/kinds"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

func TestScriptedRunner(t *testing.T) {
	t.Parallel()
	tasktest.RunRunnerTests(t, func(_ *testing.T, s tasks.Sessions) tasktest.RunnerEnv {
		r := tasktest.NewScriptedRunner()
		a := tasks.Agent{Num: 5, ID: uuid.NewV4(), Name: "alpha"}
		r.Add(a, func(x tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: x.Kind == kinds.Sleep} })
		r.Attach(s)
		return tasktest.RunnerEnv{Runner: r, Agent: a}
	})
}
