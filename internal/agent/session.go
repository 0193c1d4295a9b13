package agent

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"headgate/internal/agentpb"
)

// protocolVersion is the one spoken here.
const protocolVersion = 1

// numShards is fixed for all of Headgate; an agent's shard follows from its id.
const numShards = 16

// session is one stream with a controller, from Hello on.
type session struct {
	shard int32
	epoch int64
	wake  chan struct{} // holds at most one token: there may be something to send

	once  sync.Once
	ended chan struct{}
	cause error // why; set before ended is closed

	// Guarded by the slot's lock.
	replies []*agentpb.AgentMessage
	space   chan struct{} // closed and replaced when replies were taken
	beat    bool          // a heartbeat is due
}

func (se *session) wakeUp() {
	select {
	case se.wake <- struct{}{}:
	default:
	}
}

// finish ends the session; the first cause counts.
func (se *session) finish(cause error) {
	se.once.Do(func() {
		se.cause = cause
		close(se.ended)
	})
}

// Session serves one stream. The reader has a goroutine of its own, which ends
// when this method has returned, because the stream then is over.
func (a *service) Session(stream grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage]) error {
	hello := make(chan *agentpb.Hello)
	opened := make(chan *session, 1)
	failed := make(chan error, 1)
	done := make(chan struct{})
	defer close(done)
	a.readers.Go(func() { failed <- a.read(stream, hello, opened, done) })

	timer := time.NewTimer(a.slot.limits.HelloTimeout)
	defer timer.Stop()
	select {
	case m := <-hello:
		se, err := a.open(m)
		if err != nil {
			return err
		}
		opened <- se
		err = a.send(stream, se)
		a.slot.leave(se)
		return err
	case err := <-failed:
		return err
	case <-timer.C:
		return status.Error(codes.DeadlineExceeded, "NO_HELLO The session did not begin with a Hello in time.")
	}
}

// read takes messages off the stream until it ends.
func (a *service) read(stream grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage],
	hello chan<- *agentpb.Hello, opened <-chan *session, done <-chan struct{},
) error {
	m, err := stream.Recv()
	if err != nil {
		return endOfStream(err)
	}
	if m.GetHello() == nil {
		return status.Error(codes.InvalidArgument, "NO_HELLO A session begins with a Hello.")
	}
	var se *session
	select {
	case hello <- m.GetHello():
	case <-done:
		return nil
	}
	select {
	case se = <-opened:
	case <-done:
		return nil
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			se.finish(endOfStream(err))
			return nil
		}
		if err := a.slot.handle(se, m); err != nil {
			se.finish(err)
			return nil
		}
	}
}

// endOfStream: a controller that closes its side ends the session in peace.
func endOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// handle dispatches one message. While many answers wait to be sent it blocks,
// which the controller feels.
func (s *slot) handle(se *session, m *agentpb.ControllerMessage) error {
	switch msg := m.GetMsg().(type) {
	case *agentpb.ControllerMessage_Execute:
		s.execute(se, msg.Execute)
	case *agentpb.ControllerMessage_Cancel:
		s.cancelTask(se, msg.Cancel)
	case *agentpb.ControllerMessage_Ack:
		s.ack(se, msg.Ack)
	case *agentpb.ControllerMessage_Forget:
		s.forget(se, msg.Forget.GetTaskIds())
	case *agentpb.ControllerMessage_StatusRequest:
		s.status(se)
	case *agentpb.ControllerMessage_Hello:
		return status.Error(codes.InvalidArgument, "SECOND_HELLO A session has one Hello.")
	default:
		return status.Error(codes.InvalidArgument, "UNKNOWN_MESSAGE The message is of a sort that this agent does not know.")
	}
	return s.waitForSpace(se)
}

func (s *slot) waitForSpace(se *session) error {
	for {
		s.mu.Lock()
		if len(se.replies) < repliesWaiting {
			s.mu.Unlock()
			return nil
		}
		space := se.space
		s.mu.Unlock()
		select {
		case <-space:
		case <-se.ended:
			return se.cause
		}
	}
}

// open makes a session the current one, as its Hello asks: the epoch is on
// disk and the older session is over before the Welcome exists.
func (a *service) open(h *agentpb.Hello) (*session, error) {
	s := a.slot
	if h.GetProtocol() != protocolVersion {
		return nil, status.Errorf(codes.FailedPrecondition, "UNSUPPORTED_PROTOCOL This agent speaks version %d, not %d.", protocolVersion, h.GetProtocol())
	}
	if want := int32(a.state.id[15] % numShards); h.GetShard() != want {
		return nil, status.Errorf(codes.InvalidArgument, "WRONG_SHARD This agent belongs to shard %d, not %d.", want, h.GetShard())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return nil, errStoppingStatus()
	}
	if highest := s.epochs.highest[h.GetShard()]; h.GetEpoch() < highest {
		return nil, status.Errorf(codes.FailedPrecondition, "STALE_EPOCH %d", highest)
	}
	if err := s.epochs.raise(h.GetShard(), h.GetEpoch()); err != nil {
		s.log.Error("store the epoch", "err", err)
		return nil, status.Error(codes.Unavailable, "EPOCH_NOT_STORED The agent cannot write to its data directory.")
	}
	if s.session != nil {
		s.session.finish(status.Error(codes.Aborted, "REPLACED A newer session has begun."))
	}
	se := &session{
		shard: h.GetShard(), epoch: h.GetEpoch(),
		wake: make(chan struct{}, 1), ended: make(chan struct{}), space: make(chan struct{}),
	}
	s.session = se
	se.replies = append(se.replies, &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Welcome{Welcome: a.welcome()}})
	se.wakeUp()
	a.log.Info("session begins", "controller", h.GetControllerId(), "controller_version", h.GetControllerVersion(), "epoch", h.GetEpoch())
	return se, nil
}

// welcome says what became of all tasks that were not forgotten. The slot's
// lock is held.
func (a *service) welcome() *agentpb.Welcome {
	s := a.slot
	w := &agentpb.Welcome{
		Protocol: protocolVersion, AgentId: a.state.id.String(), LedgerId: s.ledger.ID().String(),
		InstanceId: a.instance.String(), Version: a.config.Version, Kinds: a.offers,
		ClockUnixNano: time.Now().UnixNano(), Hostname: a.hostname, Os: a.os,
	}
	if c := s.call; c != nil {
		if c.final != nil && c.out.Empty() {
			s.retire() // nothing but the end is left, and the ledger tells that
			s.discard(c)
			s.call = nil
		} else {
			c.out.Rewind()
			c.told, c.announce, c.announced = false, false, true
			s.running.Store(c.ref)
			w.Running = c.ref
		}
	}
	// The newest first: of what does not fit, nobody waits any more.
	room := welcomeBytes
	for _, e := range slices.Backward(s.ledger.Live()) {
		ref := &agentpb.TaskRef{TaskId: e.TaskID, Attempt: e.Attempt}
		switch {
		case s.call != nil && s.call.entry == e:
		case !e.Done:
			ref.Note = s.left.note(e.TaskID, e.Attempt)
			w.Interrupted = append(w.Interrupted, ref)
		case len(e.Final()) <= room:
			final := &agentpb.Final{}
			if err := proto.Unmarshal(e.Final(), final); err != nil {
				s.log.Error("read a stored result", "task_id", e.TaskID, "err", err)
				continue
			}
			room -= len(e.Final())
			w.Finished = append(w.Finished, final)
		}
	}
	slices.Reverse(w.Interrupted) // in the order of acceptance
	slices.Reverse(w.Finished)
	return w
}

// leave is called when a session's stream is over.
func (s *slot) leave(se *session) {
	se.finish(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == se {
		s.session = nil
		s.checkIdle()
	}
}

// send is the only sender of a stream. It asks the slot for the next message,
// so a session that ends loses nothing: what was not sent is found again.
func (a *service) send(stream grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage], se *session) error {
	beat := time.NewTicker(a.slot.limits.Heartbeat)
	defer beat.Stop()
	for {
		if m := a.slot.next(se); m != nil {
			if err := stream.Send(m); err != nil {
				return err
			}
			continue
		}
		select {
		case <-se.wake:
		case <-beat.C:
			a.slot.heartbeat(se)
		case <-se.ended:
			return se.cause
		case <-stream.Context().Done():
			return context.Cause(stream.Context())
		}
	}
}

func (s *slot) heartbeat(se *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	se.beat = s.session == se && s.busy()
}

// next gives what is to be sent now, or nil.
func (s *slot) next(se *session) *agentpb.AgentMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != se {
		return nil
	}
	select {
	case <-se.ended:
		return nil
	default:
	}
	if len(se.replies) > 0 {
		m := se.replies[0]
		se.replies[0] = nil
		if se.replies = se.replies[1:]; len(se.replies) == repliesWaiting-1 {
			close(se.space)
			se.space = make(chan struct{})
		}
		return m
	}
	if !s.busy() {
		return nil
	}
	return s.nextOfCall(se, s.call)
}

// nextOfCall keeps the order: Accepted, output, Final.
func (s *slot) nextOfCall(se *session, c *call) *agentpb.AgentMessage {
	id, attempt := c.ref.GetTaskId(), c.ref.GetAttempt()
	if !c.announced && (c.announce || !c.out.Empty()) {
		c.announced = true
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Accepted{Accepted: &agentpb.Accepted{
			TaskId: id, Attempt: attempt, StartedUnixNano: c.started.UnixNano(),
		}}}
	}
	if o := c.nextOutput(); o != nil {
		return o
	}
	if c.final != nil && c.out.Drained() {
		s.retire()
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: c.final}}
	}
	if se.beat {
		se.beat = false
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Heartbeat{Heartbeat: &agentpb.Heartbeat{TaskId: id, Attempt: attempt}}}
	}
	return nil
}

// Ping answers outside the slot, also while a task runs or the disk hangs.
func (a *service) Ping(_ context.Context, m *agentpb.PingRequest) (*agentpb.PingReply, error) {
	const maxNonce = 64 // an echo, not a transport
	if len(m.GetNonce()) > maxNonce {
		return nil, status.Errorf(codes.InvalidArgument, "NONCE_TOO_LONG A nonce has at most %d bytes.", maxNonce)
	}
	return &agentpb.PingReply{
		Nonce: m.GetNonce(), AgentId: a.state.id.String(), Version: a.config.Version,
		ClockUnixNano: time.Now().UnixNano(), Running: a.slot.running.Load(),
	}, nil
}

func errStoppingStatus() error {
	return status.Error(codes.Unavailable, "STOPPING The agent is stopping.")
}

func errDemoDrop() error {
	return status.Error(codes.Unavailable, "DEMO_FLAKY This agent was started with --demo-flaky.")
}
