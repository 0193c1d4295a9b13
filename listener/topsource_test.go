package listener

import (
	"log/slog"
	"net/netip"
	"testing"
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
