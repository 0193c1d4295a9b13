package listener_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/listener"
)

// Acceptance 33.
func TestCertificateReloadKeepsConnections(t *testing.T) {
	t.Parallel()
	first, trustFirst := certificate(t)
	second, trustSecond := certificate(t)
	var now atomic.Pointer[tls.Config]
	now.Store(first)
	l := start(t, func(c *listener.Config) {
		c.Public.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return now.Load(), nil }}
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); _, _ = io.Copy(c, c) }()
		}
	}()
	addr := open(t, l)
	old, err := tls.Dial("tcp", addr, trustFirst)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	now.Store(second)
	if c, err := tls.Dial("tcp", addr, trustFirst); err == nil {
		c.Close()
		t.Error("a newcomer still gets the old certificate")
	}
	c, err := tls.Dial("tcp", addr, trustSecond)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, c := range []net.Conn{old, c} {
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := io.WriteString(c, "still here"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 10)); err != nil {
			t.Errorf("a connection was dropped by the reload: %v", err)
		}
	}
}

// Acceptance 47.
func TestForwardedHeadersDoNotChangeTheSource(t *testing.T) {
	t.Parallel()
	l := start(t)
	srv := &http.Server{ConnContext: listener.ConnContext, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, _ := listener.InfoFrom(r.Context())
		fmt.Fprint(w, info.Source)
	})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+open(t, l), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Forwarded-For", "192.0.2.1")
	req.Header.Set("Forwarded", "for=192.0.2.1")
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: patience}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); string(b) != "127.0.0.1" {
		t.Errorf("the source is %s", b)
	}
	for _, s := range l.Status().Admission.Top {
		if s.Source != "127.0.0.1" {
			t.Errorf("the table has %s", s.Source)
		}
	}
}

// TestClientThatLeftWhileItWaitedCostsNothing lets ten clients of a source
// wait and leave; the next is served in their place.
func TestClientThatLeftWhileItWaitedCostsNothing(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	limits := wide()
	limits.SourceRate, limits.QueueWait = listener.Rate{PerSecond: 0.5, Burst: 1}, time.Hour
	l := start(t, func(c *listener.Config) { c.Limits, c.Registerer = limits, reg })
	answer(t, l)
	addr := open(t, l)
	wantAnswer(t, addr, listener.PortPublic)
	for range 10 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	waitFor(t, "ten to wait", func() bool { return l.Status().Admission.Queue.Unknown == 10 })
	for range 10 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	waitFor(t, "twenty to wait", func() bool { return l.Status().Admission.Queue.Unknown == 20 })
	limits.SourceRate = listener.Rate{PerSecond: 1e6, Burst: 1e6}
	if err := l.UpdateLimits(limits); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "all to be gone", func() bool { return l.Status().Public.Conns == 0 })
	if got := histogramCount(t, reg, "headgate_listener_queue_wait_seconds"); got != 11 {
		t.Errorf("%d were admitted, want the 11 that stayed", got)
	}
}

// histogramCount gives the observations of a histogram without labels.
func histogramCount(t *testing.T, reg prometheus.Gatherer, name string) uint64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetHistogram().GetSampleCount()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

func TestFailedHandshakeCostsItsSourceMore(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	limits := wide()
	limits.SourceRate, limits.QueueWait = listener.Rate{PerSecond: 0.001, Burst: 11}, time.Hour
	l, addr, trust := startTLS(t, func(c *listener.Config) { c.Limits, c.Registerer = limits, reg })
	for i := range 2 { // ten tokens
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		waitFor(t, "the probe to be counted", func() bool {
			return metric(t, reg, "headgate_listener_handshake_failures_total", "probe") == float64(i+1)
		})
	}
	c, err := tls.Dial("tcp", addr, trust) // the eleventh
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	waiting, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	waitFor(t, "the next to wait", func() bool { return l.Status().Admission.Queue.Unknown == 1 })
}

func TestClassifiedConnectionIsChargedToItsIdentity(t *testing.T) {
	t.Parallel()
	limits := wide()
	limits.SourceConns = 1
	l, addr, trust := startTLS(t, func(c *listener.Config) {
		c.Limits = limits
		c.Classify = func(s tls.ConnectionState) (listener.Class, string) {
			return listener.ClassAgent, fmt.Sprint("agent ", s.Version)
		}
	})
	for i := range 5 {
		c, err := tls.Dial("tcp", addr, trust)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		waitFor(t, "the connection to be of an agent", func() bool { return l.Status().Public.Classes[listener.ClassAgent] == i+1 })
	}
}

// TestNoDescriptorsLeft runs a child of this program under a low limit.
func TestNoDescriptorsLeft(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChildWithoutDescriptors$", "-test.v")
	cmd.Env = append(os.Environ(), "LISTENER_TEST_CHILD=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "child is done") {
		t.Fatalf("%v\n%s", err, out)
	}
}

// TestChildWithoutDescriptors uses up all descriptors: clients of the public
// port are reset meanwhile, not left hanging, and served afterwards.
func TestChildWithoutDescriptors(t *testing.T) {
	if os.Getenv("LISTENER_TEST_CHILD") == "" {
		t.Skip("run by TestNoDescriptorsLeft")
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 100, Max: 100}); err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	l := start(t, func(c *listener.Config) { c.Registerer = reg })
	answer(t, l)
	addr := open(t, l)
	wantAnswer(t, addr, listener.PortPublic)
	client, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0) // while one can be had
	if err != nil {
		t.Fatal(err)
	}
	var files []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		files = append(files, f)
	}
	at := l.Ports().Public[0]
	if err := syscall.Connect(client, &syscall.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}); err != nil {
		t.Fatal(err)
	}
	_ = syscall.SetsockoptTimeval(client, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Sec: 10})
	if _, err := syscall.Read(client, make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v, want a reset", err)
	}
	syscall.Close(client)
	for _, f := range files {
		f.Close()
	}
	waitFor(t, "the refusal to be counted", func() bool {
		return metric(t, reg, "headgate_listener_refused_total", "public", "fd") >= 1
	})
	wantAnswer(t, addr, listener.PortPublic)
	limits := wide()
	limits.FDReserve = 256
	if err := l.UpdateLimits(limits); err != nil {
		t.Fatal(err)
	}
	refused := false
	for range 45 {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	for range 3 {
		_, err := ask(addr)
		refused = refused || err != nil
	}
	if !refused {
		t.Error("the reserve is given to clients")
	}
	wantAnswer(t, l.Addr().String(), listener.PortController)
	t.Log("child is done")
}

// TestShedOverHTTP2 sees what the program needs to send a client away.
func TestShedOverHTTP2(t *testing.T) {
	t.Parallel()
	server, trust := certificate(t, "h2", "http/1.1")
	limits := wide()
	limits.MaxConns = 1
	l := start(t, func(c *listener.Config) { c.Public.TLS, c.Limits = server, limits })
	srv := &http.Server{ConnContext: listener.ConnContext, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, _ := listener.InfoFrom(r.Context())
		fmt.Fprint(w, r.Proto, " ", info.Shed)
	})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	addr := open(t, l)
	first, err := tls.Dial("tcp", addr, trust)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if _, err := io.WriteString(first, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := http.ReadResponse(bufio.NewReader(first), nil); err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: trust.Clone(), ForceAttemptHTTP2: true}
	if got := get(t, transport, "https://"+addr); got != "HTTP/2.0 true" {
		t.Errorf("got %q", got)
	}
}

// stub is a connection without a socket; closing it calls for the next.
type stub struct {
	net.Conn
	from *net.TCPAddr
	next chan struct{}
}

func (s *stub) RemoteAddr() net.Addr     { return s.from }
func (s *stub) SetLinger(int) error      { return nil }
func (s *stub) Close() error             { s.next <- struct{}{}; return nil }
func (s *stub) Read([]byte) (int, error) { return 0, io.EOF }

// stubs is a port from which the same stub comes again and again.
type stubs struct{ *memListener }

func (s stubs) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.done:
		return nil, net.ErrClosed
	}
}

// refusePath opens a listener in memory that refuses, and gives what has one
// connection refused: the listener's own part, without the kernel's.
func refusePath(tb testing.TB) (refuse func()) {
	tb.Helper()
	mem := newNetwork()
	limits := wide()
	limits.SourceRate, limits.QueuePerSource = listener.Rate{PerSecond: 1e-9, Burst: 1}, 1
	l, err := listener.New(tb.Context(), config(func(c *listener.Config) {
		c.Limits = limits
		c.Listen = func(ctx context.Context, network, address string) (net.Listener, error) {
			ln, err := mem.Listen(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return stubs{ln.(*memListener)}, nil
		}
	}))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	l.MarkStable("test")
	if _, err := l.WaitPublic(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	ln := mem.at(publicAddr(l))
	c := &stub{from: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1).To4()}, next: make(chan struct{}, 2)}
	for range 2 { // one is let in, one waits; both are kept
		ln.conns <- &stub{from: c.from, next: make(chan struct{}, 1)}
	}
	return func() {
		ln.conns <- c
		<-c.next
	}
}

// BenchmarkRefusePath measures a refusal. Acceptance 63.
func BenchmarkRefusePath(b *testing.B) {
	refuse := refusePath(b)
	b.ReportAllocs()
	for b.Loop() {
		refuse()
	}
}

// BenchmarkRefuse is a client that is refused before its handshake, its own
// side and the kernel's included. Acceptance 63: at most 30 us of ours.
func BenchmarkRefuse(b *testing.B) {
	limits := wide()
	limits.SourceConns = 1
	l, err := listener.New(b.Context(), config(func(c *listener.Config) { c.Limits = limits }))
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	l.MarkStable("test")
	addr, err := l.WaitPublic(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	held, err := net.Dial("tcp", addr.String())
	if err != nil {
		b.Fatal(err)
	}
	defer held.Close()
	for l.Status().Public.Conns == 0 {
	}
	buf := make([]byte, 1)
	for b.Loop() {
		c, err := net.Dial("tcp", addr.String())
		if err != nil {
			continue // it was reset that quickly
		}
		_, _ = c.Read(buf)
		c.Close()
	}
}

// BenchmarkAdmit compares a connection through the door with one through a
// plain net.Listener. Acceptance 63: at most 20 us more.
func BenchmarkAdmit(b *testing.B) {
	serve := func(b *testing.B, ln net.Listener, addr string) {
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				_, _ = c.Write([]byte{1})
				c.Close()
			}
		}()
		buf := make([]byte, 1)
		for b.Loop() {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				b.Fatal(err)
			}
			_, _ = io.ReadFull(c, buf)
			c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
	}
	b.Run("plain", func(b *testing.B) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		defer ln.Close()
		serve(b, ln, ln.Addr().String())
	})
	b.Run("door", func(b *testing.B) {
		l, err := listener.New(b.Context(), config())
		if err != nil {
			b.Fatal(err)
		}
		defer l.Close()
		l.MarkStable("test")
		addr, err := l.WaitPublic(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		serve(b, l, addr.String())
	})
}
