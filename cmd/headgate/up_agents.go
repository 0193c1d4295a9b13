package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// localAgent is an agent on this machine that `up` runs as a child process.
type localAgent struct {
	name    string
	dir     string
	address string
	extra   []string // flags of the demo
	child   *child

	mu sync.Mutex
	id string
}

// agentPlan is what `up` wants of one agent.
type agentPlan struct {
	name   string
	labels map[string]string
	extra  []string
}

// Ports of local agents are chosen once, below the ephemeral range, so that
// no outgoing connection takes them while the agent is down.
const (
	firstAgentPort = 20_000
	lastAgentPort  = 29_999
	portTries      = 200
)

func (u *up) plans() []agentPlan {
	if u.opts.demo {
		plans := demoAgents()
		for i := len(plans); i < u.opts.agents; i++ {
			plans = append(plans, agentPlan{name: "demo-" + strconv.Itoa(i+1)})
		}
		return plans[:u.opts.agents]
	}
	plans := []agentPlan{{name: "local"}}
	for i := 1; i < u.opts.agents; i++ {
		plans = append(plans, agentPlan{name: "local-" + strconv.Itoa(i+1)})
	}
	return plans[:u.opts.agents]
}

// startAgents starts every agent and pairs those that are not known yet.
func (u *up) startAgents(ctx context.Context) error {
	known, err := u.knownAgents(ctx)
	if err != nil {
		return err
	}
	for _, plan := range u.plans() {
		if err := u.startAgent(ctx, plan, known); err != nil {
			return fmt.Errorf("start agent %s: %w", plan.name, err)
		}
	}
	return nil
}

type apiAgent struct {
	ID        string   `json:"id"`
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
}

func (u *up) knownAgents(ctx context.Context) (map[string]apiAgent, error) {
	known := map[string]apiAgent{}
	path := "/api/v1/agents?limit=500"
	for path != "" {
		var page struct {
			Items      []apiAgent `json:"items"`
			NextCursor *string    `json:"next_cursor"`
		}
		if err := u.client.call(ctx, "GET", path, nil, &page); err != nil {
			return nil, fmt.Errorf("list the agents: %w", err)
		}
		for _, a := range page.Items {
			known[a.ID] = a
		}
		path = ""
		if page.NextCursor != nil && *page.NextCursor != "" {
			path = "/api/v1/agents?limit=500&cursor=" + *page.NextCursor
		}
	}
	return known, nil
}

func (u *up) startAgent(ctx context.Context, plan agentPlan, known map[string]apiAgent) error {
	a := &localAgent{name: plan.name, dir: filepath.Join(u.opts.dir, "agents", plan.name), extra: plan.extra}
	if err := os.MkdirAll(a.dir, 0o700); err != nil {
		return err
	}
	if err := a.chooseAddress(); err != nil {
		return err
	}
	if err := a.ensurePolicy(ctx); err != nil {
		return err
	}
	a.id = readTrimmed(filepath.Join(a.dir, "paired-id"))
	was, paired := known[a.id]
	token := ""
	if !paired {
		var err error
		if token, err = u.writeEnrolToken(ctx, a); err != nil {
			return err
		}
	}
	u.children = append(u.children, a)
	u.runAgentChild(a)
	if paired {
		return u.updateAddress(ctx, a, was)
	}
	return u.pairAgent(ctx, a, token, plan.labels)
}

func readTrimmed(name string) string {
	data, err := os.ReadFile(name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// chooseAddress takes the port of an earlier start, or a free one, which is
// kept from then on.
func (a *localAgent) chooseAddress() error {
	file := filepath.Join(a.dir, "address")
	if old := readTrimmed(file); old != "" && waitUntilFree(old) {
		a.address = old
		return nil
	}
	for range portTries {
		port := firstAgentPort + rand.IntN(lastAgentPort-firstAgentPort+1)
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if isFree(addr) {
			a.address = addr
			return os.WriteFile(file, []byte(addr+"\n"), 0o600)
		}
	}
	return fmt.Errorf("no free port between %d and %d", firstAgentPort, lastAgentPort)
}

// waitUntilFree waits for an agent that an earlier, killed start left behind:
// it ends by its parent-death signal, but needs a moment for it.
func waitUntilFree(addr string) bool {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(childStop)
	for {
		if isFree(addr) {
			return true
		}
		select {
		case <-tick.C:
		case <-deadline:
			return false
		}
	}
}

func isFree(addr string) bool {
	l, err := net.Listen("tcp", addr) //nolint:noctx // a probe of a local port does not hang
	if err != nil {
		return false
	}
	return l.Close() == nil
}

// agentProgram finds headgate-agent beside this program, else in the PATH.
func agentProgram() (string, error) {
	self, err := os.Executable()
	if err == nil {
		beside := filepath.Join(filepath.Dir(self), "headgate-agent")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	found, err := exec.LookPath("headgate-agent")
	if err != nil {
		return "", errors.New("the program headgate-agent is neither beside headgate nor in the PATH; `make build` makes both")
	}
	return found, nil
}

// ensurePolicy lets the agent write its development policy. It replaces one
// that it has made before and keeps one that the user has changed.
func (a *localAgent) ensurePolicy(ctx context.Context) error {
	program, err := agentProgram()
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, program, "policy", "init", "--dir", a.dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("write the development policy: %w: %s", err, out)
	}
	return nil
}

func (a *localAgent) policyFile() string { return filepath.Join(a.dir, "policy.yaml") }
func (a *localAgent) tokenFile() string  { return filepath.Join(a.dir, "enrol-token") }

func (u *up) writeEnrolToken(ctx context.Context, a *localAgent) (string, error) {
	var made struct {
		Token string `json:"token"`
	}
	if err := u.client.call(ctx, "POST", "/api/v1/enrolment-tokens", map[string]any{}, &made); err != nil {
		return "", fmt.Errorf("make an enrolment token: %w", err)
	}
	return made.Token, os.WriteFile(a.tokenFile(), []byte(made.Token+"\n"), 0o600)
}

// agentGroup is all agent processes of `up`; they stop together, after the
// controller, so that it can hand back what is running.
type agentGroup struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func (u *up) newAgentGroup(ctx context.Context) *agentGroup {
	g := &agentGroup{}
	g.ctx, g.cancel = context.WithCancel(context.WithoutCancel(ctx))
	u.onStop(func(context.Context) error {
		g.cancel()
		g.wg.Wait()
		return nil
	})
	return g
}

// runAgentChild starts the agent's process and keeps it running.
func (u *up) runAgentChild(a *localAgent) {
	a.child = &child{name: a.name, log: u.log, command: func() *exec.Cmd { return a.command(u.group.ctx) }}
	a.child.started = func(int) {
		if !u.announced() {
			return // run.json is written when everything is up
		}
		if err := u.writeRunFile(); err != nil {
			u.log.Error("write run.json", "err", err)
		}
	}
	u.group.wg.Go(func() {
		if err := a.child.run(u.group.ctx); err != nil {
			u.fail(err)
		}
	})
}

// announced says whether run.json has been written once.
func (u *up) announced() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.run.Agents != nil
}

// command gives the agent's command line. Its log goes into its own file.
func (a *localAgent) command(ctx context.Context) *exec.Cmd {
	program, err := agentProgram()
	if err != nil {
		program = "headgate-agent" // its start reports the problem
	}
	args := []string{"--data", filepath.Join(a.dir, "state"), "--listen", a.address, "--name", a.name, "--policy", a.policyFile()}
	if _, err := os.Stat(a.tokenFile()); err == nil {
		args = append(args, "--enrol-token-file", a.tokenFile())
	}
	cmd := exec.Command(program, append(args, a.extra...)...) //nolint:noctx // the child ends by TERM, then KILL, not by its context
	if log, err := os.OpenFile(filepath.Join(a.dir, "agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err == nil {
		cmd.Stdout, cmd.Stderr = io.Writer(log), io.Writer(log)
		context.AfterFunc(ctx, func() { log.Close() })
	}
	return cmd
}

// pairAgent asks the controller to dial the agent until the agent listens.
func (u *up) pairAgent(ctx context.Context, a *localAgent, token string, labels map[string]string) error {
	if err := waitListening(ctx, a.address); err != nil {
		return err
	}
	var paired apiAgent
	err := u.client.call(ctx, "POST", "/api/v1/agents/pair", map[string]any{"address": a.address, "token": token}, &paired)
	if err != nil {
		return fmt.Errorf("pair it: %w", err)
	}
	a.setID(paired.ID)
	if err := os.WriteFile(filepath.Join(a.dir, "paired-id"), []byte(paired.ID+"\n"), 0o600); err != nil {
		return err
	}
	if err := os.Remove(a.tokenFile()); err != nil {
		return err
	}
	if len(labels) == 0 {
		return nil
	}
	return u.client.call(ctx, "PATCH", "/api/v1/agents/"+paired.ID, map[string]any{"labels": labels}, nil)
}

// updateAddress tells the controller when a known agent had to move.
func (u *up) updateAddress(ctx context.Context, a *localAgent, was apiAgent) error {
	for _, addr := range was.Addresses {
		if addr == a.address {
			return nil
		}
	}
	return u.client.call(ctx, "PATCH", "/api/v1/agents/"+was.ID, map[string]any{"addresses": []string{a.address}}, nil)
}

// waitListening waits until something accepts connections at the address.
func waitListening(ctx context.Context, addr string) error {
	var dialer net.Dialer
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := dialer.DialContext(ctx, "tcp", addr)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the agent does not listen at %s: %w", addr, err)
		}
	}
}

func (a *localAgent) setID(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.id = id
}

func (a *localAgent) runAgent() runAgent {
	a.mu.Lock()
	defer a.mu.Unlock()
	return runAgent{ID: a.id, Name: a.name, Address: a.address, DataDir: filepath.Join(a.dir, "state"), PID: a.child.PID()}
}

// signInLink asks for a one-time link for the dashboard.
func (u *up) signInLink() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	var link struct {
		Code string `json:"code"`
	}
	if err := u.client.call(ctx, "POST", "/api/v1/session/links", map[string]any{}, &link); err != nil {
		return "", err
	}
	return u.run.PublicURL + "/sign-in?code=" + link.Code, nil
}

// jsonBody is a shorthand for a task's arguments.
func jsonBody(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // only literals of this program come here
	}
	return data
}
