package listener

import (
	"slices"
	"sync"
)

// maxQueuedReports bounds what waits for a slow OnPorts.
const maxQueuedReports = 64

// notifier calls OnPorts from its one goroutine, in order. The goroutine ends
// after the report of StateClosed; nobody waits for it, because the callback
// itself may be the one who closes the listener.
type notifier struct {
	call  func(PortReport)
	first chan struct{} // closed when the first call has returned

	mu    sync.Mutex
	queue []PortReport
	wake  chan struct{} // capacity 1
}

func newNotifier(call func(PortReport)) *notifier {
	return &notifier{call: call, first: make(chan struct{}), wake: make(chan struct{}, 1)}
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
			n.call(r)
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
