package agent

import (
	"time"

	"google.golang.org/protobuf/proto"

	"headgate/internal/agent/program"
	"headgate/internal/agent/spool"
	"headgate/internal/agentpb"
)

// Output takes what a task prints, keeps it within a bound and hands it to the
// controller in its own time; nobody who prints ever waits for that.
type Output interface {
	program.Sink
	// Limit lowers what is kept at most; it comes before the first Write.
	Limit(bytes int64)
	// End comes after the last Write and says what was printed and how much of
	// it was dropped.
	End() (printed, dropped int64)
}

// printer is the Output of a call.
type printer struct {
	slot *slot
	call *call
}

// Write implements program.Sink. It waits for the disk at most.
func (p printer) Write(s program.Stream, b []byte) {
	p.call.out.Write(int(s-program.Stdout), b)
	p.slot.mu.Lock()
	defer p.slot.mu.Unlock()
	p.slot.wakeLocked()
}

// Unblock implements program.Sink: Write never blocks.
func (printer) Unblock() {}

// Limit implements Output.
func (p printer) Limit(bytes int64) { p.call.out.Limit(bytes) }

// End implements Output.
func (p printer) End() (printed, dropped int64) { return p.call.out.End() }

// nextOutput gives the message for the next chunk that is due, or nil.
func (c *call) nextOutput() *agentpb.AgentMessage {
	o := c.out.Next()
	if o == nil {
		return nil
	}
	stream := agentpb.Stream_STREAM_STDOUT
	if o.Stream == spool.Stderr {
		stream = agentpb.Stream_STREAM_STDERR
	}
	return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Output{Output: &agentpb.Output{
		TaskId: c.ref.GetTaskId(), Attempt: c.ref.GetAttempt(), Seq: o.Seq, Stream: stream, Offset: o.Offset, Data: o.Data,
	}}}
}

// discard lets go of the output of a call that is over.
func (s *slot) discard(c *call) {
	if err := c.out.Remove(); err != nil {
		s.log.Error("remove the output of a task", "task_id", c.ref.GetTaskId(), "err", err)
	}
}

// takeUp looks for output that an earlier process has kept and not delivered.
// The newest is delivered as that of the task in the slot, whose end follows it;
// there is only one, unless the agent was killed again and again.
func (s *slot) takeUp() error {
	found, err := spool.Find(s.spools)
	if err != nil {
		return err
	}
	var newest *call
	for _, f := range found {
		e := s.ledger.Lookup(f.Task)
		if e == nil || !e.Live() || e.Attempt != f.Attempt || newest != nil && newest.entry.AcceptedOrder > e.AcceptedOrder {
			if err := f.Remove(); err != nil {
				return err
			}
			continue
		}
		out, err := f.Open()
		if err != nil {
			return err
		}
		if newest != nil {
			s.discard(newest)
		}
		newest = &call{
			ref: &agentpb.TaskRef{TaskId: f.Task, Attempt: f.Attempt}, epoch: e.Epoch, entry: e, out: out,
			cancel: func(error) {}, started: time.Unix(0, e.AcceptedAt), announced: true,
		}
	}
	if newest == nil {
		return nil
	}
	if newest.final, err = s.finalOf(newest); err != nil || newest.out.Empty() {
		s.discard(newest)
		return err
	}
	s.call = newest
	s.running.Store(newest.ref)
	return nil
}

// finalOf gives the end of a task of an earlier process.
func (s *slot) finalOf(c *call) (*agentpb.Final, error) {
	final := &agentpb.Final{}
	if c.entry.Done {
		return final, proto.Unmarshal(c.entry.Final(), final)
	}
	printed, _ := c.out.End()
	return &agentpb.Final{
		TaskId: c.ref.GetTaskId(), Attempt: c.ref.GetAttempt(), Epoch: c.epoch,
		Outcome: unknown, Reason: reasonRestarted, Interrupted: true,
		Detail:          s.left.note(c.ref.GetTaskId(), c.ref.GetAttempt()),
		StartedUnixNano: c.started.UnixNano(), EndedUnixNano: time.Now().UnixNano(), OutputBytes: printed,
	}, nil
}
