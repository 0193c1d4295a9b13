package listener_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/listener"
)

// startTLS gives a listener with TLS on the public port, open and served by
// an http.Server that answers with what it knows of the connection.
func startTLS(t *testing.T, change ...func(*listener.Config)) (l *listener.Listener, addr string, client *tls.Config) {
	t.Helper()
	server, client := certificate(t, "h2", "http/1.1")
	change = append([]func(*listener.Config){func(c *listener.Config) { c.Public.TLS = server }}, change...)
	l = start(t, change...)
	srv := &http.Server{
		ConnContext: listener.ConnContext,
		ErrorLog:    slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			info, ok := listener.InfoFrom(r.Context())
			fmt.Fprintf(w, "%s %t %s %t %t", r.Proto, ok, info.Port, info.TLS, info.HandshakeTook > 0 && !info.AcceptedAt.IsZero())
		}),
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-ended })
	return l, open(t, l), client
}

// Acceptance 29.
func TestBothHTTPVersionsOverTLS(t *testing.T) {
	t.Parallel()
	l, addr, trust := startTLS(t)
	for proto, want := range map[string]string{
		"HTTP/2.0": "HTTP/2.0 true public true true",
		"HTTP/1.1": "HTTP/1.1 true public true true",
	} {
		transport := &http.Transport{TLSClientConfig: trust.Clone(), ForceAttemptHTTP2: proto == "HTTP/2.0"}
		if got := get(t, transport, "https://"+addr); got != want {
			t.Errorf("%s: %q, want %q", proto, got, want)
		}
	}
	if got, want := get(t, &http.Transport{}, "http://"+l.Addr().String()), "HTTP/1.1 true controller false false"; got != want {
		t.Errorf("plain: %q, want %q", got, want)
	}
}

func get(t *testing.T, transport *http.Transport, url string) string {
	t.Helper()
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: patience}).Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Acceptance 30.
func TestPlainHTTPOnTLSPortGets400(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	_, addr, _ := startTLS(t, func(c *listener.Config) { c.Registerer = reg })
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// Longer than what the handshake reads, so that a hasty close would reset.
	if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n"+strings.Repeat("x", 20_000)); err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(c)
	if err != nil {
		t.Errorf("the answer ends with %v", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(all)), nil)
	if err != nil {
		t.Fatalf("%q: %v", all, err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(b), "HTTP request to an HTTPS server") {
		t.Errorf("got %d %q", resp.StatusCode, b)
	}
	waitFor(t, "the failure to be counted", func() bool {
		return metric(t, reg, "headgate_listener_handshake_failures_total", "not_tls") == 1
	})
}

// TestSilentClientsDelayNobody holds 500 silent connections, measures a good
// client among them and Status, and sees the silent ones end in time.
// Acceptance 27 and 34.
func TestSilentClientsDelayNobody(t *testing.T) {
	t.Parallel()
	const silent, firstByte = 500, 6 * time.Second // twice the default, so that a busy machine has measured in time
	reg := prometheus.NewRegistry()
	l, addr, trust := startTLS(t, func(c *listener.Config) {
		c.Public.FirstByteTimeout, c.Public.HandshakeTimeout, c.Limits.Handshakes, c.Registerer = firstByte, firstByte, 8, reg
	})
	began := time.Now()
	var conns []net.Conn
	for range silent {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	waitFor(t, "the silent ones to be held", func() bool { return l.Status().Public.Handshaking == silent })
	wantWithin(t, "a good client", 50*time.Millisecond, func() {
		c, err := tls.Dial("tcp", addr, trust)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	})
	wantWithin(t, "Status", 10*time.Millisecond, func() { l.Status() })
	if got := l.Status().Public.Handshaking; got < silent {
		t.Fatalf("only %d were in their handshake while it was measured", got)
	}
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(3 * patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a silent client was not ended: %v", err)
		}
	}
	if took := time.Since(began); took < firstByte || took > firstByte+patience {
		t.Errorf("silent clients ended after %v", took)
	}
	waitFor(t, "all to be counted", func() bool {
		return metric(t, reg, "headgate_listener_handshake_failures_total", "timeout") == silent
	})
}

// wantWithin takes the best of some tries, because the machine does other
// things too; what it is used for would be too slow every time.
func wantWithin(t *testing.T, what string, limit time.Duration, f func()) {
	t.Helper()
	best := time.Hour
	for try := 0; try < 20 && best > limit; try++ {
		began := time.Now()
		f()
		best = min(best, time.Since(began))
	}
	if best > limit {
		t.Errorf("%s takes %v, want at most %v", what, best, limit)
	}
}

// Acceptance 28.
func TestByteByByteClientIsEnded(t *testing.T) {
	t.Parallel()
	const limit = 1200 * time.Millisecond
	_, addr, _ := startTLS(t, func(c *listener.Config) { c.Public.FirstByteTimeout, c.Public.HandshakeTimeout = limit/2, limit })
	began := time.Now()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	hello := append([]byte{0x16, 3, 1, 0x10, 0}, make([]byte, 4096)...) // a record that takes its time
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		if _, err = c.Write(hello[i : i+1]); err != nil {
			break
		}
		if <-tick.C; time.Since(began) > patience {
			t.Fatal("the client is still served")
		}
	}
	if took := time.Since(began); took < limit {
		t.Errorf("ended after %v, before the limit: %v", took, err)
	}
}

func TestWaitingForASlotEndsAtTheDeadline(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	_, addr, trust := startTLS(t, func(c *listener.Config) {
		c.Limits.Handshakes, c.Limits.HandshakesPerSource, c.Public.HandshakeTimeout, c.Registerer = 1, 1, time.Second, reg
	})
	for range 3 { // one takes the slot and keeps it, the others wait for it
		slow, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer slow.Close()
		if _, err := slow.Write([]byte{0x16}); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "all three to be ended", func() bool {
		return metric(t, reg, "headgate_listener_handshake_failures_total", "timeout") == 3
	})
	// A busy machine may need more than the half second of a stranger.
	waitFor(t, "the slot to be free again", func() bool {
		c, err := tls.Dial("tcp", addr, trust)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

func TestHandshakeDeadlineEndsWithTheHandshake(t *testing.T) {
	t.Parallel()
	const limit = 500 * time.Millisecond
	server, trust := certificate(t)
	l := start(t, func(c *listener.Config) { c.Controller.TLS, c.Controller.HandshakeTimeout = server, limit })
	client, err := tls.Dial("tcp", l.Addr().String(), trust)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	<-time.After(limit + limit/5)
	_ = client.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(client, "late"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("the server's side read %v", err)
	}
	if _, ok := c.(*tls.Conn); !ok {
		t.Errorf("Accept gave a %T, want *tls.Conn", c)
	}
}

func TestPanicInACallbackEndsOnlyItsConnection(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	var once sync.Once
	l, addr, trust := startTLS(t, func(c *listener.Config) {
		c.Registerer = reg
		c.Public.TLS.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
			once.Do(func() { panic("defect in a callback") })
			return nil, nil
		}
	})
	if c, err := tls.Dial("tcp", addr, trust); err == nil {
		c.Close()
		t.Fatal("the handshake succeeded in spite of the panic")
	}
	c, err := tls.Dial("tcp", addr, trust)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if got := metric(t, reg, "headgate_listener_handshake_failures_total", "other"); got != 1 {
		t.Errorf("%v failures counted, want 1", got)
	}
	waitFor(t, "no handshake to be left", func() bool { return l.Status().Public.Handshaking == 0 })
}

// Acceptance 31.
func TestProbesAreCountedAndNotLogged(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	var log lockedBuffer
	_, addr, trust := startTLS(t, func(c *listener.Config) {
		c.Registerer, c.Logger = reg, slog.New(slog.NewTextHandler(&log, nil))
	})
	waitFor(t, "the line of the opening", func() bool { return strings.Contains(log.String(), "to=open") })
	before := log.String()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	waitFor(t, "the probe to be counted", func() bool {
		return metric(t, reg, "headgate_listener_handshake_failures_total", "probe") == 1
	})
	distrust := trust.Clone()
	distrust.RootCAs = nil
	if c, err := tls.Dial("tcp", addr, distrust); err == nil {
		c.Close()
		t.Fatal("a client without our certificate trusts us")
	}
	waitFor(t, "the refused certificate to be counted", func() bool {
		return metric(t, reg, "headgate_listener_handshake_failures_total", "bad_cert") == 1
	})
	if got := log.String(); got != before {
		t.Errorf("logged: %s", strings.TrimPrefix(got, before))
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
