package listener_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"headgate/listener"
)

// Acceptance 9.
func TestOnePortOpensAtOnce(t *testing.T) {
	t.Parallel()
	var heard reports
	l := start(t, func(c *listener.Config) {
		c.OnePort, c.OnPorts = true, heard.add
		c.Controller = listener.PortConfig{} // there is none
		c.OpenDelay = listener.DefaultOpenDelay
		c.OpenBarrier = func(context.Context) error { return errors.New("not asked") }
		c.OpenBarrierTimeout = listener.DefaultOpenBarrierTimeout
	})
	answer(t, l)
	wantAnswer(t, l.Addr().String(), listener.PortPublic)
	r := l.Ports()
	if r.State != listener.StateOpen || !r.PublicOpen || len(r.Controller) != 0 || r.Public[0].String() != l.Addr().String() {
		t.Errorf("report is %+v", r)
	}
	if s := l.Status(); s.Controller.Open || len(s.Controller.Addresses) != 0 || !s.Public.Open {
		t.Errorf("status is %+v", s)
	}
	for range 3 {
		l.MarkUnstable("means nothing here")
		l.MarkStable("nor this")
	}
	if addr, err := l.WaitPublic(t.Context()); err != nil || addr.String() != l.Addr().String() {
		t.Errorf("WaitPublic: %v, %v", addr, err)
	}
	if ln, err := net.Listen("tcp", l.Addr().String()); err == nil {
		ln.Close()
		t.Error("somebody else could listen on the port")
	}
	if err := l.Drain(t.Context()); err != nil {
		t.Errorf("Drain: %v", err)
	}
	want := []listener.State{listener.StateOpen, listener.StateDraining, listener.StateClosed}
	waitFor(t, "the last report", func() bool { return slices.Contains(heard.states(), listener.StateClosed) })
	if d := cmp.Diff(want, heard.states()); d != "" {
		t.Errorf("states (-want +got):\n%s", d)
	}
}

// Acceptance 9: the one port is lost and comes back.
func TestOnePortThatIsLostComesBack(t *testing.T) {
	t.Parallel()
	mem := newNetwork()
	l := start(t, func(c *listener.Config) { c.Listen, c.OnePort = mem.Listen, true })
	answer(t, l)
	addr := l.Addr().String()
	mem.breakAt(addr, net.ErrWriteToConnected)
	mem.at(addr).Close()
	waitFor(t, "the loss", func() bool { return l.Ports().State == listener.StatePublicFailed })
	mem.breakAt(addr, nil)
	waitFor(t, "the port to be back", func() bool { return l.Ports().State == listener.StateOpen })
	c, err := mem.dial(addr)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestOnePortThatIsBusyFailsNew(t *testing.T) {
	t.Parallel()
	busy := listen(t)
	_, err := listener.New(t.Context(), config(func(c *listener.Config) { c.OnePort, c.Public.Addr = true, busy.Addr().String() }))
	wantPortError(t, err, listener.PortPublic, "reserve")
}
