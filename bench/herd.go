package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The herd is one process with thousands of clients, each at an address of its
// own in 127.0.0.0/8. Each keeps one connection and asks over it now and then;
// when the connection breaks, or cannot be had, it comes back.

const (
	// askEvery is how often a client of the herd asks over its connection.
	askEvery = 5 * time.Second
	// askTimeout is how long it waits for a connection, or for an answer.
	askTimeout = 10 * time.Second
	// stubborn is the pause of clients without back-off.
	stubborn = 5 * time.Second
	// Clients with back-off wait half a second at first, then twice as long
	// each time, and up to half of it less.
	firstBackoff = 500 * time.Millisecond
	maxBackoff   = 5 * time.Second
)

// herdOrder is what a herd is told: to add clients, or only to report.
type herdOrder struct {
	Target  target `json:"target"`
	Clients int    `json:"clients,omitempty"` // to add
	Backoff bool   `json:"backoff,omitempty"` // of those
	Mark    bool   `json:"mark,omitempty"`    // begin counting who is back anew
}

// target says where clients go and what they trust and show.
type target struct {
	Host  string `json:"host"` // with port
	CA    string `json:"ca"`   // file
	Token string `json:"token"`
}

// herdState is its answer.
type herdState struct {
	Clients int           `json:"clients"`
	Back    int           `json:"back"`    // clients with an answer since the mark
	LastIn  time.Duration `json:"last_in"` // from the mark to the first answer of the last of them
	Tries   int64         `json:"tries"`   // connections tried since the mark
	Failed  int64         `json:"failed"`  // of those
	Busy    int64         `json:"busy"`    // answers 429 or 503 since the mark
	Example string        `json:"example"` // of a failure
	Refused int64         `json:"refused"` // failures of dial
}

// herd is the state of the process.
type herd struct {
	ctx context.Context
	wg  sync.WaitGroup

	mu      sync.Mutex
	clients []*herdClient
	marked  time.Time
	example string

	tries, failed, refused, busy atomic.Int64
}

// herdClient is one client.
type herdClient struct {
	herd    *herd
	address netip.Addr
	to      target
	tls     *tls.Config
	backoff bool
	backAt  atomic.Int64 // unix nanoseconds of the first answer since the mark; 0 = none
}

// runHerd is the process.
func runHerd(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	h := &herd{ctx: ctx, marked: time.Now()}
	defer h.wg.Wait()
	defer cancel()
	return obey(ctx, h.state(), h.obey)
}

func (h *herd) obey(o herdOrder) (herdState, error) {
	if o.Mark {
		h.mark()
	}
	if o.Clients > 0 {
		if err := h.add(o); err != nil {
			return herdState{}, err
		}
	}
	return h.state(), nil
}

func (h *herd) mark() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.clients {
		c.backAt.Store(0)
	}
	h.marked, h.example = time.Now(), ""
	for _, n := range []*atomic.Int64{&h.tries, &h.failed, &h.refused, &h.busy} {
		n.Store(0)
	}
}

func (h *herd) add(o herdOrder) error {
	conf, err := o.Target.tls()
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for range o.Clients {
		c := &herdClient{herd: h, address: herdAddress(len(h.clients)), to: o.Target, tls: conf, backoff: o.Backoff}
		h.clients = append(h.clients, c)
		h.wg.Go(c.live)
	}
	return nil
}

// herdAddress gives the address of a client: 127.80.0.1 and further.
func herdAddress(i int) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 127<<24|80<<16|uint32(i+1))
	return netip.AddrFrom4(b)
}

func (h *herd) state() herdState {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := herdState{
		Clients: len(h.clients), Tries: h.tries.Load(), Failed: h.failed.Load(),
		Refused: h.refused.Load(), Busy: h.busy.Load(), Example: h.example,
	}
	for _, c := range h.clients {
		if at := c.backAt.Load(); at != 0 {
			s.Back++
			s.LastIn = max(s.LastIn, time.Unix(0, at).Sub(h.marked))
		}
	}
	return s
}

func (h *herd) note(err error) {
	if h.ctx.Err() != nil {
		return
	}
	h.failed.Add(1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.example = err.Error()
}

// tls gives the client configuration for a target; nil stands for plain TCP.
func (t target) tls() (*tls.Config, error) {
	if t.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(t.CA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate", t.CA)
	}
	return &tls.Config{RootCAs: pool, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS12}, nil
}

// live is the life of a client.
func (c *herdClient) live() {
	failures := 0
	for c.herd.ctx.Err() == nil {
		conn, err := c.to.dial(c.herd.ctx, c.address, c.tls)
		c.herd.tries.Add(1)
		if err != nil {
			c.herd.refused.Add(1)
		} else {
			var answered bool
			answered, err = c.stay(conn)
			if answered {
				failures = 0
			}
		}
		c.herd.note(err)
		failures++
		if wait(c.herd.ctx, c.pause(failures)) != nil {
			return
		}
	}
}

func (c *herdClient) pause(failures int) time.Duration {
	if !c.backoff {
		return stubborn
	}
	d := min(firstBackoff<<min(failures-1, 10), maxBackoff)
	return d - time.Duration(rand.Int64N(int64(d/2)))
}

// stay asks over one connection until it breaks; it says whether there was an
// answer.
func (c *herdClient) stay(conn net.Conn) (answered bool, err error) {
	defer conn.Close()
	stop := context.AfterFunc(c.herd.ctx, func() { conn.Close() })
	defer stop()
	in := bufio.NewReader(conn)
	for {
		status, err := c.to.ask(conn, in, "/api/v1/session")
		if err != nil {
			return answered, err
		}
		if status != http.StatusOK {
			c.herd.busy.Add(1)
			return answered, fmt.Errorf("answer %d", status)
		}
		answered = true
		c.backAt.CompareAndSwap(0, time.Now().UnixNano())
		if err := wait(c.herd.ctx, askEvery+rand.N(askEvery/5)); err != nil {
			return answered, err
		}
	}
}

// dial connects from an address, and makes the handshake where there is one.
func (t target) dial(ctx context.Context, from netip.Addr, conf *tls.Config) (net.Conn, error) {
	d := net.Dialer{Timeout: askTimeout, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	conn, err := d.DialContext(ctx, "tcp", t.Host)
	if err != nil || conf == nil {
		return conn, err
	}
	secured := tls.Client(conn, conf)
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return secured, nil
}

// ask makes one request over a connection that stays open, by hand: thousands
// of http.Client would measure themselves.
func (t target) ask(conn net.Conn, in *bufio.Reader, path string) (status int, err error) {
	if err := conn.SetDeadline(time.Now().Add(askTimeout)); err != nil {
		return 0, err
	}
	request := "GET " + path + " HTTP/1.1\r\nHost: " + t.Host + "\r\nAuthorization: Bearer " + t.Token + "\r\n\r\n"
	if _, err := io.WriteString(conn, request); err != nil {
		return 0, err
	}
	res, err := http.ReadResponse(in, nil)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return 0, err
	}
	if strings.EqualFold(res.Header.Get("Connection"), "close") && res.StatusCode == http.StatusOK {
		return 0, io.EOF
	}
	return res.StatusCode, nil
}
