package controller

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unicode/utf16"

	"headgate/handlers"
	"headgate/internal/agent"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/internal/testkit"
	"headgate/tasks"
)

// printPolicy lets an agent print files: one, one on each stream, one cut to a
// small bound, and one before and one after a file is there.
const printPolicy = `version: 1
programs:
  show: {path: /bin/cat, args: ["{out}"], params: {out: &file {type: string, required: true, max_length: 4096}}}
  both:
    path: /bin/sh
    args: ["-c", 'cat "$1" & cat "$2" >&2; wait', sh, "{out}", "{err}"]
    params: {out: *file, err: *file}
  limited: {path: /bin/cat, args: ["{out}"], params: {out: *file}, max_output_bytes: 300000}
  halves:
    path: /bin/sh
    args: ["-c", 'cat "$1"; until [ -e "$2" ]; do sleep 0.05; done; cat "$2" "$1"; : >"$3"', sh, "{out}", "{next}", "{end}"]
    params: {out: *file, next: *file, end: *file}
`

// printers are a controller and real agents that run real programs.
type printers struct {
	*started
	dir string
}

func startPrinters(t *testing.T, dsn, data string) *printers {
	t.Helper()
	s := start(t, dsn, data, func(c *Config) { c.AllowLoopbackAgents = true })
	s.await("the opening of the public port", s.c.Opened())
	return &printers{started: s, dir: t.TempDir()}
}

// pair starts an agent that may print and pairs it; way, if not nil, gives the
// address by which the controller reaches it.
func (p *printers) pair(name string, way func(addr string) string) fleet.View {
	p.Helper()
	token, _, err := p.c.parts.fleet.CreateEnrolmentToken(p.Context(), "test", time.Hour, 1)
	if err != nil {
		p.Fatal(err)
	}
	policy := filepath.Join(p.dir, name+".yaml")
	if err := os.WriteFile(policy, []byte(printPolicy), 0o600); err != nil {
		p.Fatal(err)
	}
	addr := newAgentWith(p.T, token, agent.Config{Name: name, PolicyFile: policy})
	if way != nil {
		addr = way(addr)
	}
	v, err := p.c.parts.fleet.Pair(p.Context(), "test", addr, token)
	if err != nil {
		p.Fatal(err)
	}
	return v
}

// file makes a file to print.
func (p *printers) file(content []byte) string {
	p.Helper()
	f, err := os.CreateTemp(p.dir, "print")
	if err != nil {
		p.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		p.Fatal(err)
	}
	return f.Name()
}

// run submits a task that runs a program of the policy.
func (p *printers) run(agent, program string, args map[string]string) tasks.ID {
	p.Helper()
	text, err := json.Marshal(map[string]any{"program": program, "args": args})
	if err != nil {
		p.Fatal(err)
	}
	task, err := p.c.parts.service.Submit(p.Context(), tasks.Submission{Agent: agent, Kind: kinds.Run, Args: text}, "test", tasks.Idempotency{})
	if err != nil {
		p.Fatal(err)
	}
	return task.ID
}

// printedTask is what the API says of a task that printed.
type printedTask struct {
	Outcome     string
	Attempt     int
	OutputBytes int64 `json:"output_bytes"`
	Output      *handlers.OutputBody
}

// ended waits for a task's success and gives it.
func (p *printers) ended(id tasks.ID) printedTask {
	p.Helper()
	until(p.T, "the end of a task", func() bool { return p.task(id).State == tasks.StateCompleted })
	_, body, _ := p.caller(p.fileToken()).get("/api/v1/tasks/" + id.String())
	var got printedTask
	if err := json.Unmarshal(body, &got); err != nil {
		p.Fatalf("%v: %s", err, body)
	}
	if got.Outcome != "succeeded" || got.Attempt != 1 {
		p.Errorf("task %d: %s", id, body)
	}
	return got
}

// same compares one stream of a task, as it is downloaded, with what was printed.
func (p *printers) same(id tasks.ID, stream string, want []byte) {
	p.Helper()
	status, got, _ := p.caller(p.fileToken()).get("/api/v1/tasks/" + id.String() + "/output?stream=" + stream)
	if status != http.StatusOK || !bytes.Equal(got, want) {
		n := 0
		for n < min(len(got), len(want)) && got[n] == want[n] {
			n++
		}
		p.Errorf("%s of task %d: status %d, %d bytes instead of %d, another one at %d", stream, id, status, len(got), len(want), n)
	}
}

// random gives bytes that are the same for the same seed.
func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	_, _ = r.Read(b) // never fails
	return b
}

// cutter passes connections on and resets the first of them, each after so many
// bytes that came back.
type cutter struct {
	net.Listener
	to    string
	after int64

	mu    sync.Mutex // guards both below
	cuts  int        // still to come
	conns map[net.Conn]bool
}

func newCutter(t *testing.T, to string, cuts int, after int64) *cutter {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{Listener: ln, to: to, after: after, cuts: cuts, conns: map[net.Conn]bool{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return // closed
			}
			wg.Go(func() { c.pass(conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		c.mu.Lock()
		for conn := range c.conns {
			conn.Close()
		}
		c.conns = nil
		c.mu.Unlock()
		wg.Wait()
	})
	return c
}

// hold notes connections for the end of the test; false if it has come.
func (c *cutter) hold(conns ...net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range conns {
		if c.conns != nil {
			c.conns[conn] = true
		}
	}
	return c.conns != nil
}

func (c *cutter) left() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cuts
}

func (c *cutter) pass(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", c.to)
	if err != nil {
		return
	}
	defer server.Close()
	if !c.hold(client, server) {
		return
	}
	var there sync.WaitGroup
	there.Go(func() {
		_, _ = io.Copy(server, client)
		server.Close()
	})
	if n, _ := io.CopyN(client, server, c.after); n == c.after {
		c.mu.Lock()
		cut := c.cuts > 0
		if cut {
			c.cuts--
		}
		c.mu.Unlock()
		if cut {
			if tcp, ok := client.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // fails only if it is closed
			}
		} else {
			_, _ = io.Copy(client, server)
		}
	}
	client.Close()
	there.Wait()
}

// Whatever was under way in a connection that breaks comes again, and is stored
// once; both streams are what was printed, to the byte.
//
// Cases P4, P19, P45.
func TestOutputIsExactOverTwentyLostConnections(t *testing.T) {
	t.Parallel()
	p := startPrinters(t, testkit.NewDatabase(t), t.TempDir())
	const cuts, after, size = 20, 256 << 10, 3 << 20 // both streams are more than all that the cut connections pass
	var way *cutter
	box := p.pair("box", func(addr string) string {
		way = newCutter(t, addr, cuts, after)
		return way.Addr().String()
	})
	out, err := random(1, size), random(2, size)
	id := p.run("box", "both", map[string]string{"out": p.file(out), "err": p.file(err)})
	f := p.c.parts.fleet
	until(t, "the end of a task whose agent is lost again and again", func() bool {
		if v, err := f.Get(box.ID); err == nil && v.Live.Health == fleet.HealthUnreachable {
			f.Reconnect(box.Num, "a test does not wait for the pause")
		}
		return p.task(id).State == tasks.StateCompleted
	})
	got := p.ended(id)
	p.same(id, tasks.Stdout, out)
	p.same(id, tasks.Stderr, err)
	if n := way.left(); n != 0 {
		t.Errorf("%d connections were not cut", n)
	}
	if got.OutputBytes != 2*size || got.Output == nil || got.Output.Truncated {
		t.Errorf("the task says %+v", got)
	}
}

// Cases P22, P45, P46.
func TestOutputIsBytes(t *testing.T) {
	t.Parallel()
	p := startPrinters(t, testkit.NewDatabase(t), t.TempDir())
	p.pair("box", nil)
	var utf []byte
	for _, u := range utf16.Encode([]rune("grüße 😀 שלום\n")) {
		utf = append(utf, byte(u), byte(u>>8))
	}
	prints := map[string][]byte{
		"no UTF-8":                    []byte("\x82\xff"),
		"NUL":                         []byte("a\x00b\x00\x00"),
		"UTF-16":                      utf,
		"a rune between two chunks":   append(bytes.Repeat([]byte("x"), 64<<10-1), "é and on"...),
		"a line without an end":       bytes.Repeat([]byte("0123456789"), 500_000),
		"nothing":                     {},
		"one byte":                    {0},
		"a chunk and nothing further": random(3, 64<<10),
	}
	ids := map[string]tasks.ID{}
	for name, content := range prints {
		ids[name] = p.run("box", "show", map[string]string{"out": p.file(content)})
	}
	for name, content := range prints {
		if got := p.ended(ids[name]); got.OutputBytes != int64(len(content)) {
			t.Errorf("%s: %+v", name, got)
		}
		p.same(ids[name], tasks.Stdout, content)
	}
	p.limited()
}

// limited prints more than its program may: the outcome is the same, the ends
// are kept, and the rest has its place and its size.
func (p *printers) limited() {
	p.Helper()
	const size, kept = 2_000_000, 300_000
	content := random(4, size)
	id := p.run("box", "limited", map[string]string{"out": p.file(content)})
	got := p.ended(id)
	if got.Output == nil || got.OutputBytes != size || got.Output.Bytes != size || got.Output.StoredBytes != kept || !got.Output.Truncated || len(got.Output.Gaps) != 1 {
		p.Fatalf("the task says %+v", got)
	}
	gap := got.Output.Gaps[0]
	if gap.Stream != tasks.Stdout || gap.Offset <= 0 || gap.Bytes != size-kept {
		p.Fatalf("the gap is %+v", gap)
	}
	p.same(id, tasks.Stdout, append(bytes.Clone(content[:gap.Offset]), content[gap.Offset+gap.Bytes:]...))
}

// Cases P5, P48.
func TestManyAgentsPrintAtOnce(t *testing.T) {
	t.Parallel()
	p := startPrinters(t, testkit.NewDatabase(t), t.TempDir())
	const agents, each, size = 5, 10, 256 << 10
	for i := range agents {
		p.pair(fmt.Sprintf("box-%d", i), nil)
	}
	var ids []tasks.ID
	var want [][]byte
	for i := range agents * each {
		want = append(want, random(uint64(100+i), size))
		ids = append(ids, p.run(fmt.Sprintf("box-%d", i%agents), "show", map[string]string{"out": p.file(want[i])}))
	}
	for i, id := range ids {
		if got := p.ended(id); got.OutputBytes != size {
			t.Errorf("task %d: %+v", id, got)
		}
		p.same(id, tasks.Stdout, want[i])
	}
}

// A program prints on while there is no controller, and ends; the one that comes
// then gets all of it.
//
// Cases P19.
func TestAProgramPrintsOnWithoutAController(t *testing.T) {
	t.Parallel()
	dsn, data := testkit.NewDatabase(t), t.TempDir()
	p := startPrinters(t, dsn, data)
	p.pair("box", nil)
	first, second := random(5, 1<<20), random(6, 1<<20)
	next, end := filepath.Join(p.dir, "next"), filepath.Join(p.dir, "end")
	id := p.run("box", "halves", map[string]string{"out": p.file(first), "next": next, "end": end})
	until(t, "the first half", func() bool {
		facts, err := p.c.parts.service.OutputFacts(t.Context(), id)
		return err == nil && facts.Attempt == 1
	})
	if err := p.stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(p.file(second), next); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the program", func() bool { _, err := os.Stat(end); return err == nil })
	p = &printers{started: startPrinters(t, dsn, data).started, dir: p.dir}
	if got := p.ended(id); got.Output == nil || got.Output.Truncated {
		t.Errorf("the task says %+v", got)
	}
	p.same(id, tasks.Stdout, bytes.Join([][]byte{first, second, first}, nil))
}
