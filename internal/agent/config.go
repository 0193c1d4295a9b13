package agent

import (
	"log/slog"
	"net"
	"time"

	"headgate/internal/agent/ledger"
	"headgate/internal/agent/program"
)

// DefaultListen is where an agent listens unless told otherwise. The port lies
// below the ephemeral range, so that no outgoing connection takes it.
const DefaultListen = ":7442"

// Config is how an agent runs. DataDir is required.
type Config struct {
	DataDir        string
	Listen         string // "" = DefaultListen; port 0 is allowed
	Name           string // wanted name, a wish told in pairing; "" = the host's name
	PolicyFile     string // "" = core kinds only, no programs
	EnrolTokenFile string // read when the agent belongs to no fleet yet
	Version        string
	Logger         *slog.Logger // nil = discard

	// OnListen is told the real address when the port accepts connections.
	OnListen func(net.Addr)

	// Around, if set, stands around the executor of each kind: what it adds
	// happens within the slot, after the ledger has the start and before it has
	// the end. Fault campaigns keep their own record of what has run this way.
	Around func(Executor) Executor
	// OwnProcess says that this process is the agent and nothing else: it may
	// then become the parent of processes that have lost theirs, and passes no
	// descriptor on that its own parent has left open.
	OwnProcess bool
	// NoCgroup leaves cgroups alone, as on machines that have none.
	NoCgroup bool

	Demo   Demo
	Limits Limits
}

// Demo makes an agent behave badly on purpose, for demonstrations.
type Demo struct {
	Delay time.Duration // added before each task, within its slot
	// Flaky is the part of tasks that fail, from 0 to 1; a quarter as often
	// the session is dropped in the middle of a task.
	Flaky float64
}

// Limits are the agent's numbers; zero values mean the constants below.
type Limits struct {
	Ledger          ledger.Limits
	Heartbeat       time.Duration
	AcceptDelay     time.Duration
	HelloTimeout    time.Duration
	OutputSpool     int64 // bytes of one task's output that are kept
	LeastFree       int64 // bytes of disk without which no task is accepted
	TermGrace       time.Duration
	FinishGrace     time.Duration
	StopGrace       time.Duration
	PairingWindow   time.Duration
	PairingRun      time.Duration
	PairingSpacing  time.Duration
	PairingFailures int
}

const (
	// heartbeatEvery: three may be lost within the 20 s after which the
	// controller calls a session silent.
	heartbeatEvery = 5 * time.Second
	// acceptDelay is how long a Final may take to make Accepted superfluous.
	// It halves the messages of short tasks and delays nothing anybody sees.
	acceptDelay = time.Millisecond
	// helloTimeout bounds a stream that was opened and says nothing.
	helloTimeout = 10 * time.Second
	// DefaultOutputSpool is what one task's output may take on disk, and what of it
	// reaches the controller at most: enough for any log that a person reads,
	// small enough for the smallest machines. One task's output is kept at a time.
	DefaultOutputSpool = 64 << 20
	// leastFree is for the ledger's records of a task's start and end and for
	// the note of its program. Of a task that is accepted without it one of them
	// fails, and that ends the task where it should have waited.
	leastFree = 64 << 10
	// repliesWaiting bounds answers not yet sent; the reader then waits, which
	// the controller feels.
	repliesWaiting = 64
	// welcomeBytes bounds the results in one Welcome below the message limit.
	// What does not fit is given when the controller asks for the task again.
	welcomeBytes = 3 << 20
	// maxResult is the most that a result may have.
	maxResult = 1 << 20
	// maxTimeout bounds a task whatever the controller says.
	maxTimeout = 24 * time.Hour

	// When the agent is stopped, a running task may first end by itself for
	// finishGrace, which most do; then its program is told to end and has
	// stopGrace for it. stopWait bounds the wait for that and for the sending
	// of its Final, so that all of it fits into five seconds.
	finishGrace = 1500 * time.Millisecond
	stopGrace   = 2 * time.Second
	stopWait    = 3 * time.Second
	flushWait   = 500 * time.Millisecond

	// The limits of pairing, from HG-PAIR/1. A lockout ends with a new token,
	// which needs a command on this machine.
	pairingWindow   = 10 * time.Minute
	pairingRun      = 20 * time.Second
	pairingSpacing  = 2 * time.Second
	pairingFailures = 5
	pairingConns    = 4
	pairingMessage  = 16 << 10
	pairingBundle   = 8 // authorities in a bundle; a rotation has two

	// The limits of the gRPC server.
	maxStrangers     = 32      // connections in their handshake, which has 5 s
	maxStreams       = 16      // a session, a ping, and reserves
	maxMessage       = 4 << 20 // arguments or results of 1 MiB, a full Welcome
	maxHeaders       = 8 << 10 // names and times of calls need far less
	handshakeTimeout = 5 * time.Second
	streamWindow     = 512 << 10 // static, so that no probing pings are needed
	connWindow       = 1 << 20
	readBuffer       = 4 << 10 // messages are small; 10,000 agents need not care, one does
	keepaliveTime    = 20 * time.Second
	keepaliveTimeout = 10 * time.Second
	keepaliveMinTime = 5 * time.Second // the controller pings every 20 s
)

func (l Limits) withDefaults() Limits {
	set(&l.Heartbeat, heartbeatEvery)
	set(&l.AcceptDelay, acceptDelay)
	set(&l.HelloTimeout, helloTimeout)
	set(&l.OutputSpool, DefaultOutputSpool)
	set(&l.LeastFree, leastFree)
	set(&l.TermGrace, program.DefaultGrace)
	set(&l.FinishGrace, finishGrace)
	set(&l.StopGrace, stopGrace)
	set(&l.PairingWindow, pairingWindow)
	set(&l.PairingRun, pairingRun)
	set(&l.PairingSpacing, pairingSpacing)
	set(&l.PairingFailures, pairingFailures)
	return l
}

func set[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (c Config) withDefaults() Config {
	set(&c.Listen, DefaultListen)
	set(&c.Version, "dev")
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Limits = c.Limits.withDefaults()
	return c
}
