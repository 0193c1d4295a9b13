package controller

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"headgate/internal/store"
)

// hostIdentity tells machines apart: controllers on one have the same. Two
// machines of one image differ by the boot, two containers of one machine by
// the name.
func hostIdentity() string {
	var parts []string
	for _, name := range []string{"/etc/machine-id", "/proc/sys/kernel/random/boot_id"} {
		if b, err := os.ReadFile(name); err == nil {
			parts = append(parts, strings.TrimSpace(string(b)))
		}
	}
	return strings.Join(append(parts, hostname()), " ")
}

// checkAdvertised refuses to join controllers that could not call this one, or
// that this one could not call: each would look well and refuse what belongs to
// the other's agents.
func (c *Controller) checkAdvertised(ctx context.Context) error {
	list, err := c.parts.db.Controllers(ctx)
	if err != nil {
		return err
	}
	here, host := c.advertised(), hostIdentity()
	for _, other := range list {
		if other.ID == c.state.owner || slices.Contains(c.state.former, other.ID) || other.Host == "" {
			continue
		}
		if err := unreachableBetween(here, host, c.cfg.TwoPhase, other); err != nil {
			return err
		}
	}
	return nil
}

// unreachableBetween says why a controller at that address and another one
// cannot call each other; nil = nothing speaks against it.
func unreachableBetween(here, host string, hasPort bool, other store.Controller) error {
	switch {
	case !hasPort:
		return fmt.Errorf("two-phase: the controller %s at %q works on this database too, and calls need a controller port on both sides; set two-phase to true, or stop the other one (one that was killed is forgotten after %s)",
			other.Name, other.Addr, store.ControllerSilence)
	case other.Addr == "":
		return fmt.Errorf("the controller %s, which works on this database too, has no controller port (two-phase: false), so it cannot be called; set its two-phase to true, or stop it (one that was killed is forgotten after %s)",
			other.Name, store.ControllerSilence)
	case other.Host == host:
		return nil
	case onlyLocal(here):
		return fmt.Errorf("controller-advertise: the controller %s at %s, on another host, cannot reach this one at %s; set controller-addr to an address of this host that the other one reaches and, if that is 0.0.0.0 or behind NAT, controller-advertise to what the other one has to call",
			other.Name, other.Addr, here)
	case onlyLocal(other.Addr):
		return fmt.Errorf("the controller %s, on another host, says that it is reached at %s, which leads to this host; set its controller-addr, or its controller-advertise, to an address that this host reaches, and restart it (one that was killed is forgotten after %s)",
			other.Name, other.Addr, store.ControllerSilence)
	}
	return nil
}

// onlyLocal says whether an address means something on its own machine alone.
func onlyLocal(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil || host == "" || host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && (ip.IsLoopback() || ip.IsUnspecified())
}
