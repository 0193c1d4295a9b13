package agent

import (
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
)

// chunkCost is what a chunk takes beside its bytes; counting it keeps a program
// that prints single bytes by turns on both streams within the bound.
const chunkCost = 128

// outbox holds the output of one call until it is acknowledged. The slot's lock
// guards it.
type outbox struct {
	chunks  []*chunk // unacknowledged, in order of seq
	next    int      // the first of chunks not yet sent on the current session
	sent    int32    // chunks below this seq were sent once and never change again
	seq     int32    // of the next chunk
	offsets [3]int64 // bytes so far, by stream
	size    int
	total   int64 // bytes printed, dropped ones included
	dropped int64
	ended   bool          // the program has ended: nobody may block any more
	room    chan struct{} // closed and replaced when there is room again
}

type chunk struct {
	seq    int32
	stream agentpb.Stream
	offset int64
	data   []byte
}

func newOutbox() *outbox { return &outbox{room: make(chan struct{})} }

// add takes a piece of output. Pieces that were not sent yet are joined, so
// that a program which prints line by line does not wait for each line.
func (o *outbox) add(s program.Stream, p []byte) {
	stream := agentpb.Stream_STREAM_STDOUT
	if s == program.Stderr {
		stream = agentpb.Stream_STREAM_STDERR
	}
	o.total += int64(len(p))
	if n := len(o.chunks); n > 0 {
		last := o.chunks[n-1]
		if last.seq >= o.sent && last.stream == stream && len(last.data)+len(p) <= chunkSize {
			last.data = append(last.data, p...)
			o.offsets[stream] += int64(len(p))
			o.size += len(p)
			return
		}
	}
	o.chunks = append(o.chunks, &chunk{seq: o.seq, stream: stream, offset: o.offsets[stream], data: append([]byte(nil), p...)})
	o.seq++
	o.offsets[stream] += int64(len(p))
	o.size += len(p) + chunkCost
}

// take gives the next chunk to send, nil while the window is full.
func (o *outbox) take() *chunk {
	if o.next >= min(len(o.chunks), outputWindow) {
		return nil
	}
	c := o.chunks[o.next]
	o.next++
	o.sent = max(o.sent, c.seq+1)
	return c
}

// ack drops what is on the controller's disk; only what was sent can be.
func (o *outbox) ack(seq int32) {
	n := 0
	for n < o.next && o.chunks[n].seq <= seq {
		o.size -= len(o.chunks[n].data) + chunkCost
		o.chunks[n] = nil
		n++
	}
	if n == 0 {
		return
	}
	o.chunks, o.next = o.chunks[n:], o.next-n
	o.release()
}

// rewind makes the next session start with the first unacknowledged chunk.
func (o *outbox) rewind() { o.next = 0 }

// drained says whether all output has been sent on the current session.
func (o *outbox) drained() bool { return o.next == len(o.chunks) }

func (o *outbox) empty() bool { return len(o.chunks) == 0 }

// release wakes those that wait for room.
func (o *outbox) release() {
	close(o.room)
	o.room = make(chan struct{})
}

// spool is the program.Sink of a call.
type spool struct {
	slot *slot
	call *call
}

// Write blocks while too much output is unacknowledged; the program then feels
// it, and its time limit goes on.
func (w spool) Write(s program.Stream, p []byte) {
	limit := w.slot.limits.OutputSpool
	for len(p) > 0 {
		n := min(len(p), chunkSize)
		w.slot.mu.Lock()
		o := w.call.out
		switch {
		case o.ended && o.size >= limit+outputOverrun:
			o.total += int64(len(p))
			o.dropped += int64(len(p))
			w.slot.mu.Unlock()
			return
		case !o.ended && o.size >= limit:
			room := o.room
			w.slot.mu.Unlock()
			<-room // closed by an acknowledgement or by the program's end
			continue
		}
		o.add(s, p[:n])
		w.slot.wakeLocked()
		w.slot.mu.Unlock()
		p = p[n:]
	}
}

// Unblock lets the last output through when the program has ended.
func (w spool) Unblock() {
	w.slot.mu.Lock()
	defer w.slot.mu.Unlock()
	w.call.out.ended = true
	w.call.out.release()
}
