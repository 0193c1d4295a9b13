package fleet_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"headgate/internal/agent"
	"headgate/internal/fleet"
	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// TestContractOfTheRunner holds the fleet, with the product's own agent behind
// it, to what the queue expects of a runner.
func TestContractOfTheRunner(t *testing.T) {
	t.Parallel()
	tasktest.RunRunnerTests(t, func(t *testing.T, s tasks.Sessions) tasktest.RunnerEnv {
		h := newHarness(t, quick(), nil)
		h.Attach(s)
		h.start()
		token := h.token()
		view, err := h.Pair(t.Context(), "test", startRealAgent(t, token), token)
		if err != nil {
			t.Fatal(err)
		}
		a, err := h.Lookup(view.ID.String())
		if err != nil {
			t.Fatal(err)
		}
		return tasktest.RunnerEnv{Runner: h.Fleet, Agent: a}
	})
}

// startRealAgent runs an agent that waits to be paired and gives its address.
func startRealAgent(t *testing.T, token string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	listening, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- agent.Run(ctx, agent.Config{
			DataDir: filepath.Join(t.TempDir(), "data"), Listen: "127.0.0.1:0", Name: "box", EnrolTokenFile: file,
			OnListen: func(a net.Addr) { listening <- a.String() },
			Limits:   agent.Limits{StopGrace: time.Second},
		})
	}()
	select {
	case address := <-listening:
		t.Cleanup(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		return address
	case err := <-ended:
		cancel()
		t.Fatalf("the agent ended: %v", err)
		return ""
	}
}

var _ tasks.Runner = (*fleet.Fleet)(nil)
