package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"headgate/listener"
)

// connectionsPerRound is how many connections one round of a comparison makes:
// enough for processor time, which is counted in microseconds, to mean much.
const connectionsPerRound = 20_000

// dialWorkers is how many of them are made at once.
const dialWorkers = 16

// dialOrder makes connections and closes each when the server has.
type dialOrder struct {
	Host  string `json:"host"`
	Count int    `json:"count"`
}

// dialState says how they ended.
type dialState struct {
	Served int64 `json:"served"` // closed by the server, as ordered
	Reset  int64 `json:"reset"`
}

// runDialer is the process of the clients, so that their processor time is not
// the server's.
func runDialer(ctx context.Context) error {
	return obey(ctx, dialState{}, func(o dialOrder) (dialState, error) { return o.dial(ctx) })
}

func (o dialOrder) dial(ctx context.Context) (dialState, error) {
	var served, reset atomic.Int64
	err := inParallel(dialWorkers, o.Count, func(i int) error {
		// Many sources, as the table of the listener would meet them.
		from := net.TCPAddrFromAddrPort(netip.AddrPortFrom(floodAddress(i%floodSources), 0))
		conn, err := (&net.Dialer{LocalAddr: from}).DialContext(ctx, "tcp", o.Host)
		if err != nil {
			if errors.Is(err, syscall.ECONNRESET) {
				reset.Add(1)
				return nil
			}
			return err
		}
		defer release(conn)
		switch _, err := conn.Read(make([]byte, 1)); {
		case errors.Is(err, syscall.ECONNRESET):
			reset.Add(1)
		default:
			served.Add(1)
		}
		return nil
	})
	return dialState{Served: served.Load(), Reset: reset.Load()}, err
}

// benchListener compares what a connection costs the server: accepted by a
// plain net.Listener, admitted by ours, and refused by ours. Acceptance 63.
func benchListener(ctx context.Context, b *bench) (err error) {
	var s dialState
	w, err := startWorker(&s, nil, "-dialer")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	open := listener.Limits{
		PublicRate: listener.Rate{PerSecond: 1e6, Burst: 1e6}, SourceRate: listener.Rate{PerSecond: 1e6, Burst: 1e6},
		MaxConns: 1 << 16, FDReserve: 1,
	}
	shut := open
	shut.SourceRate = listener.Rate{PerSecond: 1e-6, Burst: 1}
	shut.QueuePerSource, shut.Queue = 1, 1
	var plain, admitted, refused []float64
	for range b.rounds {
		for _, k := range []struct {
			into   *[]float64
			listen func() (net.Listener, string, error)
			reset  bool
		}{
			{&plain, plainListener, false},
			{&admitted, func() (net.Listener, string, error) { return ourListener(ctx, open) }, false},
			{&refused, func() (net.Listener, string, error) { return ourListener(ctx, shut) }, true},
		} {
			cost, err := costOf(w, k.listen, k.reset)
			if err != nil {
				return err
			}
			*k.into = append(*k.into, cost)
		}
	}
	b.note("processor time of the server for one connection, without TLS, clients in another process, %d connections a round", connectionsPerRound)
	b.note("plain net.Listener, accept and close: %s us; ours: %s us; ours, refusing: %s us", list(plain), list(admitted), list(refused))
	b.figure("listener_refuse_us", median(refused), "us")
	b.figure("listener_admit_us", median(admitted), "us")
	b.figure("listener_admit_overhead_us", median(admitted)-median(plain), "us")
	b.ratio("listener_admit_vs_plain", median(admitted)/median(plain))
	return nil
}

func plainListener() (net.Listener, string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not wait
	if err != nil {
		return nil, "", err
	}
	return l, l.Addr().String(), nil
}

// ourListener opens the public port with those limits.
func ourListener(ctx context.Context, limits listener.Limits) (net.Listener, string, error) {
	l, err := listener.New(ctx, listener.Config{
		Controller: listener.PortConfig{Addr: "127.0.0.1:0"},
		Public:     listener.PortConfig{Addr: "127.0.0.1:0"},
		Limits:     limits,
	})
	if err != nil {
		return nil, "", err
	}
	l.MarkStable("to be measured")
	at, err := l.WaitPublic(ctx)
	if err != nil {
		return nil, "", errors.Join(err, l.Close())
	}
	return l, at.String(), nil
}

// costOf gives the processor time of this process for each of a round's
// connections, in microseconds.
func costOf(w *worker, listen func() (net.Listener, string, error), reset bool) (float64, error) {
	l, host, err := listen()
	if err != nil {
		return 0, err
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed below
			}
			release(conn)
		}
	})
	defer serving.Wait()
	defer release(l)
	before, err := ownCPU()
	if err != nil {
		return 0, err
	}
	var s dialState
	if err := w.order(dialOrder{Host: host, Count: connectionsPerRound}, &s); err != nil {
		return 0, err
	}
	after, err := ownCPU()
	if err != nil {
		return 0, err
	}
	if reset && s.Reset < connectionsPerRound*9/10 || !reset && s.Served < connectionsPerRound {
		return 0, fmt.Errorf("of %d connections %d were served and %d reset", connectionsPerRound, s.Served, s.Reset)
	}
	return float64((after - before).Nanoseconds()) / 1e3 / connectionsPerRound, nil
}

// ownCPU gives the processor time of this process.
func ownCPU() (time.Duration, error) {
	var u syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}

// benchFlood measures the controller port while the public port is flooded.
func benchFlood(ctx context.Context, b *bench) (err error) {
	r, err := b.secureRig(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	u, err := r.underFlood(ctx, b.window)
	if err != nil {
		return err
	}
	u.tell(b)
	b.figure("controller_port_p99_under_flood_ms", quantile(u.probe.Times, 0.99), "ms")
	b.ratio("controller_port_p50_under_flood_vs_calm", quantile(u.probe.Times, 0.5)/quantile(u.calm.Times, 0.5))
	return nil
}
