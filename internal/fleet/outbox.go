package fleet

import (
	"slices"
	"sync"

	"headgate/internal/agentpb"
	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/tasks"
)

const (
	// maxQueued is how many assignments and cancels may wait for an agent that
	// does not read. There is one slot, so even a handful means that something
	// is wrong; the session is then ended and everything reconciled.
	maxQueued = 64
	// maxForget is how many ids may wait to be forgotten.
	maxForget = 100_000
	// forgetBatch is how many ids travel in one message.
	forgetBatch = 1000
	// roomBytes is how much may be on its way to an agent for a send to be
	// certain not to block: gRPC lets a stream have 64 KiB under way, of which
	// a frame of 16 KiB may be counted late.
	roomBytes = 32 << 10
	// recentTasks is how many tasks an agent may still talk about after it was
	// given others: a result may cross a forced end, more is odd.
	recentTasks = 8
	// messageOverhead is a generous estimate of a message's fixed part.
	messageOverhead = 160
	// maxUnheeded is how many bytes an agent may say while the queue says
	// nothing to it. An honest one waits after four chunks of output and a
	// result; whatever comes meanwhile is kept in memory, without end when the
	// database is away.
	maxUnheeded = 8 << 20
)

// box holds what is to be sent to one agent. Posting never waits. At most one
// goroutine writes at a time: whoever posts while nobody writes does so
// himself if the send is certain not to block, and otherwise a goroutine is
// started that lives until the box is empty. An idle session thus costs no
// writer, and a busy one no switch between goroutines.
type box struct {
	mu      sync.Mutex
	writing bool
	closed  bool
	items   []item  // assignments and cancels, in order
	spare   []item  // emptied, for reuse
	forget  []int64 // ids
	ackRef  tasks.Ref
	ackSeq  int
	ack     bool
	status  bool

	// What is certain not to be under way any more: an agent that answers an
	// assignment has read everything before it.
	sent    int64 // bytes, ever
	proven  int64 // bytes, known to have been read
	lastRef tasks.Ref
	lastAt  int64 // value of sent with lastRef written

	// The tasks that the agent may talk about.
	early  map[tasks.ID]struct{} // named in its Welcome
	recent [recentTasks]tasks.ID // given on this session
	next   int

	unheeded int // bytes that the agent has said since the queue said something to it
}

// item is an assignment, or the cancelling of one.
type item struct {
	assignment tasks.Assignment
	cancel     bool
	reason     string
}

func (i *item) size() int64 {
	return int64(messageOverhead + len(i.assignment.Args) + len(i.reason) + 10*len(i.assignment.Forget))
}

// put adds an assignment or a cancel of the queue's.
func (b *box) put(i item) { b.items, b.unheeded = append(b.items, i), 0 }

// acknowledge keeps the newest acknowledgement only: it covers older ones.
func (b *box) acknowledge(ref tasks.Ref, seq int) {
	if b.ack && b.ackRef == ref {
		seq = max(seq, b.ackSeq)
	}
	b.ackRef, b.ackSeq, b.ack, b.unheeded = ref, seq, true, 0
}

// heard is what is to be thought of a message.
type heard struct {
	known   bool // the agent may know of its task
	tooMuch bool // it says more than the queue keeps up with
}

// hear notes that the agent talks about a task, and so has read what was sent
// up to its assignment. size is what the queue keeps of the message, in bytes.
func (b *box) hear(ref tasks.Ref, size int) heard {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unheeded += size
	return heard{known: b.knows(ref), tooMuch: b.unheeded > maxUnheeded}
}

// knows says whether the agent may know of a task. The box is locked.
func (b *box) knows(ref tasks.Ref) bool {
	if ref == b.lastRef {
		b.proven = max(b.proven, b.lastAt)
		return true
	}
	if ref.ID != 0 && slices.Contains(b.recent[:], ref.ID) {
		return true
	}
	_, ok := b.early[ref.ID]
	return ok
}

// allow admits the tasks of a Welcome.
func (b *box) allow(u tasks.Session) {
	b.early = map[tasks.ID]struct{}{}
	if u.Running != nil {
		b.early[u.Running.ID] = struct{}{}
	}
	for _, f := range u.Finished {
		b.early[f.ID] = struct{}{}
	}
	for _, r := range u.Interrupted {
		b.early[r.ID] = struct{}{}
	}
}

func (b *box) shut() {
	b.mu.Lock()
	b.closed = true
	b.items, b.spare, b.forget = nil, nil, nil
	b.mu.Unlock()
}

func (b *box) empty() bool {
	return len(b.items) == 0 && len(b.forget) == 0 && !b.ack && !b.status
}

// roomy says whether what waits can be sent without blocking.
func (b *box) roomy() bool {
	size := b.sent - b.proven + 10*int64(len(b.forget)) + messageOverhead
	for i := range b.items {
		size += b.items[i].size()
	}
	return size <= roomBytes
}

// post puts something into the box and sees to it that it is sent.
func (s *session) post(put func(*box)) {
	b := &s.box
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return
	}
	put(b)
	if len(b.items) > maxQueued || len(b.forget) > maxForget {
		b.mu.Unlock()
		s.cancel(&trouble{cause: CauseSilent, address: s.address, sentence: "the agent at " + s.address + " does not read what it is sent"})
		return
	}
	if b.writing {
		b.mu.Unlock()
		return
	}
	b.writing = true
	here := b.roomy()
	if !here {
		s.writers.Add(1) // under the lock: shut comes before Wait
	}
	b.mu.Unlock()
	if here {
		s.write(false)
		return
	}
	go s.writeAll()
}

func (s *session) writeAll() {
	defer s.writers.Done()
	s.write(true)
}

// write empties the box. A caller who must not block hands over to a
// goroutine when what has come meanwhile may block.
func (s *session) write(mayBlock bool) {
	b := &s.box
	m := s.f.messages.Get().(*messages)
	defer s.f.messages.Put(m)
	for {
		b.mu.Lock()
		if b.closed || b.empty() {
			b.writing = false
			b.mu.Unlock()
			return
		}
		if !mayBlock && !b.roomy() {
			s.writers.Add(1)
			b.mu.Unlock()
			go s.writeAll()
			return
		}
		batch := b.takeLocked()
		b.mu.Unlock()
		if !s.send(m, &batch) {
			s.broke()
			return
		}
		b.giveBack(batch.items)
	}
}

// broke leaves writing set: nothing can be sent on this stream any more. The
// reading side learns the reason from gRPC.
func (s *session) broke() { s.box.shut() }

// batch is what is sent in one go.
type batch struct {
	items  []item
	forget []int64
	ackRef tasks.Ref
	ackSeq int
	ack    bool
	status bool
}

func (b *box) takeLocked() batch {
	t := batch{items: b.items, forget: b.forget, ackRef: b.ackRef, ackSeq: b.ackSeq, ack: b.ack, status: b.status}
	b.items, b.spare = b.spare[:0], nil
	b.forget, b.ack, b.status = nil, false, false
	return t
}

// giveBack keeps the emptied list and lets go of the arguments in it.
func (b *box) giveBack(items []item) {
	clear(items)
	b.mu.Lock()
	if !b.closed && cap(items) <= maxQueued {
		b.spare = items[:0]
	}
	b.mu.Unlock()
}

// messages are reused for sending; gRPC has encoded a message when SendMsg
// returns and keeps nothing of it.
type messages struct {
	outer   agentpb.ControllerMessage
	execute agentpb.Execute
	wrapExe agentpb.ControllerMessage_Execute
	ack     agentpb.Ack
	wrapAck agentpb.ControllerMessage_Ack
}

func newMessages() any {
	m := &messages{}
	m.wrapExe.Execute, m.wrapAck.Ack = &m.execute, &m.ack
	return m
}

// send writes a batch; false means that the stream is over. Ids to forget
// ride with the first assignment.
func (s *session) send(m *messages, b *batch) bool {
	if b.ack {
		m.ack.TaskId, m.ack.Attempt, m.ack.Seq = int64(b.ackRef.ID), int32(b.ackRef.Attempt), int32(b.ackSeq)
		m.outer.Msg = &m.wrapAck
		if !s.sendOne(&m.outer, messageOverhead) {
			return false
		}
	}
	for i := range b.items {
		if !s.sendItem(m, &b.items[i], &b.forget) {
			return false
		}
	}
	for len(b.forget) > 0 {
		n := min(len(b.forget), forgetBatch)
		msg := &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Forget{Forget: &agentpb.Forget{TaskIds: b.forget[:n]}}}
		if !s.sendOne(msg, int64(10*n+messageOverhead)) {
			return false
		}
		b.forget = b.forget[n:]
	}
	if b.status {
		msg := &agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_StatusRequest{StatusRequest: &agentpb.StatusRequest{}}}
		return s.sendOne(msg, messageOverhead)
	}
	return true
}

func (s *session) sendItem(m *messages, i *item, forget *[]int64) bool {
	a := &i.assignment
	if i.cancel {
		msg := &agentpb.Cancel{TaskId: int64(a.ID), Attempt: int32(a.Attempt), Reason: i.reason}
		return s.sendOne(&agentpb.ControllerMessage{Msg: &agentpb.ControllerMessage_Cancel{Cancel: msg}}, i.size())
	}
	e := &m.execute
	e.TaskId, e.Attempt, e.Shard, e.Epoch = int64(a.ID), int32(a.Attempt), int32(s.lease.Shard), a.Epoch
	e.Kind, e.Args, e.Repeatable, e.TimeoutMs = a.Kind, []byte(a.Args), a.Delivery == kinds.DeliveryRepeatable, a.Timeout.Milliseconds()
	e.Forget = e.Forget[:0]
	for _, id := range a.Forget {
		e.Forget = append(e.Forget, int64(id))
	}
	if n := min(len(*forget), forgetBatch); n > 0 {
		e.Forget = append(e.Forget, (*forget)[:n]...)
		*forget = (*forget)[n:]
	}
	s.box.giving(a.Ref(), i.size()+10*int64(len(e.Forget)))
	m.outer.Msg = &m.wrapExe
	ok := s.sendOne(&m.outer, 0)
	fault.Point("after_send")
	e.Args = nil
	return ok
}

// giving is noted before an assignment is sent: its answer may be quick.
func (b *box) giving(ref tasks.Ref, size int64) {
	b.mu.Lock()
	b.sent += size
	b.lastRef, b.lastAt = ref, b.sent
	b.recent[b.next%recentTasks] = ref.ID
	b.next++
	b.mu.Unlock()
}

// sendOne writes a message; size is 0 when it has been counted already.
func (s *session) sendOne(msg *agentpb.ControllerMessage, size int64) bool {
	if size > 0 {
		s.box.mu.Lock()
		s.box.sent += size
		s.box.mu.Unlock()
	}
	s.f.metrics.sent.Inc()
	return s.stream.SendMsg(msg) == nil
}
