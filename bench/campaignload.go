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
)

const (
	// batchLoaders and singleLoaders submit; waitLoaders wait for what others
	// have submitted.
	batchLoaders  = 6
	singleLoaders = 6
	waitLoaders   = 6
	// mostInBatch is the size of the largest batch.
	mostInBatch = 250
	// mostOpen is how many tasks may be open before the clients pause.
	mostOpen = 20_000
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
	recent  chan int     // tokens that waiters may wait for
	streams []*streamWatch
	missing atomic.Int64 // waiters that were never told
}

func (c *campaign) startLoad(ctx context.Context) (*load, error) {
	ctx, cancel := context.WithCancel(ctx)
	l := &load{c: c, ending: make(chan struct{}), stop: cancel, recent: make(chan int, 4096)}
	for i := range batchLoaders + singleLoaders {
		s := &sender{load: l, chance: rand.New(rand.NewPCG(c.plan.seed, uint64(i+1))), batches: i < batchLoaders}
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
		if n, err := l.c.openTasks(ctx); err == nil {
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
	if n := l.missing.Load(); n > 0 {
		l.c.book.strange(fmt.Sprintf("%d waiters were never told of an end", n))
	}
}

// may says whether the next tasks may be sent now: as many tasks as the plan
// has for the faults so far, and not too many open ones.
func (l *load) may() bool {
	c := l.c
	if l.open.Load() > mostOpen {
		return false
	}
	done := c.book.acknowledged()
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
	at      int // controller that answered last
	n       int
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
}

// submit sends a batch or a single task until its outcome is known, or, now and
// then, leaves it unknown.
func (s *sender) submit(ctx context.Context) {
	n := 1
	if s.batches {
		n = 1 + s.chance.IntN(mostInBatch)
	}
	entries := make([]entry, n)
	for i := range entries {
		entries[i] = entry{Agent: s.agent(), Once: s.chance.IntN(3) == 0}
	}
	first := s.load.c.book.reserve(entries)
	tasks := make([]task, n)
	for i, e := range entries {
		tasks[i] = s.task(first+i, e)
	}
	var body any = tasks[0]
	path := "/api/v1/tasks"
	waits := !s.batches && s.chance.IntN(4) == 0
	switch {
	case s.batches:
		body, path = map[string]any{"tasks": tasks}, "/api/v1/tasks/batch"
	case waits:
		path += "?wait=5s"
	}
	data, err := json.Marshal(body)
	if err != nil {
		s.load.c.book.strange(err.Error())
		return
	}
	key := fmt.Sprintf("campaign-%d", first)
	for ctx.Err() == nil {
		known := s.try(ctx, path, key, data, first, n)
		if known || s.chance.IntN(100) < abandoned {
			return
		}
		_ = wait(ctx, time.Duration(20+s.chance.IntN(200))*time.Millisecond) // the loop looks at ctx
	}
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

// task makes the request; most take no time, some a little, few long.
func (s *sender) task(token int, e entry) task {
	a := s.load.c.agents[e.Agent]
	ms := 0
	switch n := s.chance.IntN(10_000); {
	case n < 2 && !s.load.c.nearlyOver():
		ms = 3_000 + s.chance.IntN(12_000)
	case n < 150:
		ms = 50 + s.chance.IntN(300)
	case n < 1000:
		ms = 1 + s.chance.IntN(20)
	}
	t := task{Agent: a.id, Kind: "core.echo", Args: work{Token: token, Millis: ms}, Timeout: "60s"}
	if a.real {
		t.Kind, t.Timeout = "cmd.run", "2m"
		t.Args = map[string]any{"program": "effect", "args": map[string]any{
			"token": token, "seconds": strconv.FormatFloat(float64(ms)/1000, 'f', 3, 64),
		}}
	} else if e.Once {
		t.Delivery = "once"
	}
	return t
}

// nearlyOver says that no long tasks are to begin any more: the time until the
// queue is empty is that of the product, not theirs.
func (c *campaign) nearlyOver() bool {
	return int(c.faults.kills.Load()) > c.plan.kills*9/10
}

// try sends once. It says whether the outcome is known.
func (s *sender) try(ctx context.Context, path, key string, body []byte, first, n int) (known bool) {
	c := s.load.c
	status, answer, err := c.post(ctx, s.client, s.at, path, key, body)
	if err != nil || status >= 500 || status == http.StatusTooManyRequests || status == http.StatusConflict {
		s.at = (s.at + 1) % len(c.controllers)
		return false
	}
	if status != http.StatusAccepted && status != http.StatusOK {
		c.book.strange(fmt.Sprintf("POST %s answered %d: %.300s", path, status, answer))
		return true
	}
	ids, outcome, err := idsOf(answer, s.batches)
	if err != nil || len(ids) != n {
		c.book.strange(fmt.Sprintf("POST %s gave %d ids for %d tasks: %v", path, len(ids), n, err))
		return true
	}
	c.book.acknowledge(first, ids)
	if outcome != "" {
		c.book.told(first, outcome)
	}
	if s.n++; s.n%4 == 0 {
		select {
		case s.load.recent <- first:
		default:
		}
	}
	return true
}

func (c *campaign) post(ctx context.Context, client *http.Client, at int, path, key string, body []byte) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.controllers[at].url+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
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
	for token := range w.load.recent {
		if err := w.await(ctx, token); err != nil {
			w.load.missing.Add(1)
		}
	}
}

func (w *awaiter) await(ctx context.Context, token int) error {
	c := w.load.c
	c.book.mu.Lock()
	id := c.book.entries[token].ID
	c.book.mu.Unlock()
	for {
		outcome, err := w.ask(ctx, id)
		if err == nil && outcome != "" {
			c.book.told(token, outcome)
			return nil
		}
		if err != nil {
			w.at++
			if err := wait(ctx, 100*time.Millisecond); err != nil {
				return err
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
		c.book.strange(fmt.Sprintf("task %d was acknowledged, but is not found", id))
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
