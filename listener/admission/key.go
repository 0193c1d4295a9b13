package admission

import "net/netip"

// Key names a source: what one party can be expected to hold. That is one
// IPv4 address, or one IPv6 /64, since a host chooses freely within its /64.
// The zero Key stands for peers that have no address. Keys are comparable.
type Key struct{ net netip.Prefix }

const (
	keyBits  = 64 // of an IPv6 source
	siteBits = 48 // of what one IPv6 customer is usually given
	wrapBits = 96 // before an IPv4 address that is written as an IPv6 one
)

// nat64 is the well-known prefix of IPv4 addresses seen through a translator.
func nat64() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0x00, 0x64, 0xff, 0x9b}), wrapBits)
}

// KeyOf gives the source that addr belongs to. An IPv4 address is the same
// source however it is written: plain, mapped into IPv6, or through NAT64.
func KeyOf(addr netip.Addr) Key {
	addr = unwrap(addr)
	bits := addr.BitLen()
	if addr.Is6() {
		bits = keyBits
	}
	p, err := addr.Prefix(bits)
	if err != nil {
		return Key{} // an address that is not valid
	}
	return Key{net: p}
}

// unwrap gives the IPv4 address within addr where there is one.
func unwrap(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if addr.Is6() && nat64().Contains(addr) {
		b := addr.As16()
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return addr
}

// Site gives the /48 around an IPv6 source, by which one who holds many /64 is
// held to a sum. All other keys are their own site.
func (k Key) Site() Key {
	if !k.net.Addr().Is6() || k.net.Bits() <= siteBits {
		return k
	}
	p, err := k.net.Addr().Prefix(siteBits)
	if err != nil {
		return k // cannot be: the address is valid and has more bits
	}
	return Key{net: p}
}

// IsZero reports whether the key stands for peers without an address.
func (k Key) IsZero() bool { return !k.net.IsValid() }

// String gives the address of an IPv4 source and the prefix of an IPv6 one.
func (k Key) String() string {
	switch {
	case k.IsZero():
		return "local"
	case k.net.IsSingleIP():
		return k.net.Addr().String()
	}
	return k.net.String()
}
