package listener

import (
	"context"
	"time"
)

// Class says what the listener holds of the peer of a connection.
type Class string

// The classes.
const (
	ClassUnknown    Class = "unknown"    // nothing is known of its source
	ClassKnown      Class = "known"      // its source is, the connection has proved nothing yet
	ClassAgent      Class = "agent"      // proved by Config.Classify
	ClassController Class = "controller" // proved by Config.Classify
	ClassUser       Class = "user"       // proved by Config.Classify or Authenticated
)

// allClasses lists the values of the label class.
func allClasses() []Class {
	return []Class{ClassUnknown, ClassKnown, ClassAgent, ClassController, ClassUser}
}

// who is what a connection has proved.
type who struct {
	class Class
	id    string
}

// Authenticated notes that a request of the connection behind ctx, which
// ConnContext made, has proved to come from identity. The first call of a
// connection gives its source the token back that the connection cost, makes
// the source known for 24 hours and charges the connection to the identity in
// place of the source, so that the members of a NAT are not punished for each
// other. Later calls cost one atomic load and do nothing. An empty identity
// and a ctx without a connection of ours do nothing.
func Authenticated(ctx context.Context, identity string) {
	c, ok := ctx.Value(infoKey{}).(*conn)
	if !ok || identity == "" || c.who.Load() != nil {
		return
	}
	c.port.identify(c, who{class: ClassUser, id: identity})
}

// identify notes what a connection has proved; only the first proof counts.
func (p *port) identify(c *conn, w who) {
	switch w.class {
	case ClassAgent, ClassController, ClassUser:
	default:
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_, held := p.conns[c]
	if !held || !c.who.CompareAndSwap(nil, &w) {
		return
	}
	p.classes[c.info.Class]--
	p.classes[w.class]++
	if p.door != nil {
		p.door.identified(time.Now(), c, w)
	}
}

// RetryAfter gives how long the client behind ctx, which ConnContext made,
// should stay away: for the answer to a connection with ConnInfo.Shed. It
// grows from 1 to 32 s while the port goes on to be too full, and is spread
// over half to one and a half of that so that clients do not return together.
func RetryAfter(ctx context.Context) time.Duration {
	c, ok := ctx.Value(infoKey{}).(*conn)
	if !ok || c.port.door == nil {
		return minRetryAfter
	}
	return c.port.door.retryAfter(time.Now())
}
