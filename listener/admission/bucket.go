package admission

import (
	"math"
	"time"
)

// Rate is what a bucket refills by and how much it holds.
type Rate struct {
	PerSecond float64 `json:"per_second"`
	Burst     float64 `json:"burst"`
}

// Times gives the rate multiplied by f, burst included.
func (r Rate) Times(f float64) Rate { return Rate{PerSecond: r.PerSecond * f, Burst: r.Burst * f} }

// grain is what a level may lack because times are whole nanoseconds.
const grain = 1e-6

// Bucket holds tokens. The zero Bucket is full at its first use. The rate comes
// with each call: a higher one lets it refill faster from where it stands and a
// lower burst cuts what is in it, but no change of rate fills it by itself.
type Bucket struct {
	level float64
	at    time.Time // of level; zero before the first use
}

// Settle brings the bucket up to now. It is called by itself only before a
// change of rate, so that the time gone by counts by the old one.
func (b *Bucket) Settle(now time.Time, r Rate) {
	if b.at.IsZero() {
		b.level, b.at = r.Burst, now
		return
	}
	if gone := now.Sub(b.at); gone > 0 {
		b.level += gone.Seconds() * r.PerSecond
	}
	b.level, b.at = min(b.level, r.Burst), now
}

// Take takes n tokens if they are there.
func (b *Bucket) Take(now time.Time, r Rate, n float64) bool {
	b.Settle(now, r)
	if b.level+grain < n {
		return false
	}
	b.level -= n
	return true
}

// Charge takes n tokens whether they are there or not. The debt is bounded by
// one burst, so that the worst source is free again in a known time.
func (b *Bucket) Charge(now time.Time, r Rate, n float64) {
	b.Settle(now, r)
	b.level = max(b.level-n, -r.Burst)
}

// Give puts n tokens back, up to the burst.
func (b *Bucket) Give(now time.Time, r Rate, n float64) {
	b.Settle(now, r)
	b.level = min(b.level+n, r.Burst)
}

// ReadyAt gives the moment from which n tokens are there, now if they are. It
// is the zero time when that moment never comes at this rate.
func (b *Bucket) ReadyAt(now time.Time, r Rate, n float64) time.Time {
	b.Settle(now, r)
	return later(now, n-b.level, r.PerSecond, r.Burst >= n)
}

// Full reports whether the bucket is as good as new.
func (b *Bucket) Full(now time.Time, r Rate) bool {
	b.Settle(now, r)
	return b.level+grain >= r.Burst
}

// later gives the moment at which lack tokens will have come.
func later(now time.Time, lack, perSecond float64, possible bool) time.Time {
	if lack <= grain {
		return now
	}
	if !possible || perSecond <= 0 {
		return time.Time{}
	}
	wait := math.Ceil(lack / perSecond * float64(time.Second))
	if wait > float64(farAway) {
		return time.Time{}
	}
	return now.Add(time.Duration(wait))
}

// farAway is when later stops counting.
const farAway = 365 * 24 * time.Hour

// minRamp is the least part of its rate at which a Pacer starts, so that it
// always moves.
const minRamp = 0.01

// Pacer is one bucket for all, with slow start. The zero Pacer lets nobody
// through; SetRate comes first.
type Pacer struct {
	rate  Rate
	level float64
	at    time.Time // of level; zero before the first SetRate

	from  float64 // part of the rate at the start of the ramp
	began time.Time
	over  time.Duration // 0: no ramp
}

// SetRate changes the rate. The first call fills the pacer; a later one leaves
// in it what is there, or less if the burst is lower.
func (p *Pacer) SetRate(now time.Time, r Rate) {
	if p.at.IsZero() {
		p.rate, p.at = r, now
		p.level = p.burst(now)
		return
	}
	p.settle(now)
	p.rate = r
	p.level = min(p.level, p.burst(now))
}

// Ramp makes rate and burst start at the part from (0 to 1) and grow evenly to
// their full value over the time given. It empties what is above that part.
func (p *Pacer) Ramp(now time.Time, from float64, over time.Duration) {
	p.settle(now)
	p.from, p.began, p.over = min(max(from, minRamp), 1), now, max(over, 0)
	p.level = min(p.level, p.burst(now))
}

// Take takes one token if it is there.
func (p *Pacer) Take(now time.Time) bool {
	p.settle(now)
	if p.level+grain < 1 {
		return false
	}
	p.level--
	return true
}

// Give puts one token back.
func (p *Pacer) Give(now time.Time) {
	p.settle(now)
	p.level = min(p.level+1, p.burst(now))
}

// ReadyAt gives the moment to try again, now if a token is there. During a
// ramp it may lie a little after the first possible moment. It is the zero
// time when the rate allows nothing.
func (p *Pacer) ReadyAt(now time.Time) time.Time {
	p.settle(now)
	return later(now, 1-p.level, p.rate.PerSecond*p.part(now), p.rate.Burst >= 1)
}

func (p *Pacer) settle(now time.Time) {
	if p.at.IsZero() {
		return // there is no rate yet
	}
	if gone := now.Sub(p.at); gone > 0 {
		// The part grows in a straight line, so the mean of both ends is exact
		// within the ramp and after it, and a little low across its end.
		mean := (p.part(p.at) + p.part(now)) / 2
		p.level += gone.Seconds() * p.rate.PerSecond * mean
	}
	p.level, p.at = min(p.level, p.burst(now)), now
}

// part is the part of the rate that holds at a moment.
func (p *Pacer) part(at time.Time) float64 {
	gone := at.Sub(p.began)
	if p.over == 0 || gone >= p.over {
		return 1
	}
	return p.from + (1-p.from)*float64(max(gone, 0))/float64(p.over)
}

// burst is what the pacer holds at most at a moment: one token at least,
// unless the rate allows none, or a small burst could never be taken.
func (p *Pacer) burst(at time.Time) float64 {
	return max(p.rate.Burst*p.part(at), min(p.rate.Burst, 1))
}
