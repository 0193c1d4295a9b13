package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/lib/pq"
)

// Times of a Notifier.
const (
	// listenPing keeps the path alive and shows when it is not: lib/pq sends
	// nothing by itself, and a path that drops packets looks like silence.
	listenPing = 5 * time.Second
	// listenLimit is how long the answer to a ping may take.
	listenLimit = 5 * time.Second
	// listenRetry bounds the pause between attempts to connect again.
	listenRetry = time.Second
	// MaxPayload is what a notification may carry; the server takes 7,999.
	MaxPayload = 7000
)

// Notifier receives wake-ups of other controllers on one channel. They are
// hints only: whoever uses it must be right without them.
type Notifier struct {
	poll    bool // behind a pooler nothing arrives
	dsn     string
	channel string
	log     *slog.Logger
	ping    time.Duration
	limit   time.Duration
}

// NewNotifier makes a Notifier for a channel, for example one per controller.
// It takes the connection string of the same database.
func (d *DB) NewNotifier(channel string) *Notifier {
	return &Notifier{poll: d.nowhere, dsn: cmp.Or(d.cfg.DirectDSN, d.cfg.DSN), channel: channel, log: d.cfg.Log, ping: listenPing, limit: listenLimit}
}

const sqlNotify = `SELECT pg_notify($1, $2)`

// Notify wakes up the listeners of a channel. It is not a write that anything
// depends on. The server takes one lock over all of its databases for it, so
// send one for each turn and not one for each task.
func (d *DB) Notify(ctx context.Context, channel, payload string) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("notify %s: payload of %d bytes, at most %d", channel, len(payload), MaxPayload)
	}
	if _, err := d.general.ExecContext(ctx, sqlNotify, channel, payload); err != nil {
		return asFault(ctx, err, "wake up another controller")
	}
	return nil
}

// Run listens until ctx ends and calls on for each payload. It calls resync
// after each connection, the first one included: whatever was sent before may
// have been lost, so the caller looks at everything once. Both are called from
// this goroutine and must not block for long.
func (n *Notifier) Run(ctx context.Context, on func(payload string), resync func()) error {
	if n.poll {
		return n.resyncs(ctx, resync)
	}
	wake := make(chan struct{}, 1)
	l := pq.NewDialListener(deadlineDialer{limit: n.ping + n.limit}, n.dsn, listenRetry/10, listenRetry,
		func(e pq.ListenerEventType, err error) {
			if e == pq.ListenerEventDisconnected || e == pq.ListenerEventConnectionAttemptFailed {
				n.log.Warn("lost the connection for wake-ups", "channel", n.channel, "err", err)
			}
		})
	listening := make(chan error, 1)
	go func() { listening <- l.Listen(n.channel) }()
	pings := make(chan struct{})
	go func() {
		defer close(pings)
		for range wake {
			// A lost path is seen by the deadline of the socket; lib/pq then
			// connects again by itself.
			_ = l.Ping()
		}
	}()
	err := n.loop(ctx, l, listening, wake, on, resync)
	close(wake)
	err = errors.Join(err, l.Close())
	<-pings
	for range l.NotificationChannel() { // closed when lib/pq's goroutine has ended
	}
	return err
}

// resyncs looks at everything again and again where nothing can be heard.
func (n *Notifier) resyncs(ctx context.Context, resync func()) error {
	tick := time.NewTicker(n.ping)
	defer tick.Stop()
	for {
		resync()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (n *Notifier) loop(ctx context.Context, l *pq.Listener, listening <-chan error, wake chan<- struct{}, on func(string), resync func()) error {
	tick := time.NewTicker(n.ping)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-listening:
			if err != nil {
				return fmt.Errorf("listen on %s: %w", n.channel, err)
			}
			listening = nil
			resync()
		case m, ok := <-l.NotificationChannel():
			switch {
			case !ok:
				return fmt.Errorf("the listener on %s has ended", n.channel)
			case m == nil:
				resync()
			default:
				on(m.Extra)
			}
		case <-tick.C:
			select {
			case wake <- struct{}{}:
			default:
			}
		}
	}
}
