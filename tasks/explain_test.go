package tasks

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"strings"
	"testing"
	"time"
	"uuid"
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

// causeTime is the moment at which TestEveryCauseIsExplained looks.
var causeTime = time.Date(2026, 11, 30, 15, 34, 0, 0, time.UTC)

// causeCase is a task and its agent in one situation.
type causeCase struct {
	cause, says, next string
	started           bool // the task is in the slot
	elsewhere         bool
	change            func(s *situation, f *flight, t *Task)
}

func inSlot(s *situation, f *flight, _ *Task) {
	f.q = Queued{ID: 4182907, Kind: "bind.reload", Timeout: time.Minute}
	s.flights = []flight{*f}
}

var causeCases = map[string]causeCase{
	"busy": {cause: CauseBusy, says: "Waits: the agent is busy with 4182907 bind.reload for 41 s; position 2.", next: "within 1 min 19 s", change: inSlot},
	"busy with one that is cancelled": {
		cause: CauseBusy, says: "for 41 s, which is being cancelled; position 2.", next: "within 50 s",
		change: func(s *situation, f *flight, t *Task) {
			f.cancelAsked = causeTime.Add(-10 * time.Second)
			inSlot(s, f, t)
		},
	},
	"busy with one that was taken over": {
		cause: CauseBusy, says: "for 1 h; position 2.", next: "within 57 s",
		change: func(s *situation, f *flight, t *Task) {
			f.since, f.loaded = causeTime.Add(-time.Hour), causeTime.Add(-3*time.Second)
			inSlot(s, f, t)
		},
	},
	"busy with one that is completed": {
		cause: CauseBusy, says: "still runs 4182907, which is completed here, for 41 s", next: "asked to end it",
		change: func(s *situation, f *flight, t *Task) { f.ghost = true; inSlot(s, f, t) },
	},
	"away": {
		cause: CauseUnreachable, says: "Waits: the agent is unreachable for 1 h: connection refused, 7 tries, next in 38 s; position 2.", next: "keeps trying",
		change: func(s *situation, _ *flight, _ *Task) {
			s.session, s.info.Why = false, "connection refused, 7 tries, next in 38 s."
		},
	},
	"certificate": {
		cause: CauseCertificate, says: "Waits: the certificate of the agent at 192.0.2.1:7442 has expired; position 2.", next: "Pair the agent again",
		change: func(s *situation, _ *flight, _ *Task) {
			s.session, s.info.Expired, s.info.Why = false, true, "the certificate of the agent at 192.0.2.1:7442 has expired"
		},
	},
	"paused": {
		cause: CausePaused, says: "Waits: the agent was paused by mira at 14:34:00 UTC; position 2.", next: "when it is resumed",
		change: func(s *situation, _ *flight, _ *Task) {
			s.info.Paused, s.info.PausedBy, s.info.PausedAt = true, "mira", causeTime.Add(-time.Hour)
		},
	},
	"quarantined": {
		cause: CauseQuarantined, says: "Waits: the agent is quarantined: It came back with another ledger; position 2.", next: "approve or remove",
		change: func(s *situation, _ *flight, _ *Task) {
			s.info.Quarantined, s.info.Why = true, "It came back with another ledger."
		},
	},
	"settling": {cause: CauseSettling, says: "settled first", next: "within seconds", change: func(s *situation, _ *flight, _ *Task) { s.ready = false }},
	"held": {
		cause: CauseHeld, says: "asked again in 4 s", next: "the disk and the log",
		change: func(s *situation, _ *flight, _ *Task) { s.hold = causeTime.Add(4 * time.Second) },
	},
	"about to": {cause: CauseStarting, says: "about to be handed to the agent; position 2.", next: "within 2 s"},
	"stopping": {cause: CauseStopping, says: "is stopping", next: "next controller", change: func(s *situation, _ *flight, _ *Task) { s.stopping = true }},
	"no database": {
		cause: CauseDatabase, says: "takes no writes for 12 s", next: "when the database works again",
		change: func(s *situation, _ *flight, _ *Task) { s.failing = causeTime.Add(-12 * time.Second) },
	},
	"not due": {
		cause: CauseNotDue, says: "Waits: not before 17:34:00 UTC, in 2 h.", next: "starts it by itself then",
		change: func(_ *situation, _ *flight, t *Task) { t.NotBefore = causeTime.Add(2 * time.Hour) },
	},
	"backing off": {
		cause: CauseBackingOff, says: "attempt 3 of 5 was interrupted; the next one follows in 25 s, at 15:34:25 UTC.", next: "other tasks go on",
		change: func(_ *situation, _ *flight, t *Task) { t.Attempt, t.NotBefore = 3, causeTime.Add(25*time.Second) },
	},
	"elsewhere": {cause: CauseElsewhere, says: "Another controller", next: "within 20 s", elsewhere: true},
	"removed":   {cause: CauseRemoved, says: "was removed", next: "cancelled within seconds", change: func(s *situation, _ *flight, _ *Task) { s.info.Removed = true }},

	"running": {cause: CauseRunning, says: "The agent has had it for 41 s and spoke 2 s ago.", next: "by 15:38:19 UTC at the latest", started: true},
	"over its time": {
		cause: CauseRunning, says: "31 s longer than its timeout", next: "becomes unknown at 15:34:29 UTC", started: true,
		change: func(_ *situation, _ *flight, t *Task) { t.Timeout = 10 * time.Second },
	},
	"handed": {
		cause: CauseStarting, says: "has not yet said that it has begun", next: "goes back to its place", started: true,
		change: func(_ *situation, f *flight, _ *Task) { f.accepted = time.Time{} },
	},
	"storing": {
		cause: CauseStoring, says: "on its way to disk", next: "Nothing", started: true,
		change: func(_ *situation, f *flight, _ *Task) { f.finishing = true },
	},
	"storing without a database": {
		cause: CauseStoring, says: "takes no writes for 12 s", next: "the agent keeps it", started: true,
		change: func(s *situation, f *flight, _ *Task) { f.finishing, s.failing = true, causeTime.Add(-12*time.Second) },
	},
	"lost": {
		cause: CauseUnreachable, says: "The connection was lost 2 min 14 s ago: no answer", next: "unknown at 15:39:19 UTC", started: true,
		change: func(s *situation, _ *flight, _ *Task) {
			s.session, s.changed, s.downWhy = false, causeTime.Add(-134*time.Second), "no answer"
		},
	},
	"taken over while it was away": {
		cause: CauseUnreachable, says: "The connection was lost 1 h ago", next: "unknown at 15:34:57 UTC", started: true,
		change: func(s *situation, f *flight, t *Task) {
			s.session, t.Timeout = false, time.Second
			f.loaded = causeTime.Add(-3 * time.Second)
		},
	},
	"quarantined with it": {
		cause: CauseQuarantined, says: "had it for 41 s and is quarantined", next: "approve or remove", started: true,
		change: func(s *situation, _ *flight, _ *Task) { s.info.Quarantined = true },
	},
	"removed with it": {
		cause: CauseRemoved, says: "was removed while it had this task", next: "completed at 15:34:06 UTC", started: true,
		change: func(s *situation, _ *flight, _ *Task) {
			s.info.Removed, s.removedAt = true, causeTime.Add(-4*time.Second)
		},
	},
	"cancelling": {
		cause: CauseCancel, says: "Being cancelled: user:mira asked for it at 15:33:57 UTC; the agent was told 3 s ago.", next: "unknown at 15:34:57 UTC", started: true,
		change: func(_ *situation, f *flight, _ *Task) { askedToEnd(f) },
	},
	"cancelling while away": {
		cause: CauseCancel, says: "user:mira asked for it at 15:33:57 UTC, but the connection to the agent was lost 1 h ago", next: "unknown at 15:34:27 UTC", started: true,
		change: func(s *situation, f *flight, _ *Task) { askedToEnd(f); s.session = false },
	},
	"cancelling in quarantine": {
		cause: CauseCancel, says: "the agent is quarantined", next: "unknown at 15:34:27 UTC", started: true,
		change: func(s *situation, f *flight, _ *Task) { askedToEnd(f); s.info.Quarantined = true },
	},
	"cancelled, and it has answered": {
		cause: CauseCancel, says: "what the agent said is on its way to disk", next: "completed with that", started: true,
		change: func(_ *situation, f *flight, _ *Task) { askedToEnd(f); f.finishing = true },
	},
}

func askedToEnd(f *flight) {
	f.cancelAsked = causeTime.Add(-3 * time.Second)
	f.markedAt, f.markedBy = f.cancelAsked, "user:mira"
}

// TestEveryCauseIsExplained: whatever a task waits for, the answer has a
// stable cause, a sentence with its numbers, the next step, and since when;
// and, in the agent's order, the place and what holds the slot.
func TestEveryCauseIsExplained(t *testing.T) {
	t.Parallel()
	causes := map[string]bool{}
	for name, c := range causeCases {
		limits := Limits{}.withDefaults()
		task := &Task{ID: 9, State: StateNew, CreatedAt: causeTime.Add(-time.Minute), Timeout: 5 * time.Minute}
		f := flight{since: causeTime.Add(-41 * time.Second), accepted: causeTime, heard: causeTime.Add(-2 * time.Second)}
		s := situation{session: true, ready: true, changed: causeTime.Add(-time.Hour), order: []ID{8, 9}, limits: &limits}
		if c.started {
			task.State, task.StartedAt, task.Attempt, f.q.ID = StateWaiting, f.since, 1, task.ID
		}
		if c.change != nil {
			c.change(&s, &f, task)
		}
		if c.started {
			s.flights = []flight{f}
		}
		w := explain(task, &s, !c.elsewhere, causeTime)
		causes[w.Cause] = true
		if w.Cause != c.cause || !strings.Contains(w.Sentence, c.says) || !strings.Contains(w.NextStep, c.next) || w.Since.IsZero() {
			t.Errorf("%s: %+v, want %s, %q and %q", name, w, c.cause, c.says, c.next)
		}
		if busy := c.cause == CauseBusy; busy != (w.Blocking == 4182907 && w.BlockingKind == "bind.reload" && w.BlockingSince.Equal(f.since)) {
			t.Errorf("%s is blocked by %+v", name, w)
		}
		if c.started != (w.Position == 0) && w.queued() {
			t.Errorf("%s: position %d", name, w.Position)
		}
	}
	m := &Manager{}
	m.routes = newRoutes(m)
	silent := Lease{Owner: uuid.NewV4(), Name: "one", Left: time.Second}
	m.routes.note(silent.Owner, false)
	for _, l := range []Lease{{}, silent} {
		task := &Task{CreatedAt: causeTime}
		if m.elsewhere(task, l); task.Waiting == nil || task.Waiting.Since.IsZero() || task.Waiting.NextStep == "" {
			t.Fatalf("of the lease %+v it says %+v", l, task.Waiting)
		}
		causes[task.Waiting.Cause] = true
	}
	for _, cause := range allCauses(t) {
		if !causes[cause] {
			t.Errorf("no case has the cause %s", cause)
		}
	}
}

// allCauses reads the constants from the source, so that a new one cannot be
// forgotten.
func allCauses(t *testing.T) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "explain.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Values) != 1 || !strings.HasPrefix(v.Names[0].Name, "Cause") {
			return true
		}
		text, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, text)
		return true
	})
	if len(all) < 10 {
		t.Fatalf("only %d causes were found", len(all))
	}
	return all
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
