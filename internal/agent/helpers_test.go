package agent_test

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"uuid"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"headgate/internal/agent"
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
	"headgate/internal/pki"
)

const (
	// roleEnv makes the test binary a program that an agent runs; agentEnv
	// makes it a whole agent, with its Config as JSON.
	roleEnv  = "AGENT_TEST_ROLE"
	agentEnv = "AGENT_TEST_CONFIG"
	// patience bounds every wait of a test; it is generous because machines
	// that build are slow.
	patience = 30 * time.Second
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		play(role)
		os.Exit(0)
	}
	if text := os.Getenv(agentEnv); text != "" {
		runChild(text)
	}
	goleak.VerifyTestMain(m)
}

// runChild is an agent in a process of its own, which a test may kill.
func runChild(text string) {
	var child childConfig
	if err := json.Unmarshal([]byte(text), &child); err != nil {
		panic(err)
	}
	c := agent.Config{
		Listen: cmp.Or(child.Listen, "127.0.0.1:0"), DataDir: child.DataDir, PolicyFile: child.PolicyFile, EnrolTokenFile: child.EnrolTokenFile, Limits: child.Limits,
		NoCgroup: child.NoCgroup, OwnProcess: true,
	}
	c.OnListen = func(a net.Addr) { fmt.Println("listening", a) }
	if err := agent.Run(context.Background(), c); err != nil {
		fmt.Println("ended", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// childConfig is the part of a Config that a child is told.
type childConfig struct {
	Listen, DataDir, PolicyFile, EnrolTokenFile string
	Limits                                      agent.Limits
	NoCgroup                                    bool
}

// testFleet is what a controller of a test has.
type testFleet struct {
	ca         *pki.Authority
	id         uuid.UUID
	controller *pki.Identity
	token      *pki.Token
}

func newFleet(t testing.TB) *testFleet {
	t.Helper()
	ca, err := pki.NewAuthority("test.fleet", time.Now())
	check(t, err)
	f := &testFleet{ca: ca, token: pki.NewToken(pki.SPKI(ca.Certificate()))}
	f.id, f.controller = f.newController(t)
	return f
}

func (f *testFleet) newController(t testing.TB) (uuid.UUID, *pki.Identity) {
	t.Helper()
	id := uuid.NewV4()
	key, err := pki.NewKey()
	check(t, err)
	leaf, err := f.ca.IssueController(&key.PublicKey, id, time.Now())
	check(t, err)
	identity, err := pki.NewIdentity(key, leaf, f.ca.Certificate())
	check(t, err)
	return id, identity
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tokenFile stores a token as an operator would.
func tokenFile(t testing.TB, token *pki.Token) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	check(t, os.WriteFile(path, []byte(token.Reveal()+"\n"), 0o600))
	return path
}

// running is an agent that runs in the test's own process.
type running struct {
	config agent.Config
	addr   string
	fleet  *testFleet
	id     uuid.UUID       // known once paired
	pin    pki.Fingerprint // of its key
	stop   context.CancelFunc
	ended  chan error // holds the word of Run
}

// quick are limits that make tests fast where nothing depends on them.
func quick() agent.Limits {
	return agent.Limits{PairingSpacing: time.Nanosecond, Heartbeat: time.Hour}
}

// start runs an agent in a new folder that waits to be paired.
func (f *testFleet) start(t testing.TB, c agent.Config) *running {
	t.Helper()
	if c.DataDir == "" {
		c.DataDir = filepath.Join(t.TempDir(), "data")
	}
	if c.EnrolTokenFile == "" {
		c.EnrolTokenFile = tokenFile(t, f.token)
	}
	a := &running{config: c, fleet: f}
	a.restart(t)
	return a
}

// paired starts an agent and pairs it.
func (f *testFleet) paired(t testing.TB, c agent.Config) *running {
	t.Helper()
	a := f.start(t, c)
	check(t, a.pair(t))
	a.awaitServing(t)
	return a
}

// awaitServing waits until the agent has gone over from pairing to serving on
// its port: a connection made in between still meets its own certificate. A
// controller dials again; a test's client gives up.
func (a *running) awaitServing(t testing.TB) {
	t.Helper()
	config := pki.DialAgent(pki.AgentDial{Identity: a.fleet.controller, Roots: pki.NewRoots(a.fleet.ca.Certificate()), ID: a.id, Pins: []pki.Fingerprint{a.pin}})
	deadline := time.After(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := tls.Dial("tcp", a.addr, config)
		if err == nil {
			conn.Close()
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the agent does not serve after pairing: %v", err)
		}
	}
}

// restart starts the agent anew on its data.
func (a *running) restart(t testing.TB) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	listening := make(chan string, 1)
	c := a.config
	c.Listen = "127.0.0.1:0"
	c.OnListen = func(addr net.Addr) { listening <- addr.String() }
	if testing.Verbose() {
		c.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, c) }()
	a.stop, a.ended = stop, ended
	t.Cleanup(func() {
		stop()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Error("the agent does not end")
		}
	})
	select {
	case a.addr = <-listening:
	case err := <-ended:
		ended <- err
		t.Fatalf("the agent did not start: %v", err)
	case <-time.After(patience):
		t.Fatal("the agent does not listen")
	}
}

// end stops the agent and gives the word of Run.
func (a *running) end(t testing.TB) error {
	t.Helper()
	a.stop()
	return a.wait(t)
}

func (a *running) wait(t testing.TB) error {
	t.Helper()
	select {
	case err := <-a.ended:
		a.ended <- err
		return err
	case <-time.After(patience):
		t.Fatal("the agent does not end")
		return nil
	}
}

func (a *running) shard() int32 { return int32(a.id[15] % 16) }

func (a *running) dial(t testing.TB) *grpc.ClientConn {
	t.Helper()
	return a.dialAs(t, a.fleet.controller)
}

func (a *running) dialAs(t testing.TB, identity *pki.Identity) *grpc.ClientConn {
	t.Helper()
	config := pki.DialAgent(pki.AgentDial{Identity: identity, Roots: pki.NewRoots(a.fleet.ca.Certificate()), ID: a.id, Pins: []pki.Fingerprint{a.pin}})
	return newClient(t, a.addr, credentials.NewTLS(config))
}

func newClient(t testing.TB, addr string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(creds), grpc.WithDisableRetry(), grpc.WithNoProxy())
	check(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// control is the controller's end of a session.
type control struct {
	t       testing.TB
	agent   *running
	stream  grpc.BidiStreamingClient[agentpb.ControllerMessage, agentpb.AgentMessage]
	in      chan *agentpb.AgentMessage
	err     error // valid when in is closed
	epoch   int64
	welcome *agentpb.Welcome
	cancel  context.CancelFunc
}

// session opens a session and takes its Welcome.
func (a *running) session(t testing.TB, epoch int64) *control {
	t.Helper()
	conn := a.dial(t)
	c := a.sessionOn(t, conn, &agentpb.Hello{Protocol: 1, Shard: a.shard(), Epoch: epoch, ControllerId: a.fleet.id.String()})
	end := c.cancel
	c.cancel = func() {
		end()
		conn.Close()
	}
	c.welcome = c.recv().GetWelcome()
	if c.welcome == nil {
		t.Fatal("the session does not begin with a Welcome")
	}
	return c
}

func (a *running) sessionOn(t testing.TB, conn *grpc.ClientConn, h *agentpb.Hello) *control {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	stream, err := agentpb.NewAgentClient(conn).Session(ctx, grpc.WaitForReady(false))
	check(t, err)
	c := &control{t: t, agent: a, stream: stream, in: make(chan *agentpb.AgentMessage), epoch: h.GetEpoch(), cancel: cancel}
	go func() {
		defer close(c.in)
		for {
			m, err := stream.Recv()
			if err != nil {
				c.err = err
				return
			}
			select {
			case c.in <- m:
			case <-ctx.Done():
				c.err = ctx.Err()
				return
			}
		}
	}()
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Hello{Hello: h}})
	return c
}

// send does not mind a session that has ended: what then comes back tells.
func (c *control) send(m *agentpb.ControllerMessage) { _ = c.stream.Send(m) }

func (c *control) recv() *agentpb.AgentMessage {
	c.t.Helper()
	select {
	case m, ok := <-c.in:
		if !ok {
			c.t.Fatalf("the session ended: %v", c.err)
		}
		return m
	case <-time.After(patience):
		c.t.Fatal("no message arrives")
		return nil
	}
}

// expectEnd takes messages until the session is over.
func (c *control) expectEnd(code codes.Code, text string) {
	c.t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case _, ok := <-c.in:
			if ok {
				continue
			}
			if s, _ := status.FromError(c.err); s.Code() != code || !strings.HasPrefix(s.Message(), text) {
				c.t.Errorf("the session ended with %v, want %s %s", c.err, code, text)
			}
			return
		case <-deadline:
			c.t.Fatal("the session does not end")
		}
	}
}

func (c *control) final() *agentpb.Final {
	c.t.Helper()
	m := c.recv()
	if m.GetFinal() == nil {
		c.t.Fatalf("got %v, want a Final", m)
	}
	return m.GetFinal()
}

// job is an Execute of a task that tests need often.
func (c *control) job(id int64, kind, args string) *agentpb.Execute {
	return &agentpb.Execute{
		TaskId: id, Attempt: 1, Shard: c.agent.shard(), Epoch: c.epoch, Kind: kind, Args: []byte(args),
		Repeatable: kind != "cmd.run", TimeoutMs: patience.Milliseconds(),
	}
}

func (c *control) execute(m *agentpb.Execute) {
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Execute{Execute: m}})
}

func (c *control) ack(o *agentpb.Output) {
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Ack{Ack: &agentpb.Ack{TaskId: o.GetTaskId(), Attempt: o.GetAttempt(), Seq: o.GetSeq()}}})
}

func (c *control) forget(ids ...int64) {
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Forget{Forget: &agentpb.Forget{TaskIds: ids}}})
}

func (c *control) status() *agentpb.Status {
	c.t.Helper()
	c.send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_StatusRequest{StatusRequest: &agentpb.StatusRequest{}}})
	for {
		if s := c.recv().GetStatus(); s != nil {
			return s
		}
	}
}

// finish acknowledges output until the Final and gives both streams.
func (c *control) finish() (stdout, stderr []byte, final *agentpb.Final) {
	c.t.Helper()
	next := int32(-1)
	for {
		m := c.recv()
		if f := m.GetFinal(); f != nil {
			return stdout, stderr, f
		}
		o := m.GetOutput()
		if o == nil {
			continue
		}
		if o.GetSeq() < next {
			c.t.Fatalf("chunk %d comes where at least %d is due", o.GetSeq(), next)
		}
		next = o.GetSeq() + 1
		to := &stdout
		if o.GetStream() == agentpb.Stream_STREAM_STDERR {
			to = &stderr
		}
		*to = append(*to, o.GetData()...)
		c.ack(o)
	}
}

// child is an agent in a process of its own.
type child struct {
	*running
	cmd *exec.Cmd
}

// startChild runs the agent of a in another process, for killing.
func (a *running) startChild(t testing.TB) *child {
	t.Helper()
	c := a.config
	text, err := json.Marshal(childConfig{c.Listen, c.DataDir, c.PolicyFile, c.EnrolTokenFile, c.Limits, c.NoCgroup})
	check(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), agentEnv+"="+string(text))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		// No later start may come that takes away what it has left.
		if id, err := agentID(c.DataDir); err == nil {
			_, err = program.NewKeeper(program.Options{Name: id.String()}).Recover()
			check(t, err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	check(t, err)
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "listening ")
	if !ok {
		t.Fatalf("the child says %q", line)
	}
	child := &child{running: &running{config: a.config, addr: addr, fleet: a.fleet, id: a.id, pin: a.pin}, cmd: cmd}
	return child
}

// kill ends the process at once, as a power cut would for it.
func (c *child) kill(t testing.TB) {
	t.Helper()
	check(t, c.cmd.Process.Kill())
	_ = c.cmd.Wait() // "signal: killed" is what was asked for
}

// policyWith writes a policy whose programs are roles of the test binary.
func policyWith(t testing.TB, roles ...string) string {
	t.Helper()
	type entry struct {
		Path    string            `json:"path"`
		Args    []string          `json:"args,omitempty"`
		Params  map[string]any    `json:"params,omitempty"`
		Env     map[string]string `json:"env"`
		Max     int64             `json:"max_output_bytes,omitempty"`
		Timeout string            `json:"timeout,omitempty"`
	}
	programs := map[string]entry{}
	for _, role := range roles {
		e := entry{Path: os.Args[0], Env: map[string]string{roleEnv: role}}
		switch role {
		case "family": // prints its number and that of a child in a session of its own
			e.Path, e.Args = "/bin/sh", []string{"-c", "setsid sh -c 'trap \"\" TERM; echo $$; sleep 3600' & echo $$; wait"}
		case "surroundings":
			e.Path, e.Args = "/bin/sh", []string{"-c", "env | sort; pwd; id -un; id -gn; id -Gn; umask; ulimit -n; ulimit -c; readlink /proc/self/fd/0; ls /proc/self/fd | wc -l"}
			e.Env = map[string]string{"TZ": "UTC", "GREETING": "a b"}
		case "limited":
			e.Max, e.Env[roleEnv] = 1000, "flood"
		case "short":
			e.Timeout, e.Env[roleEnv] = "50ms", "wait"
		case "append", "until_file":
			e.Args = []string{"{file}"}
			e.Params = map[string]any{"file": map[string]any{"type": "string", "required": true}}
		case "missing":
			e.Path = "/nowhere/program"
		}
		programs[role] = e
	}
	// JSON is YAML.
	data, err := json.Marshal(map[string]any{"version": 1, "programs": programs})
	check(t, err)
	path := filepath.Join(t.TempDir(), "policy.yaml")
	check(t, os.WriteFile(path, data, 0o600))
	return path
}
