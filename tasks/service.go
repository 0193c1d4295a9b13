package tasks

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"headgate/internal/fault"
	"headgate/internal/kinds"
)

// Limits of waiting for a task.
const (
	MaxWait = 120 * time.Second // longer connections are cut by proxies

	waitPoll   = time.Second           // between looks at who owns the agent: another owner does not tell us
	cancelPoll = 20 * time.Millisecond // between looks at a task that moves
	cancelWait = 10 * time.Second      // until a cancel that cannot be stored is given up
)

// ServiceConfig is what a Service is made of; all fields are needed.
type ServiceConfig struct {
	Manager *Manager
	Kinds   *kinds.Registry
}

// Service is the queue's face for people and programs: REST, pages and
// commands call it. Its errors are fault.Error.
type Service struct {
	m      *Manager
	store  Store
	runner Runner
	hub    *Hub
	kinds  *kinds.Registry

	mu   sync.Mutex
	keys map[planKey]struct{} // idempotency keys of requests under way
}

// NewService makes a Service over a Manager.
func NewService(cfg ServiceConfig) *Service {
	return &Service{
		m: cfg.Manager, store: cfg.Manager.cfg.Store, runner: cfg.Manager.cfg.Runner, hub: cfg.Manager.cfg.Hub,
		kinds: cfg.Kinds, keys: map[planKey]struct{}{},
	}
}

// Submit stores one task and returns it once it is on disk. With a key that
// was used before for the same body it returns the task stored then.
func (s *Service) Submit(ctx context.Context, sub Submission, actor string, key Idempotency) (*Task, error) {
	list, err := s.submit(ctx, []Submission{sub}, actor, key, "", nil)
	if err != nil {
		return nil, err
	}
	return &list[0], nil
}

// SubmitAndWait is Submit followed by Wait, but nothing is read back: the task
// is known, and its end comes from the write loop after the commit. Errors are
// those of Submit; once the task is stored it is given as it is known.
func (s *Service) SubmitAndWait(ctx context.Context, sub Submission, actor string, key Idempotency, d time.Duration) (*Task, error) {
	w := newWaiter()
	defer s.hub.leave(w)
	list, err := s.submit(ctx, []Submission{sub}, actor, key, "", w)
	if err != nil {
		return nil, err
	}
	t := &list[0]
	if w.id != 0 {
		return s.follow(ctx, w, t, d), nil
	}
	if now, err := s.Wait(ctx, t.ID, d); err == nil { // it was a replay
		t = now
	}
	return t, nil
}

// SubmitBatch stores up to MaxBatch tasks. All are checked first; if one is
// bad nothing is stored and the fault names it by pointers like
// /tasks/17/args/seconds. The tasks come in the order given, once the last is
// on disk.
func (s *Service) SubmitBatch(ctx context.Context, subs []Submission, actor string, key Idempotency) ([]Task, error) {
	if len(subs) == 0 {
		return nil, fault.New(fault.Invalid, "empty_batch", "The batch names no task.").
			WithField("/tasks", "It must hold at least one task.")
	}
	if len(subs) > MaxBatch {
		return nil, fault.Newf(fault.TooLarge, "batch_too_large", "The batch names %d tasks; at most %d are taken at once.", len(subs), MaxBatch).
			WithHint("Send it in several requests.")
	}
	return s.submit(ctx, subs, actor, key, "/tasks/", nil)
}

// submit checks and stores. w, which comes with a single submission, waits for
// its end; w.id stays 0 when the task was there before.
func (s *Service) submit(ctx context.Context, subs []Submission, actor string, key Idempotency, prefix string, w *waiter) ([]Task, error) {
	if !validText(actor) || len(actor) > maxActor {
		return nil, fault.New(fault.Invalid, "invalid_actor", "The name of who submits is not text, or is too long.")
	}
	if key.Key != "" {
		return s.submitKeyed(ctx, subs, actor, key, prefix, w)
	}
	list, err := s.check(subs, actor, prefix)
	if err != nil {
		return nil, err
	}
	if w != nil {
		list[0].waiter = w
	}
	if err := s.m.store(ctx, list); err != nil {
		return nil, err
	}
	return s.tasks(list), nil
}

// maxActor and maxKey bound what callers may put into columns of text.
const (
	maxActor = 200
	maxKey   = 200
)

// tasks composes the answer from memory: nothing is read back.
func (s *Service) tasks(list []submission) []Task {
	out := make([]Task, len(list))
	for i := range list {
		x := &list[i]
		t := &out[i]
		*t = Task{
			ID: x.ins.ID, Agent: AgentRef{Num: x.ins.Agent, ID: x.agent.ID, Name: x.agent.Name}, Kind: x.ins.Kind,
			Args: []byte(x.ins.Args), Delivery: x.ins.Delivery, Priority: x.ins.Priority, Timeout: x.ins.Timeout,
			State: StateNew, CreatedAt: x.ins.CreatedAt, NotBefore: x.ins.NotBefore, ExpiresAt: x.ins.ExpiresAt,
			Actor: x.ins.Actor, RetryOf: x.ins.RetryOf,
		}
		if !x.startedAt.IsZero() {
			t.State, t.Attempt, t.StartedAt = StateWaiting, 1, x.startedAt
			t.Waiting = justHanded(x.startedAt)
		} else {
			t.Waiting = x.waiting
		}
	}
	s.m.explainAll(pointers(out))
	return out
}

func pointers(list []Task) []*Task {
	out := make([]*Task, len(list))
	for i := range list {
		out[i] = &list[i]
	}
	return out
}

// submitKeyed stores tasks under an idempotency key, or finds those that are.
// What is stored already is not checked again: it stays the answer when its
// agent was removed since, or its expires_at has passed.
func (s *Service) submitKeyed(
	ctx context.Context, subs []Submission, actor string, key Idempotency, prefix string, w *waiter,
) ([]Task, error) {
	if len(key.Key) > maxKey || !validText(key.Key) {
		return nil, fault.Newf(fault.Invalid, "invalid_idempotency_key", "The Idempotency-Key must be text of at most %d bytes.", maxKey)
	}
	if key.Hash == [32]byte{} {
		key.Hash = hashOf(subs)
	}
	k := planKey{principal: key.Principal, route: key.Route, key: key.Key}
	if !s.enter(k) {
		return nil, fault.New(fault.Conflict, "key_in_progress", "A request with this Idempotency-Key is under way.").
			WithHint("Wait for its answer, then send this one again.")
	}
	defer s.leave(k)
	known, err := s.replay(ctx, key, len(subs))
	if err != nil {
		return nil, err
	}
	if len(known) == len(subs) {
		out := make([]Task, len(subs))
		return out, s.fillKnown(ctx, out, known)
	}
	list, err := s.check(subs, actor, prefix)
	if err != nil {
		return nil, err
	}
	if w != nil {
		list[0].waiter = w
	}
	var fresh []submission
	for i := range list {
		if known[i] == 0 {
			fresh = append(fresh, submission{
				ins: list[i].ins, agent: list[i].agent, shard: list[i].shard, waiter: list[i].waiter, replaces: list[i].replaces,
			})
			n := len(fresh) - 1
			fresh[n].ins.Key, fresh[n].ins.KeyIndex = &key, i
		}
	}
	if len(fresh) > 0 {
		if err := s.m.store(ctx, fresh); err != nil {
			return nil, err
		}
	}
	return s.keyed(ctx, len(list), fresh, known, key)
}

// keyed puts stored and found tasks into the order of the n of the request.
func (s *Service) keyed(ctx context.Context, n int, fresh []submission, known map[int]ID, key Idempotency) ([]Task, error) {
	made := s.tasks(fresh)
	lost := false
	for i := range fresh {
		lost = lost || fresh[i].replay
	}
	if lost { // another controller was first with the same key
		var err error
		if known, err = s.replay(ctx, key, n); err != nil {
			return nil, err
		}
	}
	out := make([]Task, n)
	for i := range made {
		if !fresh[i].replay {
			out[fresh[i].ins.KeyIndex] = made[i]
		}
	}
	return out, s.fillKnown(ctx, out, known)
}

// fillKnown puts the tasks that were stored before into their places, all of
// them read together: a batch that is sent again may have ten thousand.
func (s *Service) fillKnown(ctx context.Context, out []Task, known map[int]ID) error {
	var ids []ID
	for i, id := range known {
		if out[i].ID == 0 {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	found, err := s.store.TasksByID(ctx, ids)
	if err != nil {
		return readFault(err)
	}
	byID := make(map[ID]*Task, len(found))
	for i := range found {
		byID[found[i].ID] = &found[i]
	}
	for i, id := range known {
		if out[i].ID != 0 {
			continue
		}
		t := byID[id]
		if t == nil {
			return readFault(fmt.Errorf("task %d of the same key: %w", id, ErrNoTask))
		}
		out[i] = *t
	}
	s.explain(ctx, pointers(out)...)
	return nil
}

// replay gives the ids stored under a key by index; a fault when the key was
// used for something else.
func (s *Service) replay(ctx context.Context, key Idempotency, n int) (map[int]ID, error) {
	rows, err := s.store.Replay(ctx, key)
	if err != nil {
		return nil, readFault(err)
	}
	known := make(map[int]ID, len(rows))
	for _, r := range rows {
		if r.Hash != key.Hash || r.Index >= n {
			return nil, fault.New(fault.Invalid, "idempotency_key_reused", "This Idempotency-Key was used before for another request.").
				WithHint("Use a new key for a new request.")
		}
		known[r.Index] = r.ID
	}
	return known, nil
}

func (s *Service) enter(k planKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.keys[k]; ok {
		return false
	}
	s.keys[k] = struct{}{}
	return true
}

func (s *Service) leave(k planKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.keys, k)
}

// readFault gives an error of a read the meaning that callers branch on.
func readFault(err error) error {
	switch {
	case errors.Is(err, ErrDropped):
		return fault.Wrap(err, fault.NotFound, "task_removed_by_retention", "There is no task with this id any more: retention has removed the tasks of that time.").
			WithHint("How long tasks are kept is set by retention-age, retention-tasks and retention-bytes of the controller.")
	case errors.Is(err, ErrNoTask):
		return fault.Wrap(err, fault.NotFound, "unknown_task", "There is no task with this id.")
	case errors.Is(err, context.Canceled):
		return err
	}
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	return fault.Wrap(err, fault.Unavailable, "database_unavailable", "The database does not answer.").
		WithHint("Try again in a few seconds.")
}

// Get gives one task, with the reason why it waits.
func (s *Service) Get(ctx context.Context, id ID) (*Task, error) {
	t, err := s.store.Task(ctx, id)
	if err != nil {
		return nil, readFault(err)
	}
	if t.State == StateCompleted && t.Attempt > 0 {
		if t.Late, err = s.store.LateResults(ctx, id); err != nil {
			return nil, readFault(err)
		}
	}
	if t.Late == nil {
		t.Late = []LateResult{} // it was looked for
	}
	s.explain(ctx, t)
	if w := t.Waiting; w != nil && w.Position == 0 && w.queued() {
		// It stands behind what is in memory. That the place is not known is
		// no reason to give no answer.
		if n, err := s.store.Position(ctx, t.Agent.Num, t.Priority, id); err == nil && n > 0 {
			w.place(n)
		}
	}
	return t, nil
}

// Page is one page of a list.
type Page struct {
	Items []Task
	Next  ID // cursor of the next page (Filter.After), 0 = this is the last
}

// List gives a page of tasks in the filter's order, with the reasons why they
// wait. It never counts.
func (s *Service) List(ctx context.Context, f Filter) (Page, error) {
	if f.Limit == 0 {
		f.Limit = DefaultPage
	}
	if f.Limit < 1 || f.Limit > MaxPage {
		return Page{}, fault.Newf(fault.Malformed, "invalid_limit", "limit is %d; it must be from 1 to %d.", f.Limit, MaxPage).
			WithField("limit", "out of range")
	}
	want := f.Limit
	f.Limit++ // one more tells whether there is a next page
	items, err := s.store.Tasks(ctx, f)
	if err != nil {
		return Page{}, readFault(err)
	}
	var next ID
	if len(items) > want {
		items = items[:want]
		next = items[want-1].ID
	}
	s.explain(ctx, pointers(items)...)
	return Page{Items: items, Next: next}, nil
}

// Cancel ends a task that has not started, or asks the agent to end it. The
// task as it is then is returned; a completed one is a Conflict
// (already_completed).
func (s *Service) Cancel(ctx context.Context, id ID, actor string) (*Task, error) {
	if !validText(actor) || len(actor) > maxActor {
		return nil, fault.New(fault.Invalid, "invalid_actor", "The name of who cancels is not text, or is too long.")
	}
	wait := cancelWait
	if s.m.cfg.Peers != nil {
		wait = s.m.cfg.Limits.TakeOverWait
	}
	c, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if err := s.cancel(c, id, actor); err != nil {
		return nil, err
	}
	return s.Get(ctx, id)
}

// cancel ends the task wherever its agent is owned.
func (s *Service) cancel(ctx context.Context, id ID, actor string) error {
	since, lost := time.Now().Add(-ownersKept), false
	for {
		began := time.Now()
		err := s.cancelHere(ctx, id, actor)
		if s.m.cfg.Peers == nil || fault.CodeOf(err) != codeNotOwner {
			return s.cancelled(ctx, id, actor, lost, err)
		}
		row, err := s.store.Find(ctx, id)
		if err != nil {
			continue // completed meanwhile, or the database is away: said above
		}
		_, shard, ok := s.m.loopOfAgent(row.Agent)
		if !ok {
			return errNotOwner()
		}
		one, err := s.cancelThere(ctx, shard, id, actor, since)
		lost = lost || one
		if !passes(err) {
			return s.cancelled(ctx, id, actor, lost, err)
		}
		if !rest(ctx, routePause) {
			if lost {
				return errCancelUnknown()
			}
			return err
		}
		since = began
	}
}

// cancelled judges an answer: after one was lost, a task that this very caller
// has ended counts as success.
func (s *Service) cancelled(ctx context.Context, id ID, actor string, lost bool, err error) error {
	if !lost || fault.CodeOf(err) != "already_completed" {
		return err
	}
	if t, readErr := s.store.Task(ctx, id); readErr != nil || t.CancelActor != actor {
		return err
	}
	return nil
}

// cancelHere ends the task if this controller owns its agent.
func (s *Service) cancelHere(ctx context.Context, id ID, actor string) error {
	for {
		err := s.tryCancel(ctx, id, actor)
		if !errors.Is(err, errMoved) {
			return err
		}
		if !rest(ctx, cancelPoll) {
			return errCancelUnknown()
		}
	}
}

func errCancelUnknown() error {
	return fault.New(fault.Unavailable, "cancel_unknown", "The cancellation could not be stored in time; it may still be.").
		WithHint("Look at the task, then cancel it again.")
}

func (s *Service) tryCancel(ctx context.Context, id ID, actor string) error {
	row, err := s.store.Find(ctx, id)
	if errors.Is(err, ErrNoTask) {
		if _, err := s.store.Task(ctx, id); err != nil {
			return readFault(err)
		}
		return fault.New(fault.Conflict, "already_completed", "The task is completed; there is nothing left to cancel.")
	}
	if err != nil {
		return readFault(err)
	}
	l, shard, ok := s.m.loopOfAgent(row.Agent)
	if !ok {
		return errNotOwner()
	}
	c := &cancelRequest{id: id, actor: actor, row: *row, shard: shard, done: make(chan error, 1)}
	l.post(c)
	select {
	case <-ctx.Done():
		return errCancelUnknown()
	case err := <-c.done:
		return err
	}
}

type leaveKey struct{}

// WithLeave lets a wait end early: when leave is closed, Wait and
// SubmitAndWait give the task as it is known then. Other than the end of ctx
// that breaks nothing off, neither the reading nor a submission under way.
func WithLeave(ctx context.Context, leave <-chan struct{}) context.Context {
	return context.WithValue(ctx, leaveKey{}, leave)
}

// Wait gives the task when it is completed, or as it is after d (at most
// MaxWait), when ctx ends, or at the end of WithLeave. It reads once; that the database cannot be read
// later is no error: what is known is given.
func (s *Service) Wait(ctx context.Context, id ID, d time.Duration) (*Task, error) {
	w := newWaiter()
	s.hub.join(w, id)
	defer s.hub.leave(w)
	t, err := s.Get(ctx, id)
	if err != nil || t.State == StateCompleted {
		return t, err
	}
	return s.follow(ctx, w, t, d), nil
}

// follow gives t when it has ended. The waiter hears of ends that this
// controller writes; while another one owns the agent, and once after each
// change of hands, the database is asked.
func (s *Service) follow(ctx context.Context, w *waiter, t *Task, d time.Duration) *Task {
	end := time.Now().Add(min(d, MaxWait))
	epoch, _ := s.m.epochOf(t.Agent.Num)
	leave, _ := ctx.Value(leaveKey{}).(<-chan struct{})
	timer := time.NewTimer(min(d, waitPoll))
	defer timer.Stop()
	for {
		select {
		case c := <-w.told:
			return s.ended(ctx, t, c)
		case <-ctx.Done():
			return t
		case <-leave:
			return t
		case <-timer.C:
		}
		left := time.Until(end)
		now, here := s.m.epochOf(t.Agent.Num)
		if !here || now != epoch || left <= 0 {
			epoch = now
			t = s.reread(ctx, t)
		}
		if t.State == StateCompleted {
			return t
		}
		if left <= 0 {
			s.explain(ctx, t)
			return t
		}
		timer.Reset(min(left, waitPoll))
	}
}

// ended gives a task as it is on disk after c.
func (s *Service) ended(ctx context.Context, t *Task, c *completion) *Task {
	// The not_before of a task that was seen in a back-off is that of the
	// back-off, not its own.
	if c == nil || t.State == StateNew && t.Attempt > 0 {
		return s.reread(ctx, t)
	}
	done := *t
	done.State, done.Attempt, done.Ending = StateCompleted, c.attempt, c.ending
	done.StartedAt, done.CompletedAt = c.startedAt, c.completedAt
	done.CancelRequestedAt, done.CancelActor, done.Waiting = c.cancelledAt, c.cancelActor, nil
	done.Late = []LateResult{} // nothing can have come after it yet
	return &done
}

// reread gives the task as it is now, or as it is known when it cannot be read.
// Another controller is not asked for its sentence.
func (s *Service) reread(ctx context.Context, t *Task) *Task {
	now, err := s.store.Task(ctx, t.ID)
	if err != nil {
		return t
	}
	now.Waiting = s.m.Explain(now)
	return now
}
