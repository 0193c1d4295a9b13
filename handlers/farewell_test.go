package handlers_test

import (
	"context"
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
)

// guests enter a farewell and report how long after its beginning they were
// asked to leave.
func guests(f *handlers.Farewell, n int) <-chan time.Time {
	left := make(chan time.Time, n)
	for range n {
		leave, gone := f.Enter()
		go func() {
			<-leave
			left <- time.Now()
			gone()
		}()
	}
	return left
}

// Acceptance 51.
func TestAFarewellIsSpread(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const n, spread = 200, 5 * time.Second
		f := handlers.NewFarewell()
		left := guests(f, n)
		<-time.After(time.Hour)
		if len(left) != 0 || f.Open() != n {
			t.Fatalf("%d left before the beginning, %d are open", len(left), f.Open())
		}
		began := time.Now()
		f.Begin(spread)
		f.Begin(0) // only the first counts
		late := guests(f, 1)
		if err := f.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > spread {
			t.Errorf("the last one left after %v", took)
		}
		moments := map[time.Time]bool{<-late: true}
		halves := [2]int{}
		for range n {
			at := <-left
			moments[at] = true
			halves[min(1, at.Sub(began)/(spread/2))]++
		}
		if len(moments) < n/2 || halves[0] < n/5 || halves[1] < n/5 {
			t.Errorf("%d moments for %d, %v in the halves", len(moments), n, halves)
		}
		afterwards := time.Now().Add(spread)
		if at := <-guests(f, 1); at.After(afterwards) {
			t.Errorf("one that came after the end was asked to leave %v later", at.Sub(afterwards))
		}
	})
}

func TestAFarewellIsWaitedForAsLongAsAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := handlers.NewFarewell()
		_, gone := f.Enter()
		f.Begin(0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := f.Wait(ctx); err == nil {
			t.Error("nobody was waited for")
		}
		gone()
		if err := f.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Acceptance 51.
func TestWaitsEndWithTheTaskAsItIs(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	release := rig.agents.hold()
	defer release()
	id := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID
	type answer struct {
		res  *http.Response
		want int
	}
	answers := make(chan answer, 2)
	go func() {
		answers <- answer{rig.do(t, "GET", "/api/v1/tasks/"+id+"?wait=120s", "", auth.Viewer, nil), http.StatusOK}
	}()
	go func() {
		answers <- answer{rig.do(t, "POST", "/api/v1/tasks?wait=120s", `{"agent":"beta","kind":"core.echo"}`, auth.Operator, nil), http.StatusAccepted}
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for rig.leave.Open() < 2 {
		<-tick.C
	}
	rig.leave.Begin(100 * time.Millisecond)
	for range 2 {
		var a answer
		select {
		case a = <-answers:
		case <-time.After(time.Minute):
			t.Fatal("a wait goes on")
		}
		if a.res.StatusCode != a.want {
			t.Errorf("status %d, want %d", a.res.StatusCode, a.want)
		}
		if s, err := strconv.Atoi(a.res.Header.Get("Retry-After")); err != nil || s < 1 || s > 10 {
			t.Errorf("Retry-After %q", a.res.Header.Get("Retry-After"))
		}
	}
}
