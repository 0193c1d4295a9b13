package controller

import (
	"fmt"
	"runtime"
	"time"

	"headgate/internal/store"
	"headgate/tasks"
)

// Queueing are the settings of the task queue.
type Queueing struct {
	WriteLoops int // 0 = one for each CPU, at most maxWriteLoops
	Limits     tasks.Limits
}

// maxWriteLoops is how many write loops there may be: each needs a connection
// for its turns beside those for refills and leases, and more than four gain nothing.
const maxWriteLoops = store.DefaultLoopConns / 2

// defaultQueueing gives the settings as they are without any configuration.
func defaultQueueing() Queueing {
	return Queueing{Limits: tasks.DefaultLimits()}
}

// loops gives the number of write loops. With one alone the processors wait
// for each other: the controller for the commit, PostgreSQL for the next turn.
func (q Queueing) loops() int {
	if q.WriteLoops > 0 {
		return q.WriteLoops
	}
	return min(maxWriteLoops, runtime.GOMAXPROCS(0))
}

// queueKeys lists the settings of the task queue.
func queueKeys() []Key {
	limits := func(c *Config) *tasks.Limits { return &c.Queueing.Limits }
	return []Key{
		number("write-loops", "transactions of the queue at one moment, at most 4; 0 = one for each CPU", 0, func(c *Config) *int { return &c.Queueing.WriteLoops }),
		number("agent-depth", "tasks that may wait for one agent; more are refused", 1, func(c *Config) *int { return &limits(c).AgentDepth }),
		number("total-depth", "tasks that may wait in all; more are refused", 1, func(c *Config) *int { return &limits(c).TotalDepth }),
		number("inbox-items", "submissions under way to the disk at one moment; more are told to come back", 1, func(c *Config) *int { return &limits(c).InboxItems }),
		bytesKey("inbox-bytes", "size of their arguments", func(c *Config) *int { return &limits(c).InboxBytes }),
		positive("submit-wait", "until a submitter is told that it is not known whether the task was stored", func(c *Config) *time.Duration { return &limits(c).SubmitWait }),
		positive("cancel-grace", "after its timeout until the controller itself asks the agent to end a task; the agent should have done so", func(c *Config) *time.Duration { return &limits(c).CancelGrace }),
		positive("forced-grace", "after its timeout until a task without a word of its agent is completed with outcome unknown", func(c *Config) *time.Duration { return &limits(c).ForcedGrace }),
	}
}

// bytesKey is a size that must not be 0, kept as an int.
func bytesKey(name, help string, at func(*Config) *int) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			var n int64
			if err := size(name, help, func(*Config) *int64 { return &n }).set(c, v); err != nil {
				return err
			}
			if n == 0 {
				return fmt.Errorf("%q must be more than 0", v)
			}
			*at(c) = int(n)
			return nil
		},
		get: func(c Config) string { return sizeText(int64(*at(&c))) },
	}
}

// validateQueueing gives what does not fit together.
func (c Config) validateQueueing(bad func(string, ...any)) {
	q := c.Queueing
	if q.WriteLoops > maxWriteLoops {
		bad("write-loops: %d is more than %d, which is all that gains anything", q.WriteLoops, maxWriteLoops)
	}
	if q.Limits.AgentDepth > q.Limits.TotalDepth {
		bad("agent-depth: %d is more than total-depth, which is %d", q.Limits.AgentDepth, q.Limits.TotalDepth)
	}
	if q.Limits.ForcedGrace <= q.Limits.CancelGrace {
		bad("forced-grace: %v is not more than cancel-grace, which is %v; a cancelled task would have no time to end", q.Limits.ForcedGrace, q.Limits.CancelGrace)
	}
}
