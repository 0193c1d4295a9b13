package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"headgate/internal/pki"
)

const (
	echoMethod = "/headgate.bench.Echo/Echo"
	// echoBytes is the payload of one call; a small task has about as much.
	echoBytes = 100
	// echoDials bounds the handshakes under way, as the controller does.
	echoDials = 64
)

// echoService is the plain unary call that the product's sessions are
// compared with. It is written by hand so that it needs no generated code.
func echoService() *grpc.ServiceDesc {
	return &grpc.ServiceDesc{
		ServiceName: "headgate.bench.Echo",
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: "Echo", Handler: handleEcho}},
	}
}

func handleEcho(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	m := &wrapperspb.BytesValue{}
	return m, decode(m)
}

// echoFleet makes a fleet of its own in a folder: an authority, n agents that
// are enrolled already and a controller's identity.
func echoFleet(dir string, n int) error {
	d, err := pki.OpenDir(dir)
	if err != nil {
		return err
	}
	defer release(d)
	now := time.Now()
	authority, err := pki.NewAuthority("echo", now)
	if err != nil {
		return err
	}
	if err := d.Write(authorityFile, authority.PEM()); err != nil {
		return err
	}
	issue := func(file string, role pki.Role) error {
		key, err := pki.NewKey()
		if err != nil {
			return err
		}
		var cert *x509.Certificate
		if role == pki.RoleAgent {
			cert, err = authority.IssueAgent(&key.PublicKey, uuid.NewV4(), now)
		} else {
			cert, err = authority.IssueController(&key.PublicKey, uuid.NewV4(), now)
		}
		if err != nil {
			return err
		}
		identity, err := pki.NewIdentity(key, cert)
		if err != nil {
			return err
		}
		return identity.Save(d, file)
	}
	for i := range n {
		if err := issue(identityFile(i), pki.RoleAgent); err != nil {
			return err
		}
	}
	return issue(controllerFile, pki.RoleController)
}

const controllerFile = "controller.pem"

// echoClient is the process that takes the controller's part.
type echoClient struct {
	conns []*grpc.ClientConn
}

// echoOrder is one order to the echo client.
type echoOrder struct {
	Connect int     `json:"connect,omitempty"` // to this many agents
	Seconds float64 `json:"seconds,omitempty"` // call for so long
	Gap     float64 `json:"gap_ms,omitempty"`  // one connection only, pausing between calls
	Calls   int     `json:"calls,omitempty"`   // with Gap: how many
	Free    bool    `json:"free,omitempty"`    // give unused memory back to the system
}

// echoResult is what came of it.
type echoResult struct {
	Connected int     `json:"connected"`
	Calls     int64   `json:"calls"`
	Seconds   float64 `json:"seconds"`
	P50       float64 `json:"p50_ms"`
	P99       float64 `json:"p99_ms"`
}

// runEchoClient is the client process; dir is the folder of echoFleet, where
// the simulator has also left its port.
func runEchoClient(ctx context.Context, dir string) error {
	c := &echoClient{}
	defer c.close()
	return obey(ctx, echoResult{}, func(o echoOrder) (echoResult, error) {
		if o.Connect > 0 {
			if err := c.connect(ctx, dir, o.Connect); err != nil {
				return echoResult{}, err
			}
		}
		r := echoResult{}
		var err error
		switch {
		case o.Calls > 0:
			r, err = c.callOne(ctx, o.Calls, time.Duration(o.Gap*float64(time.Millisecond)))
		case o.Seconds > 0:
			r, err = c.callAll(ctx, time.Duration(o.Seconds*float64(time.Second)))
		}
		if o.Free {
			debug.FreeOSMemory()
		}
		r.Connected = len(c.conns)
		return r, err
	})
}

func (c *echoClient) close() {
	for _, cc := range c.conns {
		if cc != nil {
			_ = cc.Close() // the process ends
		}
	}
}

// connect dials n agents, with the options of the product's own dialer, and
// makes one call on each connection.
func (c *echoClient) connect(ctx context.Context, dir string, n int) error {
	d, err := pki.OpenDir(dir)
	if err != nil {
		return err
	}
	defer release(d)
	identity, err := pki.LoadIdentity(d, controllerFile)
	if err != nil {
		return err
	}
	data, err := d.Read(authorityFile)
	if err != nil {
		return err
	}
	authorities, err := pki.ParseCertificates(data)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(dir, "port"))
	if err != nil {
		return err
	}
	roots := pki.NewRoots(authorities...)
	c.conns = make([]*grpc.ClientConn, n)
	return inParallel(echoDials, n, func(i int) error {
		agent, err := pki.LoadIdentity(d, identityFile(i))
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the folder has fewer than %d agents", n)
		}
		if err != nil {
			return err
		}
		p, err := pki.PeerOf(agent.Leaf())
		if err != nil {
			return err
		}
		target, err := netip.ParseAddrPort(agentAddress(i).String() + ":" + strings.TrimSpace(string(text)))
		if err != nil {
			return err
		}
		return c.dial(ctx, i, target, pki.AgentDial{Identity: identity, Roots: roots, ID: p.ID, Pins: []pki.Fingerprint{agent.SPKI()}})
	})
}

func (c *echoClient) dial(ctx context.Context, i int, target netip.AddrPort, agent pki.AgentDial) error {
	cc, err := grpc.NewClient("passthrough:///"+target.String(),
		grpc.WithTransportCredentials(credentials.NewTLS(pki.DialAgent(agent))),
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableHealthCheck(),
		grpc.WithIdleTimeout(0),
		grpc.WithReadBufferSize(simReadBuffer),
		grpc.WithStaticStreamWindowSize(simWindow),
		grpc.WithStaticConnWindowSize(simWindow),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}),
	)
	if err != nil {
		return err
	}
	c.conns[i] = cc
	return call(ctx, cc)
}

func call(ctx context.Context, cc *grpc.ClientConn) error {
	in, out := &wrapperspb.BytesValue{Value: make([]byte, echoBytes)}, &wrapperspb.BytesValue{}
	return cc.Invoke(ctx, echoMethod, in, out)
}

// callAll keeps one call in flight on each connection.
func (c *echoClient) callAll(ctx context.Context, d time.Duration) (echoResult, error) {
	var calls atomic.Int64
	began := time.Now()
	lists := make([][]time.Duration, len(c.conns))
	err := inParallel(len(c.conns), len(c.conns), func(i int) error {
		for time.Since(began) < d {
			t := time.Now()
			if err := call(ctx, c.conns[i]); err != nil {
				return err
			}
			lists[i] = append(lists[i], time.Since(t))
			calls.Add(1)
		}
		return nil
	})
	took := time.Since(began)
	var all []time.Duration
	for _, l := range lists {
		all = append(all, l...)
	}
	return echoResult{Calls: calls.Load(), Seconds: took.Seconds(), P50: quantile(all, 0.5), P99: quantile(all, 0.99)}, err
}

// callOne makes single calls with pauses, as on an idle machine.
func (c *echoClient) callOne(ctx context.Context, calls int, gap time.Duration) (echoResult, error) {
	var all []time.Duration
	began := time.Now()
	for range calls {
		if err := wait(ctx, gap); err != nil {
			return echoResult{}, err
		}
		t := time.Now()
		if err := call(ctx, c.conns[0]); err != nil {
			return echoResult{}, err
		}
		all = append(all, time.Since(t))
	}
	return echoResult{Calls: int64(calls), Seconds: time.Since(began).Seconds(), P50: quantile(all, 0.5), P99: quantile(all, 0.99)}, nil
}
