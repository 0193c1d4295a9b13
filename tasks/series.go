package tasks

import (
	"context"
	"encoding/json"
	"slices"
	"time"
)

// seriesBack is how far a look at what the others have saved goes back: they
// cut their minutes at the same time, and may save them late.
const seriesBack = 5 * time.Minute

// together joins the points of several controllers, oldest first: one for each
// minute. Counts are summed; of the quantiles the largest counts, a bound that
// holds for all of them.
func together(points []Point) []Point {
	var out []Point
	where := map[int64]int{}
	for _, p := range points {
		i, seen := where[p.At.UnixMilli()]
		if !seen {
			where[p.At.UnixMilli()] = len(out)
			out = append(out, Point{Name: SeriesMinute, At: p.At, Value: p.Value})
			continue
		}
		var a, b MinutePoint
		if json.Unmarshal(out[i].Value, &a) != nil || json.Unmarshal(p.Value, &b) != nil {
			continue // of a version that writes something else
		}
		if v, err := json.Marshal(a.plus(b)); err == nil {
			out[i].Value = v
		}
	}
	slices.SortStableFunc(out, func(a, b Point) int { return a.At.Compare(b.At) })
	return out
}

func (p MinutePoint) plus(q MinutePoint) MinutePoint {
	sum := MinutePoint{
		Submitted: p.Submitted + q.Submitted, Completed: map[Outcome]int64{}, New: p.New + q.New, Waiting: p.Waiting + q.Waiting,
		WaitP50: max(p.WaitP50, q.WaitP50), WaitP95: max(p.WaitP95, q.WaitP95), WaitP99: max(p.WaitP99, q.WaitP99),
		RunP50: max(p.RunP50, q.RunP50), RunP95: max(p.RunP95, q.RunP95), RunP99: max(p.RunP99, q.RunP99),
	}
	for _, one := range []MinutePoint{p, q} {
		for o, n := range one.Completed {
			sum.Completed[o] += n
		}
	}
	return sum
}

// saved takes over what is stored of the time since a moment, by all
// controllers. What this one could not store yet stays as it is.
func (s *stats) saved(stored []Point, since time.Time) {
	known := map[int64]bool{}
	stored = together(stored)
	for _, p := range stored {
		known[p.At.UnixMilli()] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.points {
		if p.At.Before(since) || !known[p.At.UnixMilli()] {
			stored = append(stored, p)
		}
	}
	slices.SortStableFunc(stored, func(a, b Point) int { return a.At.Compare(b.At) })
	s.points = stored
}

// runSeries cuts a point at each full minute and saves it, and reads what the
// others have saved. What cannot be saved now is saved with the next one, for an
// hour.
func (m *Manager) runSeries(ctx context.Context) {
	var unsaved []Point
	restored := false
	for {
		now := time.Now()
		next := now.Truncate(time.Minute).Add(time.Minute)
		t := time.NewTimer(next.Sub(now))
		if !restored {
			restored = m.readSeries(ctx, now.Add(-seriesSpan))
		}
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		unsaved = append(unsaved, m.stats.cut(next))
		if m.savePoints(ctx, unsaved) {
			unsaved = nil
			m.readSeries(ctx, next.Add(-seriesBack))
		} else if len(unsaved) > minutesKept {
			unsaved = unsaved[1:]
		}
	}
}

// readSeries reads what is saved since a moment; false when it cannot be.
func (m *Manager) readSeries(ctx context.Context, since time.Time) bool {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Limits.StoreWait)
	defer cancel()
	stored, err := m.cfg.Store.Points(ctx, SeriesMinute, since)
	if err != nil {
		return false
	}
	m.stats.saved(stored, since)
	return true
}

func (m *Manager) savePoints(ctx context.Context, points []Point) bool {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Limits.StoreWait)
	defer cancel()
	if err := m.cfg.Store.SavePoints(ctx, points); err != nil {
		m.log.Debug("series could not be saved yet", "err", err)
		return false
	}
	return true
}
