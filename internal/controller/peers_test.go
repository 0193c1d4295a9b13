package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/internal/pki"
	"headgate/internal/testkit"
	"headgate/tasks"
)

// couple is two controllers on one database, with agents of both.
type couple struct {
	*testing.T
	one, two *started
	dsn      string
	agents   []uuid.UUID
}

// startCouple starts two controllers with default settings, but for what tests
// need, and waits until each holds its part.
func startCouple(t *testing.T, change ...func(*Config)) *couple {
	t.Helper()
	c := &couple{T: t, dsn: testkit.NewDatabase(t)}
	dataOne := t.TempDir()
	change = append(change, func(cfg *Config) {
		cfg.AllowLoopbackAgents = true
		cfg.AdminTokenFile = filepath.Join(dataOne, "token")
		cfg.DrainTimeout = 2 * time.Second
	})
	c.one = start(t, c.dsn, dataOne, change...)
	c.one.await("the opening of the first public port", c.one.c.Opened())
	c.two = start(t, c.dsn, withKeys(t, dataOne), change...)
	c.two.await("the opening of the second public port", c.two.c.Opened())
	c.until("each holds eight shards", func() bool { return len(c.held(c.one)) == 8 && len(c.held(c.two)) == 8 })
	return c
}

// withKeys gives a state directory with the CA's key of another one, as an
// operator makes it for a second controller.
func withKeys(t *testing.T, from string) string {
	t.Helper()
	to := t.TempDir()
	keys, err := filepath.Glob(filepath.Join(from, "keys", "ca-*.key"))
	if err != nil || len(keys) == 0 {
		t.Fatalf("no key of the CA: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(to, "keys"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, k := range keys {
		b, err := os.ReadFile(k)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, "keys", filepath.Base(k)), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// An operator who forgot to copy the key sees so at once; waiting would not
// bring it.
func TestASecondControllerWithoutTheKeyEndsAndNamesIt(t *testing.T) {
	t.Parallel()
	dsn := testkit.NewDatabase(t)
	one := start(t, dsn, t.TempDir())
	one.await("the opening of the public port", one.c.Opened())
	cfg := DefaultConfig()
	cfg.Data, cfg.DatabaseURL = t.TempDir(), dsn
	cfg.PublicAddr, cfg.ControllerAddr = "127.0.0.1:0", "127.0.0.1:0"
	two, err := New(cfg, Options{Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = two.Run(ctx)
	if f, ok := errors.AsType[*fault.Error](err); !ok || f.Code != pki.CodeCAKeyMissing || !strings.Contains(f.Hint, "keys/ca-") {
		t.Errorf("ended with %v, want %s and the file to copy", err, pki.CodeCAKeyMissing)
	}
}

func (c *couple) held(s *started) map[tasks.Shard]bool {
	held := map[tasks.Shard]bool{}
	for _, l := range s.c.parts.manager.Held() {
		held[l.Shard] = true
	}
	return held
}

// until waits for a condition.
func (c *couple) until(what string, holds func() bool) {
	c.Helper()
	for end := time.Now().Add(time.Minute); !holds(); pause(c.Context(), 20*time.Millisecond) {
		if time.Now().After(end) {
			c.Fatalf("not in time: %s", what)
		}
	}
}

// pair pairs an agent at the second controller, whoever will own it.
func (c *couple) pair() uuid.UUID {
	c.Helper()
	f := c.two.c.parts.fleet
	token, _, err := f.CreateEnrolmentToken(c.Context(), "test", time.Hour, 1)
	if err != nil {
		c.Fatal(err)
	}
	v, err := f.Pair(c.Context(), "test", newAgent(c.T, token), token)
	if err != nil {
		c.Fatal(err)
	}
	c.agents = append(c.agents, v.ID)
	return v.ID
}

// agentsOfBoth pairs agents until each controller owns one, and gives them.
func (c *couple) agentsOfBoth() (ofOne, ofTwo uuid.UUID) {
	c.Helper()
	for ofOne == uuid.Nil() || ofTwo == uuid.Nil() {
		id := c.pair()
		if c.held(c.one)[tasks.ShardOf(id)] {
			ofOne = id
		} else {
			ofTwo = id
		}
	}
	for _, at := range []struct {
		s  *started
		id uuid.UUID
	}{{c.one, ofOne}, {c.two, ofTwo}} {
		c.until("the owner is connected to its agent", func() bool {
			v, err := at.s.c.parts.fleet.Get(at.id)
			return err == nil && v.Live.Health == fleet.HealthConnected
		})
		for _, s := range []*started{c.one, c.two} {
			c.until("both know the agent", func() bool { _, err := s.c.parts.fleet.Get(at.id); return err == nil })
		}
	}
	return ofOne, ofTwo
}

// request calls the API of a controller at its public port.
func (c *couple) request(s *started, method, path string, body any, header ...string) (int, map[string]any) {
	c.Helper()
	data, ok := body.(string) // the very bytes
	if !ok {
		b, err := json.Marshal(body)
		if err != nil {
			c.Fatal(err)
		}
		data = string(b)
	}
	req, err := http.NewRequestWithContext(c.Context(), method, s.c.Endpoints().PublicURL+"/api/v1"+path, strings.NewReader(data))
	if err != nil {
		c.Fatal(err)
	}
	c.authorize(req)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	} else {
		req.Body, req.ContentLength = nil, 0
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.client().Do(req)
	if err != nil {
		c.Error(err)
		return 0, nil
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		c.Error(err)
	}
	var out map[string]any
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &out); err != nil {
			c.Errorf("%s %s: %v: %s", method, path, err, raw)
		}
	}
	return resp.StatusCode, out
}

func (c *couple) authorize(req *http.Request) {
	c.Helper()
	token, err := os.ReadFile(c.one.c.cfg.AdminTokenFile)
	if err != nil {
		c.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
}

func (c *couple) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Minute}
}

func echoFor(agent uuid.UUID) map[string]any {
	return map[string]any{"agent": agent.String(), "kind": kinds.Echo, "args": map[string]any{"n": json.RawMessage("1.50")}}
}

// Cases R8, R16.
func TestEachControllerServesTheAgentsOfBoth(t *testing.T) {
	t.Parallel()
	c := startCouple(t)
	ofOne, ofTwo := c.agentsOfBoth()
	for _, at := range []*started{c.one, c.two} {
		for _, agent := range []uuid.UUID{ofOne, ofTwo} {
			status, task := c.request(at, "POST", "/tasks?wait=30s", echoFor(agent))
			if status != http.StatusOK || task["outcome"] != "succeeded" || task["actor"] != "token:up" {
				t.Errorf("a task for agent %s: %d %v", agent, status, task)
				continue
			}
			id := task["id"].(string)
			if status, again := c.request(at, "POST", "/tasks/"+id+"/retry", nil); status != http.StatusAccepted || again["retry_of"] != id {
				t.Errorf("retry of %s: %d %v", id, status, again)
			}
			if status, pong := c.request(at, "POST", "/agents/"+agent.String()+"/ping", nil); status != http.StatusOK || pong["rtt_ms"] == nil {
				t.Errorf("ping of %s: %d %v", agent, status, pong)
			}
		}
	}
	c.batch(ofOne, ofTwo)
	c.cancelElsewhere(ofOne)
	c.pauseElsewhere(ofOne)
}

// batch submits a batch over both and looks at its order.
func (c *couple) batch(agents ...uuid.UUID) {
	c.Helper()
	var list []any
	for i := range 20 {
		list = append(list, echoFor(agents[i%len(agents)]))
	}
	body := map[string]any{"tasks": list}
	status, got := c.request(c.two, "POST", "/tasks/batch", body, "Idempotency-Key", "batch-1")
	items, _ := got["items"].([]any)
	if status != http.StatusAccepted || len(items) != len(list) {
		c.Fatalf("batch: %d %v", status, got)
	}
	for i, item := range items {
		if agent := item.(map[string]any)["agent"].(map[string]any)["id"]; agent != agents[i%len(agents)].String() {
			c.Errorf("item %d is for agent %v", i, agent)
		}
	}
	status, again := c.request(c.one, "POST", "/tasks/batch", body, "Idempotency-Key", "batch-1")
	for i, item := range again["items"].([]any) {
		if item.(map[string]any)["id"] != items[i].(map[string]any)["id"] {
			c.Errorf("sent again, %d: item %d is task %v, was %v", status, i, item, items[i])
		}
	}
}

// cancelElsewhere cancels a running and a waiting task at the controller that
// does not own them.
func (c *couple) cancelElsewhere(agent uuid.UUID) {
	c.Helper()
	sleep := map[string]any{"agent": agent.String(), "kind": kinds.Sleep, "args": map[string]any{"seconds": 60}}
	_, running := c.request(c.two, "POST", "/tasks", sleep)
	_, waiting := c.request(c.two, "POST", "/tasks", sleep)
	c.until("the owner's sentence is told: busy with the task before", func() bool {
		_, seen := c.request(c.two, "GET", "/tasks/"+waiting["id"].(string), nil)
		w, _ := seen["waiting"].(map[string]any)
		return w["cause"] == tasks.CauseBusy && w["blocking"] == running["id"]
	})
	for _, task := range []map[string]any{waiting, running} {
		if status, got := c.request(c.two, "POST", "/tasks/"+task["id"].(string)+"/cancel", nil); status != http.StatusAccepted {
			c.Errorf("cancel: %d %v", status, got)
		}
		_, end := c.request(c.two, "GET", "/tasks/"+task["id"].(string)+"?wait=30s", nil)
		if end["outcome"] != "cancelled" || end["cancel_actor"] != "token:up" && end["cancel_actor"] != nil {
			c.Errorf("cancelled elsewhere: %v", end)
		}
	}
}

// pauseElsewhere pauses an agent at the controller that does not own it.
func (c *couple) pauseElsewhere(agent uuid.UUID) {
	c.Helper()
	if status, got := c.request(c.two, "PATCH", "/agents/"+agent.String(), map[string]any{"paused": true}); status != http.StatusOK {
		c.Fatalf("pause: %d %v", status, got)
	}
	c.until("the owner knows that the agent is paused", func() bool {
		v, err := c.one.c.parts.fleet.Get(agent)
		return err == nil && !v.PausedAt.IsZero()
	})
	_, task := c.request(c.two, "POST", "/tasks", echoFor(agent))
	if w, _ := task["waiting"].(map[string]any); w["cause"] != tasks.CausePaused {
		c.Errorf("a task for a paused agent: %v", task)
	}
	c.request(c.two, "PATCH", "/agents/"+agent.String(), map[string]any{"paused": false})
	if _, end := c.request(c.two, "GET", "/tasks/"+task["id"].(string)+"?wait=30s", nil); end["outcome"] != "succeeded" {
		c.Errorf("after the pause: %v", end)
	}
}

// What a controller takes for its own agents it also takes for another's,
// whatever the arguments consist of.
func TestALargeBatchOfMarkupIsPassedOn(t *testing.T) {
	t.Parallel()
	c := startCouple(t)
	ofOne, _ := c.agentsOfBoth()
	one := fmt.Sprintf(`{"agent":%q,"kind":%q,"args":{"text":"%s"}}`, ofOne, kinds.Echo, strings.Repeat("<", 200<<10))
	body := `{"tasks":[` + strings.Repeat(one+",", 19) + one + `]}`
	for _, at := range []*started{c.one, c.two} {
		if status, got := c.request(at, "POST", "/tasks/batch", body); status != http.StatusAccepted {
			t.Errorf("a batch of %d bytes: %d %v", len(body), status, got["detail"])
		}
	}
}

// Cases P23, R18.
func TestOneKeyRacedOverTwoControllersMakesOneTask(t *testing.T) {
	t.Parallel()
	c := startCouple(t)
	ofOne, _ := c.agentsOfBoth()
	ids := make(chan string, 100)
	var all sync.WaitGroup
	for i := range 100 {
		at := []*started{c.one, c.two}[i%2]
		all.Go(func() {
			for {
				status, task := c.request(at, "POST", "/tasks", echoFor(ofOne), "Idempotency-Key", "raced")
				if status == http.StatusConflict && task["code"] == "key_in_progress" {
					continue
				}
				if status != http.StatusAccepted {
					t.Errorf("%d %v", status, task)
					return
				}
				ids <- task["id"].(string)
				return
			}
		})
	}
	all.Wait()
	close(ids)
	distinct := map[string]bool{}
	for id := range ids {
		distinct[id] = true
	}
	if len(distinct) != 1 {
		t.Errorf("one key made the tasks %v", distinct)
	}
	body := echoFor(ofOne)
	body["priority"] = 1
	for _, at := range []*started{c.one, c.two} {
		if status, got := c.request(at, "POST", "/tasks", body, "Idempotency-Key", "raced"); status != http.StatusUnprocessableEntity {
			t.Errorf("another body under the key: %d %v", status, got)
		}
	}
}

// Cases Q5.
func TestEventsOfOneControllerReachReadersOfTheOther(t *testing.T) {
	t.Parallel()
	c := startCouple(t)
	ofOne, _ := c.agentsOfBoth()
	follow := func(ctx context.Context, s *started, last string) (events <-chan string) {
		req, err := http.NewRequestWithContext(ctx, "GET", s.c.Endpoints().PublicURL+"/api/v1/events?topics=tasks", nil)
		if err != nil {
			t.Fatal(err)
		}
		c.authorize(req)
		if last != "" {
			req.Header.Set("Last-Event-ID", last)
		}
		resp, err := c.client().Do(req)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("events: %v %v", resp, err)
		}
		out := make(chan string, 1000)
		go func() {
			defer close(out)
			defer resp.Body.Close()
			buf := make([]byte, 64<<10)
			for {
				n, err := resp.Body.Read(buf)
				out <- string(buf[:n])
				if err != nil {
					return
				}
			}
		}()
		return out
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := follow(ctx, c.two, "")
	_, task := c.request(c.one, "POST", "/tasks", echoFor(ofOne))
	want := fmt.Sprintf(`{"type":"task.completed","id":%q`, task["id"])
	var seen strings.Builder
	for end := time.After(time.Minute); !strings.Contains(seen.String(), want); {
		select {
		case text, ok := <-events:
			if !ok {
				t.Fatalf("the stream ended: %s", &seen)
			}
			seen.WriteString(text)
		case <-end:
			t.Fatalf("no %s in %s", want, &seen)
		}
	}
	cancel()
	for range events { // until its reader has ended
	}
}

func TestNoOwnerIsSaidAndWaitedFor(t *testing.T) {
	t.Parallel()
	c := startCouple(t)
	ofOne, _ := c.agentsOfBoth()
	sub := tasks.Submission{Agent: ofOne.String(), Kind: kinds.Echo, Args: json.RawMessage(`{}`)}
	done := make(chan error, 1)
	go func() { done <- c.one.stop() }()
	// While one hands over, a submission at two waits for the new owner: two itself.
	task, err := c.two.c.parts.service.SubmitAndWait(t.Context(), sub, "test", tasks.Idempotency{}, time.Minute)
	if err != nil || task.State != tasks.StateCompleted {
		t.Errorf("during the hand-over: %+v, %v", task, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	c.until("the one that is left holds everything", func() bool { return len(c.held(c.two)) == tasks.NumShards })
	if _, err := c.two.c.parts.manager.Owner(t.Context(), 3); fault.CodeOf(err) != "owner_unreachable" {
		t.Errorf("the owner of a shard of its own: %v", err)
	}
}
