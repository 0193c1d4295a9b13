package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"headgate/internal/agentpb"
)

// service is what a paired agent serves.
type service struct {
	agentpb.UnimplementedAgentServer

	config   Config
	log      *slog.Logger
	state    *state
	slot     *slot
	instance uuid.UUID
	offers   []*agentpb.KindInfo
	hostname string
	os       string
	readers  sync.WaitGroup
}

// port is the agent's one TCP port. The phases - pairing, then sessions - serve
// it one after the other; the port itself stays open in between.
type port struct {
	*net.TCPListener
}

// phase is the port as one phase sees it.
type phase struct {
	port
	most   int64 // connections that have not proved who they are
	open   atomic.Int64
	paused atomic.Bool
	closed atomic.Bool
	gone   chan struct{} // closed with closed
	once   sync.Once
	log    *slog.Logger
	full   atomic.Bool // told once until there is room again
}

// newPhase lets a phase accept connections. The former one has been closed and
// does not accept any more.
func (p port) newPhase(most int64, log *slog.Logger) (*phase, error) {
	if err := p.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return &phase{port: p, most: most, log: log, gone: make(chan struct{})}, nil
}

// Accept refuses strangers beyond the limit at once: to let them wait would let
// one of them keep all others out.
func (p *phase) Accept() (net.Conn, error) {
	for {
		if p.paused.Load() {
			<-p.gone
		}
		c, err := p.TCPListener.Accept()
		if p.closed.Load() {
			if err == nil {
				c.Close()
			}
			return nil, net.ErrClosed
		}
		if err != nil && p.paused.Load() {
			continue // woken by pause
		}
		if err != nil {
			return nil, err
		}
		if p.open.Add(1) <= p.most {
			p.full.Store(false)
			return &counted{Conn: c, phase: p}, nil
		}
		p.open.Add(-1)
		c.Close()
		if !p.full.Swap(true) {
			p.log.Warn("refuse connections, too many are open", "most", p.most, "from", c.RemoteAddr().String())
		}
	}
}

// pause leaves new connections to the next phase: they wait in the system's
// queue until it accepts.
func (p *phase) pause() {
	p.paused.Store(true)
	_ = p.SetDeadline(time.Unix(1, 0)) // ends a waiting Accept; fails only on a closed port
}

// Close ends the phase; the port goes on listening.
func (p *phase) Close() error {
	p.once.Do(func() {
		p.closed.Store(true)
		close(p.gone)
	})
	return p.SetDeadline(time.Unix(1, 0))
}

// counted has a place among the strangers until it is closed or has proved
// that it is a controller of the fleet.
type counted struct {
	net.Conn
	phase *phase
	once  sync.Once
}

func (c *counted) leave() { c.once.Do(func() { c.phase.open.Add(-1) }) }

func (c *counted) Close() error {
	c.leave()
	return c.Conn.Close()
}

// proving are credentials after whose handshake a connection is no stranger.
type proving struct {
	credentials.TransportCredentials
}

func (p proving) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := p.TransportCredentials.ServerHandshake(raw)
	if c, ok := raw.(*counted); ok && err == nil {
		c.leave()
	}
	return conn, info, err
}

// newServer makes a gRPC server with every limit set.
func newServer(creds credentials.TransportCredentials, maxMessage int) *grpc.Server {
	return grpc.NewServer(
		grpc.Creds(creds),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxSendMsgSize(maxMessage),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connWindow),
		grpc.ReadBufferSize(readBuffer),
		grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveMinTime, PermitWithoutStream: true}),
	)
}

// serve runs a phase until ctx is done or end yields, then calls before and
// stops the server.
func serve(ctx context.Context, s *grpc.Server, p *phase, end <-chan error, before func()) error {
	served := make(chan error, 1)
	go func() { served <- s.Serve(p) }()
	var err error
	select {
	case err = <-served:
		s.Stop()
		return err // the port itself has failed
	case err = <-end:
	case <-ctx.Done():
	}
	before()
	stopped := make(chan struct{})
	go func() {
		s.GracefulStop() // lets a last answer out
		close(stopped)
	}()
	timer := time.NewTimer(flushWait)
	defer timer.Stop()
	select {
	case <-stopped:
	case <-timer.C:
		s.Stop()
		<-stopped
	}
	if serr := <-served; serr != nil && !errors.Is(serr, grpc.ErrServerStopped) && !errors.Is(serr, net.ErrClosed) {
		err = errors.Join(err, serr)
	}
	return err
}
