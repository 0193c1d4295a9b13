package store

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/auth"
	"headgate/internal/testkit"
)

// TestALostDeadlockIsRunAgain lets two writes lock the same rows in opposite
// orders: the server ends one of them, which is run again and counted.
//
// Cases Q13.
func TestALostDeadlockIsRunAgain(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	d := openDSN(t, testkit.NewDatabase(t), func(c *Config) { c.Metrics = reg })
	names := [2]string{"anna", "bert"}
	for _, n := range names {
		if _, err := d.EnsureUser(t.Context(), n, auth.Viewer); err != nil {
			t.Fatal(err)
		}
	}
	const touch = `UPDATE app_user SET role = 'operator' WHERE name = $1`
	var holds [2]chan struct{}
	for i := range holds {
		holds[i] = make(chan struct{})
	}
	ends, tries := make(chan error, 2), make(chan struct{}, 10)
	for i := range holds {
		go func() {
			first := true
			ends <- d.write(t.Context(), "touch two users", func(tx *Tx) error {
				tries <- struct{}{}
				if _, err := tx.exec(touch, names[i]); err != nil {
					return err
				}
				if first {
					first = false
					close(holds[i])
					<-holds[1-i]
				}
				_, err := tx.exec(touch, names[1-i])
				return err
			})
		}()
	}
	for range holds {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
	if len(tries) < 3 {
		t.Errorf("the two writes were tried %d times, want a deadlock between them", len(tries))
	}
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	counted := 0.0
	for _, f := range all {
		if f.GetName() == "headgate_store_write_retries_total" {
			counted = f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	if counted < 1 {
		t.Error("it was not counted")
	}
}

// TestTheDriverIsNewEnough: before 1.12.3 a message that was cut short left a
// broken connection in the pool.
//
// Cases Q36.
func TestTheDriverIsNewEnough(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`github\.com/lib/pq v1\.(\d+)\.(\d+)`).FindStringSubmatch(string(b))
	if m == nil {
		t.Fatal("go.mod does not name lib/pq v1")
	}
	minor, err := strconv.Atoi(m[1])
	if err != nil {
		t.Fatal(err)
	}
	patch, err := strconv.Atoi(m[2])
	if err != nil {
		t.Fatal(err)
	}
	if minor < 12 || minor == 12 && patch < 3 {
		t.Errorf("%s is older than 1.12.3", m[0])
	}
}

// TestNothingNotifiesForEachRow: the server takes one lock over all databases
// when a transaction commits that has notified, which halves the rate of 16
// writers. No turn does, and no trigger.
//
// Cases R25.
func TestNothingNotifiesForEachRow(t *testing.T) {
	t.Parallel()
	notifies := regexp.MustCompile(`(?i)notify`)
	for _, s := range turnShapes() {
		if notifies.MatchString(s.sql()) {
			t.Errorf("turn %06b notifies", s)
		}
	}
	d := open(t)
	if n := countOn(t, d, `SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND prosrc ~* 'notify'`); n != 0 {
		t.Errorf("%d functions of the schema notify", n)
	}
}
