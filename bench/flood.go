package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// The flood is one process that does what attackers and broken programs do, at
// a rate and from many addresses: connections that say nothing, connections
// that break off, handshakes that stall, requests without a right.

// floodOrder begins a flood, or ends it with Rate 0.
type floodOrder struct {
	Target  target `json:"target"`
	Rate    int    `json:"rate"`    // connections a second
	Sources int    `json:"sources"` // addresses they come from
}

// floodState tells what became of it.
type floodState struct {
	Made     int64 `json:"made"`     // connections that the kernel made
	Refused  int64 `json:"refused"`  // that it did not
	Reset    int64 `json:"reset"`    // reset before an answer
	Answered int64 `json:"answered"` // requests that got one
	Held     int64 `json:"held"`     // open now
}

type flood struct {
	ctx  context.Context
	stop context.CancelFunc // of the present one
	wg   sync.WaitGroup

	made, refused, reset, answered, held atomic.Int64
}

const (
	// floodTick is how often a part of the rate is let go.
	floodTick = 10 * time.Millisecond
	// floodHold is how long a silent connection is kept by the flood.
	floodHold = 30 * time.Second
	// maxHeld bounds the descriptors of the flood.
	maxHeld = 8000
)

// runFlood is the process.
func runFlood(ctx context.Context) error {
	f := &flood{ctx: ctx, stop: func() {}}
	defer f.wg.Wait()
	defer func() { f.stop() }()
	return obey(ctx, f.state(), f.obey)
}

func (f *flood) state() floodState {
	return floodState{
		Made: f.made.Load(), Refused: f.refused.Load(), Reset: f.reset.Load(),
		Answered: f.answered.Load(), Held: f.held.Load(),
	}
}

func (f *flood) obey(o floodOrder) (floodState, error) {
	f.stop()
	f.wg.Wait()
	if o.Rate > 0 {
		conf, err := o.Target.tls()
		if err != nil {
			return floodState{}, err
		}
		var ctx context.Context
		ctx, f.stop = context.WithCancel(f.ctx)
		f.wg.Go(func() { f.pour(ctx, o, conf) })
	}
	return f.state(), nil
}

// pour starts connections at the ordered rate.
func (f *flood) pour(ctx context.Context, o floodOrder, conf *tls.Config) {
	tick := time.NewTicker(floodTick)
	defer tick.Stop()
	began, started := time.Now(), 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for due := int(time.Since(began).Seconds() * float64(o.Rate)); started < due; started++ {
			if f.held.Load() >= maxHeld {
				continue
			}
			n := started
			f.wg.Go(func() { f.one(ctx, o.Target, n, floodAddress(n%o.Sources), conf) })
		}
	}
}

// floodAddress gives the address of a source: 127.90.0.1 and further.
func floodAddress(i int) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 127<<24|90<<16|uint32(i+1))
	return netip.AddrFrom4(b)
}

// one is one connection of the flood; which sort goes by turns.
func (f *flood) one(ctx context.Context, t target, n int, from netip.Addr, conf *tls.Config) {
	f.held.Add(1)
	defer f.held.Add(-1)
	d := net.Dialer{Timeout: askTimeout, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	conn, err := d.DialContext(ctx, "tcp", t.Host)
	if err != nil {
		if ctx.Err() == nil {
			f.refused.Add(1)
		}
		return
	}
	f.made.Add(1)
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	switch n % 4 {
	case 0: // says nothing
		f.await(conn, nil)
	case 1: // breaks off
	case 2: // begins a handshake and stalls
		f.await(conn, []byte{0x16, 3, 1, 2, 0, 1})
	case 3: // asks without a right
		f.stranger(ctx, conn, t, conf)
	}
}

// await writes something and waits until the server ends the connection.
func (f *flood) await(conn net.Conn, say []byte) {
	_ = conn.SetDeadline(time.Now().Add(floodHold)) // a closed one tells itself at once
	if _, err := conn.Write(say); err != nil {
		f.reset.Add(1)
		return
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		f.reset.Add(1)
	}
}

func (f *flood) stranger(ctx context.Context, conn net.Conn, t target, conf *tls.Config) {
	if conf != nil {
		secured := tls.Client(conn, conf)
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		if secured.HandshakeContext(ctx) != nil {
			f.reset.Add(1)
			return
		}
		conn = secured
	}
	_ = conn.SetDeadline(time.Now().Add(askTimeout)) // likewise
	request := "GET /api/v1/tasks HTTP/1.1\r\nHost: " + t.Host + "\r\nConnection: close\r\n\r\n"
	if _, err := conn.Write([]byte(request)); err != nil {
		f.reset.Add(1)
		return
	}
	if n, err := conn.Read(make([]byte, 512)); n == 0 && err != nil {
		f.reset.Add(1)
		return
	}
	f.answered.Add(1)
}
