package listener

import (
	"fmt"
	"math"
	"runtime"
	"time"

	"headgate/listener/admission"
)

// LimitMode says what becomes of a connection that is over a limit.
type LimitMode string

// The modes.
const (
	ModeEnforce LimitMode = "enforce" // it waits or is reset
	ModeObserve LimitMode = "observe" // it is counted in would_refuse_total and let in
	ModeOff     LimitMode = "off"     // nothing is looked at
)

// The built-in limits. Limits says what they bound.
const (
	tlsRatePerCPU   = 200  // handshakes; 7.5 % of a CPU with ECDSA certificates, 23 % with RSA ones
	plainRatePerCPU = 2000 // an accept without a handshake costs a twelfth

	defaultMaxConns = 4096
	// connsHeadroom is what the files of the program itself are given when
	// MaxConns follows from the limit of open files.
	connsHeadroom = 512
)

// DefaultLimits gives the built-in limits but for those that follow from the
// machine, which are left zero.
func DefaultLimits() Limits {
	return Limits{
		Mode:                ModeEnforce,
		SourceRate:          Rate{PerSecond: 20, Burst: 40}, // thirty members of a NAT come at once
		KnownFactor:         10,
		SourceConns:         256,
		IdentityConns:       IdentityConns{Agent: 16, User: 64},
		Queue:               1024,
		QueuePerSource:      128,
		QueueWait:           5 * time.Second,
		HandshakesPerSource: 32,
		FDReserve:           256,
	}
}

// Rate is a number of connections a second, and of how many at once.
type Rate = admission.Rate

// Limits bound the public port; the controller port has none of them. A field
// that is zero stands for its default. Public sources are single IPv4
// addresses and IPv6 /64 networks.
type Limits struct {
	Mode LimitMode `json:"mode"` // "": enforce

	// PublicRate paces all new connections together. 0: 200 a second for each
	// CPU where the port has TLS, 2,000 where it has not; one second's worth
	// at once.
	PublicRate Rate `json:"public_rate"`
	// SourceRate paces those of one source; 0: 20 a second, 40 at once. One
	// that comes faster waits in the source's own part of the queue.
	SourceRate Rate `json:"source_rate"`
	// KnownFactor multiplies SourceRate and QueuePerSource for known sources. 0: 10.
	KnownFactor float64 `json:"known_factor"`
	// SourceConns bounds the connections that one source holds without having
	// proved who it is. 0: 256.
	SourceConns int `json:"source_conns"`
	// IdentityConns bounds how many connections of one agent or user are no
	// longer charged to their source. More are not refused: they stay charged.
	IdentityConns IdentityConns `json:"identity_conns"`

	Queue          int           `json:"queue"`            // waiting connections; 0: 1,024
	QueuePerSource int           `json:"queue_per_source"` // of one unknown source; 0: 128
	QueueWait      time.Duration `json:"-"`                // 0: 5 s, then they are reset

	Handshakes int `json:"handshakes"` // under way at one moment; 0: 64 per CPU, at least 128
	// HandshakesPerSource bounds those of one source, with those that have not
	// said a word yet, which Handshakes leaves out. 0: 32.
	HandshakesPerSource int `json:"handshakes_per_source"`

	// MaxConns bounds the connections of the port. Above it they are delivered
	// with ConnInfo.Shed set, above 1.1 times it reset. 0: 4,096, or as many
	// as the limit of open files allows.
	MaxConns int `json:"max_conns"`
	// FDReserve is how many file descriptors are kept for everything else;
	// connections that would take them are reset. 0: 256.
	FDReserve int `json:"fd_reserve"`
}

// IdentityConns is part of Limits.
type IdentityConns struct {
	Agent int `json:"agent"` // 0: 16
	User  int `json:"user"`  // 0: 64
}

// withDefaults fills in what was left zero.
func (l Limits) withDefaults(tls bool) Limits {
	d := DefaultLimits()
	if l.Mode == "" {
		l.Mode = d.Mode
	}
	perCPU := plainRatePerCPU
	if tls {
		perCPU = tlsRatePerCPU
	}
	orDefault(&l.PublicRate.PerSecond, float64(perCPU*runtime.GOMAXPROCS(0)))
	orDefault(&l.PublicRate.Burst, max(l.PublicRate.PerSecond, 1))
	orDefault(&l.SourceRate.PerSecond, d.SourceRate.PerSecond)
	orDefault(&l.SourceRate.Burst, max(d.SourceRate.Burst, 2*l.SourceRate.PerSecond))
	orDefault(&l.KnownFactor, d.KnownFactor)
	orDefault(&l.SourceConns, d.SourceConns)
	orDefault(&l.IdentityConns.Agent, d.IdentityConns.Agent)
	orDefault(&l.IdentityConns.User, d.IdentityConns.User)
	orDefault(&l.Queue, d.Queue)
	orDefault(&l.QueuePerSource, min(d.QueuePerSource, l.Queue))
	orDefault(&l.QueueWait, d.QueueWait)
	orDefault(&l.Handshakes, defaultHandshakes())
	orDefault(&l.HandshakesPerSource, d.HandshakesPerSource)
	orDefault(&l.MaxConns, maxConnsFor(openFiles()))
	orDefault(&l.FDReserve, d.FDReserve)
	return l
}

// maxConnsFor gives the default of MaxConns for a limit of open files, 0 being
// none.
func maxConnsFor(files int) int {
	if files <= 0 {
		return defaultMaxConns
	}
	return max(1, min(defaultMaxConns, max(files-connsHeadroom, files/2)))
}

// hardCap gives the number of connections above which they are reset.
func (l Limits) hardCap() int { return l.MaxConns + (l.MaxConns+9)/10 }

// source gives the part of the limits that a table of sources goes by.
func (l Limits) source() admission.SourceRates {
	return admission.SourceRates{Source: l.SourceRate, Known: l.KnownFactor}
}

// line gives the part that the queue goes by. A known source, which may stand
// for a whole network or a proxy's clients, has more places as it has more
// tokens; the queue still takes them away for those who have fewer.
func (l Limits) line() admission.QueueConfig {
	known := min(float64(l.QueuePerSource)*l.KnownFactor, float64(l.Queue))
	return admission.QueueConfig{Cap: l.Queue, CapPerKey: l.QueuePerSource, CapFirst: int(known), MaxWait: l.QueueWait}
}

// problems names everything that is wrong with limits whose defaults are
// filled in.
func (l Limits) problems() (list []string) {
	say := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	switch l.Mode {
	case ModeEnforce, ModeObserve, ModeOff:
	default:
		say("limit mode %q is none of enforce, observe, off", l.Mode)
	}
	for name, r := range map[string]Rate{"public": l.PublicRate, "source": l.SourceRate} {
		if !finite(r.PerSecond) || r.PerSecond <= 0 {
			say("%s rate %v must be more than 0 a second", name, r.PerSecond)
		}
		if !finite(r.Burst) || r.Burst < 1 {
			say("%s burst %v must be at least 1", name, r.Burst)
		}
	}
	if !finite(l.KnownFactor) || l.KnownFactor < 1 {
		say("known factor %v must be at least 1", l.KnownFactor)
	}
	if l.QueueWait < 0 {
		say("queue wait must not be negative, is %v", l.QueueWait)
	}
	for _, n := range []struct {
		name string
		v    int
	}{
		{"source conns", l.SourceConns},
		{"identity conns of an agent", l.IdentityConns.Agent},
		{"identity conns of a user", l.IdentityConns.User},
		{"queue", l.Queue},
		{"queue per source", l.QueuePerSource},
		{"handshakes", l.Handshakes},
		{"handshakes per source", l.HandshakesPerSource},
		{"max conns", l.MaxConns},
		{"fd reserve", l.FDReserve},
	} {
		if n.v < 0 {
			say("%s must not be negative, is %d", n.name, n.v)
		}
	}
	if l.QueuePerSource > l.Queue {
		say("queue per source %d is more than the queue of %d", l.QueuePerSource, l.Queue)
	}
	return list
}

func finite(f float64) bool { return !math.IsNaN(f) && !math.IsInf(f, 0) }

// UpdateLimits changes the limits of the public port while it is in use. It
// fails with a *ConfigError that names every problem, and then changes
// nothing. No bucket is filled by it, and no connection closed: a cap below
// what is in use keeps newcomers out until enough have ended.
func (l *Listener) UpdateLimits(limits Limits) error {
	limits = limits.withDefaults(l.cfg.Public.TLS != nil)
	if list := limits.problems(); len(list) > 0 {
		return &ConfigError{Problems: list}
	}
	l.door.update(time.Now(), limits)
	return nil
}
