package listener

import (
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"

	"headgate/listener/admission"
)

func TestTheSourceWithMostRefusalsIsCounted(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	p := &port{name: PortPublic, met: newMetrics(), log: slog.New(slog.DiscardHandler)}
	d := newDoor(p, Limits{}.withDefaults(false), 0, now)
	refuse := func(addr string, times int) {
		s := d.sources.Get(now, admission.KeyOf(netip.MustParseAddr(addr)))
		for range times {
			d.sources.Refuse(s, "rate_source")
		}
	}
	counted := func() float64 {
		var m dto.Metric
		if err := p.met.topRefused.Write(&m); err != nil {
			t.Fatal(err)
		}
		return m.GetCounter().GetValue()
	}
	refuse("192.0.2.1", 3)
	refuse("192.0.2.2", 5)
	d.tell(now)
	if got := counted(); got != 5 {
		t.Errorf("counted %v, want the 5 of the second source", got)
	}
	refuse("192.0.2.1", 2)
	d.tell(now)
	if got := counted(); got != 7 {
		t.Errorf("counted %v, want 5 and 2", got)
	}
	d.tell(now)
	if got := counted(); got != 7 {
		t.Errorf("counted %v although nothing was refused", got)
	}
}

// TestManySourcesAreLookedThroughOnceASecond asks for the status of a port with
// a large table, while which everybody else waits.
func TestManySourcesAreLookedThroughOnceASecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &port{name: PortPublic, met: newMetrics(), log: slog.New(slog.DiscardHandler)}
		d := newDoor(p, Limits{}.withDefaults(false), 0, time.Now())
		refuse := func(i, times int) {
			s := d.sources.Get(time.Now(), admission.KeyOf(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})))
			for range times {
				d.sources.Refuse(s, "rate_source")
			}
		}
		most := func() string { return d.status().Top[0].Source }
		refuse(0, 5)
		if got := most(); got != "192.0.0.0" {
			t.Fatalf("most is refused of %s", got)
		}
		refuse(1, 6)
		if got := most(); got != "192.0.0.1" {
			t.Errorf("of few sources most is refused of %s", got)
		}
		for i := range fewSources {
			refuse(i+2, 1)
		}
		refuse(2, 7)
		if got := most(); got != "192.0.0.1" {
			t.Errorf("many sources are looked through again at once, which names %s", got)
		}
		<-time.After(topEvery)
		if got := most(); got != "192.0.0.2" {
			t.Errorf("a second later most is refused of %s", got)
		}
	})
}
