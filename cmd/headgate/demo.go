package main

import (
	"context"
	"fmt"
	"time"
)

// demoAgents is the fleet of `make demo`: five agents, one slow, one flaky.
func demoAgents() []agentPlan {
	return []agentPlan{
		{name: "dns-ams-01", labels: map[string]string{"site": "ams", "role": "dns"}},
		{name: "dns-fra-01", labels: map[string]string{"site": "fra", "role": "dns"}},
		{name: "dhcp-ams-01", labels: map[string]string{"site": "ams", "role": "dhcp"}},
		{name: "dhcp-slow-01", labels: map[string]string{"site": "lon", "role": "dhcp", "demo": "slow"}, extra: []string{"--demo-delay", "400ms"}},
		{name: "dns-flaky-01", labels: map[string]string{"site": "lon", "role": "dns", "demo": "flaky"}, extra: []string{"--demo-flaky", "0.2"}},
	}
}

// makeHistory submits tasks of every kind, so that the pages have something
// to show: successes, failures, a cancel, an expiry, and a queue.
func (u *up) makeHistory(ctx context.Context) error {
	if done, err := u.historyMade(ctx); done || err != nil {
		return err
	}
	var batch []map[string]any
	add := func(agent, kind string, args any, more ...any) {
		task := map[string]any{"agent": agent, "kind": kind, "args": jsonBody(args)}
		for i := 0; i+1 < len(more); i += 2 {
			task[more[i].(string)] = more[i+1]
		}
		batch = append(batch, task)
	}
	for _, a := range u.children {
		add(a.id, "core.inventory", map[string]any{})
		add(a.id, "core.ping", map[string]any{})
		add(a.id, "cmd.run", map[string]any{"program": "uname"})
		add(a.id, "cmd.run", map[string]any{"program": "df"})
		add(a.id, "cmd.run", map[string]any{"program": "uptime"})
		add(a.id, "core.sleep", map[string]any{"seconds": 0.3})
		for i := range 5 {
			add(a.id, "core.echo", map[string]any{"step": i + 1, "note": "history of the demo"})
		}
	}
	first := u.children[0]
	add(first.id, "cmd.run", map[string]any{"program": "tcpdump"})                      // not in the policy: rejected
	add(first.id, "core.sleep", map[string]any{"seconds": 30}, "timeout", "1s")         // timed-out
	add(first.id, "core.sleep", map[string]any{"seconds": 20})                          // keeps the next ones waiting
	add(first.id, "core.echo", map[string]any{"late": true}, "expires_at", soon(5))     // expired
	add(first.id, "core.echo", map[string]any{"later": true}, "not_before", soon(3600)) // not due for an hour
	if err := u.client.call(ctx, "POST", "/api/v1/tasks/batch", map[string]any{"tasks": batch}, nil); err != nil {
		return err
	}
	return u.cancelOne(ctx, first.id)
}

func soon(seconds int) string {
	return time.Now().Add(time.Duration(seconds) * time.Second).UTC().Format(time.RFC3339)
}

// cancelOne submits a task and cancels it before it starts.
func (u *up) cancelOne(ctx context.Context, agent string) error {
	var task struct {
		ID string `json:"id"`
	}
	err := u.client.call(ctx, "POST", "/api/v1/tasks", map[string]any{"agent": agent, "kind": "core.ping", "args": jsonBody(map[string]any{})}, &task)
	if err != nil {
		return err
	}
	return u.client.call(ctx, "POST", fmt.Sprintf("/api/v1/tasks/%s/cancel", task.ID), map[string]any{}, nil)
}

// historyMade asks the controller itself: an agent of the demo that has had
// tasks has a past, while those of other agents here do not count.
func (u *up) historyMade(ctx context.Context) (bool, error) {
	var page struct {
		Items []struct{} `json:"items"`
	}
	err := u.client.call(ctx, "GET", "/api/v1/tasks?limit=1&agent="+u.children[0].id, nil, &page)
	return len(page.Items) > 0, err
}
