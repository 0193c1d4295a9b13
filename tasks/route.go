package tasks

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
	"uuid"

	"headgate/internal/fault"
)

// Times and sizes of what is passed on to other controllers.
const (
	routePause   = 100 * time.Millisecond  // between looks at who owns an agent now
	ownersKept   = time.Second             // how old the answer may be that a first call goes by
	ownersWait   = 5 * time.Second         // for the database to name the owners
	explainWait  = 1500 * time.Millisecond // a page shall not wait long for another controller's sentence
	peerItems    = 1000                    // tasks in one call
	peerBytes    = 4 << 20                 // of arguments in one call; escaping may double them
	silenceQuiet = 5 * time.Second         // a silent owner is not asked for sentences again so soon
)

// codeNotOwner is the code of everything that only the owner of an agent can
// do, said by one that is not; nothing was done.
const codeNotOwner = "owner_unreachable"

// errNotOwner is the answer about tasks of shards that are held elsewhere.
func errNotOwner() error {
	return notOwner("Another controller owns this agent, or ownership is changing hands just now; nothing was done.")
}

// passes says whether an owner's refusal ends by itself, or with a take-over.
func passes(err error) bool {
	switch fault.CodeOf(err) {
	case codeNotOwner, "shutting_down", "not_ready":
		return true
	}
	return false
}

func notOwner(message string) error {
	return fault.New(fault.Unavailable, codeNotOwner, message).WithHint("Try again in a few seconds; a take-over ends within 20 s.")
}

func errPeerUnknown() error {
	return fault.New(fault.Unavailable, "commit_unknown",
		"The controller that owns the agent fell silent while the task was being stored; nobody knows yet whether it is.").
		WithHint("Send the request again with the same Idempotency-Key, which settles it; without one, look at the agent's tasks first.")
}

// routes remembers who owns which shard, and who of them did not answer.
type routes struct {
	m       *Manager
	reading chan struct{} // held by the one who asks the database

	mu     sync.Mutex // guards what follows
	owners [NumShards]Lease
	read   time.Time // when the answer was asked for; zero = never
	silent map[uuid.UUID]silence
}

// silence is that of an owner that does not answer.
type silence struct{ since, tried time.Time }

func newRoutes(m *Manager) *routes {
	return &routes{m: m, reading: make(chan struct{}, 1), silent: map[uuid.UUID]silence{}}
}

// keep takes over what the database said.
func (r *routes) keep(o Owners, asked time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if asked.Before(r.read) {
		return
	}
	r.owners, r.read = [NumShards]Lease{}, asked
	known := map[uuid.UUID]silence{}
	for _, l := range o.Leases {
		r.owners[l.Shard] = l
		if s, ok := r.silent[l.Owner]; ok {
			known[l.Owner] = s
		}
	}
	r.silent = known
}

// who gives the owners as they were at a moment, or later.
func (r *routes) who(ctx context.Context, since time.Time) ([NumShards]Lease, error) {
	for {
		r.mu.Lock()
		owners, fresh := r.owners, !r.read.IsZero() && !r.read.Before(since)
		r.mu.Unlock()
		if fresh {
			return owners, nil
		}
		select {
		case r.reading <- struct{}{}:
		case <-ctx.Done():
			return owners, ctx.Err()
		}
		err := r.ask(ctx, since)
		<-r.reading
		if err != nil {
			return owners, err
		}
	}
}

// ask reads the owners, unless somebody else has just done so.
func (r *routes) ask(ctx context.Context, since time.Time) error {
	r.mu.Lock()
	fresh := !r.read.IsZero() && !r.read.Before(since)
	r.mu.Unlock()
	if fresh {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, ownersWait)
	defer cancel()
	asked := time.Now()
	o, err := r.m.cfg.Store.Owners(ctx)
	if err != nil {
		return err
	}
	r.keep(o, asked)
	return nil
}

// note remembers whether an owner has answered.
func (r *routes) note(owner uuid.UUID, answered bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if answered {
		delete(r.silent, owner)
		return
	}
	s := silence{since: time.Now(), tried: time.Now()}
	if before, ok := r.silent[owner]; ok {
		s.since = before.since
	}
	r.silent[owner] = s
}

// silence says since when an owner does not answer; false when it does.
func (r *routes) silence(owner uuid.UUID) (silence, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.silent[owner]
	return s, ok
}

// Owner gives the other controller that holds a shard. A fault says that there
// is none, or none that can be called.
func (m *Manager) Owner(ctx context.Context, s Shard) (Lease, error) {
	return m.ownerSince(ctx, s, time.Now().Add(-ownersKept))
}

func (m *Manager) ownerSince(ctx context.Context, s Shard, since time.Time) (Lease, error) {
	owners, err := m.routes.who(ctx, since)
	if err != nil {
		return Lease{}, readFault(err)
	}
	l := owners[s]
	return l, m.callable(l)
}

// callable says why the owner of a lease cannot be asked, if so.
func (m *Manager) callable(l Lease) error {
	switch {
	case l.Owner == uuid.Nil() || l.Left <= 0:
		return notOwner("No controller owns this agent at the moment; nothing was done.")
	case l.Owner == m.cfg.Owner.ID:
		return notOwner("This controller has just taken the agent over and reads its queue; nothing was done.")
	case l.Addr == "" || l.Peer == uuid.Nil():
		return notOwner("The controller that owns this agent cannot be called by others: it is of an older version, or has no controller port; nothing was done.")
	}
	return nil
}

// silence says what to tell of an owner that does not answer.
func (l Lease) silence() error {
	return notOwner("The controller " + l.called() + ", which owns this agent, does not answer; nothing was done.")
}

func (l Lease) called() string {
	if l.Name == "" {
		return "at " + l.Addr
	}
	return l.Name + " at " + l.Addr
}

// holdsAll says whether this controller has loaded the shards of all of them.
func (m *Manager) holdsAll(subs []submission) bool {
	mine := m.mine.Load()
	for i := range subs {
		if mine&(1<<subs[i].shard) == 0 {
			return false
		}
	}
	return true
}

// route has submissions stored by whoever owns their agents, as long as
// TakeOverWait allows: an owner that does not answer is waited for, or its
// successor.
func (m *Manager) route(ctx context.Context, subs []submission) error {
	for i := range subs {
		subs[i].again = true
	}
	return m.routeSome(ctx, subs)
}

// routeSome does so for those that are marked.
func (m *Manager) routeSome(ctx context.Context, subs []submission) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Limits.TakeOverWait)
	defer cancel()
	var left []*submission
	for i := range subs {
		if subs[i].again {
			left = append(left, &subs[i])
		}
	}
	since := time.Now().Add(-ownersKept)
	for {
		began := time.Now()
		m.deal(ctx, left, since)
		left = slices.DeleteFunc(left, func(s *submission) bool { return !s.again })
		if len(left) == 0 || !rest(ctx, routePause) {
			return firstError(subs)
		}
		since = began
	}
}

// rest waits a moment; false when ctx has ended.
func rest(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// deal hands each submission to its owner, and notes what became of it. Those
// of one owner stay in order.
func (m *Manager) deal(ctx context.Context, list []*submission, since time.Time) {
	var here []*submission
	there := map[uuid.UUID][]*submission{}
	mine := m.mine.Load()
	owners, err := m.routes.who(ctx, since)
	for _, s := range list {
		l := owners[s.shard]
		switch {
		case mine&(1<<s.shard) != 0:
			here = append(here, s)
		case err != nil:
			if s.err == nil { // what was said before says more
				s.failed(errNotStored(), true)
			}
		default:
			if err := m.callable(l); err != nil {
				s.failed(err, true)
				continue
			}
			there[l.Owner] = append(there[l.Owner], s)
		}
	}
	var all sync.WaitGroup
	for _, group := range there {
		all.Go(func() { m.forward(ctx, owners[group[0].shard], group) })
	}
	if len(here) > 0 {
		for i, r := range m.storeHere(ctx, here) {
			here[i].settled(r)
		}
	}
	all.Wait()
}

// settled notes what became of the submission.
func (s *submission) settled(r result) {
	if r.err != nil {
		s.failed(r.err, fault.CodeOf(r.err) == codeNotOwner)
		return
	}
	s.ins.ID, s.replay, s.startedAt = r.id, r.replay, r.startedAt
	s.err, s.again = nil, false
}

// failed notes an error. After an answer was lost, only its success or a word
// about the key itself says more than that nobody knows.
func (s *submission) failed(err error, again bool) {
	if s.lost && fault.Is(err, fault.Unavailable) {
		err = errPeerUnknown()
	}
	s.err, s.again = err, again
}

// forward passes tasks on to their owner, part by part.
func (m *Manager) forward(ctx context.Context, to Lease, list []*submission) {
	for len(list) > 0 {
		n := part(list)
		if !m.forwardPart(ctx, to, list[:n]) {
			for _, s := range list[n:] {
				s.failed(to.silence(), true)
			}
			return
		}
		list = list[n:]
	}
}

// part gives how many of the submissions go into one call.
func part(list []*submission) int {
	size := 0
	for i, s := range list {
		if size += len(s.ins.Args); i > 0 && (i == peerItems || size > peerBytes) {
			return i
		}
	}
	return len(list)
}

// forwardPart makes one call; false when it makes no sense to go on with this
// owner.
func (m *Manager) forwardPart(ctx context.Context, to Lease, list []*submission) bool {
	wire := make([]PeerInsert, len(list))
	for i, s := range list {
		wire[i] = peerInsert(s)
	}
	got, err := m.cfg.Peers.Store(ctx, to, wire)
	if err == nil && len(got) != len(list) {
		err = errors.New("the answer is about another number of tasks")
	}
	word, said := errors.AsType[*fault.Error](err)
	_, unsent := errors.AsType[*UnsentError](err)
	m.routes.note(to.Owner, err == nil || said)
	m.metrics.forwarded(len(list), err)
	switch {
	case err == nil:
		for i, s := range list {
			s.settled(got[i].result())
			s.waiting = got[i].Waiting
		}
		return true
	case said:
		leaving := passes(word)
		for _, s := range list {
			s.failed(word, leaving)
		}
		return !leaving
	}
	if !unsent {
		m.log.Warn("the answer of another controller was lost", "controller", to.called(), "err", err)
	}
	for _, s := range list {
		if unsent {
			s.failed(to.silence(), true)
			continue
		}
		s.lost = true
		s.failed(errPeerUnknown(), s.ins.Key != nil) // under its key it may be sent again
	}
	return false
}

func (p *PeerStored) result() result {
	r := result{id: p.ID, replay: p.Replay, startedAt: p.StartedAt}
	if p.Err != nil {
		r.err = p.Err.fault()
	}
	return r
}

// cancelThere has the owner of the task's agent end it; errMoved = look again.
func (s *Service) cancelThere(ctx context.Context, shard Shard, id ID, actor string, since time.Time) (lost bool, err error) {
	to, err := s.m.ownerSince(ctx, shard, since)
	if err != nil {
		return false, err
	}
	err = s.m.cfg.Peers.Cancel(ctx, to, id, actor)
	_, said := errors.AsType[*fault.Error](err)
	_, unsent := errors.AsType[*UnsentError](err)
	s.m.routes.note(to.Owner, err == nil || said)
	if err == nil || said {
		return false, err
	}
	return !unsent, to.silence()
}

// explain fills in why tasks are not completed. Those of other controllers'
// agents are explained by their owners, if they answer soon.
func (s *Service) explain(ctx context.Context, list ...*Task) {
	var there []*Task
	for _, t := range list {
		t.Waiting = nil
	}
	s.m.explainAll(list)
	for _, t := range list {
		if t.Waiting != nil && t.Waiting.Cause == CauseElsewhere {
			there = append(there, t)
		}
	}
	if len(there) == 0 || s.m.cfg.Peers == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, explainWait)
	defer cancel()
	owners, err := s.m.routes.who(ctx, time.Now().Add(-ownersKept))
	if err != nil {
		return
	}
	groups := map[uuid.UUID][]*Task{}
	for _, t := range there {
		l := owners[ShardOf(t.Agent.ID)]
		s.m.elsewhere(t, l)
		quiet, silent := s.m.routes.silence(l.Owner)
		if s.m.callable(l) == nil && (!silent || time.Since(quiet.tried) > silenceQuiet) {
			groups[l.Owner] = append(groups[l.Owner], t)
		}
	}
	var all sync.WaitGroup
	for _, group := range groups {
		all.Go(func() { s.m.explainThere(ctx, owners[ShardOf(group[0].Agent.ID)], group) })
	}
	all.Wait()
}

// explainThere asks one owner about its tasks.
func (m *Manager) explainThere(ctx context.Context, to Lease, list []*Task) {
	wire := make([]PeerTask, len(list))
	for i, t := range list {
		wire[i] = PeerTask{
			ID: t.ID, Agent: t.Agent.Num, State: t.State, Attempt: t.Attempt, Timeout: t.Timeout,
			CreatedAt: t.CreatedAt, NotBefore: t.NotBefore, StartedAt: t.StartedAt,
		}
	}
	got, err := m.cfg.Peers.Explain(ctx, to, wire)
	_, said := errors.AsType[*fault.Error](err)
	m.routes.note(to.Owner, err == nil || said)
	for i, t := range list {
		if err == nil && i < len(got) && got[i] != nil {
			t.Waiting = got[i]
		} else if err != nil && !said {
			m.elsewhere(t, to)
		}
	}
}
