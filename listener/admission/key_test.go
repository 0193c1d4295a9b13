package admission_test

import (
	"net/netip"
	"testing"

	"headgate/listener/admission"
)

// Acceptance 40.
func TestOneSourceHoweverItsAddressIsWritten(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]struct{ key, site string }{
		"192.0.2.7":                {"192.0.2.7", "192.0.2.7"},
		"::ffff:192.0.2.7":         {"192.0.2.7", "192.0.2.7"},
		"64:ff9b::c000:207":        {"192.0.2.7", "192.0.2.7"},
		"64:ff9b::192.0.2.7":       {"192.0.2.7", "192.0.2.7"},
		"64:ff9b:1::192.0.2.7":     {"64:ff9b:1::/64", "64:ff9b:1::/48"}, // a local prefix is not the well-known one
		"2001:db8:1:2:3:4:5:6":     {"2001:db8:1:2::/64", "2001:db8:1::/48"},
		"2001:db8:1:2:ffff::1":     {"2001:db8:1:2::/64", "2001:db8:1::/48"},
		"2001:db8:1:3::1":          {"2001:db8:1:3::/64", "2001:db8:1::/48"},
		"fe80::1%eth0":             {"fe80::/64", "fe80::/48"},
		"::1":                      {"::/64", "::/48"},
		"::ffff:192.0.2.7%strange": {"192.0.2.7", "192.0.2.7"},
	} {
		a, err := netip.ParseAddr(addr)
		if err != nil {
			t.Fatal(err)
		}
		k := admission.KeyOf(a)
		if k.String() != want.key || k.Site().String() != want.site {
			t.Errorf("%s: source %s of site %s, want %s of %s", addr, k, k.Site(), want.key, want.site)
		}
		if k.Site().Site() != k.Site() {
			t.Errorf("%s: the site of its site is another", addr)
		}
	}
	if k := admission.KeyOf(netip.Addr{}); !k.IsZero() || k.String() != "local" || k.Site() != k {
		t.Errorf("no address gives %s", k)
	}
}
