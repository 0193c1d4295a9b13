// Package listener provides one net.Listener over two ports that open at
// different times: the controller port accepts from the start, the public port
// only once the program has said that it is stable. It knows nothing of the
// program that uses it; what it needs arrives in Config. It does not
// speak HTTP or decide what stable means.
//
// # Why two ports
//
// A server that has just started usually has to call itself, or its peers,
// before it can serve the public. If the same port does both, the waiting
// public takes the capacity that the start needs. Here New binds the controller
// port and reserves the public one: until it opens, the public port belongs to
// this process but refuses every connection, so a conflict shows at once, its
// number is known even when 0 was asked for, and nobody else can take it.
//
// # Use
//
//	l, err := listener.New(ctx, listener.Config{
//		Controller: listener.PortConfig{Addr: "127.0.0.1:7441", TLS: inner},
//		Public:     listener.PortConfig{Addr: ":7440", TLS: outer},
//		OpenDelay:  listener.DefaultOpenDelay,
//	})
//	srv := &http.Server{Handler: h, ConnContext: listener.ConnContext}
//	go srv.Serve(l)     // Serve, not ServeTLS: handshakes are made here
//	l.MarkStable("migrated and reachable")
//
// A handler asks InfoFrom(r.Context()) which port its connection came in by.
//
// # What Accept promises
//
// Accept returns a live connection, or net.ErrClosed after Close or Drain, or,
// once, a *FatalError when the controller port is lost for good. Nothing that
// goes wrong with a single connection, and nothing that goes wrong with the
// public port, comes out of it: http.Server ends at the first error it does not
// know and slows down at those it calls temporary. Connections of the
// controller port are handed out first.
//
// TLS handshakes happen before Accept returns, in a bounded number at a time
// and each within a deadline, so that silent and slow clients delay nobody. A
// TLS connection is handed out as *tls.Conn itself, as HTTP/2 needs it; name
// "h2" in NextProtos of the port's tls.Config to have it. Certificates can be
// changed without a restart by GetConfigForClient or GetCertificate.
//
// # Who is let in
//
// The public port lets sources in by turn. A source (one IPv4 address, one IPv6
// /64) that comes faster than its rate waits in its own part of a fair queue,
// and delays nobody else; all together are paced too, since every handshake
// costs processor time. Known sources (named by SetKnown, or with a login in
// the last day) have a higher rate and four of five turns, strangers never less
// than the fifth. A handler that has made out whom a request is from says so by
// Authenticated: then the connection is charged to that identity, and many
// members behind one address do not take each other's places.
//
// Whoever must be refused is reset before the handshake, which costs least on
// both sides and is not mistaken for a broken protocol. Between the soft and
// the hard cap of connections they are let in with ConnInfo.Shed set, so that
// the program can say why and when to come back (RetryAfter). The controller
// port has none of this, only caps of its own: a flood on the public port does
// not reach it. Limits names every limit; UpdateLimits changes them at work,
// and the mode observe counts without refusing.
//
// # States
//
//	starting -> controller-only <-> settling -> open <-> shedding
//	                                  ^  |                  |
//	                                  |  v                  |
//	                                reclosed <--------------+
//
//	settling, open, shedding -> public-failed -> open
//	any of them -> draining -> closed
//
// MarkStable and MarkUnstable move it, and may be called as often as the
// program changes its mind: an open port rides out UnstableGrace, sheds (only
// clients it knows come in), and after ReclosePeriod refuses again; then every
// opening takes twice the delay of the one before, up to a minute. Live
// connections are never ended by it. Who is admitted changes at most twice in
// twice MinOpen. OpenBarrier lets several programs open together.
//
// Repeated and impossible requests do nothing. A public port that cannot be
// opened is tried again, with a growing pause, and never disturbs the
// controller port. OnPorts hears of every change of state.
//
// # Sockets of other kinds
//
// A port may be a unix socket (unix:/path, unix:@name) instead of TCP. Its file
// exists while the port accepts; a stale one is removed first, a live one or
// another file is left alone. Sockets that a service manager passed take the
// place of addresses by Config.Activated; they are never shut down or unlinked.
// Config.OnePort does without the controller port.
//
// # Operating systems
//
// Reserving uses what Linux offers (a bound socket that does not listen) and
// checks after each step that it had the effect meant. Where the check fails,
// and on other systems, the port is closed and bound again when it opens; then
// another program can take it in between, and New logs a warning when the
// number is one that outgoing connections are given.
package listener
