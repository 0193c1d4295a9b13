package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/pki"
	"headgate/tasks"
)

// protocolVersion is the one that is spoken here.
const protocolVersion = 1

// session is the one long-lived stream with an agent. Its reading side and
// all calls to Tasks happen in the member's loop; its writing side is box.
type session struct {
	f       *Fleet
	m       *member
	lease   tasks.Lease
	address string // as configured
	kinds   []KindOffer
	up      tasks.Session // what SessionUp will say

	ctx    context.Context // of the stream; its cause is why the session ends
	cancel context.CancelCauseFunc
	cc     *grpc.ClientConn
	stream grpc.BidiStreamingClient[agentpb.ControllerMessage, agentpb.AgentMessage]

	heard   atomic.Int64 // unix nanoseconds of the last message
	asked   atomic.Int64 // of the last StatusRequest, 0 when it was answered
	rtt     atomic.Int64 // nanoseconds, 0 = not known yet
	skew    atomic.Pointer[time.Duration]
	strikes int // the loop's

	box     box
	writers sync.WaitGroup
}

// attempt is one dial to one address of an agent.
type attempt struct {
	m        *member
	lease    tasks.Lease
	pin      [32]byte
	address  string
	answered func() // hears that the peer has taken the connection
}

// openAt makes a connection and exchanges Hello and Welcome.
func (f *Fleet) openAt(ctx context.Context, a attempt) (*session, *trouble) {
	dial := f.agentDial(a.m, a.pin)
	cc, l, err := f.dialer.client(a.address, pki.DialAgent(dial))
	if err != nil {
		return nil, &trouble{cause: CauseAddressRefused, sentence: "the address cannot be used", address: a.address, err: err}
	}
	l.answered = a.answered
	s := &session{f: f, m: a.m, lease: a.lease, address: a.address, cc: cc}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	welcome, err := s.greet()
	if err == nil {
		err = s.accept(welcome)
	}
	if err == nil {
		return s, nil
	}
	t := s.whyNot(l, dial, err)
	s.close(t)
	return nil, t
}

// greet opens the stream and waits for the agent's first message.
func (s *session) greet() (*agentpb.Welcome, error) {
	limits := s.f.cfg.Limits
	timer := time.AfterFunc(limits.ConnectTimeout+limits.WelcomeTimeout, func() {
		s.cancel(&trouble{cause: CauseSilent, sentence: fmt.Sprintf("%s did not answer the greeting within %s", s.address, limits.WelcomeTimeout)})
	})
	defer timer.Stop()
	stream, err := agentpb.NewAgentClient(s.cc).Session(s.ctx)
	if err != nil {
		return nil, err
	}
	s.stream = stream
	hello := &agentpb.Hello{
		Protocol: protocolVersion, Shard: int32(s.lease.Shard), Epoch: s.lease.Epoch,
		ControllerId: s.f.cfg.ControllerID.String(), ControllerVersion: s.f.cfg.Version,
	}
	if err := stream.Send(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Hello{Hello: hello}}); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if first.GetWelcome() == nil {
		return nil, s.broken("its first message was not a welcome")
	}
	s.heard.Store(time.Now().UnixNano())
	return first.GetWelcome(), nil
}

func (s *session) broken(what string) *trouble {
	return &trouble{cause: CauseProtocol, sentence: "the agent at " + s.address + " breaks the protocol: " + what, address: s.address}
}

// accept checks the Welcome and records what is new in it.
func (s *session) accept(w *agentpb.Welcome) error {
	if w.GetProtocol() != protocolVersion {
		return s.broken(fmt.Sprintf("it speaks version %d, this controller speaks %d", w.GetProtocol(), protocolVersion))
	}
	if id, err := uuid.Parse(w.GetAgentId()); err != nil || id != s.m.id {
		return &trouble{cause: CauseOtherAgent, sentence: fmt.Sprintf("agent %s answers at %s", clean(w.GetAgentId(), maxName), s.address), address: s.address}
	}
	ledger, err := uuid.Parse(w.GetLedgerId())
	if err != nil || ledger == uuid.Nil() {
		return s.broken("its ledger has no id")
	}
	instance, err := uuid.Parse(w.GetInstanceId())
	if err != nil {
		return s.broken("its process has no id")
	}
	if why := s.m.sawInstance(instance, time.Now()); why != "" {
		s.f.Quarantine(s.m.num, why)
		return &trouble{cause: CauseProtocol, sentence: why, address: s.address}
	}
	s.sawClock(w.GetClockUnixNano(), time.Now(), 0)
	s.kinds = s.f.kinds.offers(w.GetKinds())
	s.up = tasks.Session{Agent: s.m.num, LedgerID: ledger, Running: refOf(w.GetRunning())}
	for _, p := range w.GetFinished() {
		s.up.Finished = append(s.up.Finished, finalOf(p))
	}
	for _, p := range w.GetInterrupted() {
		ref := *refOf(p)
		s.up.Interrupted = append(s.up.Interrupted, ref)
		if note := clean(p.GetNote(), maxSentence); note != "" {
			if s.up.Found == nil {
				s.up.Found = map[tasks.Ref]string{}
			}
			s.up.Found[ref] = note
		}
	}
	s.box.allow(s.up)
	return s.record(w)
}

// sawInstance notices two processes that answer in turn with one identity:
// a copied machine, or a backup started beside the original.
func (m *member) sawInstance(id uuid.UUID, now time.Time) (why string) {
	const within = time.Minute // a restart brings a new id, but never an old one back
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.instances[0].id == id {
		m.instances[0].at = now
		return ""
	}
	if m.instances[1].id == id && now.Sub(m.instances[1].at) < within {
		return "two processes answer in turn with this agent's identity; the machine was probably copied"
	}
	m.instances[1], m.instances[0] = m.instances[0], instanceAt{id, now}
	return ""
}

// record stores what the agent said of itself, if it is new. The first ledger
// must be stored before anything is given to the agent. A ledger that
// replaces another one is not stored here: see settle.
func (s *session) record(w *agentpb.Welcome) error {
	version, host, os := clean(w.GetVersion(), maxName), clean(w.GetHostname(), maxName), clean(w.GetOs(), maxName)
	s.m.mu.Lock()
	row := s.m.row
	// A settled ledger counts as on record, even if it is not yet stored: tasks
	// may have been given since, and this ledger knows them.
	settled := s.m.settled && s.m.ledger == s.up.LedgerID
	s.m.ledger, s.m.settled = s.up.LedgerID, settled
	s.m.mu.Unlock()
	s.up.LedgerNew = row.LedgerID != uuid.Nil() && row.LedgerID != s.up.LedgerID && !settled
	s.up.LedgerApproved = s.up.LedgerNew && row.approved() == s.up.LedgerID
	ledger := s.up.LedgerID
	if s.up.LedgerNew {
		ledger = row.LedgerID
	}
	if row.LedgerID == ledger && row.Version == version && row.Hostname == host && row.OS == os {
		return nil
	}
	ctx, cancel := context.WithTimeout(s.ctx, storeTimeout)
	defer cancel()
	if err := s.f.cfg.Store.SetSeen(ctx, s.m.num, s.lease, ledger, version, host, os); err != nil {
		return &trouble{cause: CauseDatabase, sentence: "what the agent said of itself could not be recorded", address: s.address, err: err}
	}
	s.m.mu.Lock()
	s.m.row.LedgerID, s.m.row.Version, s.m.row.Hostname, s.m.row.OS = ledger, version, host, os
	s.m.mu.Unlock()
	return nil
}

// settle is called with the first assignment of a session: by giving the
// agent work the queue says that it has settled all earlier tasks, so a ledger
// that replaced another one may now be recorded. Recording it earlier would
// let a crash hide the replacement from the next reconcile.
func (s *session) settle() {
	if !s.up.LedgerNew {
		return
	}
	s.m.mu.Lock()
	first := !s.m.settled && s.m.ledger == s.up.LedgerID
	s.m.settled = s.m.settled || first
	s.m.mu.Unlock()
	if first {
		s.f.soon(s.m)
	}
}

// whyNot says why no session came about.
func (s *session) whyNot(l *link, dial pki.AgentDial, err error) *trouble {
	if t, ok := errors.AsType[*trouble](err); ok {
		return t
	}
	if t, ok := errors.AsType[*trouble](context.Cause(s.ctx)); ok {
		return &trouble{cause: t.cause, sentence: t.sentence, address: s.address, err: err}
	}
	if highest, stale := staleEpoch(err); stale {
		s.m.refused(highest, s.lease.Epoch, time.Now())
		return &trouble{cause: CauseStaleEpoch, address: s.address, err: err, sentence: fmt.Sprintf(
			"the agent has already obeyed epoch %s of shard %d, this controller has %d; another controller has taken over, or the database was restored from a backup",
			clean(highest, maxReason), s.lease.Shard, s.lease.Epoch)}
	}
	if status.Code(err) == codes.Unimplemented {
		return &trouble{cause: CauseNotAnAgent, address: s.address, err: err, sentence: s.address + " answers, but does not offer sessions"}
	}
	if _, first := l.failure(); first == nil { // the connection stands
		return &trouble{cause: CauseEnded, address: s.address, err: err, sentence: "the agent at " + s.address + " refused the session"}
	}
	return s.f.dialer.explain(l, dial)
}

// serve tells the queue of the session and reads until it ends.
func (s *session) serve() *trouble {
	f, m := s.f, s.m
	m.obeyed()
	m.session.Store(s)
	f.metrics.sessions.Inc()
	f.tasks.SessionUp(s.up)
	s.up.Finished, s.up.Interrupted, s.up.Found = nil, nil, nil // a long-lived session needs no copies
	err := s.read()
	m.session.Store(nil)
	t := s.whyEnded(err)
	s.close(t)
	f.tasks.SessionDown(m.num, t.sentence)
	f.metrics.sessions.Dec()
	f.metrics.ended.WithLabelValues(t.cause).Inc()
	f.log.Info("session ended", "agent", m.id, "cause", t.cause, "err", t)
	return t
}

// whyEnded says why a session that stood is over.
func (s *session) whyEnded(err error) *trouble {
	if t, ok := errors.AsType[*trouble](err); ok {
		return t
	}
	if t, ok := errors.AsType[*trouble](context.Cause(s.ctx)); ok {
		return &trouble{cause: t.cause, sentence: t.sentence, address: s.address, err: t.err}
	}
	t := &trouble{cause: CauseEnded, address: s.address, err: err, sentence: "the agent at " + s.address + " closed the session"}
	switch {
	case s.ctx.Err() != nil:
		t.cause, t.sentence = CauseReconnect, "this controller is stopping"
	case status.Code(err) == codes.ResourceExhausted:
		t.cause, t.sentence = CauseProtocol, fmt.Sprintf("the agent at %s sent a message of more than %d bytes", s.address, s.f.cfg.Limits.MaxMessage)
	case status.Code(err) == codes.Internal:
		t.cause, t.sentence = CauseProtocol, "the agent at "+s.address+" sent something that is not a message"
	default:
		if strings.HasPrefix(status.Convert(err).Message(), "STOPPING") {
			t.sentence = "the agent at " + s.address + " is stopping"
		}
		if highest, stale := staleEpoch(err); stale {
			t.cause, t.sentence = CauseStaleEpoch, fmt.Sprintf("the agent obeys epoch %s now, this session has %d", clean(highest, maxReason), s.lease.Epoch)
		}
	}
	return t
}

// close ends stream and connection and waits for the writer.
func (s *session) close(t *trouble) {
	s.box.shut()
	s.cancel(t)
	_ = s.cc.Close() // it was our own; there is nobody to tell
	s.writers.Wait()
}

// read passes on what the agent says until the stream ends.
func (s *session) read() error {
	var msg agentpb.AgentMessage
	for {
		if err := s.stream.RecvMsg(&msg); err != nil {
			return err
		}
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		now := time.Now()
		s.heard.Store(now.UnixNano())
		s.f.metrics.received.Inc()
		if err := s.take(&msg, now); err != nil {
			return err
		}
	}
}

// take passes on one message. Whether its task was ever given is for the queue
// to judge; here it only counts towards the limit on nonsense.
func (s *session) take(msg *agentpb.AgentMessage, now time.Time) error {
	num, t := s.m.num, s.f.tasks
	switch p := msg.GetMsg().(type) {
	case *agentpb.AgentMessage_Accepted:
		ref := tasks.Ref{ID: tasks.ID(p.Accepted.GetTaskId()), Attempt: int(p.Accepted.GetAttempt())}
		heard := s.box.hear(ref, messageOverhead)
		t.Accepted(num, ref)
		return s.judge(ref, heard)
	case *agentpb.AgentMessage_Output:
		c, ok := outputOf(p.Output, now)
		if !ok {
			return s.broken("a piece of output has no stream, a negative place or too many bytes")
		}
		heard := s.box.hear(c.Ref, messageOverhead+len(c.Data))
		t.Output(num, c)
		return s.judge(c.Ref, heard)
	case *agentpb.AgentMessage_Heartbeat:
		ref := tasks.Ref{ID: tasks.ID(p.Heartbeat.GetTaskId()), Attempt: int(p.Heartbeat.GetAttempt())}
		return s.judge(ref, s.box.hear(ref, 0)) // the queue is not told
	case *agentpb.AgentMessage_Final:
		fault.Point("after_result_received")
		final := finalOf(p.Final)
		heard := s.box.hear(final.Ref, messageOverhead+len(final.Ending.Result)+len(final.Ending.ResultBytes)+len(final.Ending.Detail))
		t.Final(num, final)
		return s.judge(final.Ref, heard)
	case *agentpb.AgentMessage_Refused:
		r := refusalOf(p.Refused)
		heard := s.box.hear(r.Ref, messageOverhead+len(r.Detail))
		t.Refused(num, r)
		return s.judge(r.Ref, heard)
	case *agentpb.AgentMessage_Status:
		if asked := s.asked.Swap(0); asked != 0 {
			rtt := time.Duration(now.UnixNano() - asked)
			s.sawRTT(rtt)
			s.sawClock(p.Status.GetClockUnixNano(), now, rtt)
			return nil
		}
		return s.strike("it sends its status without being asked")
	case *agentpb.AgentMessage_Welcome:
		return s.broken("it greets twice")
	}
	return s.strike("a message is empty or of an unknown sort")
}

func (s *session) sawRTT(d time.Duration) {
	s.rtt.Store(max(int64(d), 1))
	s.f.metrics.sawRTT(d)
}

// sawClock notes how far the agent's clock is before ours. It is shown and
// nothing else: no decision compares the clocks of two machines.
func (s *session) sawClock(unixNano int64, now time.Time, rtt time.Duration) {
	if unixNano <= 0 {
		return // it does not say
	}
	skew := time.Unix(0, unixNano).Sub(now.Add(-rtt / 2))
	s.skew.Store(&skew)
}

// judge counts messages about tasks that this session never gave and its
// Welcome did not name, and bounds what an agent says while nobody answers it.
func (s *session) judge(ref tasks.Ref, h heard) error {
	switch {
	case h.tooMuch:
		return s.broken("it says more than was acknowledged")
	case h.known:
		return nil
	}
	return s.strike(fmt.Sprintf("it talks about task %s, which it was not given", ref.ID))
}

func (s *session) strike(what string) error {
	s.strikes++
	if s.strikes < s.f.cfg.Limits.Strikes {
		return nil
	}
	return s.broken(fmt.Sprintf("%d messages made no sense, the last one because %s", s.strikes, what))
}

// pulse gives up a silent session and asks a quiet one for its status.
func (s *session) pulse(now time.Time) {
	limits := s.f.cfg.Limits
	quiet := now.Sub(time.Unix(0, s.heard.Load()))
	if quiet > limits.SilentAfter {
		s.cancel(&trouble{cause: CauseSilent, address: s.address, sentence: fmt.Sprintf("nothing heard from %s for %d s", s.address, int(quiet.Seconds()))})
		return
	}
	if due := quiet >= limits.Pulse || s.rtt.Load() == 0; due && s.asked.CompareAndSwap(0, now.UnixNano()) {
		s.post(func(b *box) { b.status = true })
	}
}
