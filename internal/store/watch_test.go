package store

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Cases Q22.
func TestHealthNamesWhoHoldsAnOldSnapshot(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	r.history(3, 2*day)
	tx, err := r.general.Beginx()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec(`SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(`SET LOCAL application_name = 'monthly report'`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(`SELECT count(*) FROM agent_task`); err != nil {
		t.Fatal(err)
	}
	h, err := r.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(h.Snapshot.Who, "(monthly report)") || h.Snapshot.Age <= 0 {
		t.Errorf("snapshot %+v", h.Snapshot)
	}
	if h.Partitions != 2 || h.PartitionsAhead != 1 || h.TaskBytes == 0 || h.QueueIndexBytes == 0 || len(h.Notes()) != 0 {
		t.Errorf("health %+v, notes %v", h, h.Notes())
	}
	h.Snapshot.Age, h.PartitionsAhead = 2*time.Minute, 0
	if n := h.Notes(); len(n) != 2 || !strings.Contains(n[0], "monthly report") || !strings.Contains(n[0], "2m0s") {
		t.Errorf("notes %v", n)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if h, err = r.Health(t.Context()); err != nil || strings.Contains(h.Snapshot.Who, "monthly report") {
		t.Errorf("after its end: %+v, %v", h.Snapshot, err)
	}
}

func TestRetentionSaysHowItWent(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	d := open(t)
	r := rigOn(t, openDSN(t, d.cfg.DSN, func(c *Config) { c.Metrics = reg }), 1)
	value := func(name string) float64 {
		t.Helper()
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range all {
			if f.GetName() == name {
				m := f.GetMetric()[0]
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		t.Fatalf("no %s", name)
		return 0
	}
	r.history(1, 100*day)
	r.nextPartition()
	r.history(1, 2*time.Hour)
	r.retain(Retention{Age: 90 * day})
	if value("headgate_store_partitions_dropped_total") != 1 || value("headgate_store_retention_failing") != 0 ||
		time.Since(time.Unix(int64(value("headgate_store_retention_last_run_timestamp_seconds")), 0)) > time.Minute {
		t.Error("a run that did its work is not told")
	}
	if _, err := r.general.Exec(`ALTER TABLE agent_queue RENAME TO also_gone`); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ApplyRetention(t.Context(), Retention{Age: 90 * day}); err == nil || value("headgate_store_retention_failing") != 1 {
		t.Errorf("a run that failed (%v) is not told", err)
	}
	r.LeaveRetention()
	if value("headgate_store_retention_failing") != 0 || value("headgate_store_retention_last_run_timestamp_seconds") != 0 {
		t.Error("a controller that leaves it to another still tells")
	}
}
