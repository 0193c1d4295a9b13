package listener_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"headgate/listener"
)

// TestNobodyElseCanListen tries to listen on the public port in each phase. Acceptance 17.
func TestNobodyElseCanListen(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{"127.0.0.1:0", "0.0.0.0:0", ":0", "[::1]:0"} {
		t.Run(addr, func(t *testing.T) {
			t.Parallel()
			if ln, err := net.Listen("tcp", addr); err != nil {
				t.Skipf("this machine has no such address: %v", err)
			} else {
				ln.Close()
			}
			l := start(t, func(c *listener.Config) {
				c.Public.Addr = addr
				c.UnstableGrace, c.ReclosePeriod, c.MinOpen = 1, 1, 1
			})
			answer(t, l)
			at := l.Ports().Public[0]
			near := at // as a client on this machine dials it
			if at.Addr().IsUnspecified() {
				near = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
			}
			for _, phase := range []string{"reserved", "open", "closed again"} {
				if phase == "closed again" {
					wantAnswer(t, near.String(), listener.PortPublic)
					l.MarkUnstable("test")
					waitFor(t, "the port to close again", func() bool { return l.Ports().State == listener.StateReclosed })
					waitFor(t, "the port to refuse", func() bool {
						_, err := ask(near.String())
						return errors.Is(err, syscall.ECONNREFUSED)
					})
				}
				for _, take := range []netip.AddrPort{near, at} {
					if ln, err := net.Listen("tcp", take.String()); err == nil {
						ln.Close()
						t.Errorf("%s: somebody else could listen on %s", phase, take)
					}
				}
				if phase == "reserved" {
					wantRefused(t, near.String())
					open(t, l)
				}
			}
			wantAnswer(t, l.Addr().String(), listener.PortController)
		})
	}
}

// TestOutgoingDialCannotTakeTheReservedNumber lets the kernel choose a local
// port where the only choice is the reserved one. That the same dial succeeds
// when the number is free shows that it was the reservation which stopped it. Acceptance 16.
func TestOutgoingDialCannotTakeTheReservedNumber(t *testing.T) {
	t.Parallel()
	server := listen(t)
	for _, addr := range []string{"127.0.0.1:0", "0.0.0.0:0", ":0"} {
		t.Run(addr, func(t *testing.T) {
			t.Parallel()
			l := start(t, func(c *listener.Config) { c.Public.Addr = addr })
			number := l.Ports().Public[0].Port()
			switch err := dialFrom(number, server.Addr().String()); {
			case errors.Is(err, unix.ENOPROTOOPT):
				t.Skip("this kernel cannot narrow the range of local ports")
			case !errors.Is(err, unix.EADDRNOTAVAIL):
				t.Errorf("dialling from the reserved number gives %v", err)
			}
			l.Close()
			if err := dialFrom(number, server.Addr().String()); err != nil {
				t.Errorf("dialling from the freed number gives %v", err)
			}
		})
	}
}

// dialFrom dials with port as the only local number that the kernel may give.
func dialFrom(port uint16, addr string) error {
	d := net.Dialer{Timeout: patience, Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if cerr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_LOCAL_PORT_RANGE, int(port)<<16|int(port))
		}); cerr != nil {
			return cerr
		}
		return err
	}}
	c, err := d.Dial("tcp4", addr)
	if err != nil {
		return err
	}
	_ = c.(*net.TCPConn).SetLinger(0) // leave no TIME_WAIT on the number
	return c.Close()
}

// TestManyCycles is not parallel, because it counts open files.
func TestManyCycles(t *testing.T) {
	free := listen(t)
	addr := free.Addr().String()
	free.Close()
	before := openFiles(t)
	for i := range 300 {
		l, err := listener.New(t.Context(), config(func(c *listener.Config) { c.Public.Addr = addr }))
		if err != nil {
			t.Fatalf("cycle %d: %v", i, err)
		}
		ended := answer(t, l)
		if got := open(t, l); got != addr {
			t.Fatalf("cycle %d: opened at %s, want %s", i, got, addr)
		}
		// The server closes first, so TIME_WAIT stays on the number.
		wantAnswer(t, addr, listener.PortPublic)
		if i%2 == 0 {
			if err := l.Drain(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		l.Close()
		<-ended
	}
	if after := openFiles(t); after > before {
		t.Fatalf("%d files open, %d before", after, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
