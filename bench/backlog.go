package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	// deadBacklog is how many tasks wait for the agent that is dead.
	deadBacklog = 1_000_000
	// backlogBatch is how many of them one call submits, the most that is allowed.
	backlogBatch = 10_000
	// backlogAgents are the others, backlogRate is what they are offered together.
	backlogAgents = 200
	backlogRate   = 2000
	// backlogWindow is one side of a round.
	backlogWindow = 8 * time.Second
)

// benchBacklog measures the others' results beside an agent that is dead and
// has a million tasks waiting, against the same fleet without it. Both stand
// side by side and are loaded in turn.
func benchBacklog(ctx context.Context, b *bench) (err error) {
	var rigs [2]*rig
	defer func() {
		for _, r := range rigs {
			if r != nil {
				err = errors.Join(err, r.close())
			}
		}
	}()
	for i := range rigs {
		if rigs[i], err = b.backlogRig(ctx); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := rigs[1].fillDead(ctx); err != nil {
		return err
	}
	b.note("%d tasks submitted to a dead agent in %.0f s", deadBacklog, time.Since(began).Seconds())
	for _, r := range rigs {
		if err := r.rest(ctx); err != nil {
			return err
		}
	}
	var p99 [2][]float64
	for range b.rounds {
		for i, r := range rigs {
			p, err := r.paceOthers(ctx)
			if err != nil {
				return err
			}
			p99[i] = append(p99[i], quantile(p.results, 0.99))
		}
	}
	b.note("%d tasks/s to %d agents, p99 of submit to result in ms: without %s; beside %d tasks of a dead agent %s",
		backlogRate, backlogAgents, list(p99[0]), deadBacklog, list(p99[1]))
	b.ratio("p99_beside_dead_backlog", median(p99[1])/median(p99[0]))
	return nil
}

// backlogRig is a fleet whose last agent is dead.
func (b *bench) backlogRig(ctx context.Context) (*rig, error) {
	dir, err := b.newDir()
	if err != nil {
		return nil, err
	}
	r := &rig{bench: b, dir: dir, extra: []string{
		"--agent-depth", strconv.Itoa(2 * deadBacklog), "--total-depth", strconv.Itoa(2 * deadBacklog),
	}}
	err = r.startUp(ctx)
	if err == nil {
		err = r.simulate(ctx, backlogAgents+1)
	}
	if err == nil {
		err = r.sim.stop()
		r.sim = nil
	}
	if err == nil {
		err = r.simulateSome(ctx, backlogAgents)
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// simulateSome starts fewer agents than there are; the others are dead.
func (r *rig) simulateSome(ctx context.Context, n int) error {
	all := r.ids
	err := r.simulate(ctx, n)
	r.ids = all
	return err
}

// fillDead submits the backlog.
func (r *rig) fillDead(ctx context.Context) error {
	host, err := r.api.host()
	if err != nil {
		return err
	}
	w, err := dialWire(host)
	if err != nil {
		return err
	}
	defer w.close()
	var body bytes.Buffer
	body.WriteString(`{"tasks":[`)
	for i := range backlogBatch {
		if i > 0 {
			body.WriteByte(',')
		}
		fmt.Fprintf(&body, `{"agent":%q,"kind":"core.echo","args":%s}`, r.ids[backlogAgents], echoArgs)
	}
	body.WriteString(`]}`)
	req := request(host, "/api/v1/tasks/batch", r.api.token, body.Bytes())
	for range deadBacklog / backlogBatch {
		status, answer, err := w.do(req)
		if err != nil {
			return err
		}
		if status != 202 {
			return fmt.Errorf("POST /tasks/batch answered %d: %.300s", status, answer)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// rest lets PostgreSQL do at once what it would do some time after so many
// inserts, and what is no matter of who waits for whom.
func (r *rig) rest(ctx context.Context) error {
	db, err := openDB(r.run.DatabaseURL)
	if err != nil {
		return err
	}
	defer release(db)
	for _, text := range []string{"VACUUM (ANALYZE) agent_task", "VACUUM agent_queue", "CHECKPOINT"} {
		if _, err := db.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("%s: %w", text, err)
		}
	}
	return nil
}

// paceOthers loads the agents that live.
func (r *rig) paceOthers(ctx context.Context) (paced, error) {
	open, err := r.stats(ctx)
	if err != nil {
		return paced{}, err
	}
	r.open = open.Tasks.New
	return r.pace(ctx, backlogRate, backlogWindow, r.ids[:backlogAgents])
}
