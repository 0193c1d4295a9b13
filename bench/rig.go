package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	// upWait is until `headgate up` says that it is ready.
	upWait = 2 * time.Minute
	// connectWait is until all agents are connected.
	connectWait = 3 * time.Minute
	// pairsPerToken stays below the pairings that one API token may start in a
	// minute; more agents are enrolled with more tokens.
	pairsPerToken = 250
	// usesPerToken is how many agents one enrolment token may enrol at most.
	usesPerToken = 1000
	// pairWorkers is how many pairings run at once.
	pairWorkers = 8
	// callTimeout bounds one call of the API.
	callTimeout = 2 * time.Minute
)

// rig is a real Headgate: `headgate up` without agents of its own, and a
// simulator with as many as a benchmark needs.
type rig struct {
	bench *bench
	dir   string // of this rig, with the data of both
	env   []string
	up    *process
	run   runFile
	api   *api
	sim   *worker
	ids   []string // of the agents
	port  int
	open  int // tasks of agents that are dead, which nobody waits for

	// Of a rig that is started again on the same ports; see secureRig.
	public, controller string
	extra              []string // arguments of up
}

// runFile is what `headgate up` tells of itself in run.json.
type runFile struct {
	PublicURL     string `json:"public_url"`
	ControllerURL string `json:"controller_url"`
	CAFile        string `json:"ca_file"`
	TokenFile     string `json:"token_file"`
	DatabaseURL   string `json:"database_url"`
	PID           int    `json:"pid"`
}

// newRig starts Headgate in a new folder; the environment is added to that of
// all its processes.
func (b *bench) newRig(ctx context.Context, env ...string) (*rig, error) {
	dir, err := b.newDir()
	if err != nil {
		return nil, err
	}
	r := &rig{bench: b, dir: dir}
	r.env = append(env, "BENCH_CPU_PROFILE="+r.profileFile()) // read only by a program built for profiles
	if err := r.startUp(ctx); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// upArgs is the command that is measured.
func (r *rig) upArgs(public string) []string {
	controller := cmp.Or(r.controller, "127.0.0.1:0")
	return append([]string{
		"up", "--data", filepath.Join(r.dir, "headgate"), "--agents", "0",
		"--public-addr", public, "--controller-addr", controller,
	}, r.extra...)
}

// startUp starts `headgate up` and waits for its run.json.
func (r *rig) startUp(ctx context.Context) error {
	logFile := filepath.Join(r.dir, "up.log")
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(r.bench.headgate, r.upArgs(cmp.Or(r.public, "127.0.0.1:0"))...) //nolint:noctx // it ends by TERM, then KILL
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), r.env...)
	if r.up, err = startProcess(cmd); err != nil {
		return err
	}
	file := filepath.Join(r.dir, "headgate", "run.json")
	err = waitUntil(ctx, upWait, "headgate up to be ready; see "+logFile, func() (bool, error) {
		select {
		case <-r.up.ended:
			text, _ := os.ReadFile(logFile) // the error says the rest
			return false, fmt.Errorf("headgate up ended: %w\n%s", r.up.err, lastLines(string(text), 20))
		default:
		}
		_, err := os.Stat(file)
		return err == nil, nil
	})
	if err != nil {
		return err
	}
	return r.readRunFile(file)
}

func (r *rig) readRunFile(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &r.run); err != nil {
		return err
	}
	token, err := os.ReadFile(r.run.TokenFile)
	if err != nil {
		return err
	}
	r.api = &api{base: r.run.PublicURL, token: strings.TrimSpace(string(token)), http: &http.Client{Timeout: callTimeout}}
	return nil
}

// stopUp ends Headgate and leaves its data.
func (r *rig) stopUp() error {
	if r.up == nil {
		return nil
	}
	err := r.up.stop()
	r.up = nil
	return err
}

// close ends everything and removes the data.
func (r *rig) close() error {
	var errs []error
	if r.sim != nil {
		errs = append(errs, r.sim.stop())
	}
	errs = append(errs, r.stopUp())
	return errors.Join(append(errs, r.bench.removeDir(r.dir))...)
}

// simulate starts n simulated agents, has the controller pair those that it
// does not know, and waits until all are connected.
func (r *rig) simulate(ctx context.Context, n int) error {
	var st simState
	var err error
	r.sim, err = startWorker(&st, nil, "-simulator", filepath.Join(r.dir, "agents"), "-agents", strconv.Itoa(n))
	if err != nil {
		return err
	}
	r.ids, r.port = st.IDs, st.Port
	for from := st.Paired; from < n; from += usesPerToken {
		if err := r.pair(ctx, from, min(n, from+usesPerToken)); err != nil {
			return err
		}
	}
	return r.connected(ctx, n)
}

// pair enrols the agents from one index to another, with one enrolment token.
func (r *rig) pair(ctx context.Context, from, to int) error {
	var enrol struct {
		Token string `json:"token"`
	}
	if err := r.api.call(ctx, "POST", "/api/v1/enrolment-tokens", map[string]any{"max_uses": to - from}, &enrol); err != nil {
		return fmt.Errorf("make an enrolment token: %w", err)
	}
	var st simState
	if err := r.sim.order(simCommand{Token: enrol.Token}, &st); err != nil {
		return err
	}
	var callers []*api
	for i := from; i < to; i += pairsPerToken {
		c, err := r.api.another(ctx, fmt.Sprintf("bench-%d", i))
		if err != nil {
			return err
		}
		callers = append(callers, c)
	}
	return inParallel(pairWorkers, to-from, func(i int) error {
		address := net.JoinHostPort(agentAddress(from+i).String(), strconv.Itoa(r.port))
		body := map[string]any{"address": address, "token": enrol.Token}
		if err := callers[i/pairsPerToken].call(ctx, "POST", "/api/v1/agents/pair", body, &struct{}{}); err != nil {
			return fmt.Errorf("pair the agent at %s: %w", address, err)
		}
		return nil
	})
}

// stats is the part of GET /stats that is needed here.
type stats struct {
	Agents map[string]int `json:"agents"`
	Tasks  struct {
		New       int              `json:"new"`
		Waiting   int              `json:"waiting"`
		Submitted int64            `json:"submitted"`
		Completed map[string]int64 `json:"completed"`
	} `json:"tasks"`
}

func (s *stats) completed() (n int64) {
	for _, k := range s.Tasks.Completed {
		n += k
	}
	return n
}

func (r *rig) stats(ctx context.Context) (s stats, err error) {
	err = r.api.call(ctx, "GET", "/api/v1/stats?since=-1m", nil, &s)
	return s, err
}

// connected waits until n agents are.
func (r *rig) connected(ctx context.Context, n int) error {
	last := 0
	err := waitUntil(ctx, connectWait, fmt.Sprintf("%d agents to be connected", n), func() (bool, error) {
		s, err := r.stats(ctx)
		last = s.Agents["connected"]
		return last == n, err
	})
	if err != nil {
		return fmt.Errorf("%w (%d are)", err, last)
	}
	return nil
}

// drained waits until no task is open but those of dead agents.
func (r *rig) drained(ctx context.Context) error {
	return waitUntil(ctx, connectWait, "all tasks to be completed", func() (bool, error) {
		s, err := r.stats(ctx)
		return err == nil && s.Tasks.New+s.Tasks.Waiting == r.open, err
	})
}

// postmaster gives the process id of the private cluster.
func (r *rig) postmaster(ctx context.Context) (int, error) {
	db, err := openDB(r.run.DatabaseURL)
	if err != nil {
		return 0, err
	}
	defer release(db)
	var dir string
	if err := db.QueryRowContext(ctx, "SELECT current_setting('data_directory')").Scan(&dir); err != nil {
		return 0, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return strconv.Atoi(line)
}

// api calls the REST interface as anybody would.
type api struct {
	base  string
	token string
	http  *http.Client
}

// another makes a further API token and gives a client that uses it.
func (a *api) another(ctx context.Context, name string) (*api, error) {
	var made struct {
		Secret string `json:"secret"`
	}
	err := a.call(ctx, "POST", "/api/v1/tokens", map[string]any{"name": name, "role": "admin"}, &made)
	if err != nil {
		return nil, fmt.Errorf("make an API token: %w", err)
	}
	return &api{base: a.base, token: made.Secret, http: a.http}, nil
}

// host gives where the API listens.
func (a *api) host() (string, error) {
	u, err := url.Parse(a.base)
	if err != nil {
		return "", err
	}
	return u.Host, nil
}

func (a *api) call(ctx context.Context, method, path string, body, out any) error {
	var reader io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return err
		}
		reader = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.base+path, reader)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+a.token)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := a.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode >= 300 {
		return fmt.Errorf("%s %s answered %d: %s", method, path, res.StatusCode, bytes.TrimSpace(data))
	}
	if out == nil || len(data) == 0 {
		return nil
	}
	return json.Unmarshal(data, out)
}
