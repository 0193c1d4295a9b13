package listener

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the counters of one listener. Labels come from closed sets.
type metrics struct {
	accepted          *prometheus.CounterVec
	refused           *prometheus.CounterVec
	wouldRefuse       *prometheus.CounterVec
	shed              prometheus.Counter
	topRefused        prometheus.Counter
	queueWait         prometheus.Histogram
	handshakes        *prometheus.HistogramVec
	live              *liveMetrics
	state             *prometheus.GaugeVec
	transitions       *prometheus.CounterVec
	publicLate        prometheus.Gauge
	callback          prometheus.Histogram
	publicOpen        prometheus.Gauge
	secondsToOpen     prometheus.Gauge
	handshakeFailures *prometheus.CounterVec
	acceptErrors      *prometheus.CounterVec
}

// allStates lists the values of the label state.
func allStates() []State {
	return []State{
		StateStarting, StateControllerOnly, StateSettling, StateOpen, StateShedding, StateReclosed,
		StatePublicFailed, StateDraining, StateClosed,
	}
}

func newMetrics() *metrics {
	const ns, sub = "headgate", "listener"
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help}, labels)
	}
	value := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help})
	}
	seconds := func(name, help string, buckets ...float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Namespace: ns, Subsystem: sub, Name: name, Help: help, Buckets: buckets}
	}
	m := &metrics{
		accepted:          counter("accepted_total", "Connections accepted from the kernel.", "port"),
		refused:           counter("refused_total", "Connections reset by the listener before the program saw them.", "port", "reason"),
		wouldRefuse:       counter("would_refuse_total", "Connections let in by the mode observe that the mode enforce would have refused.", "reason"),
		state:             gauge("state", "1 for the state the listener is in, 0 for the others.", "state"),
		transitions:       counter("transitions_total", "Changes of the listener's state.", "from", "to"),
		handshakeFailures: counter("handshake_failures_total", "TLS handshakes that did not succeed.", "reason"),
		acceptErrors:      counter("accept_errors_total", "Errors of accept; none of them reaches the program.", "port", "errno"),
		publicOpen:        value("public_open", "1 while the public port accepts."),
		secondsToOpen:     value("seconds_to_public_open", "From the start of the listener to the first opening of the public port; 0 before."),
		publicLate:        value("public_late", "1 when the public port did not open within the time after which a warning is due, until it opens."),
		live:              newLiveMetrics(),
		topRefused: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: ns, Subsystem: sub,
			Name: "refused_top_source_total", Help: "Of the refused connections those of the source that had most of them, counted every ten seconds.",
		}),
		shed: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: ns, Subsystem: sub,
			Name: "shed_total", Help: "Connections delivered above the soft cap, to be answered with 429.",
		}),
		queueWait: prometheus.NewHistogram(seconds("queue_wait_seconds",
			"From accept to admission, for connections admitted to the public port.", .001, .01, .1, .5, 1, 2, 5)),
		handshakes: prometheus.NewHistogramVec(seconds("handshake_seconds",
			"From the first byte to the end of the TLS handshake.", .001, .005, .01, .05, .1, .5, 1, 5), []string{"port", "result"}),
		callback: prometheus.NewHistogram(seconds("callback_seconds", "What calls of OnPorts took.", .001, .01, .1, 1, 10)),
	}
	m.zero()
	return m
}

// zero makes every series exist from the start, so that a rate over the first
// event is seen.
func (m *metrics) zero() {
	for _, p := range []Port{PortController, PortPublic} {
		m.accepted.WithLabelValues(string(p))
		for _, reason := range reasons(p) {
			m.refused.WithLabelValues(string(p), reason)
		}
		for _, result := range []string{shookOK, shookFailed} {
			m.handshakes.WithLabelValues(string(p), result)
		}
	}
	for _, reason := range append(doorReasons(), softCap) {
		m.wouldRefuse.WithLabelValues(reason)
	}
	for _, s := range allStates() {
		m.state.WithLabelValues(string(s))
		for _, to := range successors(s) {
			m.transitions.WithLabelValues(string(s), string(to))
		}
	}
	for _, reason := range []string{failTimeout, failProbe, failNotTLS, failBadCert, failOther} {
		m.handshakeFailures.WithLabelValues(reason)
	}
	m.state.WithLabelValues(string(StateStarting)).Set(1)
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.accepted, m.refused, m.wouldRefuse, m.shed, m.topRefused, m.queueWait, m.handshakes, m.live, m.state, m.transitions,
		m.publicOpen, m.publicLate, m.callback, m.secondsToOpen, m.handshakeFailures, m.acceptErrors,
	}
}

// register adds all of them to reg, or none. It does nothing without a reg.
func (m *metrics) register(reg prometheus.Registerer) error {
	if reg == nil {
		return nil
	}
	for i, c := range m.collectors() {
		if err := reg.Register(c); err != nil {
			for _, done := range m.collectors()[:i] {
				reg.Unregister(done)
			}
			return fmt.Errorf("register listener metrics: %w", err)
		}
	}
	return nil
}

// unregister takes them out again, when New fails after registering.
func (m *metrics) unregister(reg prometheus.Registerer) {
	if reg == nil {
		return
	}
	for _, c := range m.collectors() {
		reg.Unregister(c)
	}
}

// entered notes a change of state.
func (m *metrics) entered(from State, r PortReport) {
	m.transitions.WithLabelValues(string(from), string(r.State)).Inc()
	m.state.WithLabelValues(string(from)).Set(0)
	m.state.WithLabelValues(string(r.State)).Set(1)
	open := 0.0
	if r.PublicOpen {
		open = 1
		m.publicLate.Set(0)
	}
	m.publicOpen.Set(open)
}

// Values of the label result.
const (
	shookOK     = "ok"
	shookFailed = "failed"
)

// shook notes the end of a handshake; one that has not begun took no time.
func (m *metrics) shook(p Port, took time.Duration, err error) {
	result := shookOK
	if err != nil {
		result = shookFailed
	}
	m.handshakes.WithLabelValues(string(p), result).Observe(took.Seconds())
}

// opened notes how long the first opening took.
func (m *metrics) opened(took time.Duration) { m.secondsToOpen.Set(took.Seconds()) }
