package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/testkit"
)

// two is an `up` with its agents, and a `serve` on the same database.
type two struct {
	*instance
	second *served
	agent  runAgent // of the second one
}

// startTwo starts both and waits until they have shared the agents out.
func startTwo(t *testing.T) *two {
	t.Helper()
	i, dsn := newInstance(t), testkit.NewDatabase(t)
	i.up("--database-url", dsn, "--agents", "6")
	dir := t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "keys"), os.DirFS(filepath.Join(i.dir, "keys"))); err != nil {
		t.Fatal(err)
	}
	keys, err := filepath.Glob(filepath.Join(dir, "keys", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range keys {
		if err := os.Chmod(k, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	settings := "allow_loopback_agents: true\nadmin_token_file: " + i.run.TokenFile + "\n"
	x := &two{instance: i, second: startServeIn(t, dir, dsn, nil, settings)}
	x.until("each holds eight shards", func() bool { return x.shards() == 8 })
	x.until("an agent belongs to the second one", func() bool {
		for _, a := range x.agents() {
			for _, r := range x.run.Agents {
				if a.ID == r.ID && a.Connection.Health == "elsewhere" {
					x.agent = r
				}
			}
		}
		return x.agent.ID != ""
	})
	return x
}

func (x *two) until(what string, holds func() bool) {
	x.Helper()
	for end := time.Now().Add(readyWithin); !holds(); <-time.After(50 * time.Millisecond) {
		if time.Now().After(end) {
			x.Fatalf("not in time: %s\nlog of the second:\n%.20000s", what, x.second.log())
		}
	}
}

// shards says how many of them the first one holds.
func (x *two) shards() int {
	x.Helper()
	var status struct {
		Owned []int `json:"shards_owned"`
	}
	if err := x.client().call(x.Context(), "GET", "/api/v1/status", nil, &status); err != nil {
		x.Fatal(err)
	}
	return len(status.Owned)
}

type listedAgent struct {
	ID         string `json:"id"`
	Connection struct {
		Health string `json:"health"`
	} `json:"connection"`
}

func (x *two) agents() []listedAgent {
	x.Helper()
	var page struct{ Items []listedAgent }
	if err := x.client().call(x.Context(), "GET", "/api/v1/agents", nil, &page); err != nil {
		x.Fatal(err)
	}
	return page.Items
}

// appendID submits, at the first one, a task for the agent of the second, under
// a key, and sends it again until it is stored. The task leaves a trace of each
// of its runs.
func (x *two) appendID(key string) string {
	x.Helper()
	var task resultTask
	x.until("task "+key+" is stored", func() bool {
		err := x.trySubmit(x.Context(), key, &task)
		return err == nil && task.ID != ""
	})
	return task.ID
}

func (x *two) trySubmit(ctx context.Context, key string, task *resultTask) error {
	token, err := os.ReadFile(x.run.TokenFile)
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string]any{"agent": x.agent.ID, "kind": "cmd.run", "args": map[string]any{"program": "append-id"}})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, "POST", x.run.PublicURL+"/api/v1/tasks", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(task)
}

// endAll waits until the tasks have succeeded, and compares with the traces.
func (x *two) endAll(ids []string) {
	x.Helper()
	for _, id := range ids {
		if got := x.waitFor(id); outcome(got) != "succeeded" {
			x.Errorf("task %s: %+v", id, got)
		}
	}
	text, err := os.ReadFile(filepath.Join(filepath.Dir(x.agent.DataDir), "appended-ids"))
	if err != nil {
		x.Fatal(err)
	}
	ran := strings.Fields(string(text))
	slices.Sort(ran)
	want := slices.Sorted(slices.Values(ids))
	if !slices.Equal(ran, want) {
		x.Errorf("ran: %v\nwant each once: %v", ran, want)
	}
}

// Cases P26, Q10, Q11, Q19, R10, R16, R28.
func TestAFrozenAndAKilledControllerDoNoHarm(t *testing.T) {
	t.Parallel()
	x := startTwo(t)
	var ids []string
	for n := range 5 {
		ids = append(ids, x.appendID("before-"+string(rune('a'+n))))
	}
	// Frozen for longer than its lease, with work on the way.
	x.second.signal(syscall.SIGSTOP)
	ids = append(ids, x.appendID("frozen"))
	x.until("the first one has taken over", func() bool { return x.shards() == 16 })
	x.endAll(ids)
	x.second.signal(syscall.SIGCONT)
	x.until("the one that was frozen has its part again", func() bool { return x.shards() == 8 })
	if log := x.second.log(); !strings.Contains(log, "shards lost to another controller") {
		t.Errorf("the one that was frozen has not noticed:\n%.20000s", log)
	}
	ids = append(ids, x.appendID("thawed"))
	x.endAll(ids)
	// Killed.
	if err := x.second.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	ids = append(ids, x.appendID("killed"))
	x.endAll(ids)
	if n := x.shards(); n != 16 {
		t.Errorf("%d shards after the other one was killed", n)
	}
}
