package controller

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"headgate/internal/agent"
	"headgate/internal/kinds"
	"headgate/internal/testkit"
	"headgate/listener"
	"headgate/tasks"
)

// newAgent runs a real agent that was given a token, and gives its address.
func newAgent(t *testing.T, token string) string {
	t.Helper()
	return newAgentWith(t, token, agent.Config{Name: "box"})
}

// newAgentWith is newAgent for an agent with settings of its own.
func newAgentWith(t *testing.T, token string, config agent.Config) string {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	listening := make(chan string, 1)
	config.Listen, config.DataDir, config.EnrolTokenFile = "127.0.0.1:0", filepath.Join(dir, "data"), file
	config.OnListen = func(a net.Addr) { listening <- a.String() }
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, config) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the agent: %v", err)
		}
	})
	select {
	case addr := <-listening:
		return addr
	case <-time.After(time.Minute):
		t.Fatal("the agent does not listen")
		return ""
	}
}

// task gives the task as the API shows it.
func (s *started) task(id tasks.ID) *tasks.Task {
	s.Helper()
	got, err := s.c.parts.service.Get(s.Context(), id)
	if err != nil {
		s.Fatal(err)
	}
	return got
}

// Acceptance 52.
func TestRunningTasksSurviveReclosingAndDraining(t *testing.T) {
	t.Parallel()
	dsn, data := testkit.NewDatabase(t), t.TempDir()
	quick := func(c *Config) {
		c.AllowLoopbackAgents = true
		c.Listening.UnstableGrace, c.Listening.RecloseAfter, c.Listening.MinOpen = time.Millisecond, time.Millisecond, time.Millisecond
	}
	first := start(t, dsn, data, quick)
	first.await("the opening of the public port", first.c.Opened())
	token, _, err := first.c.parts.fleet.CreateEnrolmentToken(t.Context(), "test", time.Hour, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.c.parts.fleet.Pair(t.Context(), "test", newAgent(t, token), token); err != nil {
		t.Fatal(err)
	}
	sub := tasks.Submission{Agent: "box", Kind: kinds.Sleep, Args: json.RawMessage(`{"seconds":10}`), Delivery: kinds.DeliveryOnce}
	task, err := first.c.parts.service.Submit(t.Context(), sub, "test", tasks.Idempotency{})
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the start of the task", func() bool { return first.task(task.ID).State == tasks.StateWaiting })

	first.c.listener.MarkUnstable("a test says so")
	until(t, "the re-closing", func() bool { return first.c.listener.Ports().State == listener.StateReclosed })
	if !first.publicRefuses() {
		t.Error("the public port does not refuse")
	}
	if _, r := first.readyz(); r.Ready || r.Unmet[0].Condition != "public_port" {
		t.Errorf("readyz: %+v", r)
	}
	if got := first.task(task.ID); got.State == tasks.StateNew {
		t.Errorf("the task went back: %+v", got)
	}
	first.c.listener.MarkStable("a test says so")
	until(t, "the opening again", func() bool { return first.c.listener.Ports().PublicOpen })
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}

	second := start(t, dsn, data, quick)
	second.await("the second join", second.c.Joined())
	until(t, "the end of the task", func() bool { return second.task(task.ID).State == tasks.StateCompleted })
	if got := second.task(task.ID); got.Ending.Outcome != tasks.Succeeded || got.Attempt != 1 {
		t.Errorf("ended as %+v", got)
	}
}
