package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

const (
	// outputSims are simulated agents under a flood of submissions all the time.
	outputSims = 200
	// outputOpen is how far the flood runs ahead of them.
	outputOpen = 100_000
	// outputAgents are real agents, which print.
	outputAgents = 10
	// outputTasks print outputBytes each.
	outputTasks = 100
	outputBytes = 16 << 20
	// outputReaders then read outputs at the same time.
	outputReaders = 8
	// outputsWait is until all outputs are stored.
	outputsWait = 4 * time.Minute
	// sampleEvery is how often the memory is looked at.
	sampleEvery = 100 * time.Millisecond
)

// printPolicy lets an agent print; what is random cannot be compressed.
const printPolicy = `version: 1
programs:
  print:
    path: %s
    args: ["-c", "%d", "/dev/urandom"]
    timeout: 5m
`

// benchOutputs measures by how much the resident memory of the controller rises
// above that under a flood of submissions when programs print a lot beside it,
// and when that is read.
func benchOutputs(ctx context.Context, b *bench) (err error) {
	r, err := b.newRig(ctx)
	if err != nil {
		return err
	}
	p := &printers{rig: r}
	defer func() { err = errors.Join(err, p.close(), r.close()) }()
	if err := r.simulate(ctx, outputSims); err != nil {
		return err
	}
	if err := p.start(ctx); err != nil {
		return err
	}
	before, err := r.stats(ctx)
	if err != nil {
		return err
	}
	g := &generator{rig: r, most: outputOpen}
	if err := g.start(ctx); err != nil {
		return err
	}
	err = p.measure(ctx, g, before.completed())
	return errors.Join(err, g.stop())
}

// printers are real agents that run a program which prints.
type printers struct {
	rig    *rig
	agents []*process
	ids    []string // of the agents
	tasks  []string
}

func (p *printers) close() error {
	var errs []error
	for _, a := range p.agents {
		errs = append(errs, a.stop())
	}
	return errors.Join(errs...)
}

func (p *printers) start(ctx context.Context) error {
	var enrol struct {
		Token string `json:"token"`
	}
	if err := p.rig.api.call(ctx, "POST", "/api/v1/enrolment-tokens", map[string]any{"max_uses": outputAgents}, &enrol); err != nil {
		return err
	}
	for i := range outputAgents {
		if err := p.add(ctx, i, enrol.Token); err != nil {
			return err
		}
	}
	return p.rig.connected(ctx, outputSims+outputAgents)
}

// add starts an agent and has it paired.
func (p *printers) add(ctx context.Context, i int, token string) error {
	dir := filepath.Join(p.rig.dir, fmt.Sprintf("printer-%d", i))
	head, err := exec.LookPath("head")
	if err == nil {
		head, err = filepath.EvalSymlinks(head)
	}
	if err != nil {
		return err
	}
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	tokenFile, policy := filepath.Join(dir, "token"), filepath.Join(dir, "policy.yaml")
	err = errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(tokenFile, []byte(token), 0o600),
		os.WriteFile(policy, fmt.Appendf(nil, printPolicy, head, outputBytes), 0o600))
	if err != nil {
		return err
	}
	address := fmt.Sprintf("127.70.0.%d:%d", i+1, port)
	log, err := os.OpenFile(filepath.Join(dir, "agent.log"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	//nolint:noctx // it ends by TERM, then KILL
	cmd := exec.Command(p.rig.bench.agent, "--data", filepath.Join(dir, "data"), "--listen", address,
		"--name", fmt.Sprintf("printer-%d", i), "--policy", policy, "--enrol-token-file", tokenFile)
	cmd.Stdout, cmd.Stderr = log, log
	proc, err := startProcess(cmd)
	if err != nil {
		return err
	}
	p.agents = append(p.agents, proc)
	var made struct {
		ID string `json:"id"`
	}
	var last error
	err = waitEvery(ctx, pairAgain, upWait, "the agent at "+address+" to be paired", func() (bool, error) {
		last = p.rig.api.call(ctx, "POST", "/api/v1/agents/pair", map[string]any{"address": address, "token": token}, &made)
		return last == nil, nil
	})
	p.ids = append(p.ids, made.ID)
	return errors.Join(err, last)
}

// measure gives the highest resident memory of the controller beyond that of
// the flood alone, while outputs come in and while they are read.
func (p *printers) measure(ctx context.Context, g *generator, base int64) error {
	b, watch := p.rig.bench, p.watch()
	defer watch.close()
	keep := func(d time.Duration, what string, until func() (bool, error)) error {
		return waitEvery(ctx, pollEvery, d, what, func() (bool, error) {
			if _, err := g.look(ctx, base); err != nil {
				return false, err
			}
			return until()
		})
	}
	if err := keep(b.window+time.Minute, "the flood to go on", after(b.window)); err != nil {
		return err
	}
	watch.peaks()
	if err := keep(b.window+time.Minute, "the flood to go on", after(b.window)); err != nil {
		return err
	}
	flood := watch.peaks()
	if err := p.submit(ctx); err != nil {
		return err
	}
	began := time.Now()
	if err := keep(outputsWait, "all outputs to be stored", func() (bool, error) { return p.printed(ctx) }); err != nil {
		return fmt.Errorf("%w (%d are missing)", err, len(p.tasks))
	}
	took, written := time.Since(began), watch.peaks()
	read := make(chan error, 1)
	go func() { read <- p.readAll(ctx) }()
	var readErr error
	err := keep(outputsWait, "outputs to be read", func() (bool, error) {
		select {
		case readErr = <-read:
			return true, nil
		default:
			return false, nil
		}
	})
	if err := errors.Join(err, readErr); err != nil {
		return err
	}
	reading := watch.peaks()
	b.note("%d outputs of %d MiB were stored in %.1f s beside the flood: %.1f MiB/s; then %d of them were read at the same time",
		outputTasks, outputBytes>>20, took.Seconds(), float64(outputTasks*(outputBytes>>20))/took.Seconds(), outputReaders)
	b.note("highest resident memory of the controller: flood alone %.1f MiB, with outputs %.1f, while they are read %.1f; of an agent: idle %.1f, printing %.1f",
		flood[0], written[0], reading[0], flood[1], written[1])
	b.figure("rss_over_plateau_mib", max(written[0], reading[0])-flood[0], "MiB")
	b.figure("agent_rss_over_plateau_mib", max(written[1], reading[1])-flood[1], "MiB")
	return p.check(ctx)
}

// after gives a condition that holds when d has passed.
func after(d time.Duration) func() (bool, error) {
	end := time.Now().Add(d)
	return func() (bool, error) { return time.Now().After(end), nil }
}

// submit gives each agent its share of the tasks.
func (p *printers) submit(ctx context.Context) error {
	for i := range outputTasks {
		var task struct {
			ID string `json:"id"`
		}
		body := map[string]any{"agent": p.ids[i%len(p.ids)], "kind": "cmd.run", "timeout": "5m", "args": map[string]any{"program": "print"}}
		if err := p.rig.api.call(ctx, "POST", "/api/v1/tasks", body, &task); err != nil {
			return err
		}
		p.tasks = append(p.tasks, task.ID)
	}
	return nil
}

// printed says whether all tasks are completed; it fails if one is not well.
func (p *printers) printed(ctx context.Context) (bool, error) {
	for len(p.tasks) > 0 {
		var task struct {
			ID          string `json:"id"`
			State       string `json:"state"`
			Outcome     string `json:"outcome"`
			Detail      string `json:"detail"`
			OutputBytes int64  `json:"output_bytes"`
		}
		last := p.tasks[len(p.tasks)-1]
		if err := p.rig.api.call(ctx, "GET", "/api/v1/tasks/"+last, nil, &task); err != nil {
			return false, err
		}
		if task.State != "completed" {
			return false, nil
		}
		if task.Outcome != "succeeded" || task.OutputBytes != outputBytes {
			return false, fmt.Errorf("task %s is %s with %d bytes of output: %s", last, task.Outcome, task.OutputBytes, task.Detail)
		}
		p.tasks = p.tasks[:len(p.tasks)-1]
	}
	return true, nil
}

// readAll reads whole outputs, several at the same time.
func (p *printers) readAll(ctx context.Context) error {
	var page struct {
		Items []struct {
			ID string `json:"id"`
		} `json:"items"`
	}
	err := p.rig.api.call(ctx, "GET", "/api/v1/tasks?kind=cmd.run&limit="+strconv.Itoa(outputReaders), nil, &page)
	if err != nil {
		return err
	}
	return inParallel(len(page.Items), len(page.Items), func(i int) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.rig.api.base+"/api/v1/tasks/"+page.Items[i].ID+"/output", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+p.rig.api.token)
		res, err := p.rig.api.http.Do(req)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		if n, err := io.Copy(io.Discard, res.Body); err != nil || n != outputBytes {
			return fmt.Errorf("the output of task %s has %d bytes (status %d): %w", page.Items[i].ID, n, res.StatusCode, err)
		}
		return nil
	})
}

// check compares what is on disk with what was printed.
func (p *printers) check(ctx context.Context) error {
	db, err := openDB(p.rig.run.DatabaseURL)
	if err != nil {
		return err
	}
	defer release(db)
	var n int64
	if err := db.QueryRowContext(ctx, "SELECT coalesce(sum(octet_length(bytes)), 0) FROM task_output").Scan(&n); err != nil {
		return err
	}
	if n != outputTasks*outputBytes {
		return fmt.Errorf("%d bytes of output are on disk; %d were printed", n, outputTasks*outputBytes)
	}
	return nil
}

// memoryWatch samples resident memory and keeps the highest values.
type memoryWatch struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
	mu     sync.Mutex
	top    [2]float64 // MiB: the controller, the largest agent
}

func (p *printers) watch() *memoryWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &memoryWatch{cancel: cancel}
	w.done.Go(func() {
		for wait(ctx, sampleEvery) == nil {
			var now [2]float64
			now[0], _ = residentKiB(p.rig.run.PID)
			for _, a := range p.agents {
				kib, _ := residentKiB(a.pid())
				now[1] = max(now[1], kib)
			}
			w.mu.Lock()
			for i := range now {
				w.top[i] = max(w.top[i], now[i]/1024)
			}
			w.mu.Unlock()
		}
	})
	return w
}

// peaks gives the highest values since the last call.
func (w *memoryWatch) peaks() [2]float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	top := w.top
	w.top = [2]float64{}
	return top
}

func (w *memoryWatch) close() {
	w.cancel()
	w.done.Wait()
}
