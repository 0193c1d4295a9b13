package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"headgate/handlers"
	"headgate/internal/pki"
	"headgate/listener"
)

// ServiceManager is the program above a controller, systemd for example, and
// what it wants to hear by the protocol of sd_notify(3). The zero value is
// nobody. The protocol is one datagram a message, so no library is needed.
type ServiceManager struct {
	Socket   string        // where it listens; "" = nowhere
	Watchdog time.Duration // it expects a sign of life within this time; 0 = never
}

// ServiceManagerFrom reads what the service manager told the process pid by
// its environment. What cannot be read counts as not said.
func ServiceManagerFrom(lookup func(string) (string, bool), pid int) ServiceManager {
	var m ServiceManager
	m.Socket, _ = lookup("NOTIFY_SOCKET")
	if of, ok := lookup("WATCHDOG_PID"); ok && of != strconv.Itoa(pid) {
		return m // meant for another process that passed its environment on
	}
	text, _ := lookup("WATCHDOG_USEC")
	if usec, err := strconv.ParseInt(text, 10, 64); err == nil && usec > 0 {
		m.Watchdog = time.Duration(usec) * time.Microsecond
	}
	return m
}

// Times of the talk with the service manager.
const (
	selfPause    = 250 * time.Millisecond // between calls to ourselves until one succeeds
	statusEvery  = time.Second            // what no event tells is noticed this soon
	extendEvery  = 5 * time.Second        // while the start goes on, it is asked for
	extendBy     = 30 * time.Second
	stopMargin   = 5 * time.Second // beyond what the stop may take by itself
	notifyWait   = time.Second     // a service manager that reads nothing stops nobody
	statusLength = 300             // bytes of a status line
)

// herald tells the service manager how the controller stands. Nothing that
// goes wrong here touches the controller; all of it is a no-op without a
// socket.
type herald struct {
	to  ServiceManager
	log *slog.Logger
	up  atomic.Bool // between READY=1 and STOPPING=1

	mu    sync.Mutex
	ports listener.PortReport
	said  string // the last status
}

func newHerald(to ServiceManager, log *slog.Logger) *herald { return &herald{to: to, log: log} }

// tell sends one message of several assignments.
func (h *herald) tell(lines ...string) {
	if h.to.Socket == "" {
		return
	}
	if err := sendDatagram(h.to.Socket, strings.Join(lines, "\n")); err != nil {
		h.log.Debug("tell the service manager", "message", lines[0], "err", err)
	}
}

// sendDatagram dials anew for each message: the service manager may have been
// restarted in between, and messages are rare.
func sendDatagram(to, text string) error {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: to, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // it was a datagram: nothing is left to send
	if err := conn.SetWriteDeadline(time.Now().Add(notifyWait)); err != nil {
		return err
	}
	_, err = conn.Write([]byte(text))
	return err
}

// portsChanged takes note of the listener's state and tells it.
func (h *herald) portsChanged(r listener.PortReport, ready handlers.Readiness) {
	h.mu.Lock()
	h.ports = r
	h.mu.Unlock()
	h.status(ready)
}

// status tells how the controller stands, if that has changed.
func (h *herald) status(ready handlers.Readiness) {
	h.mu.Lock()
	text := statusLine(h.ports, ready)
	news := text != h.said
	h.said = text
	h.mu.Unlock()
	if news {
		h.tell("STATUS=" + text)
	}
}

// statusLine is what `systemctl status` shows: the state of the two ports, why,
// and the first thing that the controller waits for.
func statusLine(r listener.PortReport, ready handlers.Readiness) string {
	var b strings.Builder
	fmt.Fprint(&b, r.State)
	if r.Reason != "" {
		fmt.Fprintf(&b, " (%s)", r.Reason)
	}
	if len(r.Controller) > 0 {
		fmt.Fprintf(&b, "; controller port %s", r.Controller[0])
	}
	if r.PublicOpen && len(r.Public) > 0 {
		fmt.Fprintf(&b, "; public port %s", r.Public[0])
	}
	if r.Err != nil {
		fmt.Fprintf(&b, "; %v", r.Err)
	}
	if len(ready.Unmet) > 0 {
		fmt.Fprintf(&b, "; not ready, %s: %s", ready.Unmet[0].Condition, ready.Unmet[0].Detail)
	}
	line := strings.Join(strings.Fields(b.String()), " ")
	if len(line) > statusLength {
		line = strings.ToValidUTF8(line[:statusLength], "") + "..."
	}
	return line
}

// ready tells that the start is over for those who wait for it.
func (h *herald) ready() {
	h.up.Store(true)
	h.tell("READY=1")
}

// reloading tells that the configuration is being applied again; the function
// it gives tells the end, which is READY=1 too. So nothing is said before the
// start is over, nor once the stop has begun.
func (h *herald) reloading() (done func()) {
	if !h.up.Load() {
		return func() {}
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		h.log.Debug("read the monotonic clock", "err", err)
	}
	h.tell("RELOADING=1", fmt.Sprintf("MONOTONIC_USEC=%d", now.Nano()/int64(time.Microsecond)))
	return func() {
		if h.up.Load() {
			h.tell("READY=1")
		}
	}
}

// stopping tells that the stop has begun and how long it may take, so that a
// service manager with a shorter limit does not kill what is still served.
func (h *herald) stopping(within time.Duration) {
	h.up.Store(false)
	h.tell("STOPPING=1", extension(within))
}

func extension(by time.Duration) string {
	return fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", by.Microseconds())
}

// keepServiceManager runs what the service manager needs all the time.
func (c *Controller) keepServiceManager(sup *supervisor) {
	if c.herald.to.Socket == "" {
		return
	}
	sup.run("service manager", c.tellServiceManager)
	if c.herald.to.Watchdog > 0 {
		sup.run("watchdog", c.feedWatchdog)
	}
}

// tellServiceManager says READY=1 once the controller port answers, and from
// then on what has changed. While the start goes on it asks for more time.
func (c *Controller) tellServiceManager(ctx context.Context) error {
	for c.callOwnPort(ctx) != nil {
		select {
		case <-time.After(selfPause):
		case <-ctx.Done():
			return nil
		}
	}
	c.herald.ready()
	tick := time.NewTicker(statusEvery)
	defer tick.Stop()
	var asked time.Time
	for {
		c.herald.status(c.readiness())
		if c.starting() && time.Since(asked) >= extendEvery {
			asked = time.Now()
			c.herald.tell(extension(extendBy))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// starting says whether the public port has not been opened yet.
func (c *Controller) starting() bool {
	select {
	case <-c.opened:
		return false
	default:
		return !c.stopping()
	}
}

func (c *Controller) stopping() bool { return c.readiness().Phase == string(phaseDrain) }

// feedWatchdog gives a sign of life twice in the time that is allowed, but
// only while /livez answers on the controller port. A stop has its own limits.
func (c *Controller) feedWatchdog(ctx context.Context) error {
	tick := time.NewTicker(c.herald.to.Watchdog / 2)
	defer tick.Stop()
	for {
		if err := c.callOwnPort(ctx); err == nil || c.stopping() || c.turnedAway(err) {
			c.herald.tell("WATCHDOG=1")
		} else if ctx.Err() == nil {
			c.log.Error("my own /livez does not answer; the watchdog of the service manager gets no sign of life", "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// turnedAway says whether a call to ourselves met a listener that lives, but has
// no place: with one port alone the call is a client like all others.
func (c *Controller) turnedAway(err error) bool {
	return !c.cfg.TwoPhase && errors.Is(err, unix.ECONNRESET)
}

// callOwnPort asks for /livez as selfCall does, but also before there is a CA,
// when the port's certificate is one that it made itself. The second try is
// for a certificate that was replaced during the first.
func (c *Controller) callOwnPort(ctx context.Context) error {
	var err error
	for range 2 {
		roots := pki.NewRoots(append(c.state.roots.Certificates(), c.state.port.Leaf())...)
		if err = c.callLivez(ctx, roots); err == nil {
			return nil
		}
	}
	return err
}
