package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"headgate/internal/kinds"
	"headgate/internal/localpg"
	"headgate/internal/testkit"
	"headgate/tasks"
)

// submitters submit tasks all the time, each again with its key until it is
// acknowledged.
type submitters struct {
	caller *caller
	agent  string
	stop   chan struct{}
	ended  sync.WaitGroup

	mu      sync.Mutex // guards what follows
	acked   map[string]tasks.ID
	keys    int
	refused map[int]int // answers by status
	odd     []string
}

func (c *caller) submitters(agent string, n int) *submitters {
	s := &submitters{caller: c, agent: agent, stop: make(chan struct{}), acked: map[string]tasks.ID{}, refused: map[int]int{}}
	for range n {
		s.ended.Go(s.run)
	}
	return s
}

func (s *submitters) run() {
	pause := time.NewTicker(100 * time.Millisecond)
	defer pause.Stop()
	for {
		s.mu.Lock()
		s.keys++
		key := fmt.Sprintf("key-%d", s.keys)
		s.mu.Unlock()
		for !s.try(key) {
			<-pause.C
		}
		select {
		case <-s.stop:
			return
		case <-pause.C:
		}
	}
}

// try submits a task and says whether it was acknowledged.
func (s *submitters) try(key string) bool {
	body, _ := json.Marshal(map[string]any{"agent": s.agent, "kind": kinds.Echo, "args": map[string]string{"text": key}})
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, s.caller.base+"/api/v1/tasks", bytes.NewReader(body))
	if err != nil {
		s.note(err.Error())
		return true
	}
	req.Header.Set("Authorization", "Bearer "+s.caller.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := s.caller.http.Do(req)
	if err != nil {
		s.note(err.Error())
		return false
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	var task struct {
		ID tasks.ID `json:"id,string"`
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.odd = append(s.odd, err.Error())
	case resp.StatusCode < http.StatusMultipleChoices:
		if err := json.Unmarshal(answer, &task); err != nil || task.ID == 0 {
			s.odd = append(s.odd, fmt.Sprintf("%s: %v", answer, err))
		}
		s.acked[key] = task.ID
		return true
	case resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") == "":
		s.odd = append(s.odd, fmt.Sprintf("503 without Retry-After: %s", answer))
	}
	s.refused[resp.StatusCode]++
	return false
}

func (s *submitters) note(odd string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.odd = append(s.odd, odd)
}

func (s *submitters) counts() (acked, unavailable int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.acked), s.refused[http.StatusServiceUnavailable]
}

// TestTheDatabaseGoesAwayAndComesBack stops PostgreSQL under load, twice: in
// good order, and at once. Meanwhile readiness names it and submissions are
// refused with Retry-After; afterwards everything goes on by itself, and every
// task that was acknowledged has run once.
//
// Cases P9, R19.
func TestTheDatabaseGoesAwayAndComesBack(t *testing.T) {
	t.Parallel()
	config := testkit.ClusterConfig(t)
	var cluster *localpg.Cluster
	startDB := func() {
		t.Helper()
		var err error
		if cluster, err = localpg.Start(t.Context(), config); err != nil {
			t.Fatal(err)
		}
	}
	startDB()
	t.Cleanup(func() { _ = cluster.Stop(context.Background()) })
	s := start(t, cluster.DSN(), t.TempDir(), func(c *Config) { c.AllowLoopbackAgents = true })
	s.await("the opening of the public port", s.c.Opened())
	token, _, err := s.c.parts.fleet.CreateEnrolmentToken(t.Context(), "test", time.Hour, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.c.parts.fleet.Pair(t.Context(), "test", newAgent(t, token), token); err != nil {
		t.Fatal(err)
	}
	load := s.caller(s.fileToken()).submitters("box", 4)

	atOnce, cancel := context.WithCancel(t.Context())
	cancel()
	for i, how := range []context.Context{t.Context(), atOnce} {
		before, _ := load.counts()
		until(t, "load", func() bool { n, _ := load.counts(); return n > before+20 })
		if err := cluster.Stop(how); err != nil && i == 0 {
			t.Fatal(err)
		}
		_, refused := load.counts()
		until(t, "refusals", func() bool { _, n := load.counts(); return n > refused+10 })
		until(t, "readiness that names the database", func() bool {
			status, r := s.readyz()
			return status == http.StatusServiceUnavailable && len(r.Unmet) > 0 && r.Unmet[0].Condition == checkDatabase
		})
		startDB()
		back, _ := load.counts()
		began := time.Now()
		until(t, "load after the database is back", func() bool { n, _ := load.counts(); return n > back+20 })
		t.Logf("20 tasks were acknowledged %s after the database was back", time.Since(began))
		until(t, "readiness", func() bool { status, _ := s.readyz(); return status == http.StatusOK })
	}
	close(load.stop)
	load.ended.Wait()
	load.judge(s)
}

// judge looks for each key's task, which must have succeeded in its first
// attempt, and for any that should not be there.
func (l *submitters) judge(s *started) {
	s.Helper()
	for _, odd := range l.odd {
		s.Error(odd)
	}
	ids := map[tasks.ID]bool{}
	for key, id := range l.acked {
		if ids[id] {
			s.Errorf("task %d was given for two keys", id)
		}
		ids[id] = true
		until(s.T, "the end of a task", func() bool { return s.task(id).State == tasks.StateCompleted })
		got := s.task(id)
		if got.Ending.Outcome != tasks.Succeeded || got.Attempt != 1 {
			s.Errorf("task %d of %s ended as %s (%s) in attempt %d", id, key, got.Ending.Outcome, got.Ending.Reason, got.Attempt)
		}
	}
	if len(l.acked) != l.keys {
		s.Errorf("%d keys were acknowledged of %d", len(l.acked), l.keys)
	}
	page, err := s.c.parts.db.Tasks(s.Context(), tasks.Filter{Limit: 500})
	if err != nil {
		s.Fatal(err)
	}
	for _, x := range page {
		if !ids[x.ID] {
			s.Errorf("task %d was never acknowledged under any key", x.ID)
		}
	}
	found, err := s.c.parts.db.CheckConsistency(s.Context())
	if err != nil || !found.OK() {
		s.Errorf("the tables: %v, %v", found.Notes(), err)
	}
	s.Logf("%d tasks, refusals %v", len(l.acked), l.refused)
}
