package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"headgate/internal/fault"
)

// line is a gate on a time line of its own.
type line struct {
	*testing.T
	g   *gate
	now time.Time
}

func newLine(t *testing.T) *line {
	t.Helper()
	now := time.Unix(1_800_000_000, 0)
	l := &line{T: t, g: newGate(now), now: now}
	for range goodInRow {
		l.ask(checkDatabase, time.Millisecond, nil)
		l.ask(checkSelfCall, time.Millisecond, nil)
	}
	l.expect(true, "")
	return l
}

// ask lets a probe end took later, and the next begin probeEvery after it began.
func (l *line) ask(name string, took time.Duration, err error) {
	l.now = l.now.Add(took)
	l.g.probed(l.now, name, took, err)
	l.now = l.now.Add(max(0, probeEvery-took))
}

// expect checks the verdict and the name of the check that fails.
func (l *line) expect(stable bool, failing string) {
	l.Helper()
	got, why := l.g.verdict()
	if got != stable || failing != "" && !strings.HasPrefix(why, failing+": ") {
		l.Errorf("stable %v because %q, want %v and %q", got, why, stable, failing)
	}
}

var errRefused = errors.New("connection refused")

func TestNothingIsStableBeforeItWasAsked(t *testing.T) {
	t.Parallel()
	l := &line{T: t, g: newGate(time.Now()), now: time.Now()}
	l.expect(false, checkDatabase)
	for range goodInRow {
		l.ask(checkDatabase, time.Millisecond, nil)
	}
	l.expect(false, checkSelfCall)
	l.ask(checkSelfCall, time.Millisecond, nil)
	l.ask(checkSelfCall, goodProbe+time.Millisecond, nil) // too slow to count
	l.ask(checkSelfCall, time.Millisecond, nil)
	l.ask(checkSelfCall, time.Millisecond, nil)
	l.expect(false, checkSelfCall)
	l.ask(checkSelfCall, time.Millisecond, nil)
	l.expect(true, "")
}

func TestThreeFailuresInARowAreUnstable(t *testing.T) {
	t.Parallel()
	for _, name := range []string{checkDatabase, checkSelfCall} {
		l := newLine(t)
		for range 5 {
			l.ask(name, time.Millisecond, errRefused)
			l.ask(name, time.Millisecond, nil)
		}
		l.expect(true, "")
		l.ask(name, time.Millisecond, errRefused)
		l.ask(name, time.Millisecond, errRefused)
		l.expect(true, "")
		l.ask(name, time.Millisecond, errRefused)
		l.expect(false, name)
		l.ask(name, time.Millisecond, nil)
		l.ask(name, time.Millisecond, nil)
		l.ask(name, time.Millisecond, errRefused) // begins the way back anew
		l.ask(name, time.Millisecond, nil)
		l.ask(name, time.Millisecond, nil)
		l.expect(false, name)
		l.ask(name, time.Millisecond, nil)
		l.expect(true, "")
	}
}

func TestSilenceOfFiveSecondsIsUnstable(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	began := l.now
	l.ask(checkDatabase, probeLimit, errNoAnswer)
	l.expect(true, "")
	l.ask(checkDatabase, probeLimit, errNoAnswer)
	l.expect(false, checkDatabase)
	if took := l.now.Sub(began); took < downTerm || took > 2*downTerm {
		t.Errorf("noticed after %v", took)
	}
	if _, why := l.g.verdict(); why != "database: failed 2 times in 6s: no answer within 3s" {
		t.Errorf("the reason reads %q", why)
	}
}

func TestSlowAnswersAreUnstableOnlyWhenTheyAreMany(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	for i := range 2 * probeWindow {
		took := time.Millisecond
		if i%probeWindow == 0 {
			took = slowProbe + 500*time.Millisecond // one of twenty
		}
		l.ask(checkSelfCall, took, nil)
	}
	l.expect(true, "")
	l.ask(checkSelfCall, slowProbe+500*time.Millisecond, nil)
	l.ask(checkSelfCall, slowProbe+500*time.Millisecond, nil)
	l.expect(false, checkSelfCall)
	for range goodInRow {
		l.ask(checkSelfCall, time.Millisecond, nil)
	}
	l.expect(true, "")
	l.ask(checkSelfCall, time.Millisecond, nil)
	l.expect(true, "") // the slow ones of before count no more
}

func TestResourcesHaveTwoThresholds(t *testing.T) {
	t.Parallel()
	for _, name := range []string{checkDescriptors, checkMemory} {
		l := newLine(t)
		for _, step := range []struct {
			used float64
			ok   bool
		}{{89, true}, {91, false}, {89, false}, {86, false}, {84, true}, {89, true}, {95, false}} {
			l.g.used(l.now, name, step.used, 100, "something")
			if got, _ := l.g.verdict(); got != step.ok {
				t.Errorf("%s at %v %%: stable %v", name, step.used, got)
			}
		}
		l.g.used(l.now, name, 1e9, 0, "something") // no limit at all
		l.expect(true, "")
	}
}

func TestOnlyLastingLagIsUnstable(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	wake := func(lag time.Duration) {
		l.now = l.now.Add(wakeTick + lag)
		l.g.woke(l.now, lag)
	}
	wake(time.Hour) // the machine was asleep
	l.expect(true, "")
	wake(0)
	for range 13 { // 4.9 s
		wake(lateWake + 26*time.Millisecond)
	}
	l.expect(true, "")
	wake(lateWake) // in time once
	for range 13 {
		wake(lateWake + 26*time.Millisecond)
	}
	l.expect(true, "")
	wake(lateWake + 26*time.Millisecond)
	l.expect(false, checkScheduler)
	for range 49 {
		wake(0)
	}
	l.expect(false, checkScheduler)
	for range 3 {
		wake(0)
	}
	l.expect(true, "")
}

func TestDialsCountOnlyWhileTheyHurt(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	for range 10 {
		l.g.dialling(l.now, 100_000)
	}
	l.expect(true, "") // thousands of unreachable agents alone keep nobody out
	l.ask(checkSelfCall, stormSlow+time.Millisecond, nil)
	for range stormyRounds - 1 {
		l.g.dialling(l.now, manyDials+1)
	}
	l.expect(true, "")
	l.g.dialling(l.now, manyDials+1)
	l.expect(false, checkOutbound)
	for range stormyRounds - 1 {
		l.g.dialling(l.now, 0)
	}
	l.expect(false, checkOutbound)
	l.g.dialling(l.now, 0)
	l.expect(true, "")
}

func TestThePresentLagIsOfTheLastCalls(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	l.ask(checkSelfCall, time.Second, nil)
	if got := l.g.recent(); got != time.Second {
		t.Errorf("got %v", got)
	}
	for range recentProbes {
		l.ask(checkSelfCall, 2*time.Millisecond, nil)
	}
	if got := l.g.recent(); got != 2*time.Millisecond {
		t.Errorf("got %v", got)
	}
}

func TestChecksAreListedAsTheyStand(t *testing.T) {
	t.Parallel()
	l := newLine(t)
	list := l.g.list()
	if len(list) != 6 || list[0].Name != checkDatabase || !list[0].OK || list[0].Detail != "answered in 1ms" || list[0].Last == nil {
		t.Errorf("got %+v", list)
	}
	if list[2].Last != nil {
		t.Errorf("descriptors were never looked at: %+v", list[2])
	}
}

func TestP95IsTheOneThatOneInTwentyIsAbove(t *testing.T) {
	t.Parallel()
	var took []time.Duration
	for i := range 20 {
		took = append(took, time.Duration(20-i))
	}
	if got := fmt.Sprint(int(p95(took)), int(p95(took[19:])), int(took[0])); got != "19 1 20" {
		t.Errorf("got %s", got)
	}
}

func TestSentencesForOperatorsDoNotTellThemToTryAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want string
	}{
		{fault.Wrap(errors.New("dial"), fault.Unavailable, "database_unavailable", "the database does not answer").WithHint("try again in a few seconds"), "the database does not answer"},
		{fault.New(fault.Invalid, "database_not_durable", "fsync is off.").WithHint("Switch it on."), "fsync is off: Switch it on."},
		{fault.New(fault.Invalid, "x", "plain"), "plain"},
		{errors.New("other"), "other"},
	} {
		if got := sentence(c.err); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}
