package fleet

import (
	"runtime"
	"time"
)

// Defaults of Limits.
const (
	// defaultDials bounds the handshakes under way at once: enough to keep two
	// cores busy, few enough that none of them waits long.
	defaultDials = 64
	// dialsPerCPU is the pace of dials that is reached at most, for each
	// processor: a handshake with all around it takes about a millisecond.
	dialsPerCPU = 1000
	// defaultSlowDials bounds the dials that have no answer yet and so cost
	// nothing but a descriptor; see gate.
	defaultSlowDials = 1024
	// defaultSlowAfter is when a dial counts as slow: far above a handshake on
	// a busy machine, far below the connect timeout.
	defaultSlowAfter = 250 * time.Millisecond
	// defaultConnectTimeout is for TCP and TLS together.
	defaultConnectTimeout = 3 * time.Second
	// defaultWelcomeTimeout leaves the agent time to write its epoch to a slow
	// disk and to end an older session.
	defaultWelcomeTimeout = 8 * time.Second
	// defaultPulse is how often a quiet agent is asked for its status.
	defaultPulse = 10 * time.Second
	// defaultSilentAfter is when a session that says nothing is given up: two
	// pulses and some seconds, below the promised 30 s.
	defaultSilentAfter = 25 * time.Second
	// defaultUserTimeout is TCP_USER_TIMEOUT: bytes that stay unacknowledged
	// for so long end the connection.
	defaultUserTimeout = 10 * time.Second
	// Back-off between dials to one agent: 1 s, growing by 1.6 to 60 s.
	defaultBackoffBase = time.Second
	defaultBackoffMax  = time.Minute
	backoffFactor      = 1.6
	// defaultBackoffWork is the longest pause while tasks wait for the agent: it
	// may be back. eagerDials is about how many dials a second that may come to,
	// over all agents that are away.
	defaultBackoffWork = 4 * time.Second
	eagerDials         = 200
	// backoffJitter is the part of a delay that is random. It is taken off
	// after the cap, so that agents at the cap do not dial in step.
	backoffJitter = 0.5
	// steadyAfter is how long a session must have lasted for the next one to
	// be tried without a history of failures.
	steadyAfter = 10 * time.Second
	// defaultMaxMessage lets a Welcome carry the few results that were not yet
	// forgotten, each of at most 1 MiB, and stops anything larger.
	defaultMaxMessage = 8 << 20
	// defaultWindow is the static flow-control window: what one agent can make
	// us buffer when its results are not taken off fast enough.
	defaultWindow = 128 << 10
	// maxHeaderList bounds the header block of an agent's answers.
	maxHeaderList = 16 << 10
	// readBuffer is off: crypto/tls keeps a buffer of its own, so it would save
	// no system call, and 32 KiB, the default, times 10,000 is a lot.
	readBuffer = 0
	// defaultStrikes is how many messages about tasks that were never given, or
	// that break the protocol's sizes, one session may send.
	defaultStrikes = 100
	// defaultPairTimeout is for one whole run of the pairing protocol.
	defaultPairTimeout = 20 * time.Second
	// defaultPairRate bounds the dials to addresses that users choose, per
	// user and minute.
	defaultPairRate = 300
	// defaultAnswerStep is what the time of a failed pairing is rounded up to,
	// so that the answer's delay says little about a network.
	defaultAnswerStep = time.Second
	// EnrolKeep is how long an agent may stay enrolling: its certificate went
	// out, but nobody knows whether it arrived.
	EnrolKeep = 10 * time.Minute
	// defaultReloadEvery is the pass that alone notices changes by others.
	defaultReloadEvery = 30 * time.Second
	// reloadPause spaces re-reads that notices ask for.
	reloadPause = 200 * time.Millisecond
	// reloadRetry is the pause after a read that failed while agents wait for
	// it: as long as a short outage of the database, no longer.
	reloadRetry = time.Second
	// storeTimeout bounds one call to the database made by a session.
	storeTimeout = 5 * time.Second
	// pulseTick is how often sessions are looked over.
	pulseTick = time.Second
)

// Limits are the numbers of the fleet; zero values take the defaults.
type Limits struct {
	Dials          int // handshakes under way at once
	DialRate       int // dials begun in a second at most; the pace grows up to it, see ramp
	SlowDials      int // dials without an answer beyond those
	SlowAfter      time.Duration
	ConnectTimeout time.Duration
	WelcomeTimeout time.Duration
	Pulse          time.Duration
	SilentAfter    time.Duration
	UserTimeout    time.Duration
	BackoffBase    time.Duration
	BackoffMax     time.Duration
	BackoffWork    time.Duration
	MaxMessage     int // bytes of one message from an agent
	Window         int // bytes, per connection
	Strikes        int
	PairTimeout    time.Duration
	PairsPerMinute int // per actor
	AnswerStep     time.Duration
	ReloadEvery    time.Duration
}

func (l Limits) withDefaults() Limits {
	set(&l.Dials, defaultDials)
	set(&l.DialRate, dialsPerCPU*runtime.GOMAXPROCS(0))
	set(&l.SlowDials, defaultSlowDials)
	set(&l.SlowAfter, defaultSlowAfter)
	set(&l.ConnectTimeout, defaultConnectTimeout)
	set(&l.WelcomeTimeout, defaultWelcomeTimeout)
	set(&l.Pulse, defaultPulse)
	set(&l.SilentAfter, defaultSilentAfter)
	set(&l.UserTimeout, defaultUserTimeout)
	set(&l.BackoffBase, defaultBackoffBase)
	set(&l.BackoffMax, defaultBackoffMax)
	set(&l.BackoffWork, defaultBackoffWork)
	set(&l.MaxMessage, defaultMaxMessage)
	set(&l.Window, defaultWindow)
	set(&l.Strikes, defaultStrikes)
	set(&l.PairTimeout, defaultPairTimeout)
	set(&l.PairsPerMinute, defaultPairRate)
	set(&l.AnswerStep, defaultAnswerStep)
	set(&l.ReloadEvery, defaultReloadEvery)
	return l
}

func set[T int | time.Duration](v *T, fallback T) {
	if *v == 0 {
		*v = fallback
	}
}
