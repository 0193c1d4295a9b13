package tasks

import (
	"context"
	"crypto/sha256"
	"errors"
	"time"

	"headgate/internal/fault"
)

// RetryRoute is the route of the keys under which retries are stored. Their
// principal is empty, which no caller's is: everybody's retry of a task is the
// same one.
const RetryRoute = "retry"

// retryKey makes a retry exactly once, whoever asks for it, however often and
// whenever: the row of the key is written with the new task or not at all.
func retryKey(of ID) *Idempotency {
	return &Idempotency{Route: RetryRoute, Key: of.String(), Hash: sha256.Sum256([]byte(of.String())), Lasting: true}
}

// Retry stores a task that repeats a completed one and returns it once it is
// on disk; with replayed, it is the one of an earlier call. A task that is not
// completed is a Conflict (task_not_completed), one whose agent was removed is
// another (agent_removed).
func (s *Service) Retry(ctx context.Context, id ID, actor string) (t *Task, replayed bool, err error) {
	if !validText(actor) || len(actor) > maxActor {
		return nil, false, fault.New(fault.Invalid, "invalid_actor", "The name of who retries is not text, or is too long.")
	}
	old, err := s.Get(ctx, id)
	switch {
	case err != nil:
		return nil, false, err
	case old.RetriedAs != 0:
		t, err = s.Get(ctx, old.RetriedAs)
		return t, true, err
	case old.State != StateCompleted:
		return nil, false, notCompleted(old)
	}
	list := make([]submission, 1)
	if err := s.again(&list[0], old, actor); err != nil {
		return nil, false, err
	}
	if err := s.m.store(ctx, list); err != nil {
		return nil, false, retryFault(err)
	}
	if !list[0].replay {
		return &s.tasks(list)[0], false, nil
	}
	known, err := s.store.Replay(ctx, *list[0].ins.Key)
	if err != nil || len(known) == 0 {
		return nil, false, readFault(cmpErr(err, ErrNoTask))
	}
	t, err = s.Get(ctx, known[0].ID)
	return t, true, err
}

// again fills in what repeats a task: everything that its submitter chose, for
// the same agent, with as much time to start as it had.
func (s *Service) again(x *submission, old *Task, actor string) error {
	err := s.checkOne(x, &Submission{
		Agent: old.Agent.ID.String(), Kind: old.Kind, Args: old.Args, Timeout: old.Timeout, Priority: &old.Priority, Delivery: old.Delivery,
	}, actor, time.Now().UTC(), nil)
	// An agent that was removed and paired again has another number; it may be
	// another machine.
	if fault.CodeOf(err) == "unknown_agent" || err == nil && x.agent.Num != old.Agent.Num {
		return errAgentRemoved(old.Agent.Name)
	}
	if err != nil {
		return err
	}
	x.ins.ExpiresAt = x.ins.CreatedAt.Add(old.ExpiresAt.Sub(later(old.CreatedAt, old.NotBefore)))
	x.ins.RetryOf, x.ins.Key = old.ID, retryKey(old.ID)
	return nil
}

func notCompleted(t *Task) error {
	hint := "Wait for its end (GET with ?wait=30s), or cancel it first."
	if t.State == StateNew {
		hint = "It starts by itself in its turn. Cancel it first if it shall begin anew."
	}
	return fault.Newf(fault.Conflict, "task_not_completed", "Task %d is not completed, so there is nothing to retry yet.", t.ID).WithHint(hint)
}

// retryFault says how to go on after an error that leaves it open whether the
// retry is stored: unlike a submission, a retry needs no key to be repeated.
func retryFault(err error) error {
	if f, ok := errors.AsType[*fault.Error](err); ok && f.Code == "commit_unknown" {
		return f.WithHint("Send the retry again: it gives the one task, stored or not.")
	}
	return err
}
