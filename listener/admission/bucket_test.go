package admission_test

import (
	"testing"
	"time"

	"headgate/listener/admission"
)

// start is any moment; these tests need no clock.
func start() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

// takes counts how many of n tries succeed.
func takes(n int, take func() bool) (ok int) {
	for range n {
		if take() {
			ok++
		}
	}
	return ok
}

func TestBucket(t *testing.T) {
	t.Parallel()
	now, rate := start(), admission.Rate{PerSecond: 20, Burst: 40}
	var b admission.Bucket
	take := func() bool { return b.Take(now, rate, 1) }
	if got := takes(100, take); got != 40 {
		t.Fatalf("a new bucket gave %d, want its burst of 40", got)
	}
	at := b.ReadyAt(now, rate, 1)
	if want := now.Add(50 * time.Millisecond); !at.Equal(want) {
		t.Errorf("ready at %v, want %v", at, want)
	}
	now = at
	if got := takes(2, take); got != 1 {
		t.Errorf("at the moment named it gave %d, want 1", got)
	}
	now = now.Add(time.Second)
	if got := takes(100, take); got != 20 {
		t.Errorf("a second gave %d, want 20", got)
	}
	now = now.Add(-time.Hour)
	if take() {
		t.Error("a clock that steps back fills it")
	}
	now = now.Add(time.Second)
	if got := takes(100, take); got != 20 {
		t.Errorf("a second after the step gave %d, want 20", got)
	}
	now = now.Add(time.Hour)
	if got := takes(100, take); got != 40 {
		t.Errorf("an hour gave %d, want the burst", got)
	}
	if at := b.ReadyAt(now, rate, 41); !at.IsZero() {
		t.Errorf("more than the burst is ready at %v, want never", at)
	}
	if at := b.ReadyAt(now, admission.Rate{Burst: 40}, 1); !at.IsZero() {
		t.Errorf("a rate of nothing is ready at %v, want never", at)
	}
}

func TestBucketDebtIsBounded(t *testing.T) {
	t.Parallel()
	now, rate := start(), admission.Rate{PerSecond: 20, Burst: 40}
	var b admission.Bucket
	for range 1000 {
		b.Charge(now, rate, 5)
	}
	if got, want := b.ReadyAt(now, rate, 1), now.Add(2050*time.Millisecond); !got.Equal(want) {
		t.Errorf("free again at %v, want %v", got, want)
	}
	b.Give(now, rate, 1e9)
	if got := takes(100, func() bool { return b.Take(now, rate, 1) }); got != 40 {
		t.Errorf("gave %d after a gift, want the burst", got)
	}
}

func TestChangedRateFillsNothing(t *testing.T) {
	t.Parallel()
	now, low, high := start(), admission.Rate{PerSecond: 20, Burst: 40}, admission.Rate{PerSecond: 200, Burst: 400}
	var b admission.Bucket
	b.Take(now, low, 30)
	if got := takes(1000, func() bool { return b.Take(now, high, 1) }); got != 10 {
		t.Errorf("a higher rate gave %d at once, want the 10 that were left", got)
	}
	now = now.Add(time.Hour)
	b.Settle(now, high)
	if got := takes(1000, func() bool { return b.Take(now, low, 1) }); got != 40 {
		t.Errorf("a lower burst left %d, want 40", got)
	}
	if b.Full(now, low) {
		t.Error("an empty bucket is full")
	}
}

func TestPacer(t *testing.T) {
	t.Parallel()
	now := start()
	var p admission.Pacer
	take := func() bool { return p.Take(now) }
	if take() || !p.ReadyAt(now).IsZero() {
		t.Error("a pacer without a rate lets somebody through")
	}
	p.SetRate(now, admission.Rate{PerSecond: 200, Burst: 200})
	if got := takes(1000, take); got != 200 {
		t.Errorf("gave %d, want 200", got)
	}
	p.SetRate(now, admission.Rate{PerSecond: 1000, Burst: 1000})
	if got := takes(1000, take); got != 0 {
		t.Errorf("a new rate gave %d at once", got)
	}
	if at, want := p.ReadyAt(now), now.Add(time.Millisecond); !at.Equal(want) {
		t.Errorf("ready at %v, want %v", at, want)
	}
	now = now.Add(100 * time.Millisecond)
	if got := takes(1000, take); got != 100 {
		t.Errorf("100 ms gave %d, want 100", got)
	}
	now = now.Add(-time.Minute)
	if take() {
		t.Error("a clock that steps back fills it")
	}
}

func TestRamp(t *testing.T) {
	t.Parallel()
	now := start()
	var p admission.Pacer
	p.SetRate(now, admission.Rate{PerSecond: 400, Burst: 400})
	p.Ramp(now, 0.25, 10*time.Second)
	take := func() bool { return p.Take(now) }
	if got := takes(1000, take); got != 100 {
		t.Errorf("the ramp began with %d, want a quarter", got)
	}
	second := func() (got int) {
		for range 100 {
			now = now.Add(10 * time.Millisecond)
			got += takes(1000, take)
		}
		return got
	}
	var got []int
	for range 12 {
		got = append(got, second())
	}
	for i, n := range got[:10] {
		// Over second i the part runs from 0.25+0.075i to 0.325+0.075i.
		want := 400 * (0.2875 + 0.075*float64(i))
		if float64(n) < want-2 || float64(n) > want+2 {
			t.Errorf("second %d gave %d, want about %.0f", i, n, want)
		}
	}
	if got[11] < 399 || got[11] > 401 {
		t.Errorf("after the ramp a second gave %d, want 400", got[11])
	}
	p.Ramp(now, 0, 10*time.Second)
	takes(1000, take)
	for range 200 {
		at := p.ReadyAt(now)
		if at.IsZero() || at.Before(now) {
			t.Fatalf("ready at %v during a ramp from nothing", at)
		}
		if now = at; !take() {
			t.Fatal("nothing there at the moment named")
		}
	}
}
