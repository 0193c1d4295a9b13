package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"uuid"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/pki"
)

const (
	simulatorVersion = "simulated"
	// maxSimulated is bounded by descriptors: one per connection, and 20,000
	// are allowed to a process here.
	maxSimulated = 10_000
	// Limits of the simulator's server, the same as the real agent's.
	simReadBuffer = 4 << 10
	simWindow     = 128 << 10
	simMaxMessage = 4 << 20
	// handshakes is how long a connection may take until it is secured; a
	// thousand begin at once.
	handshakes    = 30 * time.Second
	authorityFile = "ca.pem"
)

// firstAddress is where agent 0 listens; agent i is i addresses further. All
// of 127.0.0.0/8 belongs to the loopback interface.
func firstAddress() netip.Addr { return netip.AddrFrom4([4]byte{127, 65, 0, 0}) }

// agentAddress gives the address of an agent.
func agentAddress(index int) netip.Addr {
	base := firstAddress().As4()
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(base[:])+uint32(index))
	return netip.AddrFrom4(b)
}

// indexOf is the inverse of agentAddress; it is wrong for other addresses.
func indexOf(addr netip.Addr) int {
	base, b := firstAddress().As4(), addr.Unmap().As4()
	return int(binary.BigEndian.Uint32(b[:])) - int(binary.BigEndian.Uint32(base[:]))
}

// simulator is many agents behind one listener.
type simulator struct {
	agentpb.UnimplementedAgentServer
	agentpb.UnimplementedPairingServer

	dir      *pki.Dir
	agents   []*simAgent
	liars    int // of them the last ones, which misbehave
	lastTask atomic.Int64
	token    atomic.Pointer[pki.Token]
	bundle   sync.Once // stores the authorities, which are the same for all
	recorder recorder
	sessions atomic.Int64
	executed atomic.Int64
	repeated atomic.Int64
}

// agentAt gives the agent that listens at an address.
func (s *simulator) agentAt(addr net.Addr) (*simAgent, error) {
	if tcp, ok := addr.(*net.TCPAddr); ok {
		if i := indexOf(tcp.AddrPort().Addr()); i >= 0 && i < len(s.agents) {
			return s.agents[i], nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "NO_AGENT No agent is simulated at %s.", addr)
}

// newSimulator makes n agents, or takes them up again from the folder.
func newSimulator(dir string, n int) (*simulator, error) {
	if n < 1 || n > maxSimulated {
		return nil, fmt.Errorf("the number of agents must be from 1 to %d, not %d", maxSimulated, n)
	}
	d, err := pki.OpenDir(dir)
	if err != nil {
		return nil, err
	}
	s := &simulator{dir: d, agents: make([]*simAgent, n)}
	var authorities []*x509.Certificate
	data, err := d.Read(authorityFile)
	if err == nil {
		authorities, err = pki.ParseCertificates(data)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for i := range s.agents {
		if s.agents[i], err = s.loadAgent(i, authorities); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func (s *simulator) loadAgent(i int, authorities []*x509.Certificate) (*simAgent, error) {
	a := &simAgent{index: i, instance: uuid.NewV4(), roots: pki.NewRoots(authorities...)}
	identity, err := pki.LoadIdentity(s.dir, identityFile(i))
	if err == nil {
		p, err := pki.PeerOf(identity.Leaf())
		a.id, a.identity = p.ID, identity
		a.paired.Store(true)
		return a, err
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	a.id = uuid.NewV4()
	a.identity, err = pki.NewAgentIdentity(a.id, time.Now())
	return a, err
}

func identityFile(index int) string { return fmt.Sprintf("agents/%05d.pem", index) }

func (s *simulator) storeIdentity(a *simAgent, bundle []*x509.Certificate) error {
	var err error
	s.bundle.Do(func() { err = s.dir.Write(authorityFile, pki.EncodeCertificates(bundle...)) })
	return errors.Join(err, a.identity.Save(s.dir, identityFile(a.index)))
}

// listenAll listens on every address of the loopback interface. The port is
// kept in the folder, since controllers remember it.
func (s *simulator) listenAll(ctx context.Context) (net.Listener, error) {
	file := filepath.Join(s.dir.Path(), "port")
	port := "0"
	if old, err := os.ReadFile(file); err == nil {
		port = strings.TrimSpace(string(old))
	}
	config := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, c syscall.RawConn) error {
		var bound error
		err := c.Control(func(fd uintptr) { bound = unix.BindToDevice(int(fd), "lo") })
		return errors.Join(err, bound)
	}}
	l, err := config.Listen(ctx, "tcp4", "0.0.0.0:"+port)
	if err != nil {
		return nil, fmt.Errorf("listen on the loopback interface: %w", err)
	}
	port = strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	return l, os.WriteFile(file, []byte(port+"\n"), 0o600)
}

// server makes the gRPC server of all agents.
func (s *simulator) server() *grpc.Server {
	config := &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2"},
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			a, err := s.agentAt(h.Conn.LocalAddr())
			if err != nil {
				return nil, err
			}
			return a.serverConfig()
		},
	}
	g := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(config)),
		grpc.MaxRecvMsgSize(simMaxMessage),
		grpc.ConnectionTimeout(handshakes),
		grpc.StaticStreamWindowSize(simWindow),
		grpc.StaticConnWindowSize(simWindow),
		grpc.ReadBufferSize(simReadBuffer),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	)
	agentpb.RegisterAgentServer(g, s)
	agentpb.RegisterPairingServer(g, s)
	g.RegisterService(echoService(), s)
	return g
}

// simState is what the simulator tells of itself.
type simState struct {
	Port     int             `json:"port"`
	IDs      []string        `json:"ids,omitempty"`
	Paired   int             `json:"paired"`
	Sessions int64           `json:"sessions"`
	Executed int64           `json:"executed"`
	Repeated int64           `json:"repeated"`
	Started  map[int64]int64 `json:"started,omitempty"`
}

// simCommand is one order to the simulator.
type simCommand struct {
	Token  string `json:"token,omitempty"`  // pair with this one from now on
	Record *bool  `json:"record,omitempty"` // note when tasks start, or no more
	Take   bool   `json:"take,omitempty"`   // give what was noted
	Free   bool   `json:"free,omitempty"`   // give unused memory back to the system
}

// runSimulator is the simulator process.
func runSimulator(ctx context.Context, dir string, agents, liars int) error {
	s, err := newSimulator(dir, agents)
	if err != nil {
		return err
	}
	s.liars = liars
	defer release(s.dir)
	l, err := s.listenAll(ctx)
	if err != nil {
		return err
	}
	g := s.server()
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	first := s.state(l)
	for _, a := range s.agents {
		first.IDs = append(first.IDs, a.id.String())
	}
	err = obey(ctx, first, func(c simCommand) (simState, error) { return s.obeyOne(c, l) })
	g.Stop()
	return errors.Join(err, <-served)
}

func (s *simulator) obeyOne(c simCommand, l net.Listener) (simState, error) {
	if c.Token != "" {
		token, err := pki.ParseToken(c.Token)
		if err != nil {
			return simState{}, err
		}
		s.token.Store(token)
	}
	if c.Record != nil {
		s.recorder.on.Store(*c.Record)
	}
	if c.Free {
		debug.FreeOSMemory()
	}
	st := s.state(l)
	if c.Take {
		st.Started = s.recorder.take()
	}
	return st, nil
}

func (s *simulator) state(l net.Listener) simState {
	st := simState{
		Port: l.Addr().(*net.TCPAddr).Port, Sessions: s.sessions.Load(),
		Executed: s.executed.Load(), Repeated: s.repeated.Load(),
	}
	for _, a := range s.agents {
		if a.paired.Load() {
			st.Paired++
		}
	}
	return st
}
