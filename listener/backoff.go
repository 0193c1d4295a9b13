package listener

import "time"

const (
	minRetryAfter = 1 * time.Second
	maxRetryAfter = 32 * time.Second
	// raiseEvery and calmAfter pace how the advice follows the load.
	raiseEvery = 1 * time.Second
	calmAfter  = 2 * time.Second
)

// backoff is how long clients that are sent away are told to stay away. It
// doubles once a second while clients are sent away, and halves for every two
// seconds in which none is.
type backoff struct {
	level  time.Duration // 0: as minRetryAfter
	raised time.Time
	last   time.Time // somebody was sent away
}

func (b *backoff) raise(now time.Time) {
	b.level, b.last = b.base(now), now
	if now.Sub(b.raised) >= raiseEvery {
		if !b.raised.IsZero() {
			b.level = min(2*b.level, maxRetryAfter)
		}
		b.raised = now
	}
}

// base gives the present level.
func (b *backoff) base(now time.Time) time.Duration {
	halvings := min(max(now.Sub(b.last), 0)/calmAfter, 6)
	return max(b.level>>halvings, minRetryAfter)
}
