package tasks

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/internal/fault"
)

// metrics are the numbers of the queue, named headgate_tasks_*.
type metrics struct {
	completed     map[Outcome]prometheus.Counter
	turnSize      prometheus.Histogram
	turnSeconds   prometheus.Histogram
	submitStart   prometheus.Histogram
	submitResult  prometheus.Histogram
	mismatches    prometheus.Counter
	fenced        prometheus.Counter
	unknown       prometheus.Counter
	poison        prometheus.Counter
	late          prometheus.Counter
	stale         prometheus.Counter
	excess        prometheus.Counter
	refused       prometheus.Counter
	requeued      prometheus.Counter
	refills       prometheus.Counter
	submitRefused prometheus.Counter
	passedOn      prometheus.Counter
	passedLost    prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, m *Manager) *metrics {
	var all []prometheus.Collector
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "headgate_tasks_" + name, Help: help})
		all = append(all, c)
		return c
	}
	hist := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "headgate_tasks_" + name, Help: help, Buckets: buckets})
		all = append(all, h)
		return h
	}
	gauge := func(name, help string, f func() float64) {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "headgate_tasks_" + name, Help: help}, f))
	}
	seconds := prometheus.ExponentialBuckets(0.0005, 2, 20) // 0.5 ms to 4 min
	x := &metrics{
		turnSize:      hist("turn_items", "Items in one turn.", prometheus.ExponentialBuckets(1, 2, 13)),
		turnSeconds:   hist("turn_seconds", "Time to commit one turn.", prometheus.ExponentialBuckets(0.0002, 2, 16)),
		submitStart:   hist("submit_to_start_seconds", "From submission to the agent's first word.", seconds),
		submitResult:  hist("submit_to_result_seconds", "From submission to the result on disk.", seconds),
		mismatches:    counter("mismatches_total", "Times that disk and memory had parted; must be 0."),
		fenced:        counter("fenced_total", "Turns refused because a lease was lost."),
		unknown:       counter("commits_unknown_total", "Commits whose outcome had to be read back."),
		poison:        counter("refused_data_total", "Items whose data the database refused."),
		late:          counter("late_total", "Answers that came after completion."),
		excess:        counter("excess_output_bytes_total", "Bytes of output beyond what is kept of one task; an agent that respects its own limit sends none."),
		stale:         counter("stale_words_total", "Words of agents about tasks that are not in flight there."),
		refused:       counter("refused_by_agent_total", "Tasks that an agent would not start."),
		requeued:      counter("requeued_total", "Started tasks that went back to new."),
		refills:       counter("refills_total", "Reads of agents' orders from the table."),
		submitRefused: counter("submissions_refused_total", "Submissions refused for lack of room."),
		passedOn:      counter("passed_on_total", "Submissions that another controller, which owns their agents, has answered."),
		passedLost:    counter("passed_on_unanswered_total", "Submissions that were passed on to another controller and not answered."),
		completed:     map[Outcome]prometheus.Counter{},
	}
	done := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headgate_tasks_completed_total", Help: "Tasks completed, by outcome.",
	}, []string{"outcome"})
	all = append(all, done)
	for _, o := range []Outcome{Succeeded, Failed, TimedOut, Cancelled, Expired, Rejected, Unknown} {
		x.completed[o] = done.WithLabelValues(string(o))
	}
	gauge("depth", "Tasks in state new.", func() float64 { c := m.stats.counts(); return float64(c.depth + c.later) })
	gauge("later", "Tasks in state new that wait for a time.", func() float64 { return float64(m.stats.counts().later) })
	gauge("in_flight", "Tasks in state waiting-for-agent-response.", func() float64 { return float64(m.stats.counts().flights) })
	gauge("sessions", "Agents with a session, as the queue sees it.", func() float64 { return float64(m.stats.counts().sessions) })
	gauge("oldest_idle_new_seconds", "Longest time that a task waits although its agent is idle and reachable, seen by the last sweep; must be near 0.",
		func() float64 { return m.stats.counts().idle.Seconds() })
	gauge("oldest_new_seconds", "Age of the oldest task whose turn is next.", func() float64 {
		if c := m.stats.counts(); !c.oldest.IsZero() {
			return time.Since(c.oldest).Seconds()
		}
		return 0
	})
	gauge("oldest_in_flight_seconds", "For how long the task is in state waiting-for-agent-response that has been there longest, seen by the last sweep.", func() float64 {
		if c := m.stats.counts(); !c.flight.IsZero() {
			return time.Since(c.flight).Seconds()
		}
		return 0
	})
	gauge("inbox_items", "Submissions on their way to disk.", func() float64 { return float64(m.inboxItems.Load()) })
	if reg != nil {
		reg.MustRegister(all...)
	}
	return x
}

func (x *metrics) turn(items int, d time.Duration) {
	x.turnSize.Observe(float64(items))
	x.turnSeconds.Observe(d.Seconds())
}

func (x *metrics) started(d time.Duration) { x.submitStart.Observe(d.Seconds()) }

// finished counts a completion; total is the time since the submission, below
// zero when it is not known.
func (x *metrics) finished(o Outcome, total time.Duration) {
	x.completed[o].Inc()
	if total >= 0 {
		x.submitResult.Observe(total.Seconds())
	}
}

// forwarded counts submissions that were passed on.
func (x *metrics) forwarded(n int, err error) {
	if err == nil || fault.CodeOf(err) != "internal" {
		x.passedOn.Add(float64(n))
	} else {
		x.passedLost.Add(float64(n))
	}
}
