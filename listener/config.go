package listener

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// The advised and built-in values. All of them can be set in Config.
const (
	// DefaultOpenDelay is the advised OpenDelay: long enough for a start that
	// fails right after it called itself stable to fail before the public comes.
	DefaultOpenDelay = 2 * time.Second

	// DefaultOpenBarrierTimeout is the advised OpenBarrierTimeout.
	DefaultOpenBarrierTimeout = 15 * time.Second

	// DefaultOpenWarnAfter is far above what a sound start takes.
	DefaultOpenWarnAfter = 60 * time.Second
	// DefaultUnstableGrace rides out a hiccup, DefaultReclosePeriod a short
	// overload; DefaultMinOpen keeps a program that flaps from taking the
	// public port along.
	DefaultUnstableGrace = 10 * time.Second
	DefaultReclosePeriod = 30 * time.Second
	DefaultMinOpen       = 30 * time.Second
	// DefaultActivatedHold is longer than a quick restart takes.
	DefaultActivatedHold = 10 * time.Second

	// DefaultFirstByteTimeout ends clients that connect and say nothing.
	DefaultFirstByteTimeout = 3 * time.Second
	// DefaultHandshakeTimeout is counted from admission; it ends slow senders.
	DefaultHandshakeTimeout = 5 * time.Second
	// defaultAcceptTimeout is how long a ready connection waits for Accept;
	// a client that waited longer has usually given up.
	defaultAcceptTimeout = 5 * time.Second
	// handshakesPerCPU and minHandshakes bound the work on keys at one moment.
	handshakesPerCPU = 64
	minHandshakes    = 128
	// DefaultOpenRamp is the advised OpenRamp.
	DefaultOpenRamp = 10 * time.Second

	// defaultControllerConns is far above what operators, peers and scrapers
	// need, and keeps a defect of one of them from taking all descriptors.
	defaultControllerConns = 1024
	// defaultMaxPending bounds the connections of one port that are accepted
	// by the kernel but not yet by the program, and with them memory.
	defaultMaxPending = 2048

	// defaultRetryMin and defaultRetryMax pace the attempts to open a public
	// port that could not be opened.
	defaultRetryMin = 1 * time.Second
	defaultRetryMax = 30 * time.Second
	// defaultControllerLoss is how long a lost controller port is tried again
	// before Accept gives a *FatalError: a program that its operator cannot
	// reach is better restarted.
	defaultControllerLoss = 30 * time.Second
)

// Config says what New builds. The zero value of each field but the two
// addresses is usable.
type Config struct {
	Controller PortConfig
	Public     PortConfig

	// OpenDelay is the time between MarkStable and the opening of the public
	// port. It is taken as it stands: 0 opens at once. DefaultOpenDelay is
	// the advised value.
	OpenDelay time.Duration

	// OpenBarrier, if set, is asked at each opening, while OpenDelay passes:
	// the port opens when it has returned nil. An error keeps the port closed,
	// and it is asked again after a pause. It must heed its context, which
	// ends after OpenBarrierTimeout (then the port opens all the same), when
	// the opening is called off, and at Close.
	OpenBarrier func(context.Context) error
	// OpenBarrierTimeout bounds OpenBarrier; 0 means that it is not asked.
	// DefaultOpenBarrierTimeout is the advised value.
	OpenBarrierTimeout time.Duration

	OpenWarnAfter time.Duration // 0: 60 s without a first opening until one error is logged
	UnstableGrace time.Duration // 0: 10 s from MarkUnstable until an open port sheds
	ReclosePeriod time.Duration // 0: 30 s of shedding until the port refuses again
	// MinOpen is the shortest time that an opened port stays open, and paces
	// every later change: two at most in twice MinOpen. 0: 30 s.
	MinOpen time.Duration

	// OnePort is for a program that needs no second port: there is no
	// controller port, the public one opens in New, MarkStable and
	// MarkUnstable do nothing, and Addr is the public address.
	OnePort bool

	// Activated are sockets that were passed to the program, see
	// ActivatedFromEnv; they take the place of the addresses of their ports. A
	// passed socket cannot refuse: while the public port is closed its clients
	// wait in the kernel for ActivatedHold (0: 10 s), so that a quick restart
	// loses none, and after that are reset until the program is stable.
	Activated     []Socket
	ActivatedHold time.Duration

	// Retry paces what is tried again.
	Retry RetryConfig

	// OpenRamp is how long after each opening the public rate grows from a
	// quarter to all of it. It is taken as it stands; DefaultOpenRamp is the
	// advised value.
	OpenRamp time.Duration

	// Limits bound the public port. UpdateLimits changes them later.
	Limits Limits

	// Classify, if set, says whom a TLS connection of either port has proved
	// to be: a class (agent, controller or user) and a name that is unique
	// within it, or nothing. It is called after the handshake and must not
	// block.
	Classify func(tls.ConnectionState) (Class, string)

	// OnPorts, if set, hears of every change of state. It is called from one
	// goroutine, in order, without a lock held; the first call has returned
	// when New returns and the last one reports StateClosed. It may call the
	// listener. A slow callback delays only later calls; if more than 64
	// reports wait, the oldest are left out.
	OnPorts func(PortReport)

	// Listen, if set, makes the sockets of both ports in place of the network.
	// A public port made by it cannot be reserved while it is closed.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)

	Logger     *slog.Logger          // nil discards
	Registerer prometheus.Registerer // nil: metrics are kept, but not shown
}

// PortConfig describes one port.
type PortConfig struct {
	// Addr is host:port as for net.Listen, where port 0 takes a free one, or
	// unix:/path, or, on Linux, unix:@name for a socket without a file.
	Addr string
	// TLS, if set, makes every connection of the port a TLS server connection.
	TLS *tls.Config

	FirstByteTimeout time.Duration // 0: 3 s of it; TLS only
	HandshakeTimeout time.Duration // 0: 5 s, counted from admission; TLS only
	AcceptTimeout    time.Duration // 0: 5 s waiting for a call of Accept

	// What follows bounds the controller port; the public port has Limits.

	MaxHandshakes int // 0: 64 per CPU, at least 128, at one moment
	MaxPending    int // 0: 2,048 not yet returned by Accept; more are reset
	MaxConns      int // 0: 1,024 held; more are reset
}

// RetryConfig paces what is tried again.
type RetryConfig struct {
	Min            time.Duration // 0: 1 s, doubles at each failure of the public port
	Max            time.Duration // 0: 30 s
	ControllerLoss time.Duration // 0: 30 s until a lost controller port is fatal
}

// withDefaults fills in what was left zero.
func (c Config) withDefaults() Config {
	c.Controller = c.Controller.withDefaults()
	c.Public = c.Public.withDefaults()
	orDefault(&c.OpenWarnAfter, DefaultOpenWarnAfter)
	orDefault(&c.UnstableGrace, DefaultUnstableGrace)
	orDefault(&c.ReclosePeriod, DefaultReclosePeriod)
	orDefault(&c.MinOpen, DefaultMinOpen)
	orDefault(&c.ActivatedHold, DefaultActivatedHold)
	c.Limits = c.Limits.withDefaults(c.Public.TLS != nil)
	orDefault(&c.Retry.Min, defaultRetryMin)
	orDefault(&c.Retry.Max, max(defaultRetryMax, c.Retry.Min))
	orDefault(&c.Retry.ControllerLoss, defaultControllerLoss)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// rules gives what the phases go by.
func (c Config) rules() rules {
	return rules{
		openDelay: c.OpenDelay, grace: c.UnstableGrace, reclose: c.ReclosePeriod, minOpen: c.MinOpen,
		onePort: c.OnePort, barrier: c.OpenBarrier != nil && c.OpenBarrierTimeout > 0,
	}
}

func (p PortConfig) withDefaults() PortConfig {
	orDefault(&p.HandshakeTimeout, DefaultHandshakeTimeout)
	orDefault(&p.FirstByteTimeout, min(DefaultFirstByteTimeout, p.HandshakeTimeout))
	orDefault(&p.AcceptTimeout, defaultAcceptTimeout)
	orDefault(&p.MaxHandshakes, defaultHandshakes())
	orDefault(&p.MaxPending, defaultMaxPending)
	orDefault(&p.MaxConns, defaultControllerConns)
	return p
}

func defaultHandshakes() int { return max(minHandshakes, handshakesPerCPU*runtime.GOMAXPROCS(0)) }

// orDefault sets *v to d when it is zero.
func orDefault[T int | float64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// validate gives a *ConfigError that names every problem, or nil. The address
// of a port that has a passed socket means nothing.
func (c Config) validate(given passed) error {
	var problems []string
	say := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	notNegative := func(name string, d time.Duration) {
		if d < 0 {
			say("%s must not be negative, is %v", name, d)
		}
	}
	c.sayPorts(given, say)
	problems = append(problems, c.Limits.problems()...)
	notNegative("open delay", c.OpenDelay)
	notNegative("open barrier timeout", c.OpenBarrierTimeout)
	notNegative("open warn after", c.OpenWarnAfter)
	notNegative("unstable grace", c.UnstableGrace)
	notNegative("reclose period", c.ReclosePeriod)
	notNegative("min open", c.MinOpen)
	notNegative("activated hold", c.ActivatedHold)
	notNegative("open ramp", c.OpenRamp)
	notNegative("retry min", c.Retry.Min)
	notNegative("retry max", c.Retry.Max)
	notNegative("retry controller loss", c.Retry.ControllerLoss)
	if c.Retry.Max < c.Retry.Min {
		say("retry max %v is less than retry min %v", c.Retry.Max, c.Retry.Min)
	}
	if len(problems) > 0 {
		return &ConfigError{Problems: problems}
	}
	return nil
}

// sayPorts names the problems of the ports.
func (c Config) sayPorts(given passed, say func(string, ...any)) {
	problems := func(name Port, cfg PortConfig, s *passedSocket) {
		list := cfg.problems()
		if s == nil {
			list = append(cfg.addrProblems(), list...)
		}
		for _, p := range list {
			say("%s: %s", name, p)
		}
	}
	if !c.OnePort {
		problems(PortController, c.Controller, given.controller)
	}
	problems(PortPublic, c.Public, given.public)
	if c.OnePort || given.controller != nil || given.public != nil {
		return
	}
	if n := portNumber(c.Controller.Addr); n != 0 && n == portNumber(c.Public.Addr) {
		say("controller and public address both use port %d; give them different ports", n)
	}
	if path, ok := unixPath(c.Controller.Addr); ok && c.Controller.Addr == c.Public.Addr {
		say("controller and public address are both %s; give them different paths", path)
	}
}

func (p PortConfig) addrProblems() (list []string) {
	if path, ok := unixPath(p.Addr); ok {
		if problem := unixProblem(path); problem != "" {
			list = append(list, fmt.Sprintf("address %q %s", p.Addr, problem))
		}
		return list
	}
	if host, port, err := net.SplitHostPort(p.Addr); err != nil {
		list = append(list, fmt.Sprintf("address %q is not host:port, unix:/path or unix:@name", p.Addr))
	} else if _, err := net.DefaultResolver.LookupPort(context.Background(), "tcp", port); err != nil || port == "" {
		list = append(list, fmt.Sprintf("address %q has no usable port number (0 to 65535)", p.Addr))
	} else if strings.ContainsAny(host, " /") {
		list = append(list, fmt.Sprintf("address %q has no usable host name", p.Addr))
	}
	return list
}

func (p PortConfig) problems() (list []string) {
	if p.FirstByteTimeout < 0 || p.HandshakeTimeout < 0 || p.AcceptTimeout < 0 {
		list = append(list, "timeouts must not be negative")
	}
	if p.FirstByteTimeout > p.HandshakeTimeout {
		list = append(list, fmt.Sprintf("first byte timeout %v is more than the handshake timeout %v", p.FirstByteTimeout, p.HandshakeTimeout))
	}
	if p.MaxHandshakes < 0 || p.MaxPending < 0 || p.MaxConns < 0 {
		list = append(list, "limits must not be negative")
	}
	return list
}

// portNumber gives the number in addr, 0 when there is none.
func portNumber(addr string) int {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0
	}
	n, err := net.DefaultResolver.LookupPort(context.Background(), "tcp", port)
	if err != nil {
		return 0
	}
	return n
}

// resolve turns addr into one address and port. An empty host gives an invalid
// address, which stands for all addresses of this machine.
func resolve(ctx context.Context, addr string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	n, err := net.DefaultResolver.LookupPort(ctx, "tcp", port)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if ip, err := hostAddr(addr); err == nil {
		return netip.AddrPortFrom(ip, uint16(n)), nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	best := ips[0].Unmap()
	for _, ip := range ips {
		if ip.Unmap().Is4() { // as net.Listen prefers it
			best = ip.Unmap()
			break
		}
	}
	return netip.AddrPortFrom(best, uint16(n)), nil
}

// hostAddr gives the host part of addr: invalid when it is empty, an error
// when it is a name.
func hostAddr(addr string) (netip.Addr, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return netip.Addr{}, err
	}
	ip, err := netip.ParseAddr(host)
	return ip.Unmap(), err
}

// addrPortOf reads the address of a listener; ok is false when it has no port.
func addrPortOf(a net.Addr) (netip.AddrPort, bool) {
	if t, ok := a.(*net.TCPAddr); ok {
		ap := t.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), true
	}
	ap, err := netip.ParseAddrPort(a.String())
	return ap, err == nil
}

// withPort gives addr with its port replaced by that of bound; an address
// without a port stays as it is.
func withPort(addr string, bound net.Addr) string {
	host, _, err := net.SplitHostPort(addr)
	at, ok := addrPortOf(bound)
	if err != nil || !ok {
		return addr
	}
	return net.JoinHostPort(host, strconv.Itoa(int(at.Port())))
}

// display gives a bound address in the form that Config takes.
func display(a net.Addr) string {
	if u, ok := a.(*net.UnixAddr); ok {
		return unixPrefix + u.Name
	}
	return a.String()
}
