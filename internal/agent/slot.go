package agent

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"headgate/internal/agent/ledger"
	"headgate/internal/agent/spool"
	"headgate/internal/agentpb"
	"headgate/internal/fault"
)

// slot is the one execution place of the agent and all that is decided about
// tasks, see the package comment. Its executor is the only thing that runs
// outside the lock.
type slot struct {
	limits   Limits
	demo     Demo
	log      *slog.Logger
	executor *executors
	left     leftovers
	spools   string // folder of the tasks' output

	// base is the parent of all tasks' contexts. It is kept here because tasks
	// outlive the sessions that bring them.
	base context.Context
	end  context.CancelCauseFunc
	work sync.WaitGroup // running executors

	// running is what Ping tells without waiting for the lock, which is held
	// while the ledger syncs.
	running atomic.Pointer[agentpb.TaskRef]

	mu       sync.Mutex // guards all below
	ledger   *ledger.Ledger
	epochs   *epochs
	session  *session // the only one whose messages start anything
	call     *call    // the last task accepted, until its end is told
	stopping bool
	idle     chan struct{} // closed when stopping and the last Final has been handed over
}

// call is one execution. The slot's lock guards it.
type call struct {
	ref     *agentpb.TaskRef
	epoch   int64
	entry   *ledger.Entry
	cancel  context.CancelCauseFunc
	started time.Time
	out     *spool.Spool
	// announce: Accepted is due on the current session; announced: it was sent.
	announce, announced bool
	timer               *time.Timer
	final               *agentpb.Final // set when the ledger has the end
	told                bool           // final was handed to the current session
}

func newSlot(c Config, l *ledger.Ledger, e *epochs, x *executors, left leftovers) (*slot, error) {
	s := &slot{
		limits: c.Limits, demo: c.Demo, log: c.Logger, executor: x, left: left, ledger: l, epochs: e, idle: make(chan struct{}),
		spools: filepath.Join(c.DataDir, spoolDir),
	}
	s.base, s.end = context.WithCancelCause(context.Background())
	if err := s.takeUp(); err != nil {
		s.end(errStopping)
		return nil, fault.Wrap(err, fault.Internal, "output_unreadable", "The output of earlier tasks in "+s.spools+" cannot be read.")
	}
	return s, nil
}

// busy says whether the slot is taken.
func (s *slot) busy() bool { return s.call != nil && !s.call.told }

// wakeLocked makes the current session look for something to send.
func (s *slot) wakeLocked() {
	if s.session != nil {
		s.session.wakeUp()
	}
}

// execute handles an Execute that was read from se.
func (s *slot) execute(se *session, m *agentpb.Execute) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != se || s.stopping {
		return // an older session, or none: nothing starts from it
	}
	ref := &agentpb.TaskRef{TaskId: m.GetTaskId(), Attempt: m.GetAttempt()}
	if m.GetShard() != se.shard || m.GetEpoch() != se.epoch {
		s.refuse(ref, agentpb.Refusal_REFUSAL_STALE_EPOCH, "The task carries another shard or epoch than its session.")
		return
	}
	if s.busy() {
		s.forgetLocked(m.GetForget())
		if proto.Equal(s.call.ref, ref) {
			s.call.announce, s.call.announced = true, false // sent again: it is attached to
			s.wakeLocked()
			return
		}
		s.refuse(ref, agentpb.Refusal_REFUSAL_BUSY, "The slot is taken by another task.")
		return
	}
	digest := digestOf(m)
	if known := s.ledger.Lookup(m.GetTaskId()); known != nil {
		if final := s.answerKnown(known, m, digest); final != nil {
			s.forgetLocked(m.GetForget())
			s.reply(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: final}})
			return
		}
	}
	s.start(ref, m, digest)
}

// start accepts a task and runs it.
func (s *slot) start(ref *agentpb.TaskRef, m *agentpb.Execute, digest [8]byte) {
	now := time.Now()
	entry := &ledger.Entry{
		TaskID: ref.GetTaskId(), Attempt: ref.GetAttempt(), Epoch: m.GetEpoch(), Kind: m.GetKind(),
		Once: s.executor.once(m), Digest: digest,
	}
	if s.left.alive(ref.GetTaskId(), ref.GetAttempt()) {
		s.refuse(ref, agentpb.Refusal_REFUSAL_BUSY, "A process of an earlier attempt is alive and cannot be ended.")
		return
	}
	if s.ledger.Full() {
		s.forgetLocked(m.GetForget())
		if s.ledger.Full() {
			s.refuse(ref, agentpb.Refusal_REFUSAL_LEDGER_FULL, "Too many results of earlier tasks have not been taken.")
			return
		}
	}
	if free := freeBytes(filepath.Dir(s.spools)); free < s.limits.LeastFree {
		s.refuse(ref, agentpb.Refusal_REFUSAL_DISK, fmt.Sprintf("The disk of the agent's data directory is full: %d bytes are free, %d are needed.", free, s.limits.LeastFree))
		return
	}
	fault.Point("before_accepted_sync")
	if err := s.ledger.Accept(entry, now, m.GetForget()); err != nil {
		s.log.Error("refuse a task", "task_id", ref.GetTaskId(), "err", err)
		s.refuse(ref, agentpb.Refusal_REFUSAL_DISK, "The agent's ledger cannot be written: "+err.Error())
		return
	}
	fault.Point("after_accepted_sync")
	ctx, cancel := context.WithCancelCause(s.base)
	c := &call{ref: ref, epoch: m.GetEpoch(), entry: entry, cancel: cancel, started: time.Now()}
	c.out = spool.New(s.spools, ref.GetTaskId(), ref.GetAttempt(), s.limits.OutputSpool)
	c.timer = time.AfterFunc(s.limits.AcceptDelay, func() { s.announce(c) })
	if s.call != nil {
		s.discard(s.call)
	}
	s.call = c
	s.running.Store(ref)
	s.work.Go(func() { s.run(ctx, c, m) })
}

// freeBytes says how much can still be written to the file system of a folder:
// more than can be when it does not tell.
func freeBytes(dir string) int64 {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Blocks == 0 {
		return math.MaxInt64
	}
	blocks := st.Bavail
	if os.Geteuid() == 0 {
		blocks = st.Bfree // what is kept back is kept back for us
	}
	size := uint64(st.Bsize)
	return int64(min(blocks, math.MaxInt64/size) * size)
}

// announce makes Accepted due, unless the end came first.
func (s *slot) announce(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.call == c && c.final == nil {
		c.announce = true
		s.wakeLocked()
	}
}

// run executes a task and records its end.
func (s *slot) run(ctx context.Context, c *call, m *agentpb.Execute) {
	defer c.cancel(nil)
	timeout := min(time.Duration(min(m.GetTimeoutMs(), maxTimeout.Milliseconds()))*time.Millisecond, maxTimeout)
	if timeout <= 0 {
		timeout = maxTimeout
	}
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	end := s.misbehave(ctx)
	if end.Outcome == "" {
		end = s.executor.Execute(ctx, Task{
			ID: c.ref.GetTaskId(), Attempt: c.ref.GetAttempt(), Kind: m.GetKind(), Args: m.GetArgs(), Output: printer{s, c},
		})
	}
	s.finish(ctx, c, end)
}

// finish records the end of a call and has it told.
func (s *slot) finish(ctx context.Context, c *call, end Ending) {
	// By the monotonic clock, so that a clock that is set meanwhile does not
	// make the task longer or end it before its start.
	now := c.started.Add(time.Since(c.started))
	printed, dropped := c.out.End()
	s.mu.Lock()
	defer s.mu.Unlock()
	c.timer.Stop()
	if end.Reason == reasonStopped && !c.entry.Once {
		// Left without an end, it counts as interrupted and will be run again.
		s.call = nil
		s.running.Store(nil)
		s.checkIdle()
		return
	}
	if dropped > 0 {
		end.Detail = sentence(end.Detail, fmt.Sprintf("Of %d bytes of output %d were dropped; its beginning and its end are kept.", printed, dropped))
	}
	end.Detail = clip(end.Detail)
	if end.Exit != nil {
		end.Exit.SpawnError = clip(end.Exit.SpawnError)
	}
	final := &agentpb.Final{
		TaskId: c.ref.GetTaskId(), Attempt: c.ref.GetAttempt(), Epoch: c.epoch,
		Outcome: end.Outcome, Reason: end.Reason, Detail: end.Detail, Result: end.Result, Exit: end.Exit,
		StartedUnixNano: c.started.UnixNano(), EndedUnixNano: now.UnixNano(), OutputBytes: printed,
	}
	stored, err := proto.Marshal(final)
	if err != nil {
		s.log.Error("encode the end of a task", "task_id", c.ref.GetTaskId(), "err", err)
	}
	fault.Point("before_done_sync")
	if err := s.ledger.Finish(c.entry, ledger.Ending{StartedAt: c.started, EndedAt: now, Outcome: final.GetOutcome(), Reason: final.GetReason(), Final: stored}); err != nil {
		s.log.Error("record the end of a task", "task_id", c.ref.GetTaskId(), "err", err)
	}
	fault.Point("after_done_sync")
	c.final = final
	s.wakeLocked()
	s.checkIdle()
}

// retire ends the call's hold on the slot: its Final is told, or the controller
// has said that it has the result.
func (s *slot) retire() {
	s.call.told = true
	s.running.Store(nil)
	s.checkIdle()
}

// checkIdle tells stop that nothing is left to wait for.
func (s *slot) checkIdle() {
	if !s.stopping || s.busy() && (s.call.final == nil || s.session != nil) {
		return
	}
	select {
	case <-s.idle:
	default:
		close(s.idle)
	}
}

// answerKnown gives the answer to an Execute whose task the ledger knows, or
// nil when the task is to be run.
func (s *slot) answerKnown(e *ledger.Entry, m *agentpb.Execute, digest [8]byte) *agentpb.Final {
	same := e.Digest == digest
	if !e.Live() && !same {
		return nil // long past, and another task: the controller counts anew
	}
	final := &agentpb.Final{
		TaskId: m.GetTaskId(), Attempt: m.GetAttempt(), Epoch: m.GetEpoch(),
		StartedUnixNano: e.StartedAt, EndedUnixNano: e.EndedAt,
	}
	switch {
	case !same:
		final.Outcome, final.Reason = rejected, reasonReused
		final.Detail = "The agent already has another task under this id whose result was not taken."
	case e.Live() && e.Done:
		if err := proto.Unmarshal(e.Final(), final); err != nil {
			s.log.Error("read a stored result", "task_id", e.TaskID, "err", err)
		}
		final.Attempt, final.Epoch = m.GetAttempt(), m.GetEpoch()
	case !e.Once && !s.executor.once(m):
		return nil // interrupted, or its result is gone: repeatable tasks run again
	case e.Done:
		final.Outcome, final.Reason = e.Outcome, e.Reason
		final.Detail = "The agent ran this task before and has handed over its result, which it no longer keeps."
	default:
		final.Outcome, final.Reason = unknown, reasonRestarted
		final.Detail = sentence("The agent was restarted while the task ran, and the task must not run twice.", s.left.note(e.TaskID, e.Attempt))
	}
	return final
}

// cancelTask handles a Cancel that was read from se.
func (s *slot) cancelTask(se *session, m *agentpb.Cancel) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.call
	if s.session == se && c != nil && c.ref.GetTaskId() == m.GetTaskId() && c.ref.GetAttempt() == m.GetAttempt() {
		c.cancel(cancelError{m.GetReason()})
	}
}

// ack handles an Ack that was read from se.
func (s *slot) ack(se *session, m *agentpb.Ack) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.call
	if s.session == se && c != nil && c.ref.GetTaskId() == m.GetTaskId() && c.ref.GetAttempt() == m.GetAttempt() {
		c.out.Ack(m.GetSeq())
		s.wakeLocked()
	}
}

// forget handles a Forget that was read from se.
func (s *slot) forget(se *session, ids []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == se {
		s.forgetLocked(ids)
	}
}

func (s *slot) forgetLocked(ids []int64) {
	var keep []int64
	for _, id := range ids {
		if s.call != nil && s.call.ref.GetTaskId() == id {
			if s.call.final == nil {
				continue // it runs: nobody can have its result
			}
			s.retire()
			s.discard(s.call)
			s.call = nil
		}
		keep = append(keep, id)
	}
	if err := s.ledger.Forget(keep); err != nil {
		s.log.Error("forget results", "err", err)
	}
}

// status answers a StatusRequest.
func (s *slot) status(se *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != se {
		return
	}
	st := &agentpb.Status{LedgerEntries: int32(s.ledger.Len()), ClockUnixNano: time.Now().UnixNano()}
	if s.busy() {
		st.Running = s.call.ref
	}
	s.reply(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Status{Status: st}})
}

func (s *slot) refuse(ref *agentpb.TaskRef, cause agentpb.Refusal, detail string) {
	m := &agentpb.Refused{TaskId: ref.GetTaskId(), Attempt: ref.GetAttempt(), Cause: cause, Detail: detail}
	if s.busy() {
		m.Running = s.call.ref
	}
	s.reply(&agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Refused{Refused: m}})
}

// reply queues an answer on the current session. The queue is bounded by its
// reader, which does not read on while too many answers wait.
func (s *slot) reply(m *agentpb.AgentMessage) {
	s.session.replies = append(s.session.replies, m)
	s.wakeLocked()
}

// stop lets nothing new start and gives the running task a moment to end by
// itself; then it ends it and waits until its end has been recorded and, if
// there is a session, told.
func (s *slot) stop() {
	s.mu.Lock()
	s.stopping = true
	s.checkIdle()
	s.mu.Unlock()
	quiet := s.idleWithin(s.limits.FinishGrace)
	s.end(errStopping)
	if !quiet && !s.idleWithin(stopWait) {
		s.log.Warn("stop without waiting for the running task any longer")
	}
}

func (s *slot) idleWithin(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-s.idle:
		return true
	case <-timer.C:
		return false
	}
}

// digestOf tells tasks with one id apart by what they do.
func digestOf(m *agentpb.Execute) [8]byte {
	h := sha256.New()
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(m.GetKind())))
	h.Write(n[:])
	h.Write([]byte(m.GetKind()))
	h.Write(m.GetArgs())
	return [8]byte(h.Sum(nil))
}

// clip makes a text fit for a message: valid UTF-8 of bounded length.
func clip(s string) string {
	const most = 4 << 10
	return strings.ToValidUTF8(s[:min(len(s), most)], "\uFFFD")
}
