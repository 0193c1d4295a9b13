package main

import (
	"bytes"
	"context"
	"fmt"
	"time"
)

// fanoutLook is how often the results are counted: fine enough for a figure of
// tenths of a second.
const fanoutLook = 10 * time.Millisecond

// fanouts gives the times, in seconds, in which one call reaches the first n
// agents, one task each, and all results are stored.
func (r *rig) fanouts(ctx context.Context, n int) (times []float64, err error) {
	host, err := r.api.host()
	if err != nil {
		return nil, err
	}
	var body bytes.Buffer
	body.WriteString(`{"tasks":[`)
	for i := range n {
		if i > 0 {
			body.WriteByte(',')
		}
		fmt.Fprintf(&body, `{"agent":%q,"kind":"core.echo","args":%s}`, r.ids[i], echoArgs)
	}
	body.WriteString(`]}`)
	req := request(host, "/api/v1/tasks/batch", r.api.token, body.Bytes())
	for range r.bench.rounds {
		took, err := r.fanout(ctx, host, req, int64(n))
		if err != nil {
			return nil, err
		}
		times = append(times, took.Seconds())
	}
	return times, nil
}

func (r *rig) fanout(ctx context.Context, host string, req []byte, n int64) (time.Duration, error) {
	w, err := dialWire(host)
	if err != nil {
		return 0, err
	}
	defer w.close()
	before, err := r.stats(ctx)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	status, answer, err := w.do(req)
	if err != nil {
		return 0, err
	}
	if status != 202 {
		return 0, fmt.Errorf("POST /tasks/batch answered %d: %.300s", status, answer)
	}
	acknowledged := time.Since(began)
	var after stats
	err = waitEvery(ctx, fanoutLook, connectWait, fmt.Sprintf("%d results", n), func() (bool, error) {
		after, err = r.stats(ctx)
		return after.completed()-before.completed() >= n, err
	})
	if err != nil {
		return 0, err
	}
	took := time.Since(began)
	if good := after.Tasks.Completed["succeeded"] - before.Tasks.Completed["succeeded"]; good != n {
		return 0, fmt.Errorf("%d of %d tasks succeeded", good, n)
	}
	r.bench.note("one task for each of %d agents: acknowledged after %.3f s, all results stored after %.3f s", n, acknowledged.Seconds(), took.Seconds())
	return took, nil
}
