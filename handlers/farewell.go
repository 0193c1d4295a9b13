package handlers

import (
	"context"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"headgate/tasks"
)

// A client that is sent away comes back after a while of its own, in this
// range, so that all of them do not come at once.
const (
	minReturn = 1 * time.Second
	maxReturn = 10 * time.Second
)

// randomReturn gives the pause of one client.
func randomReturn() time.Duration { return minReturn + rand.N(maxReturn-minReturn) }

// Farewell ends the answers that stay open, event streams and waits for a
// task, when the controller stops: each at a random moment of its own. Make it
// by NewFarewell; several handlers may share one.
type Farewell struct {
	mu     sync.Mutex // guards all below
	begun  time.Time  // zero = stay
	spread time.Duration
	guests map[*guest]struct{}
	empty  chan struct{} // closed when the last guest goes; nil = nobody waits for that
}

// guest is one answer that stays open.
type guest struct {
	leave chan struct{} // closed when it shall end
	timer *time.Timer   // nil before Begin
}

// NewFarewell makes one that asks nobody to leave before Begin.
func NewFarewell() *Farewell { return &Farewell{guests: map[*guest]struct{}{}} }

// Begin asks all to leave within spread, each at its own moment, and those
// that come later as well. Only the first call counts.
func (f *Farewell) Begin(spread time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.begun.IsZero() {
		return
	}
	f.begun, f.spread = time.Now(), spread
	for g := range f.guests {
		f.ask(g)
	}
}

// ask sets the moment of one guest; f.mu is held.
func (f *Farewell) ask(g *guest) {
	at := f.begun
	if f.spread > 0 {
		at = at.Add(rand.N(f.spread))
	}
	g.timer = time.AfterFunc(time.Until(at), func() { close(g.leave) })
}

// Wait returns when nobody is left, or with ctx's error. Who comes after that
// is not waited for.
func (f *Farewell) Wait(ctx context.Context) error {
	f.mu.Lock()
	if len(f.guests) == 0 {
		f.mu.Unlock()
		return nil
	}
	if f.empty == nil {
		f.empty = make(chan struct{})
	}
	empty := f.empty
	f.mu.Unlock()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Open says how many answers stay open now.
func (f *Farewell) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.guests)
}

// enter notes an answer that stays open. leave closes when it shall end; gone
// must be called at its end.
func (f *Farewell) enter() (leave <-chan struct{}, gone func()) {
	g := &guest{leave: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.guests[g] = struct{}{}
	if !f.begun.IsZero() {
		f.ask(g)
	}
	return g.leave, func() { f.forget(g) }
}

func (f *Farewell) forget(g *guest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.guests, g)
	if g.timer != nil {
		g.timer.Stop()
	}
	if len(f.guests) == 0 && f.empty != nil {
		close(f.empty)
		f.empty = nil
	}
}

// wait makes a call that may wait for d: the limits of ordinary requests are
// lifted, and a farewell ends it early with what is known then.
func (s *server) wait(w http.ResponseWriter, r *http.Request, d time.Duration, call func(context.Context) (*tasks.Task, error)) (*tasks.Task, error) {
	keepOpen(w, d)
	leave, gone := s.cfg.Farewell.enter()
	defer gone()
	t, err := call(tasks.WithLeave(r.Context(), leave))
	select {
	case <-leave:
		w.Header().Set("Retry-After", strconv.Itoa(int(randomReturn().Seconds())))
	default:
	}
	return t, err
}
