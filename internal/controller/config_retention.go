package controller

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"headgate/internal/store"
)

const day = 24 * time.Hour

// retentionKeys lists how much history is kept: all of it, unless they say
// otherwise, since nobody should lose what they have not agreed to lose.
func retentionKeys() []Key {
	return []Key{
		days("retention-age", "tasks whose submission and end are older are removed, for example 90d; 0 = none for their age", store.MinRetention, func(c *Config) *time.Duration { return &c.Retention.Age }),
		amount("retention-tasks", "how many of the newest tasks stay; older ones are removed; 0 = all", func(c *Config) *int64 { return &c.Retention.Tasks }),
		size("retention-bytes", "size of all tasks, results and output in the database, for example 50GiB, above which the oldest are removed; 0 = no limit", func(c *Config) *int64 { return &c.Retention.Bytes }),
	}
}

// days is a duration that may be given in days, 0 or at least the smallest
// that is allowed.
func days(name, help string, least time.Duration, at func(*Config) *time.Duration) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			d, err := parseDays(v)
			if err != nil || d < 0 {
				return fmt.Errorf("%q is not a duration like 90d or 36h", v)
			}
			if d > 0 && d < least {
				return fmt.Errorf("%q is less than %s; 0 stands for no limit", v, daysText(least))
			}
			*at(c) = d
			return nil
		},
		get: func(c Config) string { return daysText(*at(&c)) },
	}
}

// parseDays reads 90d, 1d12h, 36h and whatever else is a duration.
func parseDays(v string) (time.Duration, error) {
	number, rest, ok := strings.Cut(v, "d")
	if !ok {
		return time.ParseDuration(v)
	}
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || rest == "" {
		return time.Duration(n) * day, err //nolint:gosec // 16 bits
	}
	d, err := time.ParseDuration(rest)
	if d < 0 {
		err = strconv.ErrRange
	}
	return time.Duration(n)*day + d, err //nolint:gosec // 16 bits
}

func daysText(d time.Duration) string {
	if d > 0 && d%day == 0 {
		return strconv.FormatInt(int64(d/day), 10) + "d"
	}
	return d.String()
}

func amount(name, help string, at func(*Config) *int64) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil || n < 0 {
				return fmt.Errorf("%q is not a whole number from 0", v)
			}
			*at(c) = n
			return nil
		},
		get: func(c Config) string { return strconv.FormatInt(*at(&c), 10) },
	}
}

// sizeUnits are what a size may be given in, the longest names first.
func sizeUnits() []struct {
	name  string
	bytes float64
} {
	return []struct {
		name  string
		bytes float64
	}{
		{"KiB", 1 << 10},
		{"MiB", 1 << 20},
		{"GiB", 1 << 30},
		{"TiB", 1 << 40},
		{"kB", 1e3},
		{"MB", 1e6},
		{"GB", 1e9},
		{"TB", 1e12},
		{"", 1},
	}
}

// size is a number of bytes with a unit.
func size(name, help string, at func(*Config) *int64) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			for _, u := range sizeUnits() {
				number, ok := strings.CutSuffix(v, u.name)
				if !ok {
					continue
				}
				n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
				if err != nil || !(n >= 0) || n*u.bytes > math.MaxInt64/2 {
					break
				}
				*at(c) = int64(n * u.bytes)
				return nil
			}
			return fmt.Errorf("%q is not a size like 50GiB, 800MB or a number of bytes", v)
		},
		get: func(c Config) string { return sizeText(*at(&c)) },
	}
}

// sizeText gives a size as it can be set.
func sizeText(n int64) string {
	for _, u := range []struct {
		name  string
		bytes int64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n > 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}
