package store

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headgate/internal/testkit"
	"headgate/tasks"
)

// forgetful lets a pooler take the settings of a session and forget them, as
// many are set up; by default it refuses them.
const forgetful = "ignore_startup_parameters = extra_float_digits,statement_timeout,lock_timeout,jit,options"

// Cases Q27.
func TestEverythingWorksThroughAPoolerInTransactionMode(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string][]string{
		"that refuses settings": {"ignore_startup_parameters = extra_float_digits"}, "that forgets them": {forgetful},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := testkit.NewDatabase(t)
			d := openDSN(t, testkit.NewPooler(t, dsn, settings...))
			if d.Pooled() == "" {
				t.Fatal("the pooler was not noticed")
			}
			// More of them than the pooler has sessions, so that all get mixed.
			r := rigOn(t, d, 8)
			var wg sync.WaitGroup
			for i := range 8 {
				wg.Go(func() {
					ctx := t.Context()
					for range 5 {
						first, err := d.TakeIDs(ctx)
						if err != nil {
							t.Error(err)
							return
						}
						in := tasks.Insert{
							ID: first, Agent: r.agents[i].Num, Epoch: r.epoch(r.agents[i]), Kind: "core.echo", Args: `{"text":"hello"}`,
							Delivery: "once", Priority: 5, Timeout: time.Minute, CreatedAt: time.Now(), ExpiresAt: time.Now().Add(time.Hour), Actor: "x", Started: true,
						}
						end := tasks.Finish{
							Agent: in.Agent, Priority: 5, Ref: tasks.Ref{ID: first, Attempt: 1}, Epoch: in.Epoch,
							Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"ok":true}`)},
						}
						for _, turn := range []*tasks.Turn{{Inserts: []tasks.Insert{in}}, {Finishes: []tasks.Finish{end}}} {
							turn.Owner, turn.Leases = r.me.ID, r.leases
							if _, err := d.Turn(ctx, turn); err != nil {
								t.Error(err)
								return
							}
						}
						if x, err := d.Task(ctx, first); err != nil || x.State != tasks.StateCompleted {
							t.Errorf("task %d: %+v, %v", first, x, err)
						}
					}
				})
			}
			wg.Wait()
			checkPooledSettings(t, d)
			checkInvariant(t, d)
			if _, err := d.Renew(t.Context(), r.me, r.leases); err != nil {
				t.Error(err)
			}
		})
	}
}

// checkPooledSettings looks that the pools have their settings in every
// transaction, and leave nothing behind in the sessions of others.
func checkPooledSettings(t *testing.T, d *DB) {
	t.Helper()
	for range 8 {
		for name, want := range loopSettings() {
			if name == "application_name" {
				continue
			}
			var got string
			if err := d.loops.Get(&got, sqlSetting, name); err != nil || got != want {
				t.Fatalf("loops: %s is %q (%v), want %q", name, got, err, want)
			}
		}
		var limit string
		if err := d.pages.Get(&limit, sqlSetting, "statement_timeout"); err != nil || limit != "3s" {
			t.Fatalf("pages: statement_timeout is %q, %v", limit, err)
		}
		if err := d.upkeep.Get(&limit, sqlSetting, "statement_timeout"); err != nil || limit != "0" {
			t.Fatalf("a session was left with statement_timeout %q, %v", limit, err)
		}
	}
	if _, err := d.pages.Exec(`INSERT INTO setting (name, value) VALUES ('x', '1')`); sqlState(err) != stateReadOnly {
		t.Errorf("a page wrote: %v", err)
	}
	if _, err := d.general.Exec(`INSERT INTO setting (name, value) VALUES ('y', '1')`); err != nil {
		t.Errorf("a lone write: %v", err)
	}
	if n := countOn(t, d, `SELECT count(*) FROM setting`); n != 1 {
		t.Errorf("%d settings were stored", n)
	}
}

func TestRetentionWorksThroughAPooler(t *testing.T) {
	t.Parallel()
	d := openDSN(t, testkit.NewPooler(t, testkit.NewDatabase(t), forgetful))
	r := rigOn(t, d, 1)
	r.history(2, 100*day)
	r.nextPartition()
	r.history(1, 2*time.Hour)
	if rep := r.retain(Retention{Age: 90 * day}); len(rep.Dropped) != 1 {
		t.Errorf("report %+v", rep)
	}
	if _, err := d.Health(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestADirectWayServesWhatNeedsASession: with both, only pages and single
// writes go through the pooler.
func TestADirectWayServesWhatNeedsASession(t *testing.T) {
	t.Parallel()
	dsn := testkit.NewDatabase(t)
	d := openDSN(t, testkit.NewPooler(t, dsn, forgetful), func(c *Config) { c.DirectDSN = dsn })
	if why := d.Pooled(); why != "" || !d.pooled {
		t.Errorf("pooled: %q, %t", why, d.pooled)
	}
	r := rigOn(t, d, 1)
	in := r.insert(r.agents[0], true)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}})
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(in, 1)}})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	heard := make(chan string, 1)
	ready := make(chan struct{}, 1)
	done := make(chan error, 1)
	go func() {
		done <- d.NewNotifier("wake").Run(ctx, func(p string) { heard <- p; cancel() }, func() { ready <- struct{}{} })
	}()
	<-ready
	if err := d.Notify(ctx, "wake", "up"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	select {
	case p := <-heard:
		if p != "up" {
			t.Errorf("heard %q", p)
		}
	default:
		t.Error("nothing was heard")
	}
}

// Cases Q27.
func TestBehindAPoolerEverythingIsLookedAtAgain(t *testing.T) {
	t.Parallel()
	n := &Notifier{poll: true, ping: time.Millisecond}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var times atomic.Int32
	err := n.Run(ctx, func(string) { t.Error("heard something") }, func() {
		if times.Add(1) == 3 {
			cancel()
		}
	})
	if err != nil || times.Load() < 3 {
		t.Errorf("looked %d times, %v", times.Load(), err)
	}
}
