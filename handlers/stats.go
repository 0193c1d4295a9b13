package handlers

import (
	"encoding/json"
	"net/http"
	"time"

	"headgate/internal/fleet"
	"headgate/tasks"
)

// statsSpan is how far the series goes back when a call names no time.
const statsSpan = time.Hour

// StatsBody is what the dashboard shows in numbers. The counters of tasks are
// those of the shards that this controller owns.
type StatsBody struct {
	Agents  map[fleet.Health]int `json:"agents"` // by how their connection stands
	Tasks   TaskStats            `json:"tasks"`
	Minutes []MinuteBody         `json:"minutes"` // oldest first
} //	@name	Stats

// TaskStats counts tasks.
type TaskStats struct {
	Since              time.Time               `json:"since"`     // of the counters
	New                int                     `json:"new"`       // now, those for later included
	Later              int                     `json:"later"`     // of them not yet due
	Waiting            int                     `json:"waiting"`   // now in waiting-for-agent-response
	Submitted          int64                   `json:"submitted"` // since then
	Completed          map[tasks.Outcome]int64 `json:"completed"` // since then, by outcome
	OldestAt           *time.Time              `json:"oldest_at"` // created_at of the oldest task whose turn is next
	CompletedPerMinute float64                 `json:"completed_per_minute"`
	SubmittedPerMinute float64                 `json:"submitted_per_minute"`
	Wait               QuantilesBody           `json:"wait"` // submitted to started, over the last hour
	Run                QuantilesBody           `json:"run"`  // started to completed, over the last hour
} //	@name	TaskStats

// QuantilesBody are bounds in milliseconds below which a share of the values lies.
type QuantilesBody struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50_ms"`
	P95   float64 `json:"p95_ms"`
	P99   float64 `json:"p99_ms"`
} //	@name	Quantiles

// MinuteBody is what happened in one minute.
type MinuteBody struct {
	At        time.Time               `json:"at"` // end of the minute
	Submitted int64                   `json:"submitted"`
	Completed map[tasks.Outcome]int64 `json:"completed"` // by outcome
	New       int                     `json:"new"`
	Waiting   int                     `json:"waiting"`
	WaitP50   float64                 `json:"wait_p50_ms"`
	WaitP95   float64                 `json:"wait_p95_ms"`
	WaitP99   float64                 `json:"wait_p99_ms"`
	RunP50    float64                 `json:"run_p50_ms"`
	RunP95    float64                 `json:"run_p95_ms"`
	RunP99    float64                 `json:"run_p99_ms"`
} //	@name	Minute

// stats gives counters and the series of minutes.
//
//	@Summary	Counters and series
//	@ID			stats
//	@Tags		status
//	@Produce	json
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Param		since	query		string	false	"begin of the series: a time, or relative to now; kept for 24 h"	example(-1h)
//	@Success	200		{object}	StatsBody
//	@Failure	400		{object}	Problem
//	@Failure	401		{object}	Problem
//	@Failure	403		{object}	Problem
//	@Failure	421		{object}	Problem
//	@Failure	429		{object}	Problem
//	@Failure	503		{object}	Problem
//	@Router		/api/v1/stats [get]
func (s *server) stats(w http.ResponseWriter, r *http.Request) error {
	if s.cfg.Manager == nil {
		return errNotReady()
	}
	now := time.Now()
	since, err := instant(r.URL.Query(), "since", now)
	if err != nil {
		return err
	}
	if since.IsZero() {
		since = now.Add(-statsSpan)
	}
	body := StatsBody{Agents: s.cfg.Fleet.Counts(), Tasks: taskStats(s.cfg.Manager.Stats()), Minutes: []MinuteBody{}}
	for _, p := range s.cfg.Manager.Series(since) {
		m, err := minuteBody(p)
		if err != nil {
			return err
		}
		body.Minutes = append(body.Minutes, m)
	}
	return s.writeJSON(w, http.StatusOK, body)
}

func taskStats(st tasks.Stats) TaskStats {
	return TaskStats{
		Since: st.Since.UTC().Truncate(time.Microsecond), New: st.New, Later: st.Later, Waiting: st.Waiting, Submitted: st.Submitted,
		Completed: st.Completed, OldestAt: timeOrNil(st.Oldest), CompletedPerMinute: st.PerMinute, SubmittedPerMinute: st.SubmitsMinute,
		Wait: quantilesBody(st.Wait), Run: quantilesBody(st.Run),
	}
}

func quantilesBody(q tasks.Quantiles) QuantilesBody {
	return QuantilesBody{Count: q.Count, P50: milliseconds(q.P50), P95: milliseconds(q.P95), P99: milliseconds(q.P99)}
}

func minuteBody(p tasks.Point) (MinuteBody, error) {
	var v tasks.MinutePoint
	if err := json.Unmarshal(p.Value, &v); err != nil {
		return MinuteBody{}, err
	}
	return MinuteBody{
		At: p.At.UTC().Truncate(time.Microsecond), Submitted: v.Submitted, Completed: v.Completed, New: v.New, Waiting: v.Waiting,
		WaitP50: v.WaitP50, WaitP95: v.WaitP95, WaitP99: v.WaitP99, RunP50: v.RunP50, RunP95: v.RunP95, RunP99: v.RunP99,
	}, nil
}
