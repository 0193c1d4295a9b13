package handlers

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics counts requests by route pattern, never by path, so that the number
// of series stays bounded whatever is asked.
type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	streams  prometheus.Gauge

	// series holds the two handles of a (pattern, method, status), so that a
	// request costs one lookup and no label strings.
	series sync.Map
}

type seriesKey struct {
	pattern, method string
	status          int
}

type seriesPair struct {
	count   prometheus.Counter
	seconds prometheus.Observer
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headgate_http_requests_total", Help: "Requests answered, by route pattern, method and status.",
		}, []string{"pattern", "method", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "headgate_http_request_duration_seconds", Help: "Time from the first byte of a request to the end of its answer; event streams and waits included.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 30, 120},
		}, []string{"pattern"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "headgate_http_event_streams", Help: "Event streams open now.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.requests, m.duration, m.streams)
	}
	return m
}

func (m *metrics) observe(pattern, method string, status int, took time.Duration) {
	if pattern == "" {
		pattern = "other"
	}
	key := seriesKey{pattern, knownMethod(method), status}
	found, ok := m.series.Load(key)
	if !ok {
		found, _ = m.series.LoadOrStore(key, &seriesPair{
			count:   m.requests.WithLabelValues(key.pattern, key.method, strconv.Itoa(status)),
			seconds: m.duration.WithLabelValues(key.pattern),
		})
	}
	if pair, ok := found.(*seriesPair); ok {
		pair.count.Inc()
		pair.seconds.Observe(took.Seconds())
	}
}

// knownMethod keeps invented methods from making series.
func knownMethod(m string) string {
	switch m {
	case "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS":
		return m
	}
	return "other"
}
