package tasks_test

import (
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"
	"uuid"

	"headgate/tasks"
)

// Two controllers keep a minute each; whoever is asked shows both together.
func TestMinutesOfAllControllersAreSummed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.submit(0)
		at := time.Now().Truncate(time.Minute).Add(time.Minute)
		other, err := json.Marshal(tasks.MinutePoint{Submitted: 41, Completed: map[tasks.Outcome]int64{tasks.Failed: 2}, New: 3, WaitP99: 1e6})
		if err != nil {
			t.Fatal(err)
		}
		// The other one saves its minute after we have saved ours.
		r.pass(time.Until(at) + 10*time.Second)
		p := tasks.Point{Name: tasks.SeriesMinute + "/" + uuid.NewV4().String(), At: at, Value: other}
		if err := r.store.SavePoints(t.Context(), []tasks.Point{p}); err != nil {
			t.Fatal(err)
		}
		r.pass(time.Minute)
		points := r.manager.Series(at)
		if len(points) != 2 {
			t.Fatalf("%d points", len(points))
		}
		var sum tasks.MinutePoint
		if err := json.Unmarshal(points[0].Value, &sum); err != nil {
			t.Fatal(err)
		}
		if sum.Submitted != 42 || sum.Completed[tasks.Failed] != 2 || sum.Completed[tasks.Succeeded] != 1 || sum.New != 3 || sum.WaitP99 != 1e6 {
			t.Errorf("together: %s", points[0].Value)
		}
		synctest.Wait()
		r.check()
	})
}
