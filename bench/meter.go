package main

import (
	"context"
	"database/sql"
	"os"
	"syscall"
	"time"
)

// profileSignal starts and ends a CPU profile in a controller built for it.
const profileSignal = syscall.SIGUSR1

// meter tells which program the processors worked for, and what PostgreSQL
// had to write.
type meter struct {
	rig        *rig
	what       string
	db         *sql.DB
	began      time.Time
	postmaster int
	start      used
	profile    func() error // ends a profile
}

// used is what has been used up to a moment.
type used struct {
	controller, postgres, simulator, load time.Duration
	commits, wal                          float64
}

// meter begins to count, and to profile if that is wanted.
func (r *rig) meter(ctx context.Context, what string) (*meter, error) {
	pg, err := r.postmaster(ctx)
	if err != nil {
		return nil, err
	}
	m := &meter{rig: r, what: what, postmaster: pg}
	if m.db, err = openDB(r.run.DatabaseURL); err != nil {
		return nil, err
	}
	if m.profile, err = r.profile(what); err != nil {
		return nil, err
	}
	m.began, m.start = time.Now(), m.now(ctx)
	return m, nil
}

// now reads the counters; what cannot be read counts as nothing, since it is
// only a note.
func (m *meter) now(ctx context.Context) (u used) {
	u.controller, _ = cpuOf(m.rig.run.PID)
	u.postgres, _ = cpuOfTree(m.postmaster)
	if m.rig.sim != nil {
		u.simulator, _ = cpuOf(m.rig.sim.pid())
	}
	u.load, _ = cpuOf(os.Getpid())
	_ = m.db.QueryRowContext(ctx, `SELECT xact_commit, pg_current_wal_lsn() - '0/0' FROM pg_stat_database
		WHERE datname = current_database()`).Scan(&u.commits, &u.wal)
	return u
}

// note ends the count and prints it per item.
func (m *meter) note(ctx context.Context, items int64) {
	took, end, s := time.Since(m.began), m.now(ctx), m.start
	release(m.db)
	n := float64(max(items, 1))
	all := end.controller + end.postgres + end.simulator + end.load - s.controller - s.postgres - s.simulator - s.load
	micro := func(now, then time.Duration) float64 { return float64((now - then).Microseconds()) / n }
	m.rig.bench.note("%s: %d in %.1f s; processor time of each: controller %.1f us, PostgreSQL %.1f us, simulator %.1f us, load generator %.1f us; %.2f processors busy; %.1f to a commit, %.0f bytes of WAL each",
		m.what, items, took.Seconds(), micro(end.controller, s.controller), micro(end.postgres, s.postgres),
		micro(end.simulator, s.simulator), micro(end.load, s.load), all.Seconds()/took.Seconds(),
		n/max(end.commits-s.commits, 1), (end.wal-s.wal)/n)
	if err := m.profile(); err != nil {
		m.rig.bench.note("no profile: %v", err)
	}
}
