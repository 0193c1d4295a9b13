package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// What a database that goes away for a minute may cost.
const (
	awayTime    = time.Minute
	awayCalm    = 10 * time.Second // before, to know the usual rate
	awayAfter   = 20 * time.Second
	awayClients = 32
	awayAgents  = 100
	awayPause   = 50 * time.Millisecond // after a refusal
	awayTimeout = 30 * time.Second      // of one request
	// backLimit is from the moment the server answers until nine tenths of the
	// usual rate are acknowledged again, saidLimit until readiness names it.
	backLimit = 5 * time.Second
	saidLimit = 10 * time.Second
)

// awayLoad submits over the controller port, each task again with its key
// until it is acknowledged.
type awayLoad struct {
	client *http.Client
	base   string
	token  string
	agents []string

	mu      sync.Mutex // guards what follows
	acked   map[string]int64
	times   []time.Time // of acknowledgements
	refused int
	odd     map[string]int // answers that are neither, and how often
}

// chaosAway stops PostgreSQL for a minute under load.
func chaosAway(ctx context.Context, b *bench) (err error) {
	dir, err := b.newDir()
	if err != nil {
		return err
	}
	db := newDatabase(dir)
	if err := db.start(ctx); err != nil {
		return errors.Join(err, b.removeDir(dir))
	}
	r := &rig{bench: b, dir: dir, extra: []string{"--database-url", db.now().DSN()}}
	defer func() { // close removes the folder, which the server uses until then
		err = errors.Join(err, r.stopUp(), db.now().Stop(context.WithoutCancel(ctx)), r.close())
	}()
	if err := r.startUp(ctx); err != nil {
		return err
	}
	if err := r.simulate(ctx, awayAgents); err != nil {
		return err
	}
	return r.databaseAway(ctx, db)
}

func (r *rig) databaseAway(ctx context.Context, db *database) error {
	l, err := r.awayLoad()
	if err != nil {
		return err
	}
	loaded, stop := context.WithCancel(ctx)
	var clients sync.WaitGroup
	for i := range awayClients {
		clients.Go(func() { l.run(loaded, i) })
	}
	defer clients.Wait()
	defer stop()
	began := time.Now()
	if err := wait(ctx, awayCalm); err != nil {
		return err
	}
	gone := time.Now()
	usual := l.rate(began.Add(awayCalm/5), gone)
	if err := db.end(syscall.SIGINT); err != nil { // a fast stop
		return err
	}
	said, err := l.saidSo(ctx, gone)
	if err != nil {
		return err
	}
	if err := wait(ctx, time.Until(gone.Add(awayTime))); err != nil {
		return err
	}
	if err := db.start(ctx); err != nil {
		return err
	}
	there := time.Now()
	if err := wait(ctx, awayAfter); err != nil {
		return err
	}
	back := l.backAfter(there, usual)
	stop()
	clients.Wait()
	if err := r.drained(ctx); err != nil {
		return err
	}
	return r.judgeAway(ctx, l, usual, said, back)
}

func (r *rig) judgeAway(ctx context.Context, l *awayLoad, usual float64, said, back time.Duration) error {
	b := r.bench
	lost, doubled, failed, err := r.compareAway(ctx, l)
	if err != nil {
		return err
	}
	odd := 0
	for what, n := range l.odd {
		b.note("database away: %d times %s", n, what)
		odd += n
	}
	b.note("database away: %s acknowledged a second before, %d in all, %d refused", decimal(usual), len(l.acked), l.refused)
	if l.refused == 0 {
		return errors.New("nothing was refused while the database was away")
	}
	return errors.Join(
		b.hold("database_away_readyz_s", said.Seconds(), saidLimit.Seconds(), "s"),
		b.hold("database_away_back_s", back.Seconds(), backLimit.Seconds(), "s"),
		b.hold("database_away_other_answers", float64(odd), 0, "answers"),
		b.hold("database_away_lost", float64(lost), 0, "tasks"),
		b.hold("database_away_doubled", float64(doubled), 0, "tasks"),
		b.hold("database_away_failed", float64(failed), 0, "tasks"),
	)
}

func (r *rig) awayLoad() (*awayLoad, error) {
	t, err := r.controllerTarget()
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(t.CA)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}, MaxIdleConnsPerHost: awayClients}
	return &awayLoad{
		client: &http.Client{Transport: tr, Timeout: awayTimeout}, base: r.run.ControllerURL, token: t.Token, agents: r.ids,
		acked: map[string]int64{}, odd: map[string]int{},
	}, nil
}

func (l *awayLoad) run(ctx context.Context, client int) {
	for n := 0; ; n++ {
		key := fmt.Sprintf("away-%d-%d", client, n)
		for !l.submit(ctx, key, l.agents[(client+n*awayClients)%len(l.agents)]) {
			if wait(ctx, awayPause) != nil {
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// submit says whether the task was acknowledged. A request that has begun is
// ended, so that what it stored is known.
func (l *awayLoad) submit(ctx context.Context, key, agent string) bool {
	if ctx.Err() != nil {
		return false
	}
	body := fmt.Sprintf(`{"agent":%q,"kind":"core.echo","args":%s}`, agent, echoArgs)
	req, err := http.NewRequestWithContext(context.WithoutCancel(ctx), http.MethodPost, l.base+"/api/v1/tasks", strings.NewReader(body))
	if err != nil {
		return false
	}
	req.Header.Set("Authorization", "Bearer "+l.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	res, err := l.client.Do(req)
	if err != nil {
		l.strange("no answer: " + err.Error())
		return false
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		l.strange("half an answer: " + err.Error())
		return false
	}
	var task struct {
		ID int64 `json:"id,string"`
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if res.StatusCode < http.StatusMultipleChoices {
		if err := json.Unmarshal(answer, &task); err == nil {
			l.acked[key] = task.ID
			l.times = append(l.times, time.Now())
			return true
		}
	}
	if res.StatusCode == http.StatusServiceUnavailable && res.Header.Get("Retry-After") != "" {
		l.refused++
	} else {
		l.odd[fmt.Sprintf("%d %s", res.StatusCode, bytes.TrimSpace(answer[:min(len(answer), 200)]))]++
	}
	return false
}

func (l *awayLoad) strange(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.odd[what]++
}

// rate gives acknowledgements per second in a time.
func (l *awayLoad) rate(from, to time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, at := range l.times {
		if at.After(from) && at.Before(to) {
			n++
		}
	}
	return float64(n) / to.Sub(from).Seconds()
}

// backAfter gives how long after a moment the first second begins in which the
// rate is what it was.
func (l *awayLoad) backAfter(there time.Time, usual float64) time.Duration {
	for d := time.Duration(0); d < awayAfter-time.Second; d += 100 * time.Millisecond {
		if l.rate(there.Add(d), there.Add(d+time.Second)) >= 0.9*usual {
			return d
		}
	}
	return awayAfter
}

// saidSo gives how long it takes until readiness names the database.
func (l *awayLoad) saidSo(ctx context.Context, gone time.Time) (time.Duration, error) {
	err := waitUntil(ctx, awayTime, "readiness to name the database", func() (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, l.base+"/readyz", http.NoBody)
		if err != nil {
			return false, err
		}
		res, err := l.client.Do(req)
		if err != nil {
			return false, err
		}
		defer res.Body.Close()
		answer, err := io.ReadAll(res.Body)
		return res.StatusCode == http.StatusServiceUnavailable && bytes.Contains(answer, []byte(`"condition":"database"`)), err
	})
	return time.Since(gone), err
}

// compareAway looks for each acknowledged task, and for those that are there
// twice.
func (r *rig) compareAway(ctx context.Context, l *awayLoad) (lost, doubled, failed int, err error) {
	db, err := openDB(r.run.DatabaseURL)
	if err != nil {
		return 0, 0, 0, err
	}
	defer release(db)
	rows, err := db.QueryContext(ctx, `SELECT id, coalesce(idem_key, ''), coalesce(outcome, '') FROM agent_task_view`)
	if err != nil {
		return 0, 0, 0, err
	}
	defer rows.Close()
	ids, keys := map[int64]bool{}, map[string]bool{}
	for rows.Next() {
		var id int64
		var key, outcome string
		if err := rows.Scan(&id, &key, &outcome); err != nil {
			return 0, 0, 0, err
		}
		ids[id] = true
		if keys[key] {
			doubled++
		}
		keys[key] = true
		if outcome != "succeeded" {
			failed++
		}
	}
	for _, id := range l.acked {
		if !ids[id] {
			lost++
		}
	}
	return lost, doubled, failed, rows.Err()
}
