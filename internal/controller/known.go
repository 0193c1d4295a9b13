package controller

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"headgate/internal/fleet"
)

// Times of telling the listener where the agents are.
const (
	knownEvery = time.Minute // what no event told
	knownPause = time.Second // from one telling to the next, so that a storm of events costs little
)

// alwaysKnown gives whom the listener knows whatever agents there are: the
// trusted proxies, each of which speaks for many clients, and without a
// controller port this machine, since the gate and the operator call from it:
// by loopback or, where the port is not there, from the port's own address.
func (c *Controller) alwaysKnown() []netip.Prefix {
	list := slices.Clone(c.cfg.TrustedProxies)
	if !c.cfg.TwoPhase {
		list = append(list, netip.MustParsePrefix("127.0.0.1/32"), netip.MustParsePrefix("::1/128"))
		for _, at := range c.listener.Ports().Public {
			if !at.Addr().IsUnspecified() {
				list = append(list, netip.PrefixFrom(at.Addr(), at.Addr().BitLen()))
			}
		}
	}
	return list
}

// keepKnown tells the listener the addresses of the paired agents, whose
// machines it lets in first and at a higher rate, and of the trusted proxies.
func (c *Controller) keepKnown(ctx context.Context) error {
	tick := time.NewTicker(knownEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		known, err := agentSources(c.parts.fleet.List)
		if err != nil {
			c.log.Warn("list the addresses of the agents", "err", err)
		} else {
			c.listener.SetKnown(append(known, c.alwaysKnown()...))
		}
		pause(ctx, knownPause)
		select {
		case <-c.agents:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	return nil
}

// agentSources gives the IP addresses of all agents that are neither enrolling
// nor in quarantine. A host name counts with the address that it led to last.
func agentSources(list func(fleet.Filter) ([]fleet.View, error)) ([]netip.Prefix, error) {
	seen := map[netip.Prefix]bool{}
	var known []netip.Prefix
	add := func(address string) {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return
		}
		ip, err := netip.ParseAddr(host)
		if err != nil {
			return
		}
		p := netip.PrefixFrom(ip.Unmap(), ip.Unmap().BitLen())
		if !seen[p] {
			seen[p] = true
			known = append(known, p)
		}
	}
	for after := ""; ; {
		page, err := list(fleet.Filter{After: after, Limit: fleet.MaxPage})
		if err != nil {
			return nil, err
		}
		for _, v := range page {
			if v.Status != fleet.Active {
				continue
			}
			for _, a := range v.Addresses {
				add(a)
			}
			add(v.Live.Address)
		}
		if len(page) < fleet.MaxPage {
			return known, nil
		}
		after = fleet.Cursor(page[len(page)-1])
	}
}
