package controller

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"headgate/handlers"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/pki"
	"headgate/tasks"
)

// Times and sizes of calls to other controllers.
const (
	peerDial    = 3 * time.Second  // to connect, and for the handshake; on one network it takes milliseconds
	peerCall    = 12 * time.Second // for an answer: the owner itself says what it knows after 10 s
	peerPing    = 4 * time.Second  // of silence until the connection is probed, and for the answer to that
	peerCalls   = 64               // at one time to one controller, below what it admits on one connection
	peerAnswers = 32 << 20         // bytes of one answer
	peerIdle    = 5 * time.Minute  // until a connection to a controller that nobody calls is closed
)

// peerClient calls other controllers over their controller ports, each by one kept
// HTTP/2 connection. The other one must show the certificate of the very
// controller that the database names, from the fleet's CA, and is shown that
// of this one. It implements tasks.Peers.
type peerClient struct {
	identity *pki.Identity
	roots    *pki.Roots
	log      *slog.Logger

	mu    sync.Mutex // guards conns
	conns map[uuid.UUID]*peerConn
}

// peerConn is the way to one controller, as long as it runs.
type peerConn struct {
	addr  string
	http  *http.Client
	slots chan struct{}
}

func newPeers(identity *pki.Identity, roots *pki.Roots, log *slog.Logger) *peerClient {
	return &peerClient{identity: identity, roots: roots, log: log, conns: map[uuid.UUID]*peerConn{}}
}

// conn gives the way to the owner of a lease.
func (p *peerClient) conn(to tasks.Lease) *peerConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.conns[to.Owner]
	if c != nil && c.addr == to.Addr {
		return c
	}
	if c != nil {
		c.http.CloseIdleConnections()
	}
	transport := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: peerDial}).DialContext,
		TLSClientConfig:     pki.DialController(p.identity, p.roots, to.Peer),
		TLSHandshakeTimeout: peerDial,
		ForceAttemptHTTP2:   true,
		IdleConnTimeout:     peerIdle,
		DisableCompression:  true,
		HTTP2:               &http.HTTP2Config{StrictMaxConcurrentRequests: true, SendPingTimeout: peerPing, PingTimeout: peerPing},
	}
	c = &peerConn{addr: to.Addr, http: &http.Client{Transport: transport}, slots: make(chan struct{}, peerCalls)}
	p.conns[to.Owner] = c
	return c
}

// keep drops the ways to controllers that are gone.
func (p *peerClient) keep(alive map[uuid.UUID]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, c := range p.conns {
		if !alive[id] {
			c.http.CloseIdleConnections()
			delete(p.conns, id)
		}
	}
}

func (p *peerClient) close() { p.keep(nil) }

// Store implements tasks.Peers.
func (p *peerClient) Store(ctx context.Context, to tasks.Lease, list []tasks.PeerInsert) ([]tasks.PeerStored, error) {
	var out handlers.PeerTasksAnswer
	err := p.call(ctx, to, handlers.PeerTasks, handlers.PeerTasksBody{Tasks: list}, &out)
	return out.Items, err
}

// Cancel implements tasks.Peers.
func (p *peerClient) Cancel(ctx context.Context, to tasks.Lease, id tasks.ID, actor string) error {
	return p.call(ctx, to, handlers.PeerCancel, handlers.PeerCancelBody{ID: id, Actor: actor}, nil)
}

// Explain implements tasks.Peers.
func (p *peerClient) Explain(ctx context.Context, to tasks.Lease, list []tasks.PeerTask) ([]*tasks.Waiting, error) {
	var out handlers.PeerExplainAnswer
	err := p.call(ctx, to, handlers.PeerExplain, handlers.PeerExplainBody{Tasks: list}, &out)
	return out.Items, err
}

// ping has the owner of a lease ping an agent.
func (p *peerClient) ping(ctx context.Context, to tasks.Lease, agent uuid.UUID) (fleet.Pong, error) {
	var out handlers.PeerPingAnswer
	err := p.call(ctx, to, handlers.PeerPing, handlers.PeerPingBody{Agent: agent}, &out)
	return out.Pong, err
}

// peerJSON encodes what is sent. Arguments are text in it, in which <, > and &
// stay as they are: for pages, encoding/json would make six bytes of each, and
// a request that is not too large for us would be for the other controller.
func peerJSON(in any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(in)
	return b.Bytes(), err
}

// call makes one request. Its errors are those that tasks.Peers speaks of.
func (p *peerClient) call(ctx context.Context, to tasks.Lease, path string, in, out any) error {
	body, err := peerJSON(in)
	if err != nil {
		return &tasks.UnsentError{Err: err}
	}
	ctx, cancel := context.WithTimeout(ctx, peerCall)
	defer cancel()
	c := p.conn(to)
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return &tasks.UnsentError{Err: ctx.Err()}
	}
	var sent atomic.Bool // set by the transport's goroutine
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { sent.Store(true) }})
	req, err := http.NewRequestWithContext(traced, http.MethodPost, "https://"+to.Addr+path, bytes.NewReader(body))
	if err != nil {
		return &tasks.UnsentError{Err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		if !sent.Load() {
			return &tasks.UnsentError{Err: err}
		}
		return fmt.Errorf("call %s: %w", to.Addr, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, peerAnswers))
	switch {
	case err != nil:
		return fmt.Errorf("read the answer of %s: %w", to.Addr, err)
	case resp.StatusCode >= http.StatusBadRequest:
		return refusal(resp.StatusCode, answer)
	case out == nil:
		return nil
	}
	return json.Unmarshal(answer, out)
}

// refusal gives what another controller's problem document says. One that does
// not know us, or no such call, has done nothing.
func refusal(status int, body []byte) error {
	var p handlers.Problem
	err := json.Unmarshal(body, &p)
	kinds := map[int]fault.Kind{
		http.StatusBadRequest: fault.Malformed, http.StatusUnprocessableEntity: fault.Invalid, http.StatusNotFound: fault.NotFound,
		http.StatusConflict: fault.Conflict, http.StatusRequestEntityTooLarge: fault.TooLarge, http.StatusTooManyRequests: fault.Exhausted,
		http.StatusServiceUnavailable: fault.Unavailable, http.StatusInternalServerError: fault.Internal,
	}
	kind, known := kinds[status]
	if err != nil || !known || p.Code == "" || p.Code == "no_such_path" {
		return &tasks.UnsentError{Err: fmt.Errorf("it answered %d %s", status, p.Code)}
	}
	return &fault.Error{Kind: kind, Code: p.Code, Message: p.Detail, Hint: p.Hint}
}

// Times of following another controller's events.
const (
	peersEvery = 2 * time.Second            // between looks at who lives
	followIdle = 3 * handlers.PeerHeartbeat // without a line, the connection is dead
	followRest = 500 * time.Millisecond     // before a stream that ended is opened again
)

// followPeers tells the readers and waiters of this controller what happens at
// the others, for as long as they live.
func (c *Controller) followPeers(ctx context.Context) error {
	following := map[uuid.UUID]context.CancelFunc{}
	var all sync.WaitGroup
	defer all.Wait()
	defer c.parts.peers.close()
	tick := time.NewTicker(peersEvery)
	defer tick.Stop()
	for {
		list, err := c.parts.db.Controllers(ctx)
		if err == nil {
			alive := map[uuid.UUID]bool{}
			for _, other := range list {
				if other.ID == c.state.owner || other.Addr == "" || other.Identity == uuid.Nil() {
					continue
				}
				alive[other.ID] = true
				if following[other.ID] == nil {
					one, cancel := context.WithCancel(ctx)
					following[other.ID] = cancel
					to := tasks.Lease{Owner: other.ID, Addr: other.Addr, Peer: other.Identity, Name: other.Name}
					all.Go(func() { c.followPeer(one, to) })
				}
			}
			for id, cancel := range following {
				if !alive[id] {
					cancel()
					delete(following, id)
				}
			}
			c.parts.peers.keep(alive)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			for _, cancel := range following {
				cancel()
			}
			return nil
		}
	}
}

// followPeer follows one controller until it is gone. Whatever may have been
// missed makes everybody read again.
func (c *Controller) followPeer(ctx context.Context, to tasks.Lease) {
	hub, last := c.parts.manager.Hub(), ""
	hub.Missed() // what happened there before
	said := false
	for ctx.Err() == nil {
		began := time.Now()
		err := c.parts.peers.follow(ctx, to, &last, hub)
		if ctx.Err() == nil && !said {
			c.log.Warn("the events of another controller do not arrive; trying on", "controller", to.Name, "address", to.Addr, "err", err)
		}
		said = time.Since(began) < followIdle // it was the same trouble before
		pause(ctx, followRest)
	}
	hub.Missed()
}

// follow reads events behind last until the stream ends.
func (p *peerClient) follow(ctx context.Context, to tasks.Lease, last *string, hub *tasks.Hub) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	alive := time.AfterFunc(followIdle, cancel)
	defer alive.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+to.Addr+handlers.PeerEvents+"?"+handlers.PeerAfter+"="+*last, nil)
	if err != nil {
		return err
	}
	resp, err := p.conn(to).http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it answered %d", resp.StatusCode)
	}
	lines := newLineReader(resp.Body)
	for {
		events, err := lines.next()
		if err != nil {
			return err
		}
		alive.Reset(followIdle)
		if n := len(events); n > 0 && events[n-1].ID != "" {
			*last = events[n-1].ID
		}
		publishFrom(hub, events)
	}
}

// publishFrom passes events on; a reset of the stream concerns everybody here.
// What another controller says of its own ports concerns nobody.
func publishFrom(hub *tasks.Hub, events []tasks.PeerEvent) {
	pass := events[:0]
	for _, e := range events {
		switch e.Type {
		case tasks.EventReset:
			hub.PublishFrom(pass...)
			hub.Missed()
			pass = pass[:0]
		case tasks.EventController:
		default:
			pass = append(pass, e)
		}
	}
	hub.PublishFrom(pass...)
}

// asUnreachable gives an error of a call that changes nothing the meaning that
// callers branch on.
func asUnreachable(to tasks.Lease, err error) error {
	if err == nil {
		return nil
	}
	if _, said := errors.AsType[*fault.Error](err); said {
		return err
	}
	return fault.Wrap(err, fault.Unavailable, "owner_unreachable",
		"The controller "+to.Name+" at "+to.Addr+", which is connected to this agent, does not answer.").
		WithHint("Try again in a few seconds; if that controller has ended, another one takes over within 20 s.")
}

func errNoControllerPort() error {
	return fault.New(fault.Unavailable, "owner_unreachable", "This controller has no controller port, so it cannot call the one that is connected to this agent.").
		WithHint("Send the request to that controller, or run both with two-phase true.")
}
