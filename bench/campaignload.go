package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"headgate/internal/testkit/history"
)

const (
	// batchLoaders and singleLoaders submit; waitLoaders wait for what others
	// have submitted.
	batchLoaders  = 6
	singleLoaders = 6
	waitLoaders   = 6
	// mostInBatch is the size of the largest batch.
	mostInBatch = 250
	// mostOpen is how many tasks may be open before the clients pause, and
	// openAtEnd how many while the last faults are made.
	mostOpen  = 20_000
	openAtEnd = 1000
	// submitTimeout bounds one try; the controller may be frozen.
	submitTimeout = 8 * time.Second
	// abandoned is the part of unknown outcomes that is never asked again, in
	// percent: such a task may be there, once, or not.
	abandoned = 5
)

// load is all clients of a campaign.
type load struct {
	c                         *campaign
	ending                    chan struct{} // closed when nothing new is to be sent
	senders, awaiters, others sync.WaitGroup

	stop    context.CancelFunc
	open    atomic.Int64 // tasks not completed, as of a moment ago
	counted atomic.Int64 // tasks acknowledged until then
	recent  chan int64   // tasks that waiters may wait for
	streams []*streamWatch
}

func (c *campaign) startLoad(ctx context.Context) (*load, error) {
	ctx, cancel := context.WithCancel(ctx)
	l := &load{c: c, ending: make(chan struct{}), stop: cancel, recent: make(chan int64, 4096)}
	for i := range batchLoaders + singleLoaders {
		s := &sender{load: l, chance: rand.New(rand.NewPCG(c.plan.seed, uint64(i+1))), batches: i < batchLoaders, number: i}
		s.client = &http.Client{Timeout: submitTimeout, Transport: &http.Transport{}}
		l.senders.Go(func() { s.run(ctx) })
	}
	for i := range waitLoaders {
		w := &awaiter{load: l, client: &http.Client{Timeout: 25 * time.Second, Transport: &http.Transport{}}, at: i}
		l.awaiters.Go(func() { w.run(ctx) })
	}
	for i := range c.controllers {
		w := &streamWatch{load: l, controller: i}
		l.streams = append(l.streams, w)
		l.others.Go(func() { w.run(ctx) })
	}
	l.others.Go(func() { l.count(ctx) })
	return l, nil
}

// count keeps an eye on the backlog, as an operator's monitoring does.
func (l *load) count(ctx context.Context) {
	for wait(ctx, time.Second) == nil {
		done := l.c.book.acknowledged()
		if n, _, err := l.c.openTasks(ctx); err == nil {
			l.counted.Store(int64(done))
			l.open.Store(int64(n))
		}
	}
}

// finish lets the senders end what they have begun, and nothing new begin.
func (l *load) finish() {
	close(l.ending)
	l.senders.Wait()
}

// answered lets everybody who waits for a task have an answer.
func (l *load) answered() {
	close(l.recent)
	timer := time.AfterFunc(l.c.plan.settle, l.stop)
	l.awaiters.Wait()
	timer.Stop()
}

// leave ends all other clients.
func (l *load) leave() {
	l.stop()
	l.others.Wait()
}

// may says whether the next tasks may be sent now: as many tasks as the plan
// has for the faults so far, and not too many open ones.
func (l *load) may() bool {
	c := l.c
	done := c.book.acknowledged()
	most := c.plan.open
	if c.nearlyOver() {
		most = min(most, openAtEnd)
	}
	// What was acknowledged since they were counted may be open too.
	if int(l.open.Load())+done-int(l.counted.Load()) > most {
		return false
	}
	if c.plan.rate > 0 {
		return float64(done) < c.plan.rate*time.Since(c.faults.began).Seconds()
	}
	return done < c.plan.tasks*(int(c.faults.kills.Load())+6)/max(c.plan.kills, 1)
}

// sender is one client that submits.
type sender struct {
	load    *load
	chance  *rand.Rand
	client  *http.Client
	batches bool
	number  int // among the senders
	at      int // controller that answered last
	n       int // requests so far
}

func (s *sender) run(ctx context.Context) {
	for {
		for !s.load.may() {
			select {
			case <-s.load.ending:
				return
			case <-ctx.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
		select {
		case <-s.load.ending:
			return
		case <-ctx.Done():
			return
		default:
		}
		s.submit(ctx)
	}
}

// task is a task as it is sent.
type task struct {
	Agent    string `json:"agent"`
	Kind     string `json:"kind"`
	Args     any    `json:"args"`
	Timeout  string `json:"timeout"`
	Delivery string `json:"delivery,omitempty"`
	once     bool
}

// submission is one request of a client.
type submission struct {
	path  string
	key   string
	body  []byte
	op    int64 // of the first task in the book
	tasks int
	batch bool
}

// submit sends a batch or a single task until its outcome is known, or, now and
// then, leaves it unknown.
func (s *sender) submit(ctx context.Context) {
	sub, err := s.compose()
	if err != nil {
		s.load.c.book.strange("%v", err)
		return
	}
	for ctx.Err() == nil {
		if s.try(ctx, sub) {
			return
		}
		if s.chance.IntN(100) < abandoned {
			break
		}
		_ = wait(ctx, time.Duration(20+s.chance.IntN(200))*time.Millisecond) // the loop looks at ctx
	}
	for i := range sub.tasks {
		s.load.c.book.Unanswered(sub.op+int64(i), "left unknown")
	}
}

// compose makes a request and writes it into the book.
func (s *sender) compose() (*submission, error) {
	book := &s.load.c.book
	s.n++
	sub := &submission{path: "/api/v1/tasks", key: fmt.Sprintf("%d-%d", s.number, s.n), tasks: 1, batch: s.batches}
	if s.batches {
		sub.tasks = 1 + s.chance.IntN(mostInBatch)
	}
	tasks := make([]task, sub.tasks)
	notes := make([]history.Submission, sub.tasks)
	for i := range tasks {
		tasks[i] = s.task()
		notes[i] = history.Submission{Agent: tasks[i].Agent, Key: sub.key, Once: tasks[i].once}
		if s.batches {
			notes[i].Key += "#" + strconv.Itoa(i)
		}
	}
	var body any = tasks[0]
	switch {
	case s.batches:
		body, sub.path = map[string]any{"tasks": tasks}, "/api/v1/tasks/batch"
	case s.chance.IntN(4) == 0:
		sub.path += "?wait=5s"
	}
	var err error
	sub.body, err = json.Marshal(body)
	sub.op = book.SubmitAll(notes...)
	return sub, err
}

// agent chooses an agent; those of their own start a program for each task and
// get few.
func (s *sender) agent() int {
	crewed := s.load.c.plan.crews * s.load.c.plan.agents
	if reals := s.load.c.plan.reals; crewed == 0 || reals > 0 && s.chance.IntN(400) == 0 {
		return crewed + s.chance.IntN(reals)
	}
	return s.chance.IntN(crewed)
}

// task makes a task; most take no time, some a little, few long.
func (s *sender) task() task {
	a := s.load.c.agents[s.agent()]
	ms := 0
	switch n := s.chance.IntN(10_000); {
	case n < 2 && !s.load.c.nearlyOver():
		ms = 3_000 + s.chance.IntN(12_000)
	case n < 150:
		ms = 50 + s.chance.IntN(300)
	case n < 1000:
		ms = 1 + s.chance.IntN(20)
	}
	t := task{Agent: a.id, Kind: "core.echo", Args: work{Millis: ms}, Timeout: "60s"}
	if a.real {
		t.Kind, t.Timeout, t.once = "cmd.run", "2m", true
		t.Args = map[string]any{"program": "effect", "args": map[string]any{
			"agent": a.id, "seconds": strconv.FormatFloat(float64(ms)/1000, 'f', 3, 64),
		}}
	} else if s.chance.IntN(3) == 0 {
		t.Delivery, t.once = "once", true
	}
	return t
}

// nearlyOver says that no long tasks are to begin any more, and no backlog is to
// grow: the time until the queue is empty is that of the product, not theirs.
func (c *campaign) nearlyOver() bool {
	return int(c.faults.kills.Load()) > c.plan.kills*9/10
}

// try sends once. It says whether the outcome is known.
func (s *sender) try(ctx context.Context, sub *submission) (known bool) {
	c := s.load.c
	status, answer, err := c.post(ctx, s.client, s.at, sub)
	if err != nil || status >= 500 || status == http.StatusTooManyRequests || status == http.StatusConflict {
		s.at = (s.at + 1) % len(c.controllers)
		return false
	}
	if status != http.StatusAccepted && status != http.StatusOK {
		c.book.strange("POST %s answered %d: %.300s", sub.path, status, answer)
		return true
	}
	ids, outcome, err := idsOf(answer, sub.batch)
	if err != nil || len(ids) != sub.tasks {
		c.book.strange("POST %s gave %d ids for %d tasks: %v", sub.path, len(ids), sub.tasks, err)
		return true
	}
	c.book.AckedAll(sub.op, ids, status)
	c.book.acked.Add(int64(len(ids)))
	if outcome != "" {
		c.book.Seen(history.Now(), ids[0], history.StateCompleted, outcome)
	}
	if s.n%4 == 0 {
		select {
		case s.load.recent <- ids[0]:
		default:
		}
	}
	return true
}

func (c *campaign) post(ctx context.Context, client *http.Client, at int, sub *submission) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.controllers[at].url+sub.path, bytes.NewReader(sub.body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", sub.key)
	res, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	return res.StatusCode, data, err
}

// answered is what is read of a task.
type answered struct {
	ID      string  `json:"id"`
	State   string  `json:"state"`
	Outcome *string `json:"outcome"`
}

func idsOf(answer []byte, batch bool) (ids []int64, outcome string, err error) {
	var body struct {
		answered
		Items []answered `json:"items"`
	}
	if err := json.Unmarshal(answer, &body); err != nil {
		return nil, "", err
	}
	items := body.Items
	if !batch {
		items = []answered{body.answered}
		if body.Outcome != nil {
			outcome = *body.Outcome
		}
	}
	for _, t := range items {
		id, err := strconv.ParseInt(t.ID, 10, 64)
		if err != nil {
			return nil, "", err
		}
		ids = append(ids, id)
	}
	return ids, outcome, nil
}

// awaiter waits for tasks until it is told of their end.
type awaiter struct {
	load   *load
	client *http.Client
	at     int
}

func (w *awaiter) run(ctx context.Context) {
	for id := range w.load.recent {
		w.await(ctx, id)
	}
}

// await asks until it is told; whoever gives up before that was not told in
// time.
func (w *awaiter) await(ctx context.Context, id int64) {
	book := &w.load.c.book
	waiter := book.await(id)
	for {
		outcome, err := w.ask(ctx, id)
		if err == nil && outcome != "" {
			book.Told(waiter, id, outcome)
			return
		}
		if err != nil {
			w.at++
			if wait(ctx, 100*time.Millisecond) != nil {
				return
			}
		}
	}
}

func (w *awaiter) ask(ctx context.Context, id int64) (outcome string, err error) {
	c := w.load.c
	url := fmt.Sprintf("%s/api/v1/tasks/%d?wait=20s", c.controllers[w.at%len(c.controllers)].url, id)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	res, err := w.client.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	var t answered
	switch {
	case res.StatusCode == http.StatusNotFound:
		c.book.strange("task %d was acknowledged, but is not found", id)
		return "", errors.New("not found")
	case res.StatusCode != http.StatusOK:
		return "", fmt.Errorf("answer %d", res.StatusCode)
	}
	if err := json.NewDecoder(res.Body).Decode(&t); err != nil {
		return "", err
	}
	if t.Outcome != nil {
		outcome = *t.Outcome
	}
	return outcome, nil
}
