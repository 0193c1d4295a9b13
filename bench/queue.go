package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/internal/store"
	"headgate/migrations"
	"headgate/tasks"
)

const (
	// queueAgents share the tasks of the queue alone.
	queueAgents = 1000
	// queueClients each have one submission under way.
	queueClients = 256
	// queueReadyWait is until the Manager holds its shards.
	queueReadyWait = 30 * time.Second
	// queueDrainWait is until the last result of a load is stored.
	queueDrainWait = time.Minute
	// tendEvery is how often the controller tends its queue.
	tendEvery = 10 * time.Second
	// deepQueue is more than any run makes.
	deepQueue = 100_000_000
	// controllerGC is the target of the collector in the controller; both sides
	// of a comparison get it.
	controllerGC = 200
)

// likeController sets the pace of the collector as the controller does; what
// it gives sets it back.
func likeController() (back func()) {
	before := debug.SetGCPercent(controllerGC)
	return func() { debug.SetGCPercent(before) }
}

// queue is the task queue alone: the product's Service, Manager and store on a
// database of their own, with agents that are a function which answers at once.
type queue struct {
	dsn     string
	db      *store.DB
	manager *tasks.Manager
	service *tasks.Service
	agents  *instantAgents
	stop    context.CancelFunc
	ended   chan error // gives twice: when the Manager and when the upkeep has ended
}

// newQueue makes it on a database of its own. Absent agents have no sessions,
// and tasks pile up without a limit.
func (c *cluster) newQueue(ctx context.Context, absent bool) (*queue, error) {
	q := &queue{ended: make(chan error, 2)}
	var limits tasks.Limits
	if absent {
		limits = tasks.Limits{AgentDepth: deepQueue, TotalDepth: deepQueue}
	}
	var err error
	if q.dsn, err = c.newDatabase(ctx, "queue_alone"); err != nil {
		return nil, err
	}
	if q.db, err = store.Open(ctx, store.Config{DSN: q.dsn}); err != nil {
		return nil, err
	}
	if err := errors.Join(q.db.CheckDurability(ctx), migrations.Up(ctx, q.db.SQL())); err != nil {
		return nil, errors.Join(err, q.db.Close())
	}
	if q.agents, err = enrolInstant(ctx, q.db, queueAgents); err != nil {
		return nil, errors.Join(err, q.db.Close())
	}
	q.manager = tasks.NewManager(tasks.Config{
		Store: q.db, Runner: q.agents, Owner: tasks.Owner{ID: uuid.NewV4(), Name: "bench"},
		Loops: min(4, runtime.GOMAXPROCS(0)), Limits: limits,
	})
	q.agents.sessions, q.agents.absent = q.manager, absent
	q.service = tasks.NewService(tasks.ServiceConfig{Manager: q.manager, Kinds: kinds.Default()})
	for _, a := range q.agents.list {
		q.manager.AgentChanged(a)
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx)) // close ends it
	q.stop = stop
	go func() { q.ended <- q.manager.Run(run) }()
	go func() { q.ended <- q.tend(run) }()
	err = waitUntil(ctx, queueReadyWait, "the queue to hold its shards", func() (bool, error) { return len(q.manager.Ready()) == 0, nil })
	if err != nil {
		return nil, errors.Join(err, q.close())
	}
	return q, nil
}

func (q *queue) close() error {
	q.stop()
	return errors.Join(<-q.ended, <-q.ended, q.db.Close())
}

// tend keeps the queue small, as the controller does.
func (q *queue) tend(ctx context.Context) error {
	for wait(ctx, tendEvery) == nil {
		if err := q.db.TendQueue(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// instantAgents is a fleet without a network: each agent has finished a task
// when it has got it.
type instantAgents struct {
	list     []tasks.Agent
	byName   map[string]tasks.Agent
	sessions tasks.Sessions
	absent   bool // none has a session: tasks wait

	mu sync.Mutex
	up map[tasks.Shard]int64 // epochs under which the agents of a shard are connected
}

// enrolInstant stores agents as pairing would.
func enrolInstant(ctx context.Context, db *store.DB, n int) (*instantAgents, error) {
	f := &instantAgents{list: make([]tasks.Agent, n), byName: map[string]tasks.Agent{}, up: map[tasks.Shard]int64{}}
	err := inParallel(pairWorkers, n, func(i int) error {
		a := fleet.Agent{ID: uuid.NewV4(), Name: fmt.Sprintf("agent-%05d", i), Addresses: []string{"127.0.0.1:1"}}
		copy(a.SPKI[:], a.ID[:])
		a, err := db.InsertAgent(ctx, a)
		if err == nil {
			_, err = db.ConfirmAgent(ctx, a.ID)
		}
		f.list[i] = tasks.Agent{Num: a.Num, ID: a.ID, Name: a.Name}
		return err
	})
	for _, a := range f.list {
		f.byName[a.Name] = a
	}
	return f, err
}

// Own implements tasks.Runner.
func (f *instantAgents) Own(leases []tasks.Lease) {
	if f.absent {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	fresh := map[tasks.Shard]bool{}
	for _, l := range leases {
		fresh[l.Shard] = f.up[l.Shard] != l.Epoch
		f.up[l.Shard] = l.Epoch
	}
	for _, a := range f.list {
		if fresh[a.Shard()] {
			f.sessions.SessionUp(tasks.Session{Agent: a.Num})
		}
	}
}

// Lookup implements tasks.Runner.
func (f *instantAgents) Lookup(ref string) (tasks.Agent, error) {
	a, ok := f.byName[ref]
	if !ok {
		return a, fmt.Errorf("there is no agent %q", ref)
	}
	return a, nil
}

// Execute implements tasks.Runner: the task has succeeded.
func (f *instantAgents) Execute(x tasks.Assignment) {
	f.sessions.Final(x.Agent, tasks.Final{
		Ref: x.Ref(), Epoch: x.Epoch, Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(x.Args)},
	})
}

// The rest of tasks.Runner has nothing to do.
func (*instantAgents) Cancel(tasks.AgentNum, tasks.Ref, string) {}
func (*instantAgents) Forget(tasks.AgentNum, ...tasks.ID)       {}
func (*instantAgents) AckOutput(tasks.AgentNum, tasks.Ref, int) {}
func (*instantAgents) Reconnect(tasks.AgentNum, string)         {}
func (*instantAgents) Quarantine(tasks.AgentNum, string)        {}

// queueLoad is clients that submit single tasks, each the next one when the
// last is on disk.
type queueLoad struct {
	q         *queue
	stop      context.CancelFunc
	wg        sync.WaitGroup
	next      atomic.Int64
	submitted atomic.Int64
	base      int64 // completed before
	once      sync.Once
	err       error
}

func (q *queue) load(ctx context.Context) *queueLoad {
	ctx, cancel := context.WithCancel(ctx)
	l := &queueLoad{q: q, stop: cancel, base: q.completed()}
	for range queueClients {
		l.wg.Go(func() {
			for ctx.Err() == nil {
				agent := q.agents.list[int(l.next.Add(1))%len(q.agents.list)].Name
				// A submission that has begun is seen to its end, so that the count is right.
				_, err := q.service.Submit(context.WithoutCancel(ctx),
					tasks.Submission{Agent: agent, Kind: kinds.Echo, Args: json.RawMessage(echoArgs)}, "token:bench", tasks.Idempotency{})
				if err != nil {
					l.once.Do(func() { l.err = err })
					return
				}
				l.submitted.Add(1)
			}
		})
	}
	return l
}

func (q *queue) completed() int64 { return q.manager.Stats().Completed[tasks.Succeeded] }

// during gives how many tasks were completed while d passed, and in what time.
func (l *queueLoad) during(ctx context.Context, d time.Duration) (n int64, took time.Duration, err error) {
	began, before := time.Now(), l.q.completed()
	if err := wait(ctx, d); err != nil {
		return 0, 0, err
	}
	return l.q.completed() - before, time.Since(began), nil
}

// end stops the clients and fails unless every acknowledged task is completed,
// and the tables say the same.
func (l *queueLoad) end(ctx context.Context) error {
	l.stop()
	l.wg.Wait()
	if l.err != nil {
		return l.err
	}
	want := l.base + l.submitted.Load()
	return waitUntil(ctx, queueDrainWait, fmt.Sprintf("%d tasks to be completed", want), func() (bool, error) {
		have := l.q.completed()
		if have > want {
			return false, fmt.Errorf("%d tasks were submitted, but %d are completed", want, have)
		}
		return have == want, nil
	})
}

// check compares the tables with what was submitted.
func (q *queue) check(ctx context.Context, open, done int64) error {
	db, err := openDB(q.dsn)
	if err != nil {
		return err
	}
	defer release(db)
	var waiting, ended int64
	err = db.QueryRowContext(ctx, `SELECT (SELECT count(*) FROM agent_queue), (SELECT count(*) FROM agent_result)`).Scan(&waiting, &ended)
	if err != nil {
		return err
	}
	if waiting != open || ended != done {
		return fmt.Errorf("the tables hold %d open and %d completed tasks; %d and %d were acknowledged", waiting, ended, open, done)
	}
	return nil
}
