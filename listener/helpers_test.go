package listener_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"headgate/listener"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of a test that should not have to wait long.
const patience = 10 * time.Second

// wide gives limits that no test meets that does not mean to.
func wide() listener.Limits {
	return listener.Limits{
		PublicRate: listener.Rate{PerSecond: 1e6, Burst: 1e6}, SourceRate: listener.Rate{PerSecond: 1e6, Burst: 1e6},
		SourceConns: 1e6, HandshakesPerSource: 1e6, Handshakes: 1e6, MaxConns: 1e6, FDReserve: 1,
	}
}

// config gives a Config with free ports, no delay, wide limits and quick
// retries.
func config(change ...func(*listener.Config)) listener.Config {
	cfg := listener.Config{
		Controller: listener.PortConfig{Addr: "127.0.0.1:0"},
		Public:     listener.PortConfig{Addr: "127.0.0.1:0"},
		Limits:     wide(),
		Retry:      listener.RetryConfig{Min: 5 * time.Millisecond, Max: 20 * time.Millisecond},
	}
	for _, c := range change {
		c(&cfg)
	}
	return cfg
}

func start(t *testing.T, change ...func(*listener.Config)) *listener.Listener {
	t.Helper()
	l, err := listener.New(t.Context(), config(change...))
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// open marks l stable and waits until the public port accepts.
func open(t *testing.T, l *listener.Listener) string {
	t.Helper()
	l.MarkStable("test")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	addr, err := l.WaitPublic(ctx)
	if err != nil {
		t.Fatalf("WaitPublic: %v", err)
	}
	return addr.String()
}

func publicAddr(l *listener.Listener) string { return l.Ports().Public[0].String() }

// answer serves l: each connection gets the name of its port and ends. The
// result closes when Accept has returned an error.
func answer(t *testing.T, l net.Listener) <-chan error {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				ended <- err
				return
			}
			info, _ := listener.InfoFrom(listener.ConnContext(context.Background(), c))
			_, _ = io.WriteString(c, string(info.Port))
			c.Close()
		}
	}()
	return ended
}

// ask dials addr and reads what answer says.
func ask(addr string) (string, error) {
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(c)
	return string(b), err
}

func wantAnswer(t *testing.T, addr string, want listener.Port) {
	t.Helper()
	if got, err := ask(addr); err != nil || got != string(want) {
		t.Fatalf("%s answers %q, %v; want %q", addr, got, err, want)
	}
}

func wantRefused(t *testing.T, addr string) {
	t.Helper()
	if got, err := ask(addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("%s answers %q, %v; want connection refused", addr, got, err)
	}
}

// waitFor waits until cond holds; it is for what no channel tells.
func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// reports collects what OnPorts hears.
type reports struct {
	mu   sync.Mutex
	list []listener.PortReport
}

func (r *reports) add(p listener.PortReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, p)
}

func (r *reports) states() (list []listener.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.list {
		list = append(list, p.State)
	}
	return list
}

// certificate gives a server configuration for 127.0.0.1 and a client's that
// trusts it.
func certificate(t *testing.T, protos ...string) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, NextProtos: protos},
		&tls.Config{RootCAs: pool, ServerName: "127.0.0.1"}
}

// network is an in-memory network for tests in simulated time; its Listen is
// for Config.Listen.
type network struct {
	mu    sync.Mutex
	next  uint16
	ports map[string]*memListener
	fail  map[string]error // what listening at an address gives
	calls map[string]int   // how often it was tried
}

func newNetwork() *network {
	return &network{next: 1000, ports: map[string]*memListener{}, fail: map[string]error{}, calls: map[string]int{}}
}

func (n *network) Listen(_ context.Context, _, address string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	at := &net.TCPAddr{IP: net.ParseIP(host)}
	if port == "0" {
		n.next++
		at.Port = int(n.next)
	} else if at.Port, err = net.LookupPort("tcp", port); err != nil {
		return nil, err
	}
	key := at.String()
	n.calls[key]++
	if err := n.fail[key]; err != nil {
		return nil, err
	}
	if n.ports[key] != nil {
		return nil, syscall.EADDRINUSE
	}
	ln := &memListener{net: n, addr: at, conns: make(chan net.Conn), errs: make(chan error), done: make(chan struct{})}
	n.ports[key] = ln
	return ln, nil
}

func (n *network) breakAt(addr string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail[addr] = err
}

func (n *network) tries(addr string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.calls[addr]
}

// at gives the listener at addr, nil when the port refuses.
func (n *network) at(addr string) *memListener {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ports[addr]
}

// fromConn is a connection whose peer has an address.
type fromConn struct {
	net.Conn
	from *net.TCPAddr
}

func (c fromConn) RemoteAddr() net.Addr { return c.from }

// dialFrom connects as a client with an address.
func (n *network) dialFrom(addr, from string) (net.Conn, error) {
	return n.connect(addr, func(c net.Conn) net.Conn {
		return fromConn{Conn: c, from: &net.TCPAddr{IP: net.ParseIP(from), Port: 40_000}}
	})
}

// askFrom connects from an address and reads what comes; "" is a refusal.
func (n *network) askFrom(addr, from string) string {
	c, err := n.dialFrom(addr, from)
	if err != nil {
		return ""
	}
	defer c.Close()
	b, _ := io.ReadAll(c)
	return string(b)
}

// dial connects as a client of the port, without an address.
func (n *network) dial(addr string) (net.Conn, error) {
	return n.connect(addr, func(c net.Conn) net.Conn { return c })
}

func (n *network) connect(addr string, dress func(net.Conn) net.Conn) (net.Conn, error) {
	ln := n.at(addr)
	if ln == nil {
		return nil, syscall.ECONNREFUSED
	}
	ours, theirs := net.Pipe()
	select {
	case ln.conns <- dress(theirs):
		return ours, nil
	case <-ln.done:
		return nil, syscall.ECONNREFUSED
	}
}

// memListener is one open port of a network.
type memListener struct {
	net   *network
	addr  *net.TCPAddr
	conns chan net.Conn
	errs  chan error // what Accept shall return next
	done  chan struct{}
	once  sync.Once
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case err := <-l.errs:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: err}
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() {
		close(l.done)
		l.net.mu.Lock()
		defer l.net.mu.Unlock()
		delete(l.net.ports, l.addr.String())
	})
	return nil
}

func (l *memListener) Addr() net.Addr { return l.addr }
