package store

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
)

// turnArgs turns a Turn into the arrays of its statement. It may be used again
// once the statement has been answered.
type turnArgs struct {
	shape turnShape
	args  []any
	lists arrayText
	queue []queueOp

	printed []byte // of all rows of output, one after the other
}

// maxKeptArgs is the largest text of a turn whose memory is used again, in
// bytes: a full turn of tasks and results with their quotes.
const maxKeptArgs = 16 << 20

// reset lets go of what the last turn had; false when it is too large to keep.
func (a *turnArgs) reset() bool {
	clear(a.args)
	clear(a.queue)
	a.args, a.queue = a.args[:0], a.queue[:0]
	a.lists.reset()
	return cap(a.lists.buf)+cap(a.printed) <= maxKeptArgs
}

// queueOp is one thing done to one row of agent_queue.
type queueOp struct {
	agent    tasks.AgentNum
	priority int
	id       tasks.ID
	op       int64
	attempt  int   // as in the row
	seen     int64 // epoch as in the row, 0 = not started, -1 = any
	epoch    int64 // claims: the one it gets
	actor    string
	runAt    time.Time
	ending   *tasks.Ending
}

func makeTurnArgs(t *tasks.Turn) (*turnArgs, error) {
	a := &turnArgs{}
	return a, a.fill(t)
}

func (a *turnArgs) fill(t *tasks.Turn) error {
	ops, ended := queueOps(t, a.queue)
	a.queue = ops
	a.shape = shapeOf(t, ops, ended)
	a.leases(t)
	if a.shape.has(withInserts) {
		a.inserts(t.Inserts)
	}
	if a.shape.has(withOps) {
		if err := a.ops(ops); err != nil {
			return err
		}
	}
	if a.shape.has(withOutput) {
		a.output(t.Output)
	}
	if a.shape.has(withRare) {
		if err := a.rare(t.Due, ended); err != nil {
			return err
		}
	}
	a.seal()
	return nil
}

func shapeOf(t *tasks.Turn, ops []queueOp, ended []tasks.Finish) turnShape {
	var s turnShape
	if len(t.Due) > 0 || len(ended) > 0 || slices.ContainsFunc(ops, func(o queueOp) bool { return o.op == opRequeueLater }) {
		return wholeTurn
	}
	if len(t.Inserts) > 0 {
		s |= withInserts
		if hasKeys(t.Inserts) {
			s |= withKeys
		}
	}
	if len(ops) > 0 {
		s |= withOps
		if slices.ContainsFunc(ops, func(o queueOp) bool { return o.op == opFinish }) {
			s |= withFinishes
		}
	}
	if len(t.Output) > 0 {
		s |= withOutput
	}
	return s
}

// queueOps lists what is done to rows of agent_queue in the order of its key,
// and apart the finishes of rows that are in agent_later. A cancel mark on a
// row that the same turn ends, starts or puts back is dropped. The memory of
// ops is used again.
func queueOps(t *tasks.Turn, ops []queueOp) (_ []queueOp, ended []tasks.Finish) {
	ops = slices.Grow(ops[:0], len(t.Finishes)+len(t.Requeues)+len(t.Claims)+len(t.Cancels))
	for i := range t.Finishes {
		f := &t.Finishes[i]
		if f.Later {
			ended = append(ended, *f)
			continue
		}
		ops = append(ops, queueOp{
			agent: f.Agent, priority: f.Priority, id: f.ID, op: opFinish,
			attempt: f.Attempt, seen: f.Epoch, actor: f.CancelActor, ending: &f.Ending,
		})
	}
	for _, r := range t.Requeues {
		op := queueOp{agent: r.Agent, priority: r.Priority, id: r.ID, op: opRequeue, attempt: r.Attempt, seen: r.Epoch}
		if r.NotBefore.After(time.Now()) {
			op.op, op.runAt = opRequeueLater, r.NotBefore
		}
		ops = append(ops, op)
	}
	for _, c := range t.Claims {
		ops = append(ops, queueOp{
			agent: c.Agent, priority: c.Priority, id: c.ID, op: opClaim,
			attempt: c.Attempt - 1, seen: 0, epoch: c.Epoch,
		})
	}
	if len(t.Cancels) > 0 {
		busy := make(map[tasks.ID]bool, len(ops))
		for _, o := range ops {
			busy[o.id] = true
		}
		for _, c := range t.Cancels {
			if !busy[c.ID] {
				busy[c.ID] = true
				ops = append(ops, queueOp{
					agent: c.Agent, priority: c.Priority, id: c.ID, op: opCancel,
					attempt: c.Attempt, seen: -1, actor: c.Actor,
				})
			}
		}
	}
	slices.SortFunc(ops, func(a, b queueOp) int { // no two are equal: a turn touches a task once
		if c := cmp.Compare(a.agent, b.agent); c != 0 {
			return c
		}
		if c := cmp.Compare(a.priority, b.priority); c != 0 {
			return c
		}
		return cmp.Compare(a.id, b.id)
	})
	slices.SortStableFunc(ended, func(a, b tasks.Finish) int { return cmp.Compare(a.ID, b.ID) })
	return ops, ended
}

// leases gives the lease rows in the order of shards, so that turns lock them
// in the same order.
func (a *turnArgs) leases(t *tasks.Turn) {
	held := slices.Clone(t.Leases)
	slices.SortFunc(held, func(x, y tasks.Lease) int { return cmp.Compare(x.Shard, y.Shard) })
	addInts(a, held, func(l *tasks.Lease) int64 { return int64(l.Shard) })
	addInts(a, held, func(l *tasks.Lease) int64 { return l.Epoch })
	a.args = append(a.args, t.Owner.String(), int64(len(held)))
}

func (a *turnArgs) inserts(ins []tasks.Insert) {
	ins, keyed := dropSameKeys(ins)
	addInts(a, ins, func(i *tasks.Insert) int64 { return int64(i.ID) })
	addInts(a, ins, func(i *tasks.Insert) int64 { return int64(i.Agent) })
	addInts(a, ins, func(i *tasks.Insert) int64 { return i.Epoch })
	addTexts(a, ins, func(i *tasks.Insert) string { return i.Kind })
	addTexts(a, ins, func(i *tasks.Insert) string { return i.Args })
	addBools(a, ins, func(i *tasks.Insert) bool { return i.Delivery == kinds.DeliveryRepeatable })
	addInts(a, ins, func(i *tasks.Insert) int64 { return int64(i.Priority) })
	addInts(a, ins, func(i *tasks.Insert) int64 { return i.Timeout.Milliseconds() })
	addInts(a, ins, func(i *tasks.Insert) int64 { return micros(i.CreatedAt) })
	addInts(a, ins, func(i *tasks.Insert) int64 { return micros(i.NotBefore) })
	addInts(a, ins, func(i *tasks.Insert) int64 { return micros(i.ExpiresAt) })
	addTexts(a, ins, func(i *tasks.Insert) string { return i.Actor })
	addInts(a, ins, func(i *tasks.Insert) int64 { return int64(i.RetryOf) })
	addTexts(a, ins, func(i *tasks.Insert) string { return uuidText(i.RunID) })
	addTexts(a, ins, func(i *tasks.Insert) string {
		if i.Key == nil || i.Key.Lasting { // the latter is ours, not the submitter's
			return ""
		}
		return i.Key.Key
	})
	addBools(a, ins, func(i *tasks.Insert) bool { return i.Started })
	addBools(a, ins, func(i *tasks.Insert) bool { return !i.Started && i.NotBefore.After(i.CreatedAt) })
	addBools(a, ins, func(i *tasks.Insert) bool { return i.Key != nil })
	if !a.shape.has(withKeys) {
		return
	}
	addTexts(a, keyed, func(i *tasks.Insert) string { return i.Key.Principal })
	addTexts(a, keyed, func(i *tasks.Insert) string { return i.Key.Route })
	addTexts(a, keyed, func(i *tasks.Insert) string { return i.Key.Key })
	addInts(a, keyed, func(i *tasks.Insert) int64 { return int64(i.KeyIndex) })
	addInts(a, keyed, func(i *tasks.Insert) int64 { return int64(i.ID) })
	addBlobs(a, keyed, func(i *tasks.Insert) []byte { return i.Key.Hash[:] })
	addBools(a, keyed, func(i *tasks.Insert) bool { return i.Key.Lasting })
}

func hasKeys(ins []tasks.Insert) bool {
	for i := range ins {
		if ins[i].Key != nil {
			return true
		}
	}
	return false
}

// dropSameKeys leaves the first of several inserts with the same key: the
// others are replays of it. It also gives those that have a key, in its order.
func dropSameKeys(ins []tasks.Insert) (all, keyed []tasks.Insert) {
	if !hasKeys(ins) {
		return ins, nil
	}
	type place struct {
		principal, route, key string
		index                 int
	}
	seen := map[place]bool{}
	all = ins[:0:0]
	for _, i := range ins {
		if i.Key != nil {
			p := place{i.Key.Principal, i.Key.Route, i.Key.Key, i.KeyIndex}
			if seen[p] {
				continue
			}
			seen[p] = true
			keyed = append(keyed, i)
		}
		all = append(all, i)
	}
	slices.SortFunc(keyed, func(x, y tasks.Insert) int {
		return cmp.Or(strings.Compare(x.Key.Principal, y.Key.Principal), strings.Compare(x.Key.Route, y.Key.Route),
			strings.Compare(x.Key.Key, y.Key.Key), cmp.Compare(x.KeyIndex, y.KeyIndex))
	})
	return all, keyed
}

func (a *turnArgs) ops(ops []queueOp) error {
	addInts(a, ops, func(o *queueOp) int64 { return int64(o.agent) })
	addInts(a, ops, func(o *queueOp) int64 { return int64(o.priority) })
	addInts(a, ops, func(o *queueOp) int64 { return int64(o.id) })
	addInts(a, ops, func(o *queueOp) int64 { return o.op })
	addInts(a, ops, func(o *queueOp) int64 { return int64(o.attempt) })
	addInts(a, ops, func(o *queueOp) int64 { return o.seen })
	addInts(a, ops, func(o *queueOp) int64 { return o.epoch })
	addTexts(a, ops, func(o *queueOp) string { return o.actor })
	if !a.shape.has(withFinishes) {
		return nil
	}
	none := &tasks.Ending{}
	err := addEndings(a, ops, func(o *queueOp) *tasks.Ending {
		if o.ending == nil {
			return none
		}
		return o.ending
	})
	addInts(a, ops, func(o *queueOp) int64 { return micros(o.runAt) })
	return err
}

// addEndings adds outcome, reason, detail, exit, result, result bytes and
// output bytes of each item.
func addEndings[T any](a *turnArgs, items []T, ending func(*T) *tasks.Ending) error {
	var failed error
	exit := func(x *T) string {
		e := ending(x).Exit
		if e == nil {
			return ""
		}
		b, err := json.Marshal(e)
		if err != nil {
			failed = &tasks.PoisonError{Err: fmt.Errorf("encode the exit of a task: %w", err)}
		}
		return string(b)
	}
	addTexts(a, items, func(x *T) string { return string(ending(x).Outcome) })
	addTexts(a, items, func(x *T) string { return ending(x).Reason })
	addTexts(a, items, func(x *T) string { return ending(x).Detail })
	addTexts(a, items, exit)
	addTexts(a, items, func(x *T) json.RawMessage { return ending(x).Result })
	addBlobs(a, items, func(x *T) []byte { return ending(x).ResultBytes })
	addInts(a, items, func(x *T) int64 { return ending(x).OutputBytes })
	return failed
}

// output adds all that was printed as one parameter, and where in it each row's
// part lies: the items of an array would be read as hexadecimal text, which
// costs PostgreSQL several times what storing them does.
func (a *turnArgs) output(rows []tasks.OutputRow) {
	if a.printed = a.printed[:0]; a.printed == nil {
		a.printed = []byte{} // nil would be NULL
	}
	for i := range rows {
		a.printed = append(a.printed, rows[i].Data...)
	}
	a.args = append(a.args, a.printed)
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return int64(o.ID) })
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return int64(o.Attempt) })
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return int64(o.Seq) })
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return int64(o.Agent) })
	addTexts(a, rows, func(o *tasks.OutputRow) string { return o.Stream })
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return o.Offset })
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return micros(o.At) })
	first := 1
	addInts(a, rows, func(o *tasks.OutputRow) int64 {
		first += len(o.Data)
		return int64(first - len(o.Data))
	})
	addInts(a, rows, func(o *tasks.OutputRow) int64 { return int64(len(o.Data)) })
}

func (a *turnArgs) rare(due []tasks.DueTask, ended []tasks.Finish) error {
	due = slices.Clone(due)
	slices.SortStableFunc(due, func(x, y tasks.DueTask) int { return cmp.Compare(x.ID, y.ID) })
	addInts(a, due, func(x *tasks.DueTask) int64 { return int64(x.ID) })
	addInts(a, due, func(x *tasks.DueTask) int64 { return micros(x.RunAt) })
	addInts(a, ended, func(f *tasks.Finish) int64 { return int64(f.ID) })
	addInts(a, ended, func(f *tasks.Finish) int64 { return int64(f.Attempt) })
	addInts(a, ended, func(f *tasks.Finish) int64 { return int64(f.Agent) })
	addTexts(a, ended, func(f *tasks.Finish) string { return f.CancelActor })
	return addEndings(a, ended, func(f *tasks.Finish) *tasks.Ending { return &f.Ending })
}
