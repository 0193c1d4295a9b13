package testkit

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"
)

// How says in which way a connection is ended.
type How int

// The ways to end a connection. FIN looks to the client like a server that
// closed in good order, RST like one that crashed or a firewall that cut.
const (
	FIN How = iota
	RST
)

const (
	// proxyDialTimeout bounds the connection to the server, which is local.
	proxyDialTimeout = 10 * time.Second
	// finLinger is how long an orderly end waits for the client's own.
	finLinger = 2 * time.Second
)

// Proxy stands between lib/pq and a PostgreSQL server, understands the framing
// of the protocol, and breaks connections at chosen moments. Towards the client
// it listens on loopback TCP, because only TCP can be reset.
//
// It reads one request of a connection at a time, as lib/pq sends them.
type Proxy struct {
	listener *net.TCPListener
	network  string // of the server
	address  string
	dsn      string
	wg       sync.WaitGroup

	mu       sync.Mutex // guards what follows
	faults   []*Fault
	links    map[*link]struct{}
	healed   chan struct{} // closed while traffic flows
	blocked  bool
	closed   bool
	accepted int
	seen     map[string]int // executions by text
	alone    map[string]int // of them those outside a transaction block
}

// Fault is one armed fault. The zero value of a field means: any statement,
// none skipped, FIN, once.
type Fault struct {
	// Match chooses statements by their text as the client sent it.
	Match *regexp.Regexp
	// Skip lets that many matching statements pass first.
	Skip int
	// How ends the connection.
	How How
	// Times is how many connections are broken; 0 means one.
	Times int
	// Before loses the statement instead of its answer: the server never sees
	// it, and the client cannot tell the difference.
	Before bool

	proxy *Proxy // guards hits and skipped by its lock
	hits  []string
	wait  map[int]chan struct{}
}

// NewProxy starts a proxy in front of the server that dsn names (keyword form,
// one host). It ends with the test.
func NewProxy(tb testing.TB, dsn string) *Proxy {
	tb.Helper()
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		tb.Fatalf("proxy: read the connection string: %v", err)
	}
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatalf("proxy: listen: %v", err)
	}
	p := &Proxy{
		listener: ln, network: "tcp", address: fmt.Sprintf("%s:%d", cfg.Host, cfg.Port),
		links: map[*link]struct{}{}, healed: make(chan struct{}),
		seen: map[string]int{}, alone: map[string]int{},
	}
	close(p.healed)
	if strings.HasPrefix(cfg.Host, "/") {
		p.network, p.address = "unix", filepath.Join(cfg.Host, fmt.Sprintf(".s.PGSQL.%d", cfg.Port))
	}
	// The last mention of a keyword counts.
	p.dsn = fmt.Sprintf("%s host=127.0.0.1 port=%d", dsn, ln.Addr().(*net.TCPAddr).Port)
	p.wg.Go(p.accept)
	tb.Cleanup(p.close)
	return p
}

// DSN gives the connection string that leads through the proxy.
func (p *Proxy) DSN() string { return p.dsn }

// DropReplyAfter arms a fault: the next times statements that match are passed
// on and the server's answer is awaited, so that what they do is done (a COMMIT
// is on disk); then the answer is thrown away and the connection ended.
// Statements that the server refuses are answered as usual and do not count.
func (p *Proxy) DropReplyAfter(match *regexp.Regexp, how How, times int) *Fault {
	return p.Arm(&Fault{Match: match, How: how, Times: times})
}

// Arm arms a fault of which more is to be said than DropReplyAfter can.
func (p *Proxy) Arm(f *Fault) *Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.proxy = p
	f.Times = max(f.Times, 1)
	f.wait = map[int]chan struct{}{}
	p.faults = append(p.faults, f)
	return f
}

// Hits gives the command tags ("COMMIT", "INSERT 0 1") that the client never
// saw; empty ones for statements that were lost before the server.
func (f *Fault) Hits() []string {
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()
	return slices.Clone(f.hits)
}

// Hit is closed when the fault has struck n times.
func (f *Fault) Hit(n int) <-chan struct{} {
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()
	if f.wait[n] == nil {
		f.wait[n] = make(chan struct{})
		if len(f.hits) >= n {
			close(f.wait[n])
		}
	}
	return f.wait[n]
}

// Stall stops traffic in both directions while connections stay open and new
// ones are accepted: a server that has fallen silent.
func (p *Proxy) Stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.healed:
		p.healed = make(chan struct{})
	default:
	}
}

// Block cuts all connections and resets every new one: a server that is gone.
func (p *Proxy) Block() {
	p.mu.Lock()
	p.blocked = true
	p.mu.Unlock()
	p.Cut()
}

// Heal ends Stall and Block. What was held back is delivered late, as a network
// does. Armed faults stay armed.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocked = false
	select {
	case <-p.healed:
	default:
		close(p.healed)
	}
}

// Cut resets all connections of this moment.
func (p *Proxy) Cut() {
	p.mu.Lock()
	links := make([]*link, 0, len(p.links))
	for l := range p.links {
		links = append(links, l)
	}
	p.mu.Unlock()
	for _, l := range links {
		l.end(RST)
	}
}

// Connections gives how many connections are open and how many were accepted
// so far.
func (p *Proxy) Connections() (open, accepted int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links), p.accepted
}

// Statements gives every statement text seen and how often it was executed: the
// list of a recording run.
func (p *Proxy) Statements() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.seen)
}

// Autocommitted gives those of the statements that were executed outside a
// transaction block, where a driver that loses the answer may run them again.
func (p *Proxy) Autocommitted() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.alone)
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.listener.Close()
	p.Heal()
	p.Cut()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.AcceptTCP()
		if err != nil {
			return // closed
		}
		l := &link{proxy: p, client: client, gone: make(chan struct{})}
		p.mu.Lock()
		p.accepted++
		refused := p.blocked || p.closed
		if !refused {
			p.links[l] = struct{}{}
		}
		p.mu.Unlock()
		if refused {
			l.end(RST)
			continue
		}
		p.wg.Go(func() {
			l.run()
			p.mu.Lock()
			delete(p.links, l)
			p.mu.Unlock()
		})
	}
}

// flow waits while the proxy is stalled; false if the link ended meanwhile.
func (p *Proxy) flow(l *link) bool {
	for {
		p.mu.Lock()
		healed := p.healed
		p.mu.Unlock()
		select {
		case <-healed:
			return true
		case <-l.gone:
			return false
		}
	}
}

// executed notes a statement on its way to the server and gives the fault that
// its answer shall meet, if any.
func (p *Proxy) executed(text string, alone bool) *Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[text]++
	if alone {
		p.alone[text]++
	}
	for _, f := range p.faults {
		if len(f.hits) >= f.Times || (f.Match != nil && !f.Match.MatchString(text)) {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		return f
	}
	return nil
}

// strike counts a hit; false if others were faster and the fault is used up.
func (f *Fault) strike(tag string) bool {
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()
	if len(f.hits) >= f.Times {
		return false
	}
	f.hits = append(f.hits, tag)
	if ch := f.wait[len(f.hits)]; ch != nil {
		close(ch)
	}
	return true
}

// isClosed says whether an error is the ordinary end of a connection.
func isClosed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrUnexpectedEOF)
}
