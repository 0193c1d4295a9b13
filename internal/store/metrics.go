package store

import (
	"database/sql"

	"github.com/jmoiron/sqlx"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what the database layer counts. The zero registerer keeps them
// unregistered, so that the code need not ask.
type metrics struct {
	turnSeconds prometheus.Histogram
	turnRows    *prometheus.CounterVec
	turnErrors  *prometheus.CounterVec
	unknown     prometheus.Counter
	retries     prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		turnSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "headgate_store_turn_seconds",
			Help:    "Time of one turn of a write loop, from begin to the answer to its commit.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14), // 0.5 ms to 4 s
		}),
		turnRows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_store_turn_rows_total",
			Help: "Rows written by turns, by what was done.",
		}, []string{"op"}),
		turnErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_store_turn_errors_total",
			Help: "Turns that failed, by class: fenced, unknown, poison, other.",
		}, []string{"class"}),
		unknown: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_store_commit_unknown_total",
			Help: "Commits whose answer was lost and that had to be settled by asking.",
		}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headgate_store_write_retries_total",
			Help: "Writes run again after a deadlock or a serialization failure.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.turnSeconds, m.turnRows, m.turnErrors, m.unknown, m.retries)
	}
	return m
}

// watchPools publishes how busy each connection pool is.
func (m *metrics) watchPools(reg prometheus.Registerer, d *DB) {
	if reg == nil {
		return
	}
	for name, pool := range map[string]*sqlx.DB{"loops": d.loops, "general": d.general, "pages": d.pages} {
		labels := prometheus.Labels{"pool": name}
		gauge := func(metric, help string, value func(sql.DBStats) float64) {
			reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Name: "headgate_store_" + metric, Help: help, ConstLabels: labels,
			}, func() float64 { return value(pool.Stats()) }))
		}
		gauge("pool_in_use_connections", "Connections in use.",
			func(s sql.DBStats) float64 { return float64(s.InUse) })
		gauge("pool_open_connections", "Connections open.",
			func(s sql.DBStats) float64 { return float64(s.OpenConnections) })
		gauge("pool_wait_seconds", "Time spent waiting for a connection since the start.",
			func(s sql.DBStats) float64 { return s.WaitDuration.Seconds() })
	}
}
