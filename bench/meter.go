package main

import (
	"context"
	"os"
	"syscall"
	"time"
)

// meter tells which program the processors worked for.
type meter struct {
	rig        *rig
	what       string
	began      time.Time
	postmaster int
	start      [4]time.Duration
	profile    func() error // ends a profile
}

// meter begins to count, and to profile if that is wanted.
func (r *rig) meter(ctx context.Context, what string) (*meter, error) {
	pg, err := r.postmaster(ctx)
	if err != nil {
		return nil, err
	}
	m := &meter{rig: r, what: what, postmaster: pg}
	if m.profile, err = r.profile(what); err != nil {
		return nil, err
	}
	m.began, m.start = time.Now(), m.now()
	return m, nil
}

// now gives the processor times of controller, PostgreSQL, simulator and load
// generator; what cannot be read counts as nothing, since it is only a note.
func (m *meter) now() (t [4]time.Duration) {
	t[0], _ = cpuOf(m.rig.run.PID)
	t[1], _ = cpuOfTree(m.postmaster)
	if m.rig.sim != nil {
		t[2], _ = cpuOf(m.rig.sim.pid())
	}
	t[3], _ = cpuOf(os.Getpid())
	return t
}

// note ends the count and prints it per item.
func (m *meter) note(items int64) {
	end, took := m.now(), time.Since(m.began)
	var per [4]float64
	var sum time.Duration
	for i := range end {
		used := end[i] - m.start[i]
		sum += used
		per[i] = float64(used.Microseconds()) / float64(max(items, 1))
	}
	m.rig.bench.note("%s: %d in %.1f s; processor time of each: controller %.1f us, PostgreSQL %.1f us, simulator %.1f us, load generator %.1f us (%.2f of the processors in all)",
		m.what, items, took.Seconds(), per[0], per[1], per[2], per[3], sum.Seconds()/took.Seconds())
	if err := m.profile(); err != nil {
		m.rig.bench.note("no profile: %v", err)
	}
}

// profileSignal starts and ends a CPU profile in a controller built for it.
const profileSignal = syscall.SIGUSR1
