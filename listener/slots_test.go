package listener_test

import (
	"crypto/tls"
	"fmt"
	"io"
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
