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

	upkeep upkeepMetrics
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
	m.upkeep = newUpkeepMetrics(reg)
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

// upkeepMetrics tell how the tables stand, as of the last look at them.
type upkeepMetrics struct {
	snapshot, partitions, ahead, taskBytes prometheus.Gauge
	queueBytes, indexBytes, dead           prometheus.Gauge
	retentionRun, retentionFails           prometheus.Gauge
	dropped                                prometheus.Counter
	vacuums, rebuilds                      prometheus.Counter
	inconsistent                           *prometheus.GaugeVec
}

func newUpkeepMetrics(reg prometheus.Registerer) upkeepMetrics {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "headgate_store_" + name, Help: help})
		if reg != nil {
			reg.MustRegister(g)
		}
		return g
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "headgate_store_" + name, Help: help})
		if reg != nil {
			reg.MustRegister(c)
		}
		return c
	}
	inconsistent := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "headgate_store_inconsistent",
		Help: "What the last comparison of the queue's tables found wrong, by kind: crowded agents, torn tasks, lost tasks. Must be 0.",
	}, []string{"kind"})
	if reg != nil {
		reg.MustRegister(inconsistent)
	}
	return upkeepMetrics{
		inconsistent:   inconsistent,
		snapshot:       gauge("oldest_snapshot_seconds", "Age of the oldest transaction that keeps the database from freeing rows."),
		partitions:     gauge("partitions", "Ranges of task ids that are kept, unused ones included."),
		ahead:          gauge("partitions_ahead", "Of them those that hold no task yet; must be at least 1."),
		taskBytes:      gauge("task_bytes", "Size of tasks, results and output with their indexes."),
		queueBytes:     gauge("queue_bytes", "Size of the queue's table."),
		indexBytes:     gauge("queue_index_bytes", "Size of the queue's indexes."),
		dead:           gauge("queue_dead_rows", "Rows of the queue that a vacuum would free, if no snapshot needs them."),
		retentionRun:   gauge("retention_last_run_timestamp_seconds", "When this controller last removed what was too old without an error; 0 = another one does that."),
		retentionFails: gauge("retention_failing", "1 while the last try to remove old tasks did not succeed."),
		dropped:        counter("partitions_dropped_total", "Ranges of task ids removed by retention."),
		vacuums:        counter("queue_vacuums_total", "Vacuums of the queue by this controller, beside those of the server."),
		rebuilds:       counter("queue_index_rebuilds_total", "Indexes of the queue that this controller built anew because they had grown far beyond their need."),
	}
}

func (u *upkeepMetrics) broken(c Consistency) {
	u.inconsistent.WithLabelValues("crowded").Set(float64(len(c.Crowded)))
	u.inconsistent.WithLabelValues("torn").Set(float64(len(c.Torn)))
	u.inconsistent.WithLabelValues("lost").Set(float64(len(c.Lost)))
}

func (m *metrics) health(h Health) {
	u := &m.upkeep
	u.snapshot.Set(h.Snapshot.Age.Seconds())
	u.partitions.Set(float64(h.Partitions))
	u.ahead.Set(float64(h.PartitionsAhead))
	u.taskBytes.Set(float64(h.TaskBytes))
	u.queueBytes.Set(float64(h.QueueBytes))
	u.indexBytes.Set(float64(h.QueueIndexBytes))
	u.dead.Set(float64(h.QueueDead))
}
