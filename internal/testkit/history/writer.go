package history

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Writer appends events to the file of one process. Each call is one write, so
// that a process killed at any instant leaves whole lines and at most one that
// is torn. All methods may be called from any goroutine.
//
// A Writer that cannot write remembers the first error; Close gives it.
type Writer struct {
	mu  sync.Mutex
	f   *os.File
	err error
	ops atomic.Int64
}

// Now is the time of events: CLOCK_MONOTONIC in nanoseconds.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(fmt.Sprintf("history: the monotonic clock cannot be read: %v", err))
	}
	return ts.Nano()
}

// Open appends to a file, or makes it. What an earlier process has torn is
// closed off by a line of its own.
func Open(path string) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	w := &Writer{f: f}
	w.ops.Store(Now()) // unlike those of an earlier process in this file
	if err := w.closeOff(); err != nil {
		_ = f.Close()
		return nil, err
	}
	w.Write(Event{Kind: KindOpen, Text: fmt.Sprintf("pid %d", os.Getpid())})
	return w, nil
}

func (w *Writer) closeOff() error {
	end, err := w.f.Seek(0, io.SeekEnd)
	if err != nil || end == 0 {
		return err
	}
	last := make([]byte, 1)
	if _, err := w.f.ReadAt(last, end-1); err != nil || last[0] == '\n' {
		return err
	}
	_, err = w.f.WriteString("\n")
	return err
}

// Write appends events in one write; those without a time get the present one.
func (w *Writer) Write(events ...Event) {
	now := Now()
	var b []byte
	for i := range events {
		if events[i].T == 0 {
			events[i].T = now
		}
		line, err := json.Marshal(&events[i])
		if err != nil {
			panic(err) // an Event has no field that could fail
		}
		b = append(append(b, line...), '\n')
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.f.Write(b); err != nil && w.err == nil {
		w.err = err
	}
}

// Sync brings what was written to disk; it is needed only where the machine
// itself may go down.
func (w *Writer) Sync() error { return w.f.Sync() }

// Close ends the file and gives the first error of all writes.
func (w *Writer) Close() error {
	err := w.f.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	return err
}

// Submission is what is about to be asked for.
type Submission struct {
	Agent    string
	Key      string // for a batch the key with "#" and the index
	Priority int
	Once     bool
	Free     bool
}

// Submit notes a submission before it is sent and gives its number.
func (w *Writer) Submit(s Submission) int64 { return w.SubmitAll(s) }

// SubmitAll notes a batch before it is sent. The first has the number given,
// the others follow by one.
func (w *Writer) SubmitAll(list ...Submission) (first int64) {
	n := int64(len(list))
	first = w.ops.Add(n) - n
	events := make([]Event, len(list))
	for i, s := range list {
		events[i] = Event{
			Kind: KindSubmit, Op: first + int64(i), Agent: s.Agent, Key: s.Key, Priority: s.Priority, Once: s.Once, Free: s.Free,
		}
	}
	w.Write(events...)
	return first
}

// Acked notes the answer to a submission; id is 0 when it named no task.
func (w *Writer) Acked(op, id int64, status int) {
	w.Write(Event{Kind: KindAcked, Op: op, ID: id, Status: status})
}

// AckedAll notes the answer to a batch.
func (w *Writer) AckedAll(first int64, ids []int64, status int) {
	events := make([]Event, len(ids))
	for i, id := range ids {
		events[i] = Event{Kind: KindAcked, Op: first + int64(i), ID: id, Status: status}
	}
	w.Write(events...)
}

// Unanswered notes that no answer came: the task may be stored, once, or not.
func (w *Writer) Unanswered(op int64, why string) {
	w.Write(Event{Kind: KindAcked, Op: op, Text: why})
}

// Run names one execution.
type Run struct {
	Agent   string
	ID      int64
	Attempt int
	Epoch   int64
	Once    bool
}

// Start notes that the agent begins to run a task. Call it where the effect
// begins, before anything can be seen of it.
func (w *Writer) Start(r Run) {
	w.Write(Event{Kind: KindStart, Agent: r.Agent, ID: r.ID, Attempt: r.Attempt, Epoch: r.Epoch, Once: r.Once})
}

// End notes that it has ended, before anybody is told.
func (w *Writer) End(r Run, outcome string) {
	w.Write(Event{Kind: KindEnd, Agent: r.Agent, ID: r.ID, Attempt: r.Attempt, Outcome: outcome})
}

// Killed notes for an execution that could not do it itself that it has ended
// at some time since then.
func (w *Writer) Killed(r Run, since int64) {
	w.Write(Event{Kind: KindEnd, Agent: r.Agent, ID: r.ID, Attempt: r.Attempt, Since: since, Text: "killed"})
}

// Boot notes that an agent begins anew, before it takes anything.
func (w *Writer) Boot(agent string) { w.Write(Event{Kind: KindBoot, Agent: agent}) }

// Wait notes that a waiter asks for the end of a task, Left that it gives up,
// Told that it has got a terminal event. Each question is a waiter of its own.
func (w *Writer) Wait(waiter string, id int64) {
	w.Write(Event{Kind: KindWait, Waiter: waiter, ID: id})
}

// Left: see Wait.
func (w *Writer) Left(waiter string, id int64) {
	w.Write(Event{Kind: KindLeft, Waiter: waiter, ID: id})
}

// Told: see Wait and Follow.
func (w *Writer) Told(waiter string, id int64, outcome string) {
	w.Write(Event{Kind: KindTold, Waiter: waiter, ID: id, Outcome: outcome})
}

// Follow notes that a stream of all events is open, resumed without a gap as
// often as it breaks; Reset that it said so itself, Unfollow that it ends.
func (w *Writer) Follow(waiter string) { w.Write(Event{Kind: KindFollow, Waiter: waiter}) }

// Reset: see Follow.
func (w *Writer) Reset(waiter string) { w.Write(Event{Kind: KindReset, Waiter: waiter}) }

// Unfollow: see Follow.
func (w *Writer) Unfollow(waiter string) { w.Write(Event{Kind: KindUnfollow, Waiter: waiter}) }

// Seen notes what a read has shown that began at since.
func (w *Writer) Seen(since, id int64, state, outcome string) {
	w.Write(Event{Kind: KindSeen, Since: since, ID: id, State: state, Outcome: outcome})
}

// Fault notes that something is about to be broken, Healed that all works.
func (w *Writer) Fault(text string) { w.Write(Event{Kind: KindFault, Text: text}) }

// Healed: see Fault.
func (w *Writer) Healed(text string) { w.Write(Event{Kind: KindHealed, Text: text}) }
