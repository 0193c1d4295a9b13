package tasktest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
	"uuid"

	"headgate/tasks"
)

// place is where a task that is not completed lies.
type place uint8

const (
	inQueue place = iota
	inLater
	completed
)

// row is one task with all that the tables would hold of it.
type row struct {
	ins         tasks.Insert
	place       place
	attempt     int
	epoch       int64
	startedAt   time.Time
	runAt       time.Time
	cancelledAt time.Time
	cancelActor string
	completedAt time.Time
	ending      tasks.Ending
}

func (r *row) started() bool { return !r.startedAt.IsZero() }

type agentRow struct {
	ref    tasks.AgentRef
	labels map[string]string
	queue  []*row // what is not completed and not later, by (priority, id)
}

type leaseRow struct {
	owner uuid.UUID
	addr  string
	epoch int64
	until time.Time
}

type dedupKey struct {
	principal, route, key string
	index                 int
}

// keyed is a row of task_dedup.
type keyed struct {
	tasks.DedupRow
	until time.Time // zero = for ever
}

func (k *keyed) holds(now time.Time) bool { return k.until.IsZero() || k.until.After(now) }

type chunkKey struct {
	id           tasks.ID
	attempt, seq int
}

type lateRow struct {
	tasks.Finish
	at time.Time
}

type lateKey struct {
	id      tasks.ID
	attempt int
	epoch   int64
}

// Store is tasks.Store in memory. Its clock is the time package, so that it
// runs in simulated time. It is stricter than a database where that finds
// defects: a turn that touches one task twice, or an agent whose shard is not
// among its leases, is refused as a plain error.
type Store struct {
	mu     sync.Mutex
	nextID tasks.ID
	agents map[tasks.AgentNum]*agentRow
	leases [tasks.NumShards]leaseRow
	alive  []uuid.UUID // registered controllers
	rows   map[tasks.ID]*row
	order  []tasks.ID // ascending
	later  map[tasks.ID]*row
	dedup  map[dedupKey]keyed
	gone   map[tasks.AgentNum]time.Time // removed agents, and since when
	retry  map[tasks.ID]tasks.ID        // what repeats a task
	chunks map[chunkKey]tasks.OutputChunk
	late   map[lateKey]lateRow
	points map[string]map[int64]tasks.Point
}

// NewStore makes an empty Store.
func NewStore() *Store {
	return &Store{
		nextID: 1,
		agents: map[tasks.AgentNum]*agentRow{},
		rows:   map[tasks.ID]*row{},
		later:  map[tasks.ID]*row{},
		dedup:  map[dedupKey]keyed{},
		gone:   map[tasks.AgentNum]time.Time{},
		retry:  map[tasks.ID]tasks.ID{},
		chunks: map[chunkKey]tasks.OutputChunk{},
		late:   map[lateKey]lateRow{},
		points: map[string]map[int64]tasks.Point{},
	}
}

// NewAgent adds an agent and gives its number.
func (s *Store) NewAgent(id uuid.UUID, name string, labels map[string]string) tasks.AgentNum {
	s.mu.Lock()
	defer s.mu.Unlock()
	num := tasks.AgentNum(len(s.agents) + 1)
	s.agents[num] = &agentRow{ref: tasks.AgentRef{Num: num, ID: id, Name: name}, labels: labels}
	return num
}

// RemoveAgent marks an agent as removed, as another controller would. It tells
// nobody.
func (s *Store) RemoveAgent(num tasks.AgentNum) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone[num] = time.Now()
}

// ExpireKeys lets the 24 hours of every idempotency key be over.
func (s *Store) ExpireKeys() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, d := range s.dedup {
		if !d.until.IsZero() {
			d.until = time.Now()
			s.dedup[k] = d
		}
	}
}

// ExpireLeases ends every lease now, as if its owner had fallen silent.
func (s *Store) ExpireLeases() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.leases {
		s.leases[i].until = time.Now()
	}
}

// Late gives the answers that were kept after completion.
func (s *Store) Late() []tasks.Finish {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []tasks.Finish
	for _, l := range s.late {
		all = append(all, l.Finish)
	}
	slices.SortFunc(all, func(a, b tasks.Finish) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Attempt, b.Attempt))
	})
	return all
}

// Open counts the tasks that are not completed.
func (s *Store) Open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.later)
	for _, a := range s.agents {
		n += len(a.queue)
	}
	return n
}

// StartedPerAgent counts the started rows of each agent that has any.
func (s *Store) StartedPerAgent() map[tasks.AgentNum]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := map[tasks.AgentNum]int{}
	for num, a := range s.agents {
		for _, r := range a.queue {
			if r.started() {
				n[num]++
			}
		}
	}
	return n
}

// TakeIDs implements tasks.Queue.
func (s *Store) TakeIDs(ctx context.Context) (tasks.ID, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.nextID
	s.nextID += tasks.IDBlock
	return first, nil
}

// Turn implements tasks.Queue.
func (s *Store) Turn(ctx context.Context, t *tasks.Turn) (*tasks.TurnResult, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turn(t, true)
}

// DryRun gives what a turn would do, without doing it: what a database has
// answered when the connection ends before its commit arrives.
func (s *Store) DryRun(t *tasks.Turn) (*tasks.TurnResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turn(t, false)
}

func (s *Store) turn(t *tasks.Turn, commit bool) (*tasks.TurnResult, error) {
	now := time.Now()
	if err := s.checkLeases(t, now); err != nil {
		return nil, err
	}
	if err := checkData(t); err != nil {
		return nil, err
	}
	if err := s.checkTouches(t); err != nil {
		return nil, err
	}
	p := &pass{s: s, now: now, commit: commit, res: &tasks.TurnResult{At: now}}
	p.output(t.Output)
	p.finishes(t.Finishes)
	p.requeues(t.Requeues)
	p.cancels(t.Cancels)
	p.claims(t.Claims)
	p.due(t.Due)
	p.inserts(t.Inserts)
	return p.res, nil
}

func (s *Store) checkLeases(t *tasks.Turn, now time.Time) error {
	for _, l := range t.Leases {
		have := s.leases[l.Shard]
		if have.owner != t.Owner || have.epoch != l.Epoch || !have.until.After(now) {
			return tasks.ErrFenced
		}
	}
	return nil
}

// checkTouches refuses turns that only a defect of the caller makes.
func (s *Store) checkTouches(t *tasks.Turn) error {
	epochs := map[tasks.Shard]int64{}
	for _, l := range t.Leases {
		epochs[l.Shard] = l.Epoch
	}
	seen := map[tasks.ID]bool{}
	touch := func(agent tasks.AgentNum, id tasks.ID, epoch int64) error {
		a, ok := s.agents[agent]
		if !ok {
			return fmt.Errorf("turn names agent %d, which does not exist", agent)
		}
		held, ok := epochs[tasks.ShardOf(a.ref.ID)]
		if !ok || epoch != 0 && epoch != held {
			return fmt.Errorf("turn touches agent %d without its lease or with epoch %d instead of %d", agent, epoch, held)
		}
		if seen[id] {
			return fmt.Errorf("turn touches task %d twice", id)
		}
		seen[id] = true
		return nil
	}
	var errs []error
	for _, x := range t.Inserts {
		errs = append(errs, touch(x.Agent, x.ID, x.Epoch))
	}
	for _, x := range t.Claims {
		errs = append(errs, touch(x.Agent, x.ID, x.Epoch))
	}
	for _, x := range t.Finishes {
		errs = append(errs, touch(x.Agent, x.ID, 0))
	}
	for _, x := range t.Requeues {
		errs = append(errs, touch(x.Agent, x.ID, 0))
	}
	for _, x := range t.Due {
		errs = append(errs, touch(x.Agent, x.ID, 0))
	}
	return errors.Join(errs...)
}

// checkData refuses what PostgreSQL cannot hold.
func checkData(t *tasks.Turn) error {
	var bad error
	text := func(what string, values ...string) {
		for _, v := range values {
			if !utf8.ValidString(v) || strings.IndexByte(v, 0) >= 0 {
				bad = &tasks.PoisonError{Err: fmt.Errorf("%s %.40q is not storable text", what, v)}
			}
		}
	}
	doc := func(what string, v []byte) {
		if v != nil && (!json.Valid(v) || !utf8.Valid(v)) {
			bad = &tasks.PoisonError{Err: fmt.Errorf("%s is not JSON", what)}
		}
	}
	for i := range t.Inserts {
		x := &t.Inserts[i]
		text("insert", x.Kind, x.Actor)
		if x.Key != nil {
			text("key", x.Key.Principal, x.Key.Route, x.Key.Key)
		}
		doc("args", []byte(x.Args))
	}
	for i := range t.Finishes {
		e := &t.Finishes[i].Ending
		text("ending", string(e.Outcome), e.Reason, e.Detail, t.Finishes[i].CancelActor)
		doc("result", e.Result)
		if e.Exit != nil {
			text("exit", e.Exit.Signal, e.Exit.SpawnError, e.Exit.KilledBy)
		}
	}
	for i := range t.Cancels {
		text("cancel", t.Cancels[i].Actor)
	}
	return bad
}

// pass carries one turn through its parts. Nothing is changed unless commit.
type pass struct {
	s      *Store
	now    time.Time
	commit bool
	res    *tasks.TurnResult
}

func (p *pass) find(agent tasks.AgentNum, priority int, id tasks.ID, where place) *row {
	r := p.s.rows[id]
	if r == nil || r.place != where || r.ins.Agent != agent || r.ins.Priority != priority {
		return nil
	}
	return r
}

func (p *pass) output(rows []tasks.OutputRow) {
	for _, o := range rows {
		k := chunkKey{o.ID, o.Attempt, o.Seq}
		if _, ok := p.s.chunks[k]; !ok && p.commit {
			c := o.OutputChunk
			c.Data = bytes.Clone(c.Data)
			p.s.chunks[k] = c
		}
	}
}

func (p *pass) finishes(fs []tasks.Finish) {
	for _, f := range fs {
		where := inQueue
		if f.Later {
			where = inLater
		}
		r := p.find(f.Agent, f.Priority, f.ID, where)
		if r == nil || r.attempt != f.Attempt || r.started() != (f.Epoch != 0) || r.started() && r.epoch != f.Epoch {
			continue
		}
		p.res.Finished = append(p.res.Finished, f.ID)
		if p.commit {
			p.s.leave(r)
			r.place, r.completedAt, r.ending = completed, p.now, f.Ending
			if f.CancelActor != "" && r.cancelledAt.IsZero() {
				r.cancelledAt, r.cancelActor = p.now, f.CancelActor
			}
		}
	}
}

func (p *pass) requeues(qs []tasks.Requeue) {
	for _, q := range qs {
		r := p.find(q.Agent, q.Priority, q.ID, inQueue)
		if r == nil || !r.started() || r.attempt != q.Attempt || r.epoch != q.Epoch {
			continue
		}
		p.res.Requeued = append(p.res.Requeued, q.ID)
		if !p.commit {
			continue
		}
		r.startedAt, r.epoch, r.cancelledAt, r.cancelActor = time.Time{}, 0, time.Time{}, ""
		if q.NotBefore.After(p.now) {
			p.s.leave(r)
			p.s.enterLater(r, q.NotBefore)
		}
	}
}

func (p *pass) cancels(cs []tasks.CancelMark) {
	for _, c := range cs {
		r := p.find(c.Agent, c.Priority, c.ID, inQueue)
		if r == nil || !r.started() || r.attempt != c.Attempt {
			continue
		}
		p.res.Marked = append(p.res.Marked, c.ID)
		if p.commit && r.cancelledAt.IsZero() {
			r.cancelledAt, r.cancelActor = p.now, c.Actor
		}
	}
}

func (p *pass) claims(cs []tasks.Claim) {
	for _, c := range cs {
		r := p.find(c.Agent, c.Priority, c.ID, inQueue)
		if r == nil || r.started() || r.attempt != c.Attempt-1 {
			continue
		}
		p.res.Claimed = append(p.res.Claimed, c.ID)
		if p.commit {
			r.startedAt, r.epoch, r.attempt = p.now, c.Epoch, c.Attempt
		}
	}
}

func (p *pass) due(ds []tasks.DueTask) {
	for _, d := range ds {
		r := p.find(d.Agent, d.Priority, d.ID, inLater)
		if r == nil {
			continue
		}
		p.res.Moved = append(p.res.Moved, d.ID)
		if p.commit {
			p.s.leave(r)
			p.s.enterQueue(r)
		}
	}
}

func (p *pass) inserts(ins []tasks.Insert) {
	seen := map[dedupKey]bool{}
	for _, x := range ins {
		if x.Key != nil {
			k := dedupKey{x.Key.Principal, x.Key.Route, x.Key.Key, x.KeyIndex}
			if d, ok := p.s.dedup[k]; ok && d.holds(p.now) || seen[k] {
				continue
			}
			seen[k] = true
			if p.commit {
				p.s.keep(k, &x, p.now)
			}
		}
		p.res.Inserted = append(p.res.Inserted, x.ID)
		if !p.commit {
			continue
		}
		r := &row{ins: x}
		p.s.rows[x.ID] = r
		p.s.addOrder(x.ID)
		switch {
		case x.Started:
			r.startedAt, r.epoch, r.attempt = p.now, x.Epoch, 1
			p.s.enterQueue(r)
		case x.NotBefore.After(x.CreatedAt):
			p.s.enterLater(r, x.NotBefore)
		default:
			p.s.enterQueue(r)
		}
	}
}

// keep notes the key of an insert.
func (s *Store) keep(k dedupKey, x *tasks.Insert, now time.Time) {
	d := keyed{DedupRow: tasks.DedupRow{Index: x.KeyIndex, ID: x.ID, Hash: x.Key.Hash}}
	if !x.Key.Lasting {
		d.until = now.Add(keyTerm)
	}
	s.dedup[k] = d
	if x.Key.Route == tasks.RetryRoute && x.Key.Principal == "" {
		s.retry[x.RetryOf] = x.ID
	}
}

// keyTerm is how long an ordinary idempotency key holds.
const keyTerm = 24 * time.Hour

func (s *Store) addOrder(id tasks.ID) {
	if n := len(s.order); n == 0 || s.order[n-1] < id {
		s.order = append(s.order, id)
		return
	}
	i, _ := slices.BinarySearch(s.order, id)
	s.order = slices.Insert(s.order, i, id)
}

func compareRows(a, b *row) int {
	return cmp.Or(cmp.Compare(a.ins.Priority, b.ins.Priority), cmp.Compare(a.ins.ID, b.ins.ID))
}

func (s *Store) enterQueue(r *row) {
	a := s.agents[r.ins.Agent]
	i, _ := slices.BinarySearchFunc(a.queue, r, compareRows)
	a.queue = slices.Insert(a.queue, i, r)
	r.place = inQueue
}

func (s *Store) enterLater(r *row, at time.Time) {
	r.place, r.runAt = inLater, at
	s.later[r.ins.ID] = r
}

func (s *Store) leave(r *row) {
	delete(s.later, r.ins.ID)
	a := s.agents[r.ins.Agent]
	if i, ok := slices.BinarySearchFunc(a.queue, r, compareRows); ok {
		a.queue = slices.Delete(a.queue, i, i+1)
	}
}

// Settle implements tasks.Queue: it looks for any trace of the turn.
func (s *Store) Settle(ctx context.Context, t *tasks.Turn, r *tasks.TurnResult) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range r.Inserted {
		return s.rows[id] != nil, nil
	}
	for _, id := range r.Finished {
		return s.rows[id].place == completed, nil
	}
	for _, id := range r.Claimed {
		i := slices.IndexFunc(t.Claims, func(c tasks.Claim) bool { return c.ID == id })
		return s.rows[id].started() && s.rows[id].attempt == t.Claims[i].Attempt, nil
	}
	for _, id := range r.Requeued {
		return !s.rows[id].started(), nil
	}
	for _, id := range r.Moved {
		return s.rows[id].place == inQueue, nil
	}
	for _, id := range r.Marked {
		return !s.rows[id].cancelledAt.IsZero(), nil
	}
	for _, o := range t.Output {
		_, ok := s.chunks[chunkKey{o.ID, o.Attempt, o.Seq}]
		return ok, nil
	}
	return false, nil
}

// RecordLate implements tasks.Queue.
func (s *Store) RecordLate(ctx context.Context, late []tasks.Finish) ([]tasks.ID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var kept []tasks.ID
	for _, f := range late {
		if f.Attempt < math.MinInt16 || f.Attempt > math.MaxInt16 {
			return nil, &tasks.PoisonError{Err: fmt.Errorf("attempt %d is none", f.Attempt)}
		}
	}
	for _, f := range late {
		r := s.rows[f.ID]
		if r == nil || r.place != completed || r.ins.Agent != f.Agent {
			continue
		}
		byAgent := r.started() && r.ending.Outcome != tasks.Unknown
		if byAgent && r.attempt == f.Attempt && r.epoch == f.Epoch {
			continue
		}
		k := lateKey{f.ID, f.Attempt, f.Epoch}
		if _, ok := s.late[k]; !ok {
			s.late[k] = lateRow{f, time.Now().UTC()}
			kept = append(kept, f.ID)
		}
	}
	return kept, nil
}
