package tasks

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"headgate/internal/fault"
	"headgate/internal/kinds"
)

// maxFaults is how many wrong places of a batch are named at once.
const maxFaults = 20

// check turns submissions into what is stored. Nothing is stored unless all
// are good. Pointers begin with prefix and the index when prefix is set.
func (s *Service) check(subs []Submission, actor, prefix string) ([]submission, error) {
	list := make([]submission, len(subs))
	var agents map[string]Agent // those of a batch are looked up once
	if len(subs) > 1 {
		agents = map[string]Agent{}
	}
	now := time.Now().UTC()
	var bad *fault.Error
	wrong, fields := 0, 0
	for i := range subs {
		err := s.checkOne(&list[i], &subs[i], actor, now, agents)
		if err == nil {
			continue
		}
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || prefix == "" {
			return nil, err
		}
		at := prefix + strconv.Itoa(i)
		if wrong++; bad == nil {
			c := *f
			c.Fields = nil
			c.Message = fmt.Sprintf("Task %d of the batch: %s", i, f.Message)
			bad = &c
		}
		for _, x := range f.Fields {
			if fields++; fields <= maxFaults {
				bad.Fields = append(bad.Fields, fault.Field{Pointer: at + x.Pointer, Detail: x.Detail})
			}
		}
		if len(f.Fields) == 0 && fields < maxFaults {
			fields++
			bad.Fields = append(bad.Fields, fault.Field{Pointer: at, Detail: f.Message})
		}
	}
	if bad == nil {
		return list, nil
	}
	if wrong > 1 {
		bad.Message += fmt.Sprintf(" (%d tasks of the batch are wrong.)", wrong)
	}
	bad.Message += " Nothing was stored."
	return nil, bad
}

func (s *Service) checkOne(x *submission, in *Submission, actor string, now time.Time, agents map[string]Agent) error {
	kind, err := s.kinds.Lookup(in.Kind)
	if err != nil {
		return err
	}
	args := in.Args
	if len(args) == 0 {
		args = json.RawMessage("{}")
	}
	if len(args) > MaxArgsBytes {
		return fault.Newf(fault.TooLarge, "args_too_large", "The arguments have %d bytes; at most %d are taken.", len(args), MaxArgsBytes).
			WithField("/args", "too large")
	}
	if err := kind.Validate(args); err != nil {
		return err
	}
	agent, err := s.lookup(in.Agent, agents)
	if err != nil {
		return err
	}
	x.agent, x.shard = agent, agent.Shard()
	x.ins = Insert{
		Agent: agent.Num, Kind: in.Kind, Args: string(args), Delivery: kind.Delivery, Priority: DefaultPriority,
		CreatedAt: now.Truncate(time.Microsecond), NotBefore: in.NotBefore, ExpiresAt: in.ExpiresAt, Actor: actor,
	}
	if err := checkOrders(&x.ins, in, kind); err != nil {
		return err
	}
	x.replaces = kind.Supersedes && x.ins.NotBefore.IsZero()
	return nil
}

// lookup finds the agent, once per name and batch.
func (s *Service) lookup(ref string, agents map[string]Agent) (Agent, error) {
	if a, ok := agents[ref]; ok {
		return a, nil
	}
	if ref == "" {
		return Agent{}, fault.New(fault.Invalid, "unknown_agent", "The task names no agent.").
			WithField("/agent", "An agent's id or unique name is needed.")
	}
	a, err := s.runner.Lookup(ref)
	if err != nil {
		if f, ok := errors.AsType[*fault.Error](err); ok && len(f.Fields) == 0 {
			return Agent{}, f.WithField("/agent", f.Message)
		}
		return Agent{}, err
	}
	s.m.place(a.Num, a.Shard())
	if agents != nil {
		agents[ref] = a
	}
	return a, nil
}

// checkOrders checks delivery, priority and times.
func checkOrders(x *Insert, in *Submission, kind *kinds.Kind) error {
	bad := func(code, pointer, format string, args ...any) error {
		text := fmt.Sprintf(format, args...)
		return fault.New(fault.Invalid, code, text).WithField(pointer, text)
	}
	switch in.Delivery {
	case "", kind.Delivery:
	case kinds.DeliveryOnce:
		x.Delivery = kinds.DeliveryOnce
	case kinds.DeliveryRepeatable:
		return bad("invalid_delivery", "/delivery", "%s changes something, so it is delivered once; it cannot be made repeatable.", in.Kind)
	default:
		return bad("invalid_delivery", "/delivery", "delivery is %.40q; it must be once or repeatable.", in.Delivery)
	}
	if in.Priority != nil {
		if x.Priority = *in.Priority; x.Priority < MinPriority || x.Priority > MaxPriority {
			return bad("invalid_priority", "/priority", "priority is %d; it must be from %d (first) to %d (last).", x.Priority, MinPriority, MaxPriority)
		}
	}
	x.Timeout = kind.Timeout
	if in.Timeout != 0 {
		x.Timeout = in.Timeout.Truncate(time.Millisecond) // as it is stored, and as the agent is told
	}
	if x.Timeout < time.Millisecond || x.Timeout > kind.MaxTimeout {
		return bad("invalid_timeout", "/timeout", "timeout is %s; for %s it must be from 1 ms to %s.", in.Timeout, in.Kind, kind.MaxTimeout)
	}
	return checkTimes(x, bad)
}

func checkTimes(x *Insert, bad func(code, pointer, format string, args ...any) error) error {
	now := x.CreatedAt
	show := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	if x.ExpiresAt.IsZero() {
		x.ExpiresAt = later(now, x.NotBefore).Add(DefaultExpiry)
		if last := now.Add(MaxExpiry); x.ExpiresAt.After(last) {
			x.ExpiresAt = last
		}
	}
	switch {
	case !x.ExpiresAt.After(now):
		return bad("invalid_expires_at", "/expires_at", "expires_at %s has passed already; it is %s now.", show(x.ExpiresAt), show(now))
	case x.ExpiresAt.After(now.Add(MaxExpiry)):
		return bad("invalid_expires_at", "/expires_at", "expires_at %s is more than %d days ahead.", show(x.ExpiresAt), int(MaxExpiry.Hours()/24))
	case !x.NotBefore.IsZero() && !x.NotBefore.Before(x.ExpiresAt):
		return bad("invalid_not_before", "/not_before", "not_before %s is not before expires_at %s, so the task could never start.", show(x.NotBefore), show(x.ExpiresAt))
	}
	if !x.NotBefore.After(now) {
		x.NotBefore = time.Time{} // at once
	}
	x.ExpiresAt = x.ExpiresAt.UTC().Truncate(time.Microsecond)
	x.NotBefore = x.NotBefore.UTC().Truncate(time.Microsecond)
	return nil
}
