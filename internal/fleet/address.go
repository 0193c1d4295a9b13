package fleet

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"headgate/internal/fault"
)

const (
	// DefaultAgentPort is where an agent listens unless told otherwise.
	DefaultAgentPort = 7442
	// maxHostName is the longest DNS name.
	maxHostName = 253
	// MaxAddresses of one agent; each failed one delays the next.
	MaxAddresses = 4
	// CodeAddressRefused is the code of every refusal to dial an address.
	CodeAddressRefused = "address_refused"
)

// ParseAddress reads what a user gave as an agent's address and gives it as
// host:port. Only a plain host name or IP address passes: a target with a
// scheme could open a UNIX socket, one with a zone reaches the local link.
func ParseAddress(text string) (string, error) {
	text = strings.TrimSpace(text)
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		// The port may be left out, also behind an IPv6 address.
		host, port = strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"), strconv.Itoa(DefaultAgentPort)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 {
		return "", badAddress(text, "its port is not a number from 1 to 65535")
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return "", badAddress(text, "addresses with a zone reach only the local link")
		}
		return netip.AddrPortFrom(addr.Unmap(), uint16(number)).String(), nil
	}
	if !isHostName(host) {
		return "", badAddress(text, "its host is neither a name nor an IP address")
	}
	return net.JoinHostPort(strings.ToLower(host), strconv.FormatUint(number, 10)), nil
}

func badAddress(text, why string) error {
	const shown = 80 // characters of a wrong address that are repeated
	if len(text) > shown {
		text = strings.ToValidUTF8(text[:shown], "") + "..."
	}
	return fault.Newf(fault.Invalid, "invalid_address", "The address %q cannot be used: %s.", text, why).
		WithHint("Write host:port, for example 192.0.2.10:7442 or dns1.example.org:7442.")
}

func isHostName(host string) bool {
	if host == "" || len(host) > maxHostName {
		return false
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(host, "."), ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			if c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
				return false
			}
		}
	}
	return true
}

// dialPolicy decides about addresses after names have been resolved, so that
// a name cannot lead where its text did not say.
type dialPolicy struct {
	allowLoopback bool
	deny          func(netip.AddrPort) bool // own listeners and the database; may be nil
}

// check is asked for the very address that is about to be dialled.
func (p dialPolicy) check(target netip.AddrPort) error {
	addr := embedded(target.Addr())
	why := ""
	switch {
	case addr.IsUnspecified():
		why = "it is no address of a machine"
	case addr.IsMulticast(), addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		why = "it stands for many machines"
	case addr.IsLinkLocalUnicast(), isMetadata(addr):
		why = "link-local and cloud metadata addresses are never dialled"
	case addr.IsLoopback() && !p.allowLoopback:
		why = "it is this machine itself and allow_loopback_agents is off"
	case p.deny != nil && p.deny(netip.AddrPortFrom(addr, target.Port())):
		why = "this controller itself or its database listens there"
	default:
		return nil
	}
	return fault.New(fault.Forbidden, CodeAddressRefused, "The address is not dialled: "+why+".").
		WithHint("Give an address at which the agent can be reached from this controller.")
}

// isMetadata knows the metadata services that are not link-local.
func isMetadata(addr netip.Addr) bool {
	return addr == netip.AddrFrom4([4]byte{100, 100, 100, 200}) ||
		addr == netip.AddrFrom16([16]byte{0: 0xfd, 2: 0x0e, 3: 0xc2, 14: 0x02, 15: 0x54})
}

// embedded gives the IPv4 address inside a mapped or NAT64 form.
func embedded(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if nat64 := netip.PrefixFrom(netip.AddrFrom16([16]byte{1: 0x64, 2: 0xff, 3: 0x9b}), 96); nat64.Contains(addr) {
		b := addr.As16()
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return addr
}
