package controller

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"headgate/listener"
)

// Listening are the settings of the two-phase listener beside its addresses.
type Listening struct {
	OpenBarrierTimeout time.Duration
	OpenRamp           time.Duration
	OpenWarnAfter      time.Duration
	UnstableGrace      time.Duration
	RecloseAfter       time.Duration
	MinOpen            time.Duration
	HandshakeTimeout   time.Duration
	FirstByteTimeout   time.Duration
	Limits             listener.Limits
}

// defaultListening gives the settings as they are without any configuration,
// which are the listener's own. A number of 0 is not a limit of nothing: the
// listener finds one that fits the machine.
func defaultListening() Listening {
	return Listening{
		OpenBarrierTimeout: listener.DefaultOpenBarrierTimeout,
		OpenRamp:           listener.DefaultOpenRamp,
		OpenWarnAfter:      listener.DefaultOpenWarnAfter,
		UnstableGrace:      listener.DefaultUnstableGrace,
		RecloseAfter:       listener.DefaultReclosePeriod,
		MinOpen:            listener.DefaultMinOpen,
		HandshakeTimeout:   listener.DefaultHandshakeTimeout,
		FirstByteTimeout:   listener.DefaultFirstByteTimeout,
		Limits:             listener.DefaultLimits(),
	}
}

// listeningKeys lists the settings of the listener. Those that can change
// while it runs say so.
func listeningKeys() []Key {
	limits := func(c *Config) *listener.Limits { return &c.Listening.Limits }
	return []Key{
		span("open-barrier-timeout", "how long an opening waits for a majority of the controllers; 0 = it does not", func(c *Config) *time.Duration { return &c.Listening.OpenBarrierTimeout }),
		span("open-ramp", "time after an opening in which the public rate grows from a quarter to all of it", func(c *Config) *time.Duration { return &c.Listening.OpenRamp }),
		positive("open-warn-after", "time without a first opening until an error is logged", func(c *Config) *time.Duration { return &c.Listening.OpenWarnAfter }),
		positive("unstable-grace", "how long an open public port rides out a failed check", func(c *Config) *time.Duration { return &c.Listening.UnstableGrace }),
		positive("reclose-after", "how long it then admits only known clients before it refuses", func(c *Config) *time.Duration { return &c.Listening.RecloseAfter }),
		positive("min-open", "shortest time that an opened public port stays open", func(c *Config) *time.Duration { return &c.Listening.MinOpen }),
		positive("handshake-timeout", "time for a TLS handshake on the public port", func(c *Config) *time.Duration { return &c.Listening.HandshakeTimeout }),
		positive("first-byte-timeout", "time for the first byte of it", func(c *Config) *time.Duration { return &c.Listening.FirstByteTimeout }),

		live(mode("limit-mode", "enforce, observe (count what would be refused) or off", func(c *Config) *listener.LimitMode { return &limits(c).Mode })),
		live(rate("public-rate", "new connections a second at the public port; 0 = 200 for each CPU with TLS, 2000 without", 0, func(c *Config) *float64 { return &limits(c).PublicRate.PerSecond })),
		live(rate("public-burst", "of them at once; 0 = as many as in a second", 0, func(c *Config) *float64 { return &limits(c).PublicRate.Burst })),
		live(rate("source-rate", "new connections a second of one source; faster ones wait. Known sources have ten times as many", math.SmallestNonzeroFloat64, func(c *Config) *float64 { return &limits(c).SourceRate.PerSecond })),
		live(rate("source-burst", "of them at once", 1, func(c *Config) *float64 { return &limits(c).SourceRate.Burst })),
		live(number("source-conns", "connections of one source that have not proved who they are", 1, func(c *Config) *int { return &limits(c).SourceConns })),
		live(number("identity-conns-agent", "connections of one agent that are not charged to its source", 1, func(c *Config) *int { return &limits(c).IdentityConns.Agent })),
		live(number("identity-conns-user", "connections of one user or token that are not charged to their source", 1, func(c *Config) *int { return &limits(c).IdentityConns.User })),
		live(number("queue", "connections that wait to be let in", 1, func(c *Config) *int { return &limits(c).Queue })),
		live(number("queue-per-source", "of one source", 1, func(c *Config) *int { return &limits(c).QueuePerSource })),
		live(positive("queue-wait", "how long they wait before they are reset", func(c *Config) *time.Duration { return &limits(c).QueueWait })),
		live(number("handshakes", "TLS handshakes at one moment; 0 = 64 for each CPU, at least 128", 0, func(c *Config) *int { return &limits(c).Handshakes })),
		live(number("handshakes-per-source", "of one source", 1, func(c *Config) *int { return &limits(c).HandshakesPerSource })),
		live(number("max-conns", "connections of the public port, above which clients are told to come back, and reset above 1.1 times; 0 = 4096 or what the limit of open files allows", 0, func(c *Config) *int { return &limits(c).MaxConns })),
		live(number("fd-reserve", "file descriptors kept for everything but the public port", 1, func(c *Config) *int { return &limits(c).FDReserve })),
	}
}

// live marks a setting that a reload applies.
func live(k Key) Key {
	k.Live = true
	return k
}

// positive is a span that must not be 0.
func positive(name, help string, at func(*Config) *time.Duration) Key {
	k := span(name, help, at)
	set := k.set
	k.set = func(c *Config, v string) error {
		if err := set(c, v); err != nil {
			return err
		}
		if *at(c) == 0 {
			return fmt.Errorf("%q must be more than 0", v)
		}
		return nil
	}
	return k
}

// maxNumber bounds counts: more than any machine holds.
const maxNumber = 10_000_000

func number(name, help string, least int, at func(*Config) *int) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			n, err := strconv.Atoi(v)
			if err != nil || n < least || n > maxNumber {
				return fmt.Errorf("%q is not a whole number from %d to %d", v, least, maxNumber)
			}
			*at(c) = n
			return nil
		},
		get: func(c Config) string { return strconv.Itoa(*at(&c)) },
	}
}

// rate is a number a second, or of how many at once; least 0 allows 0.
func rate(name, help string, least float64, at func(*Config) *float64) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			n, err := strconv.ParseFloat(v, 64)
			switch {
			case err != nil || math.IsNaN(n) || n > maxNumber:
				return fmt.Errorf("%q is not a number up to %d", v, maxNumber)
			case n < 0:
				return fmt.Errorf("%q is negative", v)
			case n < least && least < 1:
				return fmt.Errorf("%q must be more than 0", v)
			case n < least:
				return fmt.Errorf("%q must be at least %v", v, least)
			}
			*at(c) = n
			return nil
		},
		get: func(c Config) string { return strconv.FormatFloat(*at(&c), 'g', -1, 64) },
	}
}

func mode(name, help string, at func(*Config) *listener.LimitMode) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			switch m := listener.LimitMode(v); m {
			case listener.ModeEnforce, listener.ModeObserve, listener.ModeOff:
				*at(c) = m
				return nil
			}
			return fmt.Errorf("%q is not enforce, observe or off", v)
		},
		get: func(c Config) string { return string(*at(&c)) },
	}
}

// validateListening gives what does not fit together.
func (c Config) validateListening(bad func(string, ...any)) {
	l := c.Listening
	if l.FirstByteTimeout > l.HandshakeTimeout {
		bad("first-byte-timeout: %v is more than handshake-timeout, which is %v", l.FirstByteTimeout, l.HandshakeTimeout)
	}
	if l.Limits.QueuePerSource > l.Limits.Queue {
		bad("queue-per-source: %d is more than queue, which is %d", l.Limits.QueuePerSource, l.Limits.Queue)
	}
	if b := l.Limits.PublicRate.Burst; b > 0 && b < 1 {
		bad("public-burst: %v is less than one connection; 0 stands for as many as in a second", b)
	}
	if h := l.Limits.Handshakes; h > 0 && l.Limits.HandshakesPerSource > h {
		bad("handshakes-per-source: %d is more than handshakes, which is %d", l.Limits.HandshakesPerSource, h)
	}
}
