package admission_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/listener/admission"
)

func key(tb testing.TB, addr string) admission.Key {
	tb.Helper()
	a, err := netip.ParseAddr(addr)
	if err != nil {
		tb.Fatal(err)
	}
	return admission.KeyOf(a)
}

// nth gives the key of the n-th of many addresses.
func nth(n int) admission.Key {
	return admission.KeyOf(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}))
}

func rates() admission.SourceRates {
	return admission.SourceRates{Source: admission.Rate{PerSecond: 20, Burst: 40}, Known: 10}
}

func TestSourcesAreHeldToTheirOwnRate(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(0, rates())
	a, b := table.Get(now, nth(1)), table.Get(now, nth(2))
	if got := takes(1000, func() bool { return table.Take(now, a) }); got != 40 {
		t.Errorf("one source had %d", got)
	}
	if got := takes(1000, func() bool { return table.Take(now, b) }); got != 40 {
		t.Errorf("another had %d beside a noisy one", got)
	}
	table.Give(now, a)
	if got := takes(10, func() bool { return table.Take(now, a) }); got != 1 {
		t.Errorf("a token given back was taken %d times", got)
	}
	table.Charge(now, a, 5)
	if at, want := table.ReadyAt(now, a), now.Add(300*time.Millisecond); !at.Equal(want) {
		t.Errorf("after a charge of 5 ready at %v, want %v", at, want)
	}
}

func TestManySubnetsOfOneSite(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(0, rates())
	got := 0
	for i := range 100 {
		s := table.Get(now, key(t, fmt.Sprintf("2001:db8:1:%x::1", i)))
		got += takes(40, func() bool { return table.Take(now, s) })
	}
	if got != 320 {
		t.Errorf("one /48 had %d, want eight times 40", got)
	}
	s := table.Get(now, key(t, "2001:db8:1:aaaa::1"))
	if at, want := table.ReadyAt(now, s), now.Add(6250*time.Microsecond); !at.Equal(want) {
		t.Errorf("its next source is ready at %v, want %v", at, want)
	}
	other := table.Get(now, key(t, "2001:db8:2::1"))
	if got := takes(100, func() bool { return table.Take(now, other) }); got != 40 {
		t.Errorf("another site had %d", got)
	}
}

func TestKnownSources(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(0, rates())
	s := table.Get(now, nth(1))
	if table.Known(now, s) {
		t.Fatal("a stranger is known")
	}
	takes(40, func() bool { return table.Take(now, s) })
	table.Login(now, s)
	if !table.Known(now, s) || table.Take(now, s) {
		t.Error("a login must make a source known, and fill nothing")
	}
	now = now.Add(time.Hour)
	if got := takes(1000, func() bool { return table.Take(now, s) }); got != 400 {
		t.Errorf("a known source had %d, want ten times 40", got)
	}
	now = now.Add(23 * time.Hour)
	if table.Known(now, s) {
		t.Error("known for more than a day after the login")
	}
	for list, want := range map[string]bool{
		"10.0.0.1/32": true, "10.0.0.0/24": true, "10.0.0.2/32": false, "::ffff:10.0.0.1/128": true,
		"64:ff9b::a00:1/128": true, "64:ff9b::/64": false, "2001:db8::/32": false, "0.0.0.0/0": true,
	} {
		p, err := netip.ParsePrefix(list)
		if err != nil {
			at, _, _ := cut(list)
			p = netip.PrefixFrom(netip.MustParseAddr(at), 128)
		}
		table.SetKnown([]netip.Prefix{p})
		if got := table.Known(now, s); got != want {
			t.Errorf("10.0.0.1 known by %s: %v, want %v", list, got, want)
		}
	}
	six := table.Get(now, key(t, "2001:db8:0:7::1"))
	for list, want := range map[string]bool{"2001:db8:0:7::99/128": true, "2001:db8::/48": true, "2001:db8:0:8::/64": false} {
		table.SetKnown([]netip.Prefix{{}, netip.MustParsePrefix(list)})
		if got := table.Known(now, six); got != want {
			t.Errorf("known by %s: %v, want %v", list, got, want)
		}
	}
	if !table.Known(now, table.Get(now, admission.Key{})) {
		t.Error("a peer without an address is a program of this machine, and known")
	}
}

func cut(prefix string) (addr, bits string, ok bool) {
	for i := range prefix {
		if prefix[i] == '/' {
			return prefix[:i], prefix[i+1:], true
		}
	}
	return prefix, "", false
}

// Acceptance 41.
func TestFullTableGivesNoFreePass(t *testing.T) {
	t.Parallel()
	const size = 1000
	now, table := start(), admission.NewSources(size, rates())
	for i := range size {
		table.Take(now, table.Get(now, nth(i)))
	}
	got := 0
	for i := range 100_000 { // each address once
		if table.Take(now, table.Get(now, nth(size+i))) {
			got++
		}
	}
	if got != 40*admission.SiteFactor {
		t.Errorf("new addresses had %d beside a full table, want %d", got, 40*admission.SiteFactor)
	}
	if table.Len() != size || table.Overflows() != 100_000 {
		t.Errorf("table holds %d, %d overflows", table.Len(), table.Overflows())
	}
	over := table.Get(now, nth(999_999))
	table.Login(now, over)
	if table.Known(now, over) {
		t.Error("one login in the overflow makes all strangers known")
	}
	agent := nth(888_888)
	table.SetKnown([]netip.Prefix{netip.MustParsePrefix(agent.String() + "/32")})
	if s := table.Get(now, agent); s == over || !table.Known(now, s) {
		t.Error("a known source found no place")
	}
	table.SetKnown([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")})
	for i := range 10 * size {
		table.Get(now, nth(2_000_000+i))
	}
	if table.Len() > size+size/8 {
		t.Errorf("table holds %d when everybody is known", table.Len())
	}
	table.SetKnown(nil)
	now = now.Add(3 * time.Second) // all buckets are full again: the old are as good as new
	if s := table.Get(now, nth(777_777)); s == over {
		t.Error("idle sources keep their places from new ones")
	}
}

func TestSourcesInUseKeepTheirPlaces(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(4, rates())
	held, known, empty := table.Get(now, nth(1)), table.Get(now, nth(2)), table.Get(now, nth(3))
	if !table.Hold(held, 1) || table.Hold(held, 1) {
		t.Fatal("the limit of connections is not kept")
	}
	table.Login(now, known)
	takes(40, func() bool { return table.Take(now, empty) })
	for i := range 100 {
		table.Get(now, nth(100+i))
	}
	for i, s := range []*admission.Source{held, known, empty} {
		if table.Get(now, nth(i+1)) != s {
			t.Errorf("source %d lost its place", i+1)
		}
	}
	table.Release(held)
	now = now.Add(3 * time.Second)
	for i := range 100 {
		table.Get(now, nth(200+i))
	}
	if table.Get(now, nth(1)) == held {
		t.Error("an idle source kept its place")
	}
	if table.Get(now, nth(2)) != known {
		t.Error("a known source lost its place")
	}
}

func TestHundredThousandSourcesInBoundedMemory(t *testing.T) { // not parallel: it looks at memory
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	now, table := start(), admission.NewSources(0, rates())
	for i := range 100_000 {
		s := table.Get(now, nth(i))
		table.Take(now, s)
		table.Refuse(s, "rate_source")
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if used := int64(after.HeapAlloc) - int64(before.HeapAlloc); used > 64<<20 {
		t.Errorf("%d MiB for 100,000 sources", used>>20)
	}
	if table.Len() != admission.MaxSources {
		t.Errorf("table holds %d", table.Len())
	}
	now = now.Add(time.Hour)
	table.TakeRefusals()
	for range 2 * admission.MaxSources {
		table.Get(now, nth(1))
		table.Get(now, nth(200_000))
		now = now.Add(time.Millisecond)
	}
	runtime.KeepAlive(table)
}

func TestIdleSourcesAreForgotten(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(0, rates())
	for i := range 1000 {
		table.Get(now, nth(i))
	}
	now = now.Add(time.Hour)
	for i := range 500 { // each newcomer clears two away
		table.Get(now, nth(10_000+i))
	}
	if table.Len() != 500 {
		t.Errorf("table holds %d, want the 500 new ones", table.Len())
	}
}

func TestChangedSourceRatesFillNothing(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(0, rates())
	s := table.Get(now, nth(1))
	takes(40, func() bool { return table.Take(now, s) })
	now = now.Add(time.Second) // worth 20 by the old rate
	table.SetRates(now, admission.SourceRates{Source: admission.Rate{PerSecond: 1000, Burst: 1000}})
	if got := takes(1000, func() bool { return table.Take(now, s) }); got != 20 {
		t.Errorf("after the change the source had %d, want 20", got)
	}
}

func TestRefusalsAreSummarised(t *testing.T) {
	t.Parallel()
	now, table := start(), admission.NewSources(0, rates())
	for i := range 40 {
		for range i + 1 {
			table.Refuse(table.Get(now, nth(i)), "rate_source")
		}
	}
	list, rest := table.TakeRefusals()
	if len(list) != 32 || list[4].Count != 5 || list[4].Why != "rate_source" {
		t.Errorf("got %d lines, the fifth is %+v", len(list), list[4])
	}
	if want := uint64(8 * (33 + 40) / 2); rest != want {
		t.Errorf("the rest is %d, want %d", rest, want)
	}
	if list, rest := table.TakeRefusals(); len(list) != 0 || rest != 0 {
		t.Error("told twice")
	}
	table.Hold(table.Get(now, nth(0)), 0)
	var got []string
	for _, v := range table.Top(now, 3) {
		got = append(got, fmt.Sprint(v.Key, v.Conns, v.Refused))
	}
	if d := cmp.Diff([]string{"10.0.0.39 0 40", "10.0.0.38 0 39", "10.0.0.37 0 38"}, got); d != "" {
		t.Errorf("top (-want +got):\n%s", d)
	}
}
