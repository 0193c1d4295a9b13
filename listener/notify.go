package listener

import (
	"slices"
	"sync"
	"time"
)

// maxQueuedReports bounds what waits for a slow OnPorts.
const maxQueuedReports = 64

// notifier calls OnPorts from its one goroutine, in order. The goroutine ends
// after the report of StateClosed; nobody waits for it, because the callback
// itself may be the one who closes the listener.
type notifier struct {
	call  func(PortReport)
	took  func(seconds float64)
	first chan struct{} // closed when the first call has returned

	mu    sync.Mutex
	queue []PortReport
	wake  chan struct{} // capacity 1
}

func newNotifier(call func(PortReport), took func(float64)) *notifier {
	return &notifier{call: call, took: took, first: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// push queues a report; it never blocks.
func (n *notifier) push(r PortReport) {
	n.mu.Lock()
	n.queue = append(n.queue, r)
	if over := len(n.queue) - maxQueuedReports; over > 0 {
		n.queue = slices.Delete(n.queue, 0, over)
	}
	n.mu.Unlock()
	select {
	case n.wake <- struct{}{}:
	default: // it is awake already and will see the report
	}
}

func (n *notifier) run() {
	called := false
	for range n.wake {
		for _, r := range n.take() {
			began := time.Now()
			n.call(r)
			n.took(time.Since(began).Seconds())
			if !called {
				called = true
				close(n.first)
			}
			if r.State == StateClosed {
				return
			}
		}
	}
}

func (n *notifier) take() []PortReport {
	n.mu.Lock()
	defer n.mu.Unlock()
	q := n.queue
	n.queue = nil
	return q
}
