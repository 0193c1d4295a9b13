package listener_test

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headgate/listener"
)

// The durations of the machine under test; all are multiples of modelStep.
const (
	modelStep    = 500 * time.Millisecond
	modelDelay   = 2 * time.Second
	modelRetry   = 3 * time.Second
	modelGrace   = 10 * time.Second
	modelReclose = 30 * time.Second
	modelMinOpen = 30 * time.Second
	modelStable  = 5 * time.Second
	modelSteady  = 10 * time.Minute
)

// model says what state a listener must be in. It knows no plan and no event:
// it looks at the clock every half second and applies the rules as they are
// written in the documentation.
type model struct {
	now                                  time.Duration
	state                                listener.State
	stable                               bool
	marked, entered, opened, settled, at time.Duration // at: when the port is to be opened
	delay                                time.Duration
	changes                              []time.Duration // of who is admitted
	everOpen, broken                     bool
	live                                 int // public connections
}

func newModel() *model {
	return &model{state: listener.StateControllerOnly, delay: modelDelay, settled: -time.Hour, opened: -time.Hour}
}

func (m *model) accepting() bool {
	return m.state == listener.StateOpen || m.state == listener.StateShedding
}

func (m *model) over() bool {
	return m.state == listener.StateDraining || m.state == listener.StateClosed
}

// room reports whether who is admitted may change now: twice in twice MinOpen.
func (m *model) room() bool {
	n := len(m.changes)
	return n < 2 || m.now-m.changes[n-2] >= 2*modelMinOpen
}

func (m *model) enter(s listener.State) {
	was := m.state
	m.state = s
	switch s {
	case listener.StateOpen:
		if was != listener.StateShedding {
			m.opened, m.everOpen = m.now, true
		}
		m.changes = append(m.changes, m.now)
	case listener.StateShedding:
		if m.now-m.entered >= modelSteady {
			m.delay = modelDelay
		}
		m.changes = append(m.changes, m.now)
	case listener.StateReclosed:
		if was == listener.StateShedding {
			m.delay = min(2*m.delay, time.Minute)
			m.changes = append(m.changes, m.now)
		}
	case listener.StateSettling:
		m.settled, m.at = m.now, m.now+m.delay
		if n := len(m.changes); n > 0 {
			m.at = max(m.at, m.changes[n-1]+modelMinOpen)
		}
	}
	m.entered = m.now
}

// try opens the port, if it can be.
func (m *model) try() {
	switch {
	case !m.broken:
		m.enter(listener.StateOpen)
	case m.state == listener.StatePublicFailed:
		m.at = m.now + modelRetry
	default:
		m.enter(listener.StatePublicFailed)
		m.at = m.now + modelRetry
	}
}

// look applies the rules until none applies.
func (m *model) look() {
	for before := listener.State(""); before != m.state; {
		before = m.state
		good, bad := m.stable, !m.stable
		since := m.now - m.marked
		switch {
		case m.state == listener.StateControllerOnly && good:
			m.enter(listener.StateSettling)
		case m.state == listener.StateReclosed && good && m.now-m.settled >= 2*modelMinOpen:
			m.enter(listener.StateSettling)
		case m.state == listener.StateSettling && bad && m.everOpen:
			m.enter(listener.StateReclosed)
		case m.state == listener.StateSettling && bad:
			m.enter(listener.StateControllerOnly)
		case m.state == listener.StateSettling && m.now >= m.at, m.state == listener.StatePublicFailed && good && m.now >= m.at:
			m.try()
		case m.state == listener.StateOpen && bad && since >= modelGrace && m.now-m.opened >= modelMinOpen && m.room():
			m.enter(listener.StateShedding)
		case m.state == listener.StateShedding && good && since >= modelStable && m.room():
			m.enter(listener.StateOpen)
		case m.state == listener.StateShedding && bad && min(since, m.now-m.entered) >= modelReclose && m.room():
			m.enter(listener.StateReclosed)
		case m.state == listener.StateDraining && m.live == 0:
			m.enter(listener.StateClosed)
		}
	}
}

func (m *model) mark(stable bool) {
	if m.over() || m.stable == stable {
		return
	}
	m.stable, m.marked = stable, m.now
	if m.state == listener.StatePublicFailed && stable {
		m.at = max(m.at, m.now+modelDelay)
	}
	m.look()
}

func (m *model) pass(d time.Duration) {
	for end := m.now + d; m.now < end; {
		m.now += modelStep
		m.look()
	}
}

// machineRun drives a listener and the model side by side.
type machineRun struct {
	t      *testing.T
	l      *listener.Listener
	mem    *network
	public string
	m      *model
	heard  reports
	did    []string
	wg     sync.WaitGroup
	live   []net.Conn // clients of the public port
	served chan net.Conn
}

// runMachine does what the bytes say. Acceptance 61.
// It gives the states that were entered.
func runMachine(t *testing.T, ops []byte) []listener.State {
	r := &machineRun{t: t, mem: newNetwork(), m: newModel(), served: make(chan net.Conn, 1000)}
	r.l = start(t, func(c *listener.Config) {
		c.Listen, c.OpenDelay, c.OnPorts = r.mem.Listen, modelDelay, r.heard.add
		c.Retry = listener.RetryConfig{Min: modelRetry, Max: modelRetry}
	})
	r.public = publicAddr(r.l)
	r.wg.Go(func() {
		for {
			c, err := r.l.Accept()
			if err != nil {
				return
			}
			r.served <- c
		}
	})
	for _, op := range ops {
		r.do(op)
		synctest.Wait()
		r.check()
		if t.Failed() {
			break
		}
	}
	r.l.Close()
	for _, c := range r.live {
		c.Close()
	}
	r.wg.Wait()
	for len(r.served) > 0 {
		(<-r.served).Close()
	}
	synctest.Wait()
	r.checkHistory()
	if t.Failed() {
		t.Logf("after: %s", strings.Join(r.did, ", "))
	}
	return r.heard.states()
}

// do makes one step. The upper half of the byte says how much of it.
func (r *machineRun) do(op byte) {
	n := 1 + time.Duration(op>>4)
	pass := func(d time.Duration) {
		r.did = append(r.did, "wait "+d.String())
		r.m.pass(d)
		<-time.After(d)
	}
	say := func(what string) { r.did = append(r.did, what) }
	switch op & 15 {
	case 0, 1:
		say("stable")
		r.m.mark(true)
		r.l.MarkStable("test")
	case 2, 3:
		say("unstable")
		r.m.mark(false)
		r.l.MarkUnstable("test")
	case 4, 5, 6:
		pass(n * modelStep)
	case 7, 8:
		pass(n * 5 * time.Second)
	case 9:
		pass(n * time.Minute)
	case 10:
		say("break")
		r.m.broken = true
		r.mem.breakAt(r.public, net.ErrWriteToConnected)
	case 11:
		say("mend")
		r.m.broken = false
		r.mem.breakAt(r.public, nil)
	case 12:
		say("lose")
		if ln := r.mem.at(r.public); ln != nil {
			ln.Close()
			r.m.enter(listener.StatePublicFailed)
			r.m.at = r.m.now + modelRetry
		}
	case 13:
		r.dial()
	case 14:
		say("limits")
		mode := []listener.LimitMode{listener.ModeEnforce, listener.ModeObserve, listener.ModeOff}[n%3]
		if err := r.l.UpdateLimits(listener.Limits{Mode: mode, MaxConns: 1000 * int(n)}); err != nil {
			r.t.Error(err)
		}
	case 15:
		r.finish(n)
	}
}

// dial connects to the public port if it accepts. Who is let in while it sheds
// is not the machine's matter.
func (r *machineRun) dial() {
	r.did = append(r.did, "dial")
	c, err := r.mem.dial(r.public)
	if (err == nil) != r.m.accepting() {
		r.t.Errorf("dial gives %v in state %s", err, r.m.state)
	}
	switch {
	case err != nil:
	case r.m.state == listener.StateShedding:
		c.Close()
	default:
		r.live = append(r.live, c)
	}
}

// finish drains or closes; seldom, or no run would be long.
func (r *machineRun) finish(n time.Duration) {
	switch n {
	case 1:
		r.did = append(r.did, "close")
		r.l.Close()
		if r.m.state != listener.StateClosed {
			r.m.enter(listener.StateClosed)
		}
	case 2:
		r.did = append(r.did, "drain")
		r.wg.Go(func() { _ = r.l.Drain(context.Background()) })
		r.m.live = r.l.Status().Public.Conns
		if !r.m.over() {
			r.m.enter(listener.StateDraining)
		}
		r.m.look()
	}
}

// check compares the listener with the model.
func (r *machineRun) check() {
	p := r.l.Ports()
	if p.State != r.m.state || p.PublicOpen != r.m.accepting() || p.PublicOpen != (r.mem.at(r.public) != nil) {
		r.t.Errorf("state is %s (%s), want %s; report says open: %t, socket: %t", p.State, p.Reason, r.m.state, p.PublicOpen, r.mem.at(r.public) != nil)
	}
	if open := r.mem.at(r.l.Addr().String()) != nil; open == (p.State == listener.StateClosed) {
		r.t.Errorf("controller port is open: %t, in state %s", open, p.State)
	}
	if p.State == listener.StateSettling && time.Until(p.OpensAt) != r.m.at-r.m.now {
		r.t.Errorf("opens in %v, want %v", time.Until(p.OpensAt), r.m.at-r.m.now)
	}
}

// checkHistory looks at what was reported on the way: the last is the end, and
// an order that the documentation does not show never happened.
func (r *machineRun) checkHistory() {
	next := map[listener.State]string{
		listener.StateStarting:       "controller-only",
		listener.StateControllerOnly: "settling draining closed",
		listener.StateSettling:       "open controller-only reclosed public-failed draining closed",
		listener.StateOpen:           "shedding public-failed draining closed",
		listener.StateShedding:       "open reclosed public-failed draining closed",
		listener.StateReclosed:       "settling draining closed",
		listener.StatePublicFailed:   "open draining closed",
		listener.StateDraining:       "closed",
	}
	states := r.heard.states()
	if len(states) == 0 || states[len(states)-1] != listener.StateClosed {
		r.t.Errorf("the last report is not of the end: %v", states)
	}
	at := listener.StateStarting
	for _, s := range states {
		if !slices.Contains(strings.Fields(next[at]), string(s)) {
			r.t.Errorf("%s follows %s", s, at)
		}
		at = s
	}
}

// Acceptance 61.
func TestMachineAgainstModel(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	visited := map[listener.State]int{}
	for range 400 {
		ops := make([]byte, 1+rnd.IntN(80))
		for i := range ops {
			ops[i] = byte(rnd.IntN(256))
			if i < len(ops)/2 && ops[i]&15 == 15 { // or half of the runs would be short
				ops[i] = 0
			}
		}
		synctest.Test(t, func(t *testing.T) {
			for _, s := range runMachine(t, ops) {
				visited[s]++
			}
		})
		if t.Failed() {
			t.Fatalf("ops %#v", ops)
		}
	}
	t.Logf("states entered: %v", visited)
	if len(visited) != 8 { // all but starting
		t.Errorf("not every state was entered: %v", visited)
	}
}

// FuzzMachine is TestMachineAgainstModel with the fuzzer's sequences.
// Acceptance 61.
func FuzzMachine(f *testing.F) {
	f.Add([]byte{0, 0x37, 2, 0x17, 0x57, 0, 0x19, 0x1f})           // open, shed, re-close, open again, drain
	f.Add([]byte{10, 0, 0x47, 2, 11, 0, 0x27, 12, 0x17, 13, 0x0f}) // break, mend, lose, close
	f.Add([]byte{0, 4, 2, 0, 4, 2, 0, 0x19, 2, 0x29, 0, 4, 2, 0x29, 0, 0x29})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) > 500 {
			t.Skip("long enough")
		}
		synctest.Test(t, func(t *testing.T) { runMachine(t, ops) })
	})
}
