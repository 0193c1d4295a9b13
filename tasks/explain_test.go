package tasks

import (
	"strings"
	"testing"
	"time"
)

func TestSpansReadLikeSpeech(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0 ms", 15 * time.Millisecond: "15 ms", 41 * time.Second: "41 s", 2*time.Minute + 14*time.Second: "2 min 14 s",
		5 * time.Minute: "5 min", 6*time.Hour + 25*time.Minute: "6 h 25 min", 76 * time.Hour: "3 d 4 h",
	} {
		if got := span(d); got != want {
			t.Errorf("span(%s) = %q, want %q", d, got, want)
		}
	}
}

func TestBecauseSentences(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 30, 15, 34, 0, 0, time.UTC)
	task := &Task{ID: 9, State: StateNew, CreatedAt: now.Add(-time.Minute), StartedAt: now.Add(-41 * time.Second), Timeout: 5 * time.Minute}
	up := situation{session: true, ready: true, changed: now.Add(-time.Hour), since: now.Add(-41 * time.Second), accepted: now, heard: now.Add(-2 * time.Second)}
	with := func(f func(*situation)) situation { s := up; f(&s); return s }
	cases := map[string]struct {
		s       situation
		started bool
		cause   string
		says    string
	}{
		"busy": {with(func(s *situation) {
			s.busy, s.blocking = true, Queued{ID: 4182907, Kind: "bind.reload", Timeout: time.Minute}
		}), false, CauseBusy, "Waits: the agent is busy with 4182907 bind.reload for 41 s"},
		"ghost": {with(func(s *situation) { s.busy, s.ghost, s.blocking = true, true, Queued{ID: 7} }), false, CauseBusy, "still runs 7, which is completed here"},
		"away":  {with(func(s *situation) { s.session, s.info.Why = false, "connection refused, next try in 38 s." }), false, CauseUnreachable, "Waits: the agent is unreachable for 1 h: connection refused, next try in 38 s"},
		"paused": {with(func(s *situation) {
			s.info.Paused, s.info.PausedBy, s.info.PausedAt = true, "mira", now.Add(-time.Hour)
		}), false, CausePaused, "Waits: the agent was paused by mira at 14:34:00 UTC"},
		"quarantined": {with(func(s *situation) { s.info.Quarantined, s.info.Why = true, "It came back with another ledger." }), false, CauseQuarantined, "Waits: the agent is quarantined: It came back with another ledger"},
		"settling":    {with(func(s *situation) { s.ready = false }), false, CauseSettling, "settled first"},
		"held":        {with(func(s *situation) { s.hold = now.Add(4 * time.Second) }), false, CauseHeld, "asked again in 4 s"},
		"about to":    {up, false, CauseStarting, "about to be handed"},
		"running":     {up, true, CauseRunning, "The agent has had it for 41 s and spoke 2 s ago."},
		"starting":    {with(func(s *situation) { s.accepted = time.Time{} }), true, CauseStarting, "has not yet said that it has begun"},
		"lost":        {with(func(s *situation) { s.session, s.changed = false, now.Add(-134*time.Second) }), true, CauseUnreachable, "The connection was lost 2 min 14 s ago."},
		"cancelling":  {with(func(s *situation) { s.cancelled = now.Add(-3 * time.Second) }), true, CauseCancel, "asked 3 s ago to end it"},
	}
	for name, c := range cases {
		w := c.s.waiting(task, now)
		if c.started {
			w = c.s.started(task, now)
		}
		if w.Cause != c.cause || !strings.Contains(w.Sentence, c.says) || w.NextStep == "" || w.Since.IsZero() {
			t.Errorf("%s: %+v, want %s and %q", name, w, c.cause, c.says)
		}
	}
	over := *task
	over.Timeout = 10 * time.Second
	if w := up.started(&over, now); !strings.Contains(w.Sentence, "31 s longer than its timeout") {
		t.Errorf("over its time: %+v", w)
	}
}

func TestTextIsMadeSafe(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"": "", "a": "a", "a\x00b": "a\uFFFDb", "\xff": "\uFFFD", "äääää": "ää..."} {
		if got := safeText(in, 8); got != want {
			t.Errorf("safeText(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestHistogramQuantilesAreNear(t *testing.T) {
	t.Parallel()
	var h histogram
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Millisecond)
	}
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Millisecond, 0.95: 950 * time.Millisecond, 0.99: 990 * time.Millisecond} {
		if got := h.quantile(q); got < want || got > want*3/2 {
			t.Errorf("quantile %g = %s, want about %s", q, got, want)
		}
	}
	var none histogram
	if none.quantile(0.5) != 0 {
		t.Error("a quantile of nothing")
	}
	h.add(1000 * time.Hour)
	h.add(-time.Second)
}
