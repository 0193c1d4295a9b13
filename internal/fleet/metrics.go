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
	}
	if reg != nil {
		reg.MustRegister(m.agents, m.dials, m.sessions, m.ended, m.sent, m.received, m.rtt, m.pairings)
	}
	return m
}

func (m *metrics) sawRTT(d time.Duration) { m.rtt.Observe(d.Seconds()) }
