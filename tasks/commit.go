package tasks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"headgate/internal/fault"
)

// ReasonNotStorable is the reason of a task whose result the database refused.
const ReasonNotStorable = "result_not_storable"

// stopGrace is how long a stopping loop still asks what became of a commit.
const stopGrace = 2 * time.Second

// commit writes the plan and notes per op what became of it. Ops that stay
// pending were not written; the error says why.
func (l *loop) commit(ctx context.Context, p *plan) error {
	begin := time.Now()
	err := l.commitOps(ctx, p, p.ops)
	l.m.metrics.turn(len(p.ops), time.Since(begin))
	return err
}

// commitOps writes ops as one turn. When their data is refused it tries each
// half alone, until the bad one stands by itself.
func (l *loop) commitOps(ctx context.Context, p *plan, ops []*op) error {
	t := l.turnOf(ops)
	passPoints("before", ops)
	res, err := l.write(ctx, t)
	if err == nil {
		passPoints("after", ops)
		note(ops, res)
		return nil
	}
	if _, poison := errors.AsType[*PoisonError](err); !poison {
		return err
	}
	if len(ops) == 1 {
		l.m.metrics.poison.Inc()
		if l.cure(ops[0], err) {
			return l.commitOps(ctx, p, ops)
		}
		return nil
	}
	half := len(ops) / 2
	if err := l.commitOps(ctx, p, ops[:half]); err != nil {
		return err
	}
	return l.commitOps(ctx, p, ops[half:])
}

// passPoints passes the fault points of what a turn writes: before and after
// the commit of an insert, of a claim (an insert may start its task at once),
// and of a completion.
func passPoints(when string, ops []*op) {
	if !fault.PointsOn {
		return
	}
	for _, o := range ops {
		switch {
		case o.kind == opInsert && o.sub.ins.Started, o.kind == opClaim:
			fault.Point(when + "_claim_commit")
		case o.kind == opFinish:
			fault.Point(when + "_complete_commit")
		}
		if o.kind == opInsert {
			fault.Point(when + "_insert_commit")
		}
	}
}

// turnOf fills a Turn with ops. Its lists are used again for the next turn;
// stores keep none of them.
func (l *loop) turnOf(ops []*op) *Turn {
	t := &l.buffer
	clear(t.Inserts)
	clear(t.Finishes)
	clear(t.Output)
	*t = Turn{
		Owner: l.m.cfg.Owner.ID, Leases: t.Leases[:0], Inserts: t.Inserts[:0], Due: t.Due[:0], Output: t.Output[:0],
		Finishes: t.Finishes[:0], Requeues: t.Requeues[:0], Claims: t.Claims[:0], Cancels: t.Cancels[:0],
	}
	var seen [NumShards]bool
	for _, o := range ops {
		if s := o.a.shard; !seen[s] {
			seen[s] = true
			t.Leases = append(t.Leases, l.shards[s].lease)
		}
		switch o.kind {
		case opOutput:
			t.Output = append(t.Output, *o.out)
		case opFinish:
			t.Finishes = append(t.Finishes, *o.fin)
		case opRequeue:
			t.Requeues = append(t.Requeues, *o.rq)
		case opCancel:
			t.Cancels = append(t.Cancels, *o.mark)
		case opDue:
			t.Due = append(t.Due, *o.due)
		case opClaim:
			epoch := l.shards[o.a.shard].lease.Epoch
			t.Claims = append(t.Claims, Claim{Agent: o.a.num, Priority: o.q.Priority, ID: o.q.ID, Epoch: epoch, Attempt: o.q.Attempt})
		case opInsert:
			t.Inserts = append(t.Inserts, o.sub.ins)
			t.Finishes = append(t.Finishes, o.older...)
		}
	}
	return t
}

// write commits one turn. A commit with an unknown outcome is settled before
// anything else happens: going on would pass over rows that appear later.
func (l *loop) write(ctx context.Context, t *Turn) (*TurnResult, error) {
	// A turn that has begun is ended also when the process stops.
	c, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.m.cfg.Limits.StoreWait)
	res, err := l.m.cfg.Store.Turn(c, t)
	cancel()
	unknown, ok := errors.AsType[*UnknownError](err)
	if !ok {
		return res, err
	}
	l.m.metrics.unknown.Inc()
	l.log.Warn("the outcome of a commit is unknown; reading back", "err", err)
	return l.readBack(ctx, t, unknown)
}

func (l *loop) readBack(ctx context.Context, t *Turn, unknown *UnknownError) (*TurnResult, error) {
	var deadline time.Time
	for pause := retryMin; ; pause = min(2*pause, retryMax) {
		c, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.m.cfg.Limits.StoreWait)
		done, err := l.m.cfg.Store.Settle(c, t, unknown.Result)
		cancel()
		switch {
		case err == nil && done:
			l.log.Info("the commit took place")
			return unknown.Result, nil
		case err == nil:
			l.log.Info("the commit did not take place; the turn is made again")
			return nil, fmt.Errorf("commit did not take place: %w", unknown.Err)
		}
		if ctx.Err() != nil {
			if deadline.IsZero() {
				deadline = time.Now().Add(stopGrace)
			}
			if time.Now().After(deadline) {
				l.inDoubt = true
				return nil, fmt.Errorf("stopped while a commit was unknown: %w", err)
			}
		}
		timer := time.NewTimer(pause)
		<-timer.C
	}
}

// note compares what was asked with what was written.
func note(ops []*op, r *TurnResult) {
	written := [...][]ID{
		opOutput: nil, opFinish: r.Finished, opRequeue: r.Requeued, opCancel: r.Marked,
		opDue: r.Moved, opClaim: r.Claimed, opInsert: r.Inserted,
	}
	var asked [opInsert + 1]int
	for _, o := range ops {
		asked[o.kind]++
		asked[opFinish] += len(o.older)
	}
	var sets [opInsert + 1]map[ID]struct{}
	for _, o := range ops {
		o.state, o.at = opDone, r.At
		if k := o.kind; k != opOutput && len(written[k]) != asked[k] {
			if sets[k] == nil {
				sets[k] = make(map[ID]struct{}, len(written[k]))
				for _, id := range written[k] {
					sets[k][id] = struct{}{}
				}
			}
			if _, ok := sets[k][o.id()]; !ok {
				o.state = opMissing
			}
		}
		for i := range o.older {
			if slices.Contains(r.Finished, o.older[i].ID) {
				o.ended = append(o.ended, o.older[i].ID)
			}
		}
	}
}

// cure makes an op storable whose data was refused, or gives it up. A result
// never keeps its task from completing.
func (l *loop) cure(o *op, err error) bool {
	l.log.Error("the database refused the data of one item", "task_id", o.id(), "agent", o.a.info.ID, "err", err)
	if o.kind == opFinish && !o.clean {
		o.clean = true
		was := o.fin.Ending
		o.fin.Ending = Ending{
			Outcome: Failed, Reason: ReasonNotStorable, OutputBytes: was.OutputBytes,
			Detail:      fmt.Sprintf("The agent's answer (outcome %.20q) could not be stored as it was.", was.Outcome),
			ResultBytes: was.Result,
		}
		return true
	}
	if o.kind == opFinish && o.fin.Ending.ResultBytes != nil {
		o.fin.Ending.ResultBytes = nil // even the bytes are refused
		return true
	}
	o.state, o.err = opRefused, fault.Wrap(err, fault.Invalid, "not_storable",
		"The database refuses a value of this request; nothing was stored.").
		WithHint("Look for characters that are not text, such as NUL, in the request.")
	return false
}

func checkedProcesses(list []Process) []Process {
	list = slices.Clone(list[:min(len(list), MaxProcesses)])
	for i := range list {
		list[i].Name = safeText(list[i].Name, maxReason)
	}
	return list
}

// checked makes an agent's ending into one that can be stored and trusted.
func checked(e Ending) Ending {
	switch e.Outcome {
	case Succeeded, Failed, TimedOut, Cancelled, Rejected, Unknown:
	default:
		e.Detail = fmt.Sprintf("The agent answered with the outcome %.40q, which is none.", e.Outcome)
		e.Outcome, e.Reason = Failed, "invalid_answer"
	}
	e.Reason, e.Detail = safeText(e.Reason, maxReason), safeText(e.Detail, maxDetail)
	if x := e.Exit; x != nil {
		c := *x
		c.Signal, c.SpawnError, c.KilledBy = safeText(c.Signal, maxReason), safeText(c.SpawnError, maxDetail), safeText(c.KilledBy, maxReason)
		c.LeftBehind, c.Survivors = checkedProcesses(c.LeftBehind), checkedProcesses(c.Survivors)
		e.Exit = &c
	}
	e.OutputBytes = max(0, e.OutputBytes)
	size := max(len(e.Result), len(e.ResultBytes))
	switch {
	case size > MaxResultBytes:
		e.Result, e.ResultBytes = nil, nil
		e.Outcome, e.Reason = Failed, "result_too_large"
		e.Detail = fmt.Sprintf("The result has %d bytes; at most %d are kept.", size, MaxResultBytes)
	case len(e.Result) == 0:
		e.Result = nil
	case !storableJSON(e.Result):
		e.Result, e.ResultBytes = nil, e.Result
	}
	return e
}

// Sizes of an agent's words; longer ones are cut.
const (
	maxReason = 64
	maxDetail = 4 << 10 // a sentence, or the end of an error output
)

func storableJSON(b json.RawMessage) bool { return validText(string(b)) && json.Valid(b) }
