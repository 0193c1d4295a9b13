package agent

import (
	"context"
	"math/rand/v2"
	"time"
)

// sessionDropShare is how many of a flaky agent's whims drop the session
// rather than fail a task.
const sessionDropShare = 0.25

// misbehave makes a demonstration agent slow or flaky. An Ending without an
// outcome means that the task shall run as usual.
func (s *slot) misbehave(ctx context.Context) Ending {
	if s.demo.Delay > 0 {
		timer := time.NewTimer(s.demo.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return endingOf(ctx)
		}
	}
	if s.demo.Flaky <= 0 {
		return Ending{}
	}
	if rand.Float64() < s.demo.Flaky*sessionDropShare {
		s.dropSession()
	}
	if rand.Float64() < s.demo.Flaky {
		return Ending{Outcome: failed, Reason: "demo_flaky", Detail: "This agent was started with --demo-flaky, so some of its tasks fail without having run."}
	}
	return Ending{}
}

func (s *slot) dropSession() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != nil {
		s.session.finish(errDemoDrop())
	}
}
