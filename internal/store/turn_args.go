package store

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"

	"headgate/internal/kinds"
	"headgate/tasks"
)

// turnArgs turns a Turn into the arrays of its statement.
type turnArgs struct {
	shape turnShape
	args  []any
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
	ops, ended := queueOps(t)
	a := &turnArgs{shape: shapeOf(t, ops, ended)}
	a.leases(t)
	if a.shape.has(withInserts) {
		a.inserts(t.Inserts)
	}
	if a.shape.has(withOps) {
		if err := a.ops(ops); err != nil {
			return nil, err
		}
	}
	if a.shape.has(withOutput) {
		a.output(t.Output)
	}
	if a.shape.has(withRare) {
		if err := a.rare(t.Due, ended); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func shapeOf(t *tasks.Turn, ops []queueOp, ended []tasks.Finish) turnShape {
	var s turnShape
	if len(t.Due) > 0 || len(ended) > 0 || slices.ContainsFunc(ops, func(o queueOp) bool { return o.op == opRequeueLater }) {
		return wholeTurn
	}
	if len(t.Inserts) > 0 {
		s |= withInserts
		if slices.ContainsFunc(t.Inserts, func(i tasks.Insert) bool { return i.Key != nil }) {
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
// row that the same turn ends, starts or puts back is dropped.
func queueOps(t *tasks.Turn) (ops []queueOp, ended []tasks.Finish) {
	for i := range t.Finishes {
		f := &t.Finishes[i]
		if f.Later {
			ended = append(ended, *f)
			continue
		}
		ops = append(ops, queueOp{
			agent: f.Agent, priority: f.Priority, id: f.ID, op: opFinish,
			attempt: f.Attempt, seen: f.Epoch, ending: &f.Ending,
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
	slices.SortStableFunc(ops, func(a, b queueOp) int {
		return cmp.Or(cmp.Compare(a.agent, b.agent), cmp.Compare(a.priority, b.priority), cmp.Compare(a.id, b.id))
	})
	slices.SortStableFunc(ended, func(a, b tasks.Finish) int { return cmp.Compare(a.ID, b.ID) })
	return ops, ended
}

// leases gives the lease rows in the order of shards, so that turns lock them
// in the same order.
func (a *turnArgs) leases(t *tasks.Turn) {
	held := slices.Clone(t.Leases)
	slices.SortFunc(held, func(x, y tasks.Lease) int { return cmp.Compare(x.Shard, y.Shard) })
	a.args = append(a.args,
		ints(held, func(l tasks.Lease) int64 { return int64(l.Shard) }),
		ints(held, func(l tasks.Lease) int64 { return l.Epoch }),
		t.Owner.String(), int64(len(held)))
}

func (a *turnArgs) inserts(ins []tasks.Insert) {
	ins, keyed := dropSameKeys(ins)
	later := func(i tasks.Insert) bool { return !i.Started && i.NotBefore.After(i.CreatedAt) }
	a.args = append(a.args,
		ints(ins, func(i tasks.Insert) int64 { return int64(i.ID) }),
		ints(ins, func(i tasks.Insert) int64 { return int64(i.Agent) }),
		ints(ins, func(i tasks.Insert) int64 { return i.Epoch }),
		texts(ins, func(i tasks.Insert) string { return i.Kind }),
		texts(ins, func(i tasks.Insert) string { return i.Args }),
		bools(ins, func(i tasks.Insert) bool { return i.Delivery == kinds.DeliveryRepeatable }),
		ints(ins, func(i tasks.Insert) int64 { return int64(i.Priority) }),
		ints(ins, func(i tasks.Insert) int64 { return i.Timeout.Milliseconds() }),
		ints(ins, func(i tasks.Insert) int64 { return micros(i.CreatedAt) }),
		ints(ins, func(i tasks.Insert) int64 { return micros(i.NotBefore) }),
		ints(ins, func(i tasks.Insert) int64 { return micros(i.ExpiresAt) }),
		texts(ins, func(i tasks.Insert) string { return i.Actor }),
		ints(ins, func(i tasks.Insert) int64 { return int64(i.RetryOf) }),
		texts(ins, func(i tasks.Insert) string { return uuidText(i.RunID) }),
		texts(ins, func(i tasks.Insert) string {
			if i.Key == nil {
				return ""
			}
			return i.Key.Key
		}),
		bools(ins, func(i tasks.Insert) bool { return i.Started }),
		bools(ins, later),
		bools(ins, func(i tasks.Insert) bool { return i.Key != nil }))
	if !a.shape.has(withKeys) {
		return
	}
	a.args = append(a.args,
		texts(keyed, func(i tasks.Insert) string { return i.Key.Principal }),
		texts(keyed, func(i tasks.Insert) string { return i.Key.Route }),
		texts(keyed, func(i tasks.Insert) string { return i.Key.Key }),
		ints(keyed, func(i tasks.Insert) int64 { return int64(i.KeyIndex) }),
		ints(keyed, func(i tasks.Insert) int64 { return int64(i.ID) }),
		blobs(keyed, func(i tasks.Insert) []byte { return i.Key.Hash[:] }))
}

// dropSameKeys leaves the first of several inserts with the same key: the
// others are replays of it. It also gives those that have a key, in its order.
func dropSameKeys(ins []tasks.Insert) (all, keyed []tasks.Insert) {
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
	a.args = append(a.args,
		ints(ops, func(o queueOp) int64 { return int64(o.agent) }),
		ints(ops, func(o queueOp) int64 { return int64(o.priority) }),
		ints(ops, func(o queueOp) int64 { return int64(o.id) }),
		ints(ops, func(o queueOp) int64 { return o.op }),
		ints(ops, func(o queueOp) int64 { return int64(o.attempt) }),
		ints(ops, func(o queueOp) int64 { return o.seen }),
		ints(ops, func(o queueOp) int64 { return o.epoch }),
		texts(ops, func(o queueOp) string { return o.actor }))
	if !a.shape.has(withFinishes) {
		return nil
	}
	none := &tasks.Ending{}
	ending := func(o queueOp) *tasks.Ending {
		if o.ending == nil {
			return none
		}
		return o.ending
	}
	if err := addEndings(a, ops, ending); err != nil {
		return err
	}
	a.args = append(a.args, ints(ops, func(o queueOp) int64 { return micros(o.runAt) }))
	return nil
}

// addEndings adds outcome, reason, detail, exit, result, result bytes and
// output bytes of each item.
func addEndings[T any](a *turnArgs, items []T, ending func(T) *tasks.Ending) error {
	exits := make([]string, len(items))
	for i, x := range items {
		e := ending(x).Exit
		if e == nil {
			continue
		}
		b, err := json.Marshal(e)
		if err != nil {
			return &tasks.PoisonError{Err: fmt.Errorf("encode the exit of a task: %w", err)}
		}
		exits[i] = string(b)
	}
	a.args = append(a.args,
		texts(items, func(x T) string { return string(ending(x).Outcome) }),
		texts(items, func(x T) string { return ending(x).Reason }),
		texts(items, func(x T) string { return ending(x).Detail }),
		pq.StringArray(exits),
		texts(items, func(x T) string { return string(ending(x).Result) }),
		blobs(items, func(x T) []byte { return ending(x).ResultBytes }),
		ints(items, func(x T) int64 { return ending(x).OutputBytes }))
	return nil
}

func (a *turnArgs) output(rows []tasks.OutputRow) {
	a.args = append(a.args,
		ints(rows, func(o tasks.OutputRow) int64 { return int64(o.ID) }),
		ints(rows, func(o tasks.OutputRow) int64 { return int64(o.Attempt) }),
		ints(rows, func(o tasks.OutputRow) int64 { return int64(o.Seq) }),
		ints(rows, func(o tasks.OutputRow) int64 { return int64(o.Agent) }),
		texts(rows, func(o tasks.OutputRow) string { return o.Stream }),
		ints(rows, func(o tasks.OutputRow) int64 { return o.Offset }),
		ints(rows, func(o tasks.OutputRow) int64 { return micros(o.At) }),
		blobs(rows, func(o tasks.OutputRow) []byte { return o.Data }))
}

func (a *turnArgs) rare(due []tasks.DueTask, ended []tasks.Finish) error {
	due = slices.Clone(due)
	slices.SortStableFunc(due, func(x, y tasks.DueTask) int { return cmp.Compare(x.ID, y.ID) })
	a.args = append(a.args,
		ints(due, func(x tasks.DueTask) int64 { return int64(x.ID) }),
		ints(due, func(x tasks.DueTask) int64 { return micros(x.RunAt) }),
		ints(ended, func(f tasks.Finish) int64 { return int64(f.ID) }),
		ints(ended, func(f tasks.Finish) int64 { return int64(f.Attempt) }),
		ints(ended, func(f tasks.Finish) int64 { return int64(f.Agent) }))
	return addEndings(a, ended, func(f tasks.Finish) *tasks.Ending { return &f.Ending })
}
