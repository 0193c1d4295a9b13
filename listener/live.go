package listener

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"headgate/listener/admission"
)

// liveMetrics are read from the listener at each scrape, so that keeping them
// costs a connection nothing.
type liveMetrics struct {
	of atomic.Pointer[Listener]

	conns, queue, tracked, overflows, files, backlog, dropped *prometheus.Desc
}

func newLiveMetrics() *liveMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("headgate_listener_"+name, help, labels, nil)
	}
	return &liveMetrics{
		conns:     desc("conns", "Connections held now, from accept to close.", "port", "class"),
		queue:     desc("queue_length", "Connections that wait to be let in to the public port.", "lane"),
		tracked:   desc("sources_tracked", "Sources in the table."),
		overflows: desc("sources_overflow_total", "How often a source found no place in the table."),
		files:     desc("fd_used_ratio", "Part of the limit of open files that this process uses."),
		backlog:   desc("accept_backlog", "Connections that the kernel holds for the port.", "port"),
		dropped:   desc("listen_overflows_total", "Connections that this machine has dropped because a listening socket was full; of all its programs."),
	}
}

// watch begins to show a listener.
func (m *liveMetrics) watch(l *Listener) { m.of.Store(l) }

// Describe is for prometheus.
func (m *liveMetrics) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.conns, m.queue, m.tracked, m.overflows, m.files, m.backlog, m.dropped} {
		out <- d
	}
}

// Collect is for prometheus. What this system does not tell is left out.
func (m *liveMetrics) Collect(out chan<- prometheus.Metric) {
	l := m.of.Load()
	if l == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v)
	}
	for _, p := range []*port{l.controller, l.public} {
		for class, n := range p.byClass() {
			gauge(m.conns, float64(n), string(p.name), string(class))
		}
		if n, ok := waitingAt(p.socket.Load()); ok {
			gauge(m.backlog, float64(n), string(p.name))
		}
	}
	d := l.door
	d.p.mu.Lock()
	known, unknown := d.queue.Len(admission.First), d.queue.Len(admission.Second)
	tracked, overflows := d.sources.Len(), d.sources.Overflows()
	d.p.mu.Unlock()
	gauge(m.queue, float64(known), "known")
	gauge(m.queue, float64(unknown), "unknown")
	gauge(m.tracked, float64(tracked))
	counter(m.overflows, float64(overflows))
	if used, limit := Descriptors(); used > 0 && limit > 0 {
		gauge(m.files, float64(used)/float64(limit))
	}
	if n, ok := listenOverflows(); ok {
		counter(m.dropped, float64(n))
	}
}
