package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"golang.org/x/sys/unix"
)

// dialer makes connections to agents. Each one serves exactly one dial: gRPC
// would connect again by itself, without our back-off, gate and words for what
// went wrong, so a lost connection is thrown away as a whole.
type dialer struct {
	limits  Limits
	policy  dialPolicy
	options []grpc.DialOption // those that are the same for every agent
}

func newDialer(l Limits, p dialPolicy) *dialer {
	return &dialer{limits: l, policy: p, options: []grpc.DialOption{
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableHealthCheck(),
		grpc.WithIdleTimeout(0),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithStaticStreamWindowSize(int32(l.Window)),
		grpc.WithStaticConnWindowSize(int32(l.Window)),
		grpc.WithMaxHeaderListSize(maxHeaderList),
		grpc.WithUserAgent("headgate"),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(l.MaxMessage),
			grpc.MaxCallSendMsgSize(l.MaxMessage),
		),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: l.BackoffMax, Multiplier: 1, MaxDelay: l.BackoffMax},
			MinConnectTimeout: l.ConnectTimeout,
		}),
	}}
}

// link is one connection, or the attempt at one, and what gRPC would flatten
// to text: the first error of its transport and the state of its TLS.
type link struct {
	address  string // as configured
	answered func() // hears that the peer has taken the connection; set before the first call, or nil

	mu      sync.Mutex
	remote  string // as dialled, once known
	err     error
	state   *tls.ConnectionState
	dialled bool
}

// client prepares a connection; the first call on it dials.
func (d *dialer) client(address string, conf *tls.Config) (*grpc.ClientConn, *link, error) {
	l := &link{address: address}
	options := append(d.options[:len(d.options):len(d.options)],
		grpc.WithTransportCredentials(&recordingTLS{conf: conf, link: l, keepState: conf.InsecureSkipVerify}),
		grpc.WithContextDialer(func(ctx context.Context, target string) (net.Conn, error) { return d.connect(ctx, target, l) }),
	)
	if conf.ServerName != "" { // the agent's own name; in pairing nobody knows it yet
		options = append(options, grpc.WithAuthority(conf.ServerName))
	}
	cc, err := grpc.NewClient("passthrough:///"+address, options...)
	return cc, l, err
}

var errDialledOnce = errors.New("fleet: a connection is dialled once")

func (d *dialer) connect(ctx context.Context, target string, l *link) (net.Conn, error) {
	if l.again() {
		return nil, errDialledOnce
	}
	ctx, cancel := context.WithTimeout(ctx, d.limits.ConnectTimeout)
	defer cancel()
	nd := net.Dialer{
		KeepAlive: -1, // the session's pulse does more
		ControlContext: func(_ context.Context, _, address string, raw syscall.RawConn) error {
			to, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			l.setRemote(address)
			if err := d.policy.check(to); err != nil {
				return err
			}
			return d.setUserTimeout(raw)
		},
	}
	conn, err := nd.DialContext(ctx, "tcp", target)
	if err != nil {
		l.note(err)
	} else if l.answered != nil {
		l.answered()
	}
	return conn, err
}

// setUserTimeout makes the kernel give up a connection whose peer does not
// acknowledge what was sent; by default that takes a quarter of an hour. It and
// the session's pulse do what gRPC's keepalive would, which costs a goroutine
// and a PING for each connection.
func (d *dialer) setUserTimeout(raw syscall.RawConn) error {
	var serr error
	err := raw.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.limits.UserTimeout.Milliseconds()))
	})
	return errors.Join(err, serr)
}

func (l *link) again() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.dialled
	l.dialled = true
	return was
}

func (l *link) setRemote(address string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remote = address
}

// note keeps the first error; what follows is only its echo.
func (l *link) note(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
}

// failure gives where the transport dialled, and its first error.
func (l *link) failure() (where string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remote != "" {
		return l.remote, l.err
	}
	return l.address, l.err
}

func (l *link) tls() *tls.ConnectionState {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

// recordingTLS does the handshake for gRPC and keeps its error as a value.
type recordingTLS struct {
	conf      *tls.Config
	link      *link
	keepState bool // pairing binds its proof to the state; others save the memory
}

// ClientHandshake implements credentials.TransportCredentials.
func (r *recordingTLS) ClientHandshake(ctx context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn := tls.Client(raw, r.conf)
	err := conn.HandshakeContext(ctx)
	state := conn.ConnectionState()
	if err == nil && state.NegotiatedProtocol != "h2" {
		err = errNoH2
	}
	if err != nil {
		r.link.note(err)
		_ = raw.Close() // the handshake's error says more
		return nil, nil, err
	}
	if r.keepState {
		r.link.mu.Lock()
		r.link.state = &state
		r.link.mu.Unlock()
	}
	return &watchedConn{Conn: conn, link: r.link}, secured{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}, nil
}

var (
	errNoH2       = errors.New("fleet: the peer speaks TLS but not HTTP/2")
	errClientOnly = errors.New("fleet: credentials for dialling cannot serve")
)

// ServerHandshake implements credentials.TransportCredentials.
func (r *recordingTLS) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errClientOnly
}

// Info implements credentials.TransportCredentials.
func (r *recordingTLS) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (r *recordingTLS) Clone() credentials.TransportCredentials { c := *r; return &c }

// OverrideServerName implements credentials.TransportCredentials; the name is
// never anything but the agent's own.
func (r *recordingTLS) OverrideServerName(string) error { return nil }

type secured struct{ credentials.CommonAuthInfo }

// AuthType implements credentials.AuthInfo.
func (secured) AuthType() string { return "tls" }

// watchedConn notes why reading ended: in TLS 1.3 a peer refuses our
// certificate only after the handshake, in answer to the first read.
type watchedConn struct {
	net.Conn
	link *link
}

// Read implements net.Conn.
func (w *watchedConn) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if err != nil {
		w.link.note(err)
	}
	return n, err
}
