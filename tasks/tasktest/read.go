package tasktest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"uuid"

	"headgate/tasks"
)

// holds says whether an agent's shard is among shards.
func (s *Store) holds(agent tasks.AgentNum, shards []tasks.Shard) bool {
	return slices.Contains(shards, tasks.ShardOf(s.agents[agent].ref.ID))
}

func (r *row) queued() tasks.Queued {
	return tasks.Queued{
		Agent: r.ins.Agent, Priority: r.ins.Priority, ID: r.ins.ID, Attempt: r.attempt,
		Kind: r.ins.Kind, Args: r.ins.Args, Delivery: r.ins.Delivery, Timeout: r.ins.Timeout,
		CreatedAt: r.ins.CreatedAt, ExpiresAt: r.ins.ExpiresAt,
	}
}

// Load implements tasks.Queue.
func (s *Store) Load(ctx context.Context, shards []tasks.Shard) (*tasks.Loaded, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &tasks.Loaded{Depth: map[tasks.AgentNum]int{}}
	for _, num := range slices.Sorted(maps.Keys(s.agents)) {
		if !s.holds(num, shards) {
			continue
		}
		for _, r := range s.agents[num].queue {
			if !r.started() {
				l.Depth[num]++
				continue
			}
			l.Started = append(l.Started, tasks.Started{
				Queued: r.queued(), Epoch: r.epoch, StartedAt: r.startedAt, CancelRequestedAt: r.cancelledAt, CancelActor: r.cancelActor,
			})
		}
	}
	for _, r := range s.later {
		if s.holds(r.ins.Agent, shards) {
			l.Later++
		}
	}
	return l, nil
}

// Refill implements tasks.Queue.
func (s *Store) Refill(ctx context.Context, reqs []tasks.RefillRequest) ([]tasks.Queued, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []tasks.Queued
	for _, q := range reqs {
		a := s.agents[q.Agent]
		if a == nil {
			continue
		}
		after := &row{ins: tasks.Insert{Priority: q.AfterPriority, ID: q.AfterID}}
		n := 0
		for _, r := range a.queue {
			if r.started() || compareRows(r, after) <= 0 {
				continue
			}
			if n++; n > q.Limit {
				break
			}
			all = append(all, r.queued())
		}
	}
	return all, nil
}

// Due implements tasks.Queue.
func (s *Store) Due(ctx context.Context, shards []tasks.Shard, limit int) ([]tasks.DueTask, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var due []tasks.DueTask
	for _, r := range s.later {
		if !r.runAt.After(now) && s.holds(r.ins.Agent, shards) {
			due = append(due, tasks.DueTask{Agent: r.ins.Agent, Priority: r.ins.Priority, ID: r.ins.ID, RunAt: r.runAt})
		}
	}
	slices.SortFunc(due, func(a, b tasks.DueTask) int {
		return cmp.Or(a.RunAt.Compare(b.RunAt), cmp.Compare(a.ID, b.ID))
	})
	return due[:min(limit, len(due))], nil
}

// Overdue implements tasks.Queue.
func (s *Store) Overdue(ctx context.Context, shards []tasks.Shard, limit int) ([]tasks.Finish, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var over []*row
	take := func(r *row) {
		if !r.started() && !r.ins.ExpiresAt.After(now) && s.holds(r.ins.Agent, shards) {
			over = append(over, r)
		}
	}
	for _, a := range s.agents {
		for _, r := range a.queue {
			take(r)
		}
	}
	for _, r := range s.later {
		take(r)
	}
	slices.SortFunc(over, func(a, b *row) int {
		return cmp.Or(a.ins.ExpiresAt.Compare(b.ins.ExpiresAt), cmp.Compare(a.ins.ID, b.ins.ID))
	})
	var fs []tasks.Finish
	for _, r := range over[:min(limit, len(over))] {
		fs = append(fs, tasks.Finish{
			Agent: r.ins.Agent, Priority: r.ins.Priority,
			Ref: tasks.Ref{ID: r.ins.ID, Attempt: r.attempt}, Later: r.place == inLater,
		})
	}
	return fs, nil
}

// Removed implements tasks.Queue.
func (s *Store) Removed(ctx context.Context, shards []tasks.Shard, within time.Duration) ([]tasks.Agent, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []tasks.Agent
	for _, num := range slices.Sorted(maps.Keys(s.gone)) {
		a := s.agents[num]
		open := len(a.queue) > 0
		for _, r := range s.later {
			open = open || r.ins.Agent == num
		}
		if open && s.holds(num, shards) && (within == 0 || time.Since(s.gone[num]) < within) {
			all = append(all, tasks.Agent{Num: num, ID: a.ref.ID, Name: a.ref.Name, Removed: true})
		}
	}
	return all, nil
}

// Abandoned implements tasks.Queue.
func (s *Store) Abandoned(ctx context.Context, agents []tasks.AgentNum, limit int) ([]tasks.Finish, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var open []*row
	for _, num := range agents {
		for _, r := range s.agents[num].queue {
			if !r.started() {
				open = append(open, r)
			}
		}
		for _, r := range s.later {
			if r.ins.Agent == num {
				open = append(open, r)
			}
		}
	}
	var fs []tasks.Finish
	for _, r := range open[:min(limit, len(open))] {
		fs = append(fs, tasks.Finish{
			Agent: r.ins.Agent, Priority: r.ins.Priority,
			Ref: tasks.Ref{ID: r.ins.ID, Attempt: r.attempt}, Later: r.place == inLater,
		})
	}
	return fs, nil
}

// Alike implements tasks.Queue.
func (s *Store) Alike(ctx context.Context, inserts []tasks.Insert) ([][]tasks.Like, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([][]tasks.Like, len(inserts))
	for i := range inserts {
		x := &inserts[i]
		behind := 0
		for _, r := range slices.Backward(s.agents[x.Agent].queue) {
			if r.started() || r.ins.Priority != x.Priority {
				continue
			}
			same := r.ins.Kind == x.Kind && r.ins.Args == x.Args && r.ins.Delivery == x.Delivery &&
				r.ins.Timeout == x.Timeout
			if same && !r.ins.ExpiresAt.After(x.ExpiresAt) {
				all[i] = append(all[i], tasks.Like{Ref: tasks.Ref{ID: r.ins.ID, Attempt: r.attempt}, Behind: behind})
			}
			behind++
		}
		slices.Reverse(all[i])
	}
	return all, nil
}

// Find implements tasks.Queue.
func (s *Store) Find(ctx context.Context, id tasks.ID) (*tasks.QueueRow, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rows[id]
	if r == nil || r.place == completed {
		return nil, tasks.ErrNoTask
	}
	return &tasks.QueueRow{
		Agent: r.ins.Agent, Priority: r.ins.Priority, Ref: tasks.Ref{ID: id, Attempt: r.attempt},
		Epoch: r.epoch, StartedAt: r.startedAt, Later: r.place == inLater,
	}, nil
}

// Acquire implements tasks.Leases.
func (s *Store) Acquire(ctx context.Context, me tasks.Owner, former []uuid.UUID, shards []tasks.Shard) ([]tasks.Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var got []tasks.Lease
	for _, sh := range shards {
		l := &s.leases[sh]
		free := !l.until.After(now) || l.owner == me.ID || slices.Contains(former, l.owner)
		if !free {
			continue
		}
		*l = leaseRow{owner: me.ID, addr: me.Addr, epoch: l.epoch + 1, until: now.Add(tasks.LeaseTerm)}
		got = append(got, s.lease(sh))
	}
	return got, nil
}

func (s *Store) lease(sh tasks.Shard) tasks.Lease {
	l := s.leases[sh]
	return tasks.Lease{Shard: sh, Epoch: l.epoch, Owner: l.owner, Addr: l.addr, Until: l.until}
}

// Renew implements tasks.Leases.
func (s *Store) Renew(ctx context.Context, me tasks.Owner, held []tasks.Lease) ([]tasks.Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var still []tasks.Lease
	for _, h := range held {
		l := &s.leases[h.Shard]
		if l.owner != me.ID || l.epoch != h.Epoch {
			continue
		}
		l.until = time.Now().Add(tasks.LeaseTerm)
		still = append(still, s.lease(h.Shard))
	}
	return still, nil
}

// Release implements tasks.Leases.
func (s *Store) Release(ctx context.Context, me tasks.Owner, held []tasks.Lease) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range held {
		if l := &s.leases[h.Shard]; l.owner == me.ID && l.epoch == h.Epoch {
			l.owner, l.addr, l.until = uuid.Nil(), "", time.Time{}
		}
	}
	return nil
}

// Owners implements tasks.Leases.
func (s *Store) Owners(ctx context.Context) (tasks.Owners, error) {
	if err := ctx.Err(); err != nil {
		return tasks.Owners{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	o := tasks.Owners{Alive: len(s.alive)}
	for sh := range s.leases {
		if s.leases[sh].owner == uuid.Nil() {
			continue
		}
		l := s.lease(tasks.Shard(sh))
		l.Left, l.Peer = l.Until.Sub(now), l.Owner
		o.Leases = append(o.Leases, l)
	}
	return o, nil
}

// SetAlive says how many controllers are registered, as those around the
// managers under test would have done.
func (s *Store) SetAlive(ids ...uuid.UUID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive = ids
}

func (s *Store) task(r *row) tasks.Task {
	t := tasks.Task{
		ID: r.ins.ID, Agent: s.agents[r.ins.Agent].ref, Kind: r.ins.Kind, Args: json.RawMessage(r.ins.Args),
		Delivery: r.ins.Delivery, Priority: r.ins.Priority, Timeout: r.ins.Timeout, Attempt: r.attempt,
		State: tasks.StateNew, Ending: r.ending,
		CreatedAt: r.ins.CreatedAt, NotBefore: r.ins.NotBefore, ExpiresAt: r.ins.ExpiresAt,
		StartedAt: r.startedAt, CompletedAt: r.completedAt, CancelRequestedAt: r.cancelledAt,
		CancelActor: r.cancelActor, Actor: r.ins.Actor, RetryOf: r.ins.RetryOf, RunID: r.ins.RunID,
	}
	switch {
	case r.place == completed:
		t.State, t.RetriedAs = tasks.StateCompleted, s.retry[r.ins.ID]
	case r.place == inLater:
		t.NotBefore = r.runAt
	case r.started():
		t.State = tasks.StateWaiting
	}
	return t
}

// Task implements tasks.Reader.
func (s *Store) Task(ctx context.Context, id tasks.ID) (*tasks.Task, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rows[id]
	if r == nil {
		return nil, tasks.ErrNoTask
	}
	t := s.task(r)
	return &t, nil
}

// Position implements tasks.Reader.
func (s *Store) Position(ctx context.Context, agent tasks.AgentNum, priority int, id tasks.ID) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.agents[agent]
	if a == nil {
		return 0, nil
	}
	n := 0
	for _, r := range a.queue {
		if r.started() {
			continue
		}
		if n++; r.ins.ID == id && r.ins.Priority == priority {
			return n, nil
		}
	}
	return 0, nil
}

// LateResults implements tasks.Reader.
func (s *Store) LateResults(ctx context.Context, id tasks.ID) ([]tasks.LateResult, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []tasks.LateResult
	for k, l := range s.late {
		if k.id == id {
			all = append(all, tasks.LateResult{Attempt: l.Attempt, StartedAt: l.StartedAt, ReceivedAt: l.at, Ending: l.Ending})
		}
	}
	slices.SortFunc(all, func(a, b tasks.LateResult) int {
		return cmp.Or(a.ReceivedAt.Compare(b.ReceivedAt), cmp.Compare(a.Attempt, b.Attempt))
	})
	return all[:min(len(all), tasks.MaxLateShown)], nil
}

// TasksByID implements tasks.Reader.
func (s *Store) TasksByID(ctx context.Context, ids []tasks.ID) ([]tasks.Task, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []tasks.Task
	for _, id := range ids {
		if r := s.rows[id]; r != nil {
			out = append(out, s.task(r))
		}
	}
	return out, nil
}

// Tasks implements tasks.Reader.
func (s *Store) Tasks(ctx context.Context, f tasks.Filter) ([]tasks.Task, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	limit := cmp.Or(f.Limit, tasks.DefaultPage)
	ids := slices.Clone(s.order)
	if !f.Ascending {
		slices.Reverse(ids)
	}
	var page []tasks.Task
	for _, id := range ids {
		if f.After != 0 && (f.Ascending && id <= f.After || !f.Ascending && id >= f.After) {
			continue
		}
		t := s.task(s.rows[id])
		if !s.matches(f, &t) {
			continue
		}
		if page = append(page, t); len(page) == limit {
			break
		}
	}
	return page, nil
}

func (s *Store) matches(f tasks.Filter, t *tasks.Task) bool {
	in := func(n int, has bool) bool { return n == 0 || has }
	ok := in(len(f.States), slices.Contains(f.States, t.State)) &&
		in(len(f.Outcomes), slices.Contains(f.Outcomes, t.Ending.Outcome)) &&
		in(len(f.Agents), slices.Contains(f.Agents, t.Agent.Num)) &&
		in(len(f.Kinds), slices.Contains(f.Kinds, t.Kind)) &&
		(f.CreatedAfter.IsZero() || t.CreatedAt.After(f.CreatedAfter)) &&
		(f.CreatedBefore.IsZero() || t.CreatedAt.Before(f.CreatedBefore))
	if !ok {
		return false
	}
	labels := s.agents[t.Agent.Num].labels
	for k, v := range f.Labels {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return f.Query == "" || strings.HasPrefix(t.ID.String(), f.Query) ||
		strings.HasPrefix(t.Agent.Name, f.Query) || strings.HasPrefix(t.Kind, f.Query)
}

// Output implements tasks.Reader.
func (s *Store) Output(ctx context.Context, id tasks.ID, fromSeq, limit int) ([]tasks.OutputChunk, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.chunksOf(id, s.newest(id), "", fromSeq, limit), nil
}

// newest gives the highest attempt of a task that has output. The lock is held.
func (s *Store) newest(id tasks.ID) int {
	newest := 0
	for k := range s.chunks {
		if k.id == id {
			newest = max(newest, k.attempt)
		}
	}
	return newest
}

// chunksOf gives chunks in order. The lock is held.
func (s *Store) chunksOf(id tasks.ID, attempt int, stream string, fromSeq, limit int) []tasks.OutputChunk {
	var all []tasks.OutputChunk
	for k, c := range s.chunks {
		if k.id == id && k.attempt == attempt && k.seq >= fromSeq && (stream == "" || c.Stream == stream) {
			c.Data = bytes.Clone(c.Data)
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b tasks.OutputChunk) int { return cmp.Compare(a.Seq, b.Seq) })
	return all[:min(limit, len(all))]
}

// OutputPart implements tasks.Reader.
func (s *Store) OutputPart(ctx context.Context, id tasks.ID, attempt int, stream string, fromSeq, limit int) ([]tasks.OutputChunk, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.chunksOf(id, attempt, stream, fromSeq, limit), nil
}

// OutputAt implements tasks.Reader.
func (s *Store) OutputAt(ctx context.Context, id tasks.ID, attempt int, stream string, pos int64) (int, int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var start int64
	for _, c := range s.chunksOf(id, attempt, stream, 0, math.MaxInt) {
		if n := int64(len(c.Data)); start+n > pos {
			return c.Seq, start, nil
		}
		start += int64(len(c.Data))
	}
	return math.MaxInt32, start, nil
}

// OutputFacts implements tasks.Reader.
func (s *Store) OutputFacts(ctx context.Context, id tasks.ID) (tasks.OutputFacts, error) {
	if err := ctx.Err(); err != nil {
		return tasks.OutputFacts{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f := tasks.OutputFacts{Attempt: s.newest(id)}
	for _, stream := range []string{tasks.Stdout, tasks.Stderr} {
		of := &f.Stdout
		if stream == tasks.Stderr {
			of = &f.Stderr
		}
		for _, c := range s.chunksOf(id, f.Attempt, stream, 0, math.MaxInt) {
			if c.Offset > of.Bytes && len(f.Gaps) < tasks.MaxGaps {
				f.Gaps = append(f.Gaps, tasks.OutputGap{Stream: stream, Offset: of.Bytes, Bytes: c.Offset - of.Bytes})
			}
			of.Bytes = c.Offset + int64(len(c.Data))
			of.Stored += int64(len(c.Data))
			f.LastSeq = max(f.LastSeq, c.Seq)
		}
	}
	return f, nil
}

// Replay implements tasks.Reader.
func (s *Store) Replay(ctx context.Context, key tasks.Idempotency) ([]tasks.DedupRow, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []tasks.DedupRow
	now := time.Now()
	for k, d := range s.dedup {
		if k.principal == key.Principal && k.route == key.Route && k.key == key.Key && d.holds(now) {
			all = append(all, d.DedupRow)
		}
	}
	slices.SortFunc(all, func(a, b tasks.DedupRow) int { return cmp.Compare(a.Index, b.Index) })
	return all, nil
}

// SavePoints implements tasks.Reader; a point saved again replaces itself.
func (s *Store) SavePoints(ctx context.Context, points []tasks.Point) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range points {
		if s.points[p.Name] == nil {
			s.points[p.Name] = map[int64]tasks.Point{}
		}
		s.points[p.Name][p.At.UnixNano()] = p
	}
	return nil
}

// Points implements tasks.Reader; oldest first.
func (s *Store) Points(ctx context.Context, name string, since time.Time) ([]tasks.Point, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []tasks.Point
	for series, points := range s.points {
		if series != name && !strings.HasPrefix(series, name+"/") {
			continue
		}
		for _, p := range points {
			if !p.At.Before(since) {
				all = append(all, p)
			}
		}
	}
	slices.SortFunc(all, func(a, b tasks.Point) int { return a.At.Compare(b.At) })
	return all, nil
}
