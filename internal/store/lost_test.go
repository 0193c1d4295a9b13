package store

import (
	"errors"
	"fmt"
	"regexp"
	"testing"
	"time"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/testkit"
	"headgate/tasks"
)

var commitText = regexp.MustCompile(`^COMMIT`)

// behindProxy gives a store that reaches its database through a proxy, and
// another one that reaches it directly.
func behindProxy(t *testing.T, change ...func(*Config)) (*DB, *DB, *testkit.Proxy) {
	t.Helper()
	dsn := testkit.NewDatabase(t)
	p := testkit.NewProxy(t, dsn)
	return openDSN(t, p.DSN(), change...), openDSN(t, dsn), p
}

func hows() map[string]testkit.How {
	return map[string]testkit.How{"FIN": testkit.FIN, "RST": testkit.RST}
}

func TestLostAnswerToACommitIsSettledByAsking(t *testing.T) {
	t.Parallel()
	for name, how := range hows() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, direct, p := behindProxy(t)
			const rounds = 5
			f := p.DropReplyAfter(commitText, how, rounds)
			for i := range rounds {
				u, err := d.EnsureUser(t.Context(), fmt.Sprintf("user-%d", i), auth.Viewer)
				if err != nil || u.Name == "" {
					t.Errorf("write %d: %v", i, err)
				}
			}
			if n := len(f.Hits()); n != rounds {
				t.Fatalf("the proxy broke %d commits, want %d", n, rounds)
			}
			if n := countOn(t, direct, `SELECT count(*) FROM app_user`); n != rounds {
				t.Errorf("%d rows, want %d", n, rounds)
			}
		})
	}
}

func TestCommitThatNeverArrivedIsAnErrorAndNoRow(t *testing.T) {
	t.Parallel()
	for name, how := range hows() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, direct, p := behindProxy(t)
			p.Arm(&testkit.Fault{Match: commitText, Before: true, How: how})
			_, err := d.EnsureUser(t.Context(), "one", auth.Viewer)
			if fault.KindOf(err) != fault.Unavailable || fault.CodeOf(err) != "commit_lost" {
				t.Errorf("write: %v, want commit_lost", err)
			}
			if n := countOn(t, direct, `SELECT count(*) FROM app_user`); n != 0 {
				t.Errorf("%d rows of a commit that never arrived", n)
			}
			if _, err := d.EnsureUser(t.Context(), "one", auth.Viewer); err != nil {
				t.Errorf("the next write: %v", err)
			}
		})
	}
}

func TestCommitStaysUnknownWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	d, direct, p := behindProxy(t, func(c *Config) { c.CommitWait = 300 * time.Millisecond })
	f := p.DropReplyAfter(commitText, testkit.RST, 1)
	go func() {
		<-f.Hit(1)
		p.Block()
	}()
	<-aside(func() {
		_, err := d.EnsureUser(t.Context(), "one", auth.Viewer)
		// The question may win the race against the block; then it is settled.
		if err != nil && fault.CodeOf(err) != "commit_unknown" {
			t.Errorf("write: %v, want commit_unknown", err)
		}
	})
	if n := countOn(t, direct, `SELECT count(*) FROM app_user`); n != 1 {
		t.Errorf("%d rows", n)
	}
}

func aside(f func()) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	return done
}

// lostTurns are turns with one kind of thing each, in an order in which each finds
// what it needs.
func lostTurns(r *rig) []func() *tasks.Turn {
	a := r.agents[0]
	first, second := r.insert(a, true), r.insert(a, false)
	later, ended := r.insert(a, false), r.insert(a, false)
	later.NotBefore = later.CreatedAt.Add(time.Hour)
	ended.NotBefore = later.NotBefore
	third := r.insert(a, true)
	third.Key = &tasks.Idempotency{Principal: "token:a", Route: "POST /tasks", Key: "k", Hash: [32]byte{1}}
	end := r.finish(ended, 0)
	end.Later = true
	ref := tasks.Ref{ID: second.ID, Attempt: 1}
	return []func() *tasks.Turn{
		func() *tasks.Turn { return &tasks.Turn{Inserts: []tasks.Insert{first, second, later, ended}} },
		func() *tasks.Turn { return &tasks.Turn{Finishes: []tasks.Finish{r.finish(first, 1)}} },
		func() *tasks.Turn {
			return &tasks.Turn{Claims: []tasks.Claim{{Agent: a.Num, Priority: 5, ID: second.ID, Epoch: r.epoch(a), Attempt: 1}}}
		},
		func() *tasks.Turn {
			return &tasks.Turn{Cancels: []tasks.CancelMark{{Agent: a.Num, Priority: 5, Ref: ref, Actor: "user:x"}}}
		},
		func() *tasks.Turn {
			return &tasks.Turn{Output: []tasks.OutputRow{{Agent: a.Num, OutputChunk: tasks.OutputChunk{Ref: ref, Stream: "stdout", Data: []byte("x")}}}}
		},
		func() *tasks.Turn {
			return &tasks.Turn{Requeues: []tasks.Requeue{{Agent: a.Num, Priority: 5, Ref: ref, Epoch: r.epoch(a)}}}
		},
		func() *tasks.Turn {
			return &tasks.Turn{Due: []tasks.DueTask{{Agent: a.Num, Priority: 5, ID: later.ID, RunAt: later.NotBefore}}}
		},
		func() *tasks.Turn { return &tasks.Turn{Finishes: []tasks.Finish{end}} },
		func() *tasks.Turn { return &tasks.Turn{Inserts: []tasks.Insert{third}} },
		func() *tasks.Turn {
			return &tasks.Turn{Requeues: []tasks.Requeue{{
				Agent: a.Num, Priority: 5, Ref: tasks.Ref{ID: third.ID, Attempt: 1},
				Epoch: r.epoch(a), NotBefore: time.Now().Add(time.Hour),
			}}}
		},
	}
}

// TestLostAnswerToATurnIsSettledByReadingBack breaks the connection before and
// after each kind of turn's commit: before, nothing is there and the turn can
// be run again; after, everything is there once.
func TestLostAnswerToATurnIsSettledByReadingBack(t *testing.T) {
	t.Parallel()
	for name, how := range hows() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, direct, p := behindProxy(t)
			r := rigOn(t, d, 1)
			for i, make := range lostTurns(r) {
				for _, before := range []bool{true, false} {
					p.Arm(&testkit.Fault{Match: commitText, Before: before, How: how})
					turn := make()
					_, err := r.tryTurn(turn)
					u, ok := errors.AsType[*tasks.UnknownError](err)
					if !ok {
						t.Fatalf("turn %d: %v, want an UnknownError", i, err)
					}
					// Settle's own commit passes, because the fault is used up.
					took, err := r.Settle(t.Context(), turn, u.Result)
					if err != nil || took == before {
						t.Fatalf("turn %d: settled as %v (%v), but the commit was broken before it arrived: %v", i, took, err, before)
					}
				}
			}
			if n := countOn(t, direct, `SELECT count(*) * 100 + (SELECT count(*) FROM agent_result) * 10 + (SELECT count(*) FROM agent_queue) FROM agent_task`); n != 522 {
				t.Errorf("rows are %d, want 522", n)
			}
			checkInvariant(t, direct)
		})
	}
}

func TestTurnBrokenBeforeItsCommitWroteNothing(t *testing.T) {
	t.Parallel()
	d, direct, p := behindProxy(t)
	r := rigOn(t, d, 1)
	p.DropReplyAfter(regexp.MustCompile(`INSERT INTO agent_task`), testkit.RST, 1)
	turn := &tasks.Turn{Inserts: []tasks.Insert{r.insert(r.agents[0], false)}}
	_, err := r.tryTurn(turn)
	if _, unknown := errors.AsType[*tasks.UnknownError](err); err == nil || unknown {
		t.Fatalf("turn: %v, want a plain error", err)
	}
	if n := countOn(t, direct, `SELECT count(*) FROM agent_task`); n != 0 {
		t.Errorf("%d rows", n)
	}
	if res, err := r.tryTurn(turn); err != nil || len(res.Inserted) != 1 {
		t.Errorf("the same turn again: %v, %v", res, err)
	}
}

func TestSettleWaitsForTheOldTransaction(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	turn := &tasks.Turn{Owner: r.me.ID, Leases: r.leases, Inserts: []tasks.Insert{r.insert(r.agents[0], false)}}
	args, err := makeTurnArgs(turn)
	if err != nil {
		t.Fatal(err)
	}
	tx, err := r.loops.BeginTxx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var a turnAnswer
	if err := tx.QueryRow(args.shape.sql(), args.args...).Scan(a.dest(args.shape)...); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		took bool
		err  error
	}
	settled := make(chan answer, 1)
	go func() {
		took, err := r.Settle(t.Context(), turn, a.result())
		settled <- answer{took, err}
	}()
	waitFor(t, r.DB, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
		AND wait_event_type = 'Lock' AND query LIKE '%shard_lease%'`, 1)
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if got := <-settled; got.err != nil || got.took {
		t.Errorf("settled a rolled back turn as %v, %v", got.took, got.err)
	}
}

func TestSilentServerEndsACallAtTheDeadline(t *testing.T) {
	t.Parallel()
	const limit = 400 * time.Millisecond
	d, _, p := behindProxy(t, func(c *Config) { c.StatementTimeout, c.SocketSlack = limit/2, limit/2 })
	r := rigOn(t, d, 1)
	turn := &tasks.Turn{Inserts: []tasks.Insert{r.insert(r.agents[0], false)}}
	p.Stall()
	start := time.Now()
	if _, err := r.tryTurn(turn); err == nil {
		t.Error("a turn on a silent server succeeded")
	}
	// database/sql may try a broken idle connection again on a new one.
	if took := time.Since(start); took < limit || took > 20*limit {
		t.Errorf("the turn ended after %v, want about %v", took, limit)
	}
	p.Heal()
	waitForWrite(t, d)
}

// waitForWrite writes until it works: the pool heals by itself.
func waitForWrite(t *testing.T, d *DB) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		_, err := d.EnsureUser(t.Context(), "after", auth.Viewer)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the store did not recover: %v", err)
		}
	}
}
