package main

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The soak is a long campaign of few faults: what a controller, an agent and
// the queue's tables need must not grow. The first controller and the first
// crew are frozen and cut off like all others, but never killed, so that
// something can be seen of them.

const (
	soakAgents = 50 // in each of the crews
	soakRate   = 100
	soakGap    = time.Minute
	// soakSamples is how many samples a soak takes.
	soakSamples = 120
	// Of the last third against the second: memory, goroutines and descriptors
	// at their lowest and tables at their largest, each with a part and a piece
	// that it may be more.
	memoryPart, memoryPiece = 1.0, 4.0 // MiB
	countPart, countPiece   = 1.05, 10.0
	tablePart, tablePiece   = 1.5, 8.0 // MiB
)

func (s campaignSizes) soak() campaignPlan {
	p := s.full()
	p.name, p.crews, p.agents, p.reals = "soak", 4, soakAgents, 0
	p.rate, p.gapMin, p.gapMax = soakRate, soakGap, soakGap
	p.least = time.Duration(s.minutes) * time.Minute
	p.most = 2 * p.least
	p.kills = s.minutes / 4
	p.tasks = soakRate * 60 * s.minutes * 3 / 4
	p.spare = true
	p.faults = func(ctx context.Context, c *campaign) error { return c.watched(ctx, scheduled) }
	return p
}

func chaosSoak(ctx context.Context, b *bench) error { return b.runCampaign(ctx, b.sizes.soak()) }

// sample is what was seen at one moment.
type sample struct {
	controllerMiB, crewMiB, tablesMiB    float64
	goroutines, descriptors, crewHandles float64
}

// watched takes samples while the faults go on, and judges them.
func (c *campaign) watched(ctx context.Context, faults func(context.Context, *campaign) error) error {
	watch, stop := context.WithCancel(ctx)
	taken := make(chan []sample)
	go func() {
		var all []sample
		for wait(watch, c.plan.least/soakSamples) == nil {
			if s, err := c.sample(watch); err == nil { // else it is frozen just now
				all = append(all, s)
			}
		}
		taken <- all
	}()
	err := faults(ctx, c)
	stop()
	c.samples = <-taken
	return err
}

func (c *campaign) sample(ctx context.Context) (s sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	// The agents belong now to one, now to the other controller: only the sum
	// over both stays the same.
	for i, n := range c.controllers {
		goroutines, err := c.metric(ctx, i, "go_goroutines")
		if err != nil {
			return s, err
		}
		files, err := openFiles(n.pid())
		if err != nil {
			return s, err
		}
		s.goroutines, s.descriptors = s.goroutines+goroutines, s.descriptors+files
	}
	controller, crew := c.controllers[0].pid(), c.crews[0].pid()
	if s.controllerMiB, err = residentKiB(controller); err != nil {
		return s, err
	}
	if s.crewMiB, err = residentKiB(crew); err != nil {
		return s, err
	}
	s.controllerMiB, s.crewMiB = s.controllerMiB/1024, s.crewMiB/1024
	if s.crewHandles, err = openFiles(crew); err != nil {
		return s, err
	}
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return s, err
	}
	defer release(db)
	err = db.QueryRowContext(ctx, `SELECT (pg_total_relation_size('agent_queue') + pg_total_relation_size('agent_later')
		+ pg_total_relation_size('shard_lease') + pg_total_relation_size('controller')) / 1048576.0`).Scan(&s.tablesMiB)
	return s, err
}

func openFiles(pid int) (float64, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return float64(len(entries)), err
}

// metric reads one metric of a controller.
func (c *campaign) metric(ctx context.Context, controller int, name string) (float64, error) {
	host := c.controllers[controller].private
	conf, err := target{Host: host, CA: c.path("controller-0", "ca.pem")}.tls()
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+host+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	in := bufio.NewScanner(res.Body)
	for in.Scan() {
		if rest, ok := strings.CutPrefix(in.Text(), name+" "); ok {
			return strconv.ParseFloat(rest, 64)
		}
	}
	return 0, fmt.Errorf("there is no metric %s", name)
}

// judgeSamples says what has grown. A short soak says little.
func (c *campaign) judgeSamples() (errs []error) {
	n := len(c.samples)
	if n < 9 {
		return nil
	}
	second, last := c.samples[n/3:2*n/3], c.samples[2*n/3:]
	c.b.note("%s: %d samples; the growth from the second to the last third of the time counts", c.plan.name, n)
	for _, g := range []struct {
		name        string
		of          func(sample) float64
		pick        func([]float64) float64
		part, piece float64
		unit        string
	}{
		{"controller_memory", func(s sample) float64 { return s.controllerMiB }, slices.Min[[]float64], memoryPart, memoryPiece, "MiB"},
		{"agents_memory", func(s sample) float64 { return s.crewMiB }, slices.Min[[]float64], memoryPart, memoryPiece, "MiB"},
		{"goroutines", func(s sample) float64 { return s.goroutines }, slices.Min[[]float64], countPart, countPiece, "goroutines"},
		{"controllers_descriptors", func(s sample) float64 { return s.descriptors }, slices.Min[[]float64], countPart, countPiece, "descriptors"},
		{"agents_descriptors", func(s sample) float64 { return s.crewHandles }, slices.Min[[]float64], countPart, countPiece, "descriptors"},
		{"tables", func(s sample) float64 { return s.tablesMiB }, slices.Max[[]float64], tablePart, tablePiece, "MiB"},
	} {
		before, after := g.pick(each(second, g.of)), g.pick(each(last, g.of))
		limit := math.Ceil(before*g.part + g.piece)
		errs = append(errs, c.b.hold(c.plan.name+"_"+g.name, after, limit, g.unit))
	}
	return errs
}

func each(samples []sample, of func(sample) float64) []float64 {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = of(s)
	}
	return values
}
