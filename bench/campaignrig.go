package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"headgate/internal/testkit/history"
)

// controllerNode is one controller with the network between it and the
// database.
type controllerNode struct {
	*node
	relay *relay
	url   string // of its public port

	private string // the address of its controller port
}

// crewNode is one crew with the network between it and the controllers.
type crewNode struct {
	*node
	relay *relay
	place crewPlace
	dir   string
}

// realNode is one headgate-agent.
type realNode struct {
	*node
	address string
	dir     string
	id      string // once it is paired
}

// pairAgain is the pause until an agent is asked again; it takes one try in 2 s.
const pairAgain = 2100 * time.Millisecond

// setUp starts everything and pairs all agents.
func (c *campaign) setUp(ctx context.Context) error {
	c.database = newDatabase(c.dir)
	if err := c.database.start(ctx); err != nil {
		return err
	}
	for i := range c.plan.controllers {
		if err := c.addController(ctx, i); err != nil {
			return err
		}
	}
	if c.plan.shadow {
		if err := c.watchRows(ctx); err != nil {
			return err
		}
	}
	enrolment, err := c.enrolment(ctx)
	if err != nil {
		return err
	}
	for i := range c.plan.crews {
		if err := c.addCrew(ctx, i, enrolment); err != nil {
			return err
		}
	}
	for i := range c.plan.reals {
		if err := c.addReal(ctx, i, enrolment); err != nil {
			return err
		}
	}
	if err := c.pairAll(ctx); err != nil {
		return err
	}
	for i := range c.controllers {
		if err := c.knowsAll(ctx, i); err != nil {
			return err
		}
	}
	return c.nameAll()
}

// watchRows makes the table in which the database writes down each change.
func (c *campaign) watchRows(ctx context.Context) error {
	db, err := openDB(c.database.now().DSN())
	if err != nil {
		return err
	}
	defer release(db)
	_, err = db.ExecContext(ctx, history.ShadowSQL)
	return err
}

// nameAll tells those who write histories the ids of their agents.
func (c *campaign) nameAll() error {
	ids := make([][]string, len(c.crews))
	for _, a := range c.agents {
		if a.real {
			c.reals[a.group].id = a.id
		} else {
			ids[a.group] = append(ids[a.group], a.id)
		}
	}
	for i, n := range c.crews {
		data, err := json.Marshal(ids[i])
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(n.dir, idsFile), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// knowsAll waits until a controller knows every agent: one that was paired at
// the other is heard of a moment later.
func (c *campaign) knowsAll(ctx context.Context, controller int) error {
	api := c.api(controller)
	return waitUntil(ctx, upWait, "all agents to be known", func() (bool, error) {
		var page struct {
			Items []struct{} `json:"items"`
		}
		err := api.call(ctx, "GET", "/api/v1/agents?limit=500", nil, &page)
		return err == nil && len(page.Items) == len(c.agents), err
	})
}

// addController starts a controller; the second gets the CA's key of the first.
func (c *campaign) addController(ctx context.Context, i int) error {
	data := c.path(fmt.Sprintf("controller-%d", i))
	if err := os.MkdirAll(filepath.Join(data, "keys"), 0o700); err != nil {
		return err
	}
	if i > 0 {
		if err := copyFiles(c.path("controller-0", "keys", "ca-*.key"), filepath.Join(data, "keys")); err != nil {
			return err
		}
	}
	n := &controllerNode{relay: newRelay()}
	c.controllers = append(c.controllers, n)
	socket := filepath.Join(socketDir(c.database.now().DSN()), ".s.PGSQL.5432")
	at, err := n.relay.add(ctx, "127.0.0.1:0", "unix", socket)
	if err != nil {
		return err
	}
	public, err := freePort(ctx)
	if err != nil {
		return err
	}
	private, err := freePort(ctx)
	if err != nil {
		return err
	}
	// An address of its own, so that no outgoing connection takes its ports
	// while it is down.
	host := fmt.Sprintf("127.69.0.%d", i+1)
	n.url = "http://" + net.JoinHostPort(host, strconv.Itoa(public))
	n.private = net.JoinHostPort(host, strconv.Itoa(private))
	args := []string{
		"serve", "--data", data, "--public-addr", net.JoinHostPort(host, strconv.Itoa(public)),
		"--controller-addr", n.private,
		"--database-url", fmt.Sprintf("host=127.0.0.1 port=%d user=headgate dbname=headgate sslmode=disable binary_parameters=yes", at.(*net.TCPAddr).Port),
		"--admin-token-file", c.path("admin-token"), "--allow-loopback-agents",
		"--open-delay", "0s", "--open-barrier-timeout", "0s", "--open-ramp", "0s", "--limit-mode", "off",
	}
	n.node = &node{
		name: fmt.Sprintf("controller-%d", i), logFile: c.path(fmt.Sprintf("controller-%d.log", i)),
		command: func() *exec.Cmd { return exec.Command(c.b.headgate, args...) }, //nolint:noctx // it is killed
	}
	if err := n.start(); err != nil {
		return err
	}
	return c.ready(ctx, n)
}

// ready waits until the controller's public port answers.
func (c *campaign) ready(ctx context.Context, n *controllerNode) error {
	client := &http.Client{Timeout: time.Second}
	defer client.CloseIdleConnections()
	return waitEvery(ctx, 50*time.Millisecond, upWait, n.name+" to be ready; see "+n.logFile, func() (bool, error) {
		select {
		case <-n.ended():
			return false, errors.New("it ended by itself")
		default:
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.url+"/readyz", nil)
		if err != nil {
			return false, err
		}
		res, err := client.Do(req)
		if err != nil {
			return false, nil
		}
		res.Body.Close()
		return res.StatusCode == http.StatusOK, nil
	})
}

// enrolment makes a token for all agents.
func (c *campaign) enrolment(ctx context.Context) (string, error) {
	text, err := os.ReadFile(c.path("admin-token"))
	if err != nil {
		return "", err
	}
	c.token = strings.TrimSpace(string(text))
	var made struct {
		Token string `json:"token"`
	}
	n := c.plan.crews*c.plan.agents + c.plan.reals
	err = c.api(0).call(ctx, "POST", "/api/v1/enrolment-tokens", map[string]any{"max_uses": n}, &made)
	return made.Token, err
}

// api calls a controller.
func (c *campaign) api(controller int) *api {
	return &api{base: c.controllers[controller].url, token: c.token, http: &http.Client{Timeout: callTimeout}}
}

func (c *campaign) addCrew(ctx context.Context, i int, enrolment string) error {
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	n := &crewNode{relay: newRelay(), place: crewPlace{i, port}, dir: c.path(fmt.Sprintf("crew-%d", i))}
	c.crews = append(c.crews, n)
	if err := agentDir(n.dir, enrolment); err != nil {
		return err
	}
	for a := range c.plan.agents {
		if _, err := n.relay.add(ctx, n.place.relayed(a), "tcp4", n.place.address(a)); err != nil {
			return err
		}
	}
	self := c.b.self
	if self == "" {
		if self, err = os.Executable(); err != nil {
			return err
		}
	}
	args := []string{"-crew", n.dir, "-agents", strconv.Itoa(c.plan.agents), "-place", fmt.Sprintf("%d:%d", i, port)}
	n.node = &node{
		name: fmt.Sprintf("crew-%d", i), logFile: c.path(fmt.Sprintf("crew-%d.log", i)),
		command: func() *exec.Cmd { return exec.Command(self, args...) }, //nolint:noctx // it is killed
	}
	return n.start()
}

func agentDir(dir, enrolment string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "token"), []byte(enrolment), 0o600)
}

// realPolicy lets an agent of its own do one thing: run effectScript.
const realPolicy = `version: 1
programs:
  effect:
    path: %s
    args: ["%[2]s", "{agent}", "{seconds}"]
    params:
      agent: {type: string, required: true}
      seconds: {type: string, pattern: "[0-9.]+", required: true}
`

// effectScript writes down that it began, takes its time, and writes down that
// it has ended. The clock is that of the histories, in hundredths of a second,
// in which a slot has one order all the same.
const effectScript = `note() {
	read -r up rest < /proc/uptime
	echo "{\"t\":${up%%.*}${up#*.}0000000,\"k\":\"$1\",\"a\":\"$2\",\"id\":$HEADGATE_TASK_ID,\"n\":$HEADGATE_ATTEMPT}" >> "$3"
}
note start "$1" HISTORY
sleep "$2"
note end "$1" HISTORY
`

func (c *campaign) addReal(ctx context.Context, i int, enrolment string) error {
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	n := &realNode{dir: c.path(fmt.Sprintf("agent-%d", i)), address: fmt.Sprintf("127.68.0.%d:%d", i+1, port)}
	c.reals = append(c.reals, n)
	if err := agentDir(n.dir, enrolment); err != nil {
		return err
	}
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		return err
	}
	policy, script := filepath.Join(n.dir, "policy.yaml"), filepath.Join(n.dir, "effect.sh")
	err = errors.Join(
		os.WriteFile(script, []byte(strings.ReplaceAll(effectScript, "HISTORY", n.history())), 0o600),
		os.WriteFile(policy, fmt.Appendf(nil, realPolicy, shell, script), 0o600),
	)
	if err != nil {
		return err
	}
	args := []string{
		"--data", filepath.Join(n.dir, "data"), "--listen", n.address, "--name", fmt.Sprintf("agent-%d", i),
		"--policy", policy, "--enrol-token-file", filepath.Join(n.dir, "token"),
	}
	n.node = &node{
		name: fmt.Sprintf("agent-%d", i), logFile: c.path(fmt.Sprintf("agent-%d.log", i)),
		command: func() *exec.Cmd { return exec.Command(c.b.agent, args...) }, //nolint:noctx // it is killed
	}
	return n.restart()
}

// restart starts the agent and writes that down, as a crew does by itself: what
// had begun before has ended with the process.
func (n *realNode) restart() error {
	w, err := history.Open(n.history())
	if err != nil {
		return err
	}
	if n.id != "" {
		w.Boot(n.id)
	}
	return errors.Join(w.Close(), n.start())
}

func (n *realNode) history() string { return filepath.Join(n.dir, historyFile) }

func (n *crewNode) history() string { return filepath.Join(n.dir, historyFile) }

// pairAll pairs all agents through the first controller.
func (c *campaign) pairAll(ctx context.Context) error {
	var addresses []string
	for i, n := range c.crews {
		for a := range c.plan.agents {
			addresses = append(addresses, n.place.relayed(a))
			c.agents = append(c.agents, campaignAgent{group: i, index: a})
		}
	}
	for i, n := range c.reals {
		addresses = append(addresses, n.address)
		c.agents = append(c.agents, campaignAgent{real: true, group: i})
	}
	text, err := os.ReadFile(c.path(c.tokenFile()))
	if err != nil {
		return err
	}
	api := c.api(0)
	return inParallel(pairWorkers, len(addresses), func(i int) error {
		var made struct {
			ID string `json:"id"`
		}
		var last error
		err := waitEvery(ctx, pairAgain, upWait, "the agent at "+addresses[i]+" to be paired", func() (bool, error) {
			last = api.call(ctx, "POST", "/api/v1/agents/pair", map[string]any{"address": addresses[i], "token": string(text)}, &made)
			return last == nil, nil
		})
		c.agents[i].id = made.ID
		return errors.Join(err, last)
	})
}

// tokenFile names one of the files with the enrolment token.
func (c *campaign) tokenFile() string {
	if c.plan.crews > 0 {
		return "crew-0/token"
	}
	return "agent-0/token"
}

// socketDir takes the folder of the socket out of a connection string of ours.
func socketDir(dsn string) string {
	_, rest, _ := strings.Cut(dsn, "host='")
	dir, _, _ := strings.Cut(rest, "'")
	return dir
}

func copyFiles(pattern, to string) error {
	files, err := filepath.Glob(pattern)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("%s: %w", pattern, fs.ErrNotExist)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(f)), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}
