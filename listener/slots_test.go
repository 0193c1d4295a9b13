package listener_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"headgate/listener"
)

// TestStalledHandshakesLeaveRoomForTheKnown has many addresses begin handshakes
// and stall. A known client is served at once all the same, an unknown one
// within the time that stalling ones are given when places are scarce.
func TestStalledHandshakesLeaveRoomForTheKnown(t *testing.T) {
	t.Parallel()
	var trusts *tls.Config
	limits := wide()
	limits.Handshakes = 8
	simulated(t, limits, func(s *sim) {
		answer(s.T, s.l)
		s.l.SetKnown([]netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")})
		var stalled sync.WaitGroup
		for i := range 20 {
			c, err := s.dialFrom(s.public, fmt.Sprintf("198.51.100.%d", i))
			if err != nil {
				s.Fatal(err)
			}
			stalled.Go(func() {
				defer c.Close()
				_, _ = c.Write([]byte{0x16, 3, 1, 2, 0, 1}) // blocks until the handshake begins, or is not to begin
				_, _ = io.ReadAll(c)
			})
		}
		for _, from := range []struct {
			addr string
			most time.Duration
		}{{"192.0.2.1", 0}, {"192.0.2.2", 0}, {"203.0.113.1", 5 * time.Second}} {
			began := time.Now()
			c, err := s.dialFrom(s.public, from.addr)
			if err != nil {
				s.Fatal(err)
			}
			tc := tls.Client(c, trusts)
			got, err := io.ReadAll(tc)
			if took := time.Since(began); err != nil || string(got) != "public" || took > from.most {
				s.Errorf("%s had the answer %q, %v after %v; want one within %v", from.addr, got, err, took, from.most)
			}
			tc.Close()
		}
		stalled.Wait()
	}, func(c *listener.Config) { c.Public.TLS, trusts = certificate(t) })
}

// TestWaitInTheQueueIsNotTakenFromTheHandshake has a client wait in the queue
// for longer than it has for its first byte and for its handshake. Neither time
// begins before it is let in.
func TestWaitInTheQueueIsNotTakenFromTheHandshake(t *testing.T) {
	t.Parallel()
	var trusts *tls.Config
	limits := wide()
	limits.SourceRate = listener.Rate{PerSecond: 0.25, Burst: 1}
	simulated(t, limits, func(s *sim) {
		answer(s.T, s.l)
		for i, wait := range []time.Duration{0, 4 * time.Second} {
			began := time.Now()
			c, err := s.dialFrom(s.public, "198.51.100.1")
			if err != nil {
				s.Fatal(err)
			}
			tc := tls.Client(c, trusts)
			got, err := io.ReadAll(tc)
			if took := time.Since(began); err != nil || string(got) != "public" || took != wait {
				s.Errorf("client %d had the answer %q, %v after %v; want one after %v", i, got, err, took, wait)
			}
			tc.Close()
		}
	}, func(c *listener.Config) {
		c.Public.TLS, trusts = certificate(t)
		c.Public.FirstByteTimeout, c.Public.HandshakeTimeout = time.Second, 2*time.Second
	})
}

// lateConn has every write wait, as on a long way.
type lateConn struct{ net.Conn }

func (c lateConn) Write(b []byte) (int, error) {
	<-time.After(700 * time.Millisecond)
	return c.Conn.Write(b)
}

// TestControllerPortHurriesNobody has half of the controller port's handshakes
// stall: a slow operator still has the whole time for one.
func TestControllerPortHurriesNobody(t *testing.T) {
	t.Parallel()
	var trusts *tls.Config
	simulated(t, wide(), func(s *sim) {
		answer(s.T, s.l)
		var stalled sync.WaitGroup
		for range 4 {
			c, err := s.dial(s.l.Addr().String())
			if err != nil {
				s.Fatal(err)
			}
			stalled.Go(func() {
				defer c.Close()
				_, _ = c.Write([]byte{0x16, 3, 1, 2, 0, 1})
				_, _ = io.ReadAll(c)
			})
		}
		c, err := s.dial(s.l.Addr().String())
		if err != nil {
			s.Fatal(err)
		}
		tc := tls.Client(lateConn{c}, trusts)
		if got, err := io.ReadAll(tc); err != nil || string(got) != "controller" {
			s.Errorf("the slow one had the answer %q, %v", got, err)
		}
		tc.Close()
		stalled.Wait()
	}, func(c *listener.Config) {
		c.Controller.TLS, trusts = certificate(t)
		c.Controller.MaxHandshakes = 8
	})
}
