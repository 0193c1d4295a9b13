package listener

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func loopback() netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0) }

// TestReservationOpensAndRefusesManyTimes goes through 300 openings of one
// reservation: the number stays, live connections survive, waiting ones are
// reset, and nobody can take the port in between. Acceptance 18.
func TestReservationOpensAndRefusesManyTimes(t *testing.T) {
	t.Parallel()
	r, err := reserve(loopback())
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	addr := r.addr.String()
	var liveClient, liveServer net.Conn
	for i := range 300 {
		ln, err := r.open()
		if err != nil {
			t.Fatalf("opening %d: %v", i, err)
		}
		if i == 0 {
			if liveClient, err = net.Dial("tcp", addr); err != nil {
				t.Fatal(err)
			}
			defer liveClient.Close()
			if liveServer, err = ln.Accept(); err != nil {
				t.Fatal(err)
			}
			defer liveServer.Close()
		}
		waiting, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatalf("opening %d: %v", i, err)
		}
		ln.Close()
		if err := r.refuse(); err != nil {
			t.Fatalf("refusing %d: %v", i, err)
		}
		if _, err := waiting.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a waiting client sees %v, want a reset", err)
		}
		waiting.Close()
		if c, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("while refusing a dial gives %v, %v", c, err)
		}
		if ln, err := net.Listen("tcp", addr); err == nil {
			ln.Close()
			t.Fatal("while refusing somebody else could listen")
		}
	}
	if _, err := io.WriteString(liveServer, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := liveClient.Read(make([]byte, 1)); err != nil {
		t.Errorf("the live connection broke: %v", err)
	}
}

// TestReuseLeftOnLosesThePort shows why reserve clears SO_REUSEADDR: with it
// on, the kernel gives the port to any program of Go.
func TestReuseLeftOnLosesThePort(t *testing.T) {
	t.Parallel()
	r, err := reserve(loopback())
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	if on, err := unix.GetsockoptInt(r.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR); err != nil || on != 0 {
		t.Fatalf("SO_REUSEADDR of a reserved socket is %d, %v", on, err)
	}
	if ln, err := net.Listen("tcp", r.addr.String()); err == nil {
		ln.Close()
		t.Fatal("the reserved port could be taken")
	}
	if err := r.reuse(true); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", r.addr.String())
	if err != nil {
		t.Fatalf("the hazard is gone: %v", err)
	}
	ln.Close()
}

// TestReservationThatTheKernelLosesFallsBack takes the socket's listening
// state away behind the back of publicSocket, as an unknown kernel might.
func TestReservationThatTheKernelLosesFallsBack(t *testing.T) {
	t.Parallel()
	cfg := Config{
		Controller: PortConfig{Addr: "127.0.0.1:0"}, Public: PortConfig{Addr: "127.0.0.1:0"},
		Logger: slog.New(slog.DiscardHandler),
	}
	s, err := newPublicSocket(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	r := s.held.(*reservation)
	want := r.addr
	// Another number under the same socket: what an auto-assigned port does.
	r.close()
	if r, err = bindExactly(loopback()); err != nil {
		t.Fatal(err)
	}
	r.addr = want
	s.held = r
	if err := s.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.held != nil {
		t.Error("the reservation that failed its check is still in use")
	}
	if got := s.ln.Addr().String(); got != want.String() {
		t.Errorf("listens at %s, want %s", got, want)
	}
	s.refuse()
	if c, err := net.Dial("tcp", want.String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after refuse a dial gives %v, %v", c, err)
	}
	if err := s.open(t.Context()); err != nil {
		t.Errorf("second opening: %v", err)
	}
}
