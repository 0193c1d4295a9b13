package fleet

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	agents   *prometheus.GaugeVec
	dials    *prometheus.CounterVec
	sessions prometheus.Gauge
	ended    *prometheus.CounterVec
	sent     prometheus.Counter
	received prometheus.Counter
	rtt      prometheus.Histogram
	pairings *prometheus.CounterVec
	waits    prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		agents: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headgate_fleet_agents", Help: "Enrolled agents by health as this controller sees it.",
		}, []string{"health"}),
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_fleet_dials_total", Help: "Dials to agents by result; the result is connected or the cause of failure.",
		}, []string{"result"}),
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headgate_fleet_sessions", Help: "Sessions with agents that are up.",
		}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_fleet_sessions_ended_total", Help: "Sessions that ended, by cause.",
		}, []string{"cause"}),
		sent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_fleet_messages_sent_total", Help: "Messages sent to agents on their sessions.",
		}),
		received: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_fleet_messages_received_total", Help: "Messages received from agents on their sessions.",
		}),
		rtt: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headgate_fleet_rtt_seconds", Help: "Round trips to agents outside their slots.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9), // 0.1 ms to 6.5 s
		}),
		pairings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_fleet_pairings_total", Help: "Runs of the pairing protocol by result.",
		}, []string{"result"}),
		waits: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headgate_fleet_dial_queue_wait_seconds", Help: "How long dials waited for their turn.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9), // 1 ms to 66 s
		}),
	}
	if reg != nil {
		reg.MustRegister(m.agents, m.dials, m.sessions, m.ended, m.sent, m.received, m.rtt, m.pairings, m.waits)
	}
	return m
}

// registerGate exports what the gate knows of itself; it is read when asked for.
func registerGate(reg prometheus.Registerer, g *gate) {
	if reg == nil {
		return
	}
	gauge := func(name, help, lane string, value func(DialLoad) float64) {
		opts := prometheus.GaugeOpts{Name: name, Help: help}
		if lane != "" {
			opts.ConstLabels = prometheus.Labels{"lane": lane}
		}
		reg.MustRegister(prometheus.NewGaugeFunc(opts, func() float64 { return value(g.load()) }))
	}
	const length, waiting = "headgate_fleet_dial_queue_length", "Agents that wait for their turn to be dialled."
	gauge(length, waiting, "urgent", func(l DialLoad) float64 { return float64(l.Urgent) })
	gauge(length, waiting, "normal", func(l DialLoad) float64 { return float64(l.Waiting - l.Urgent) })
	gauge(length, waiting, "silent", func(l DialLoad) float64 { return float64(l.Silent) })
	gauge("headgate_fleet_dials_in_flight", "Handshakes with agents under way.", "", func(l DialLoad) float64 { return float64(l.InFlight) })
	gauge("headgate_fleet_dials_slow", "Dials to agents that have no answer yet.", "", func(l DialLoad) float64 { return float64(l.Slow) })
	gauge("headgate_fleet_dial_rate", "Dials to agents that may begin in a second.", "", func(l DialLoad) float64 { return l.Rate })
}

func (m *metrics) sawDialWait(d time.Duration) { m.waits.Observe(d.Seconds()) }

func (m *metrics) sawRTT(d time.Duration) { m.rtt.Observe(d.Seconds()) }
