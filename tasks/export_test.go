package tasks

import (
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

func counterValue(c prometheus.Counter) float64 {
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		panic(err)
	}
	return m.GetCounter().GetValue()
}

// Mismatches is how often disk and memory have parted.
func (m *Manager) Mismatches() float64 { return counterValue(m.metrics.mismatches) }

// Deafen loses every wake-up from now on; only the sweep is left.
func (m *Manager) Deafen() {
	for _, l := range m.loops {
		l.deaf.Store(true)
	}
}

// Waiting is how many wait for the end of a task.
func (h *Hub) Waiting() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, ws := range h.waiters {
		n += len(ws)
	}
	return n
}
