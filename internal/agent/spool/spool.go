package spool

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
)

// The streams, as indexes.
const (
	Stdout  = 0
	Stderr  = 1
	streams = 2
)

const (
	// Window is how many chunks may be handed out and unacknowledged; they are
	// all that is kept in memory beside the one that is being filled.
	Window = 4
	// ChunkSize is the most that one chunk has.
	ChunkSize = 64 << 10
	// leastCost is what a chunk counts for at least, so that a program which
	// prints single bytes by turns on both streams is bounded too.
	leastCost = 128
)

// Chunk is a piece of one stream. Its data must not be changed.
type Chunk struct {
	Seq    int32 // counts the chunks of both streams; leaves out what was dropped
	Stream int
	Offset int64 // of its first byte in the stream, as printed
	Data   []byte
}

func (c *Chunk) cost() int64 { return max(int64(len(c.Data)), leastCost) }

func (c *Chunk) end() int64 { return c.Offset + int64(len(c.Data)) }

// Spool holds the output of one attempt of a task. Its methods may be called
// at the same time.
type Spool struct {
	folder  string // of all spools
	task    int64
	attempt int32

	mu    sync.Mutex
	dir   string // of this one; its name tells the limit
	limit int64

	seq     int32
	printed [streams]int64 // bytes, kept or not
	stored  [streams]int64 // where the last kept piece ended
	middle  [streams]int64 // where the last piece ended that was dropped between the halves
	dropped int64
	open    Chunk // being filled; only its data says whether it is one
	head    int64 // cost of the first half
	tail    int64 // cost of what is kept of the last half
	inTail  bool
	mark    int32 // the first of the numbers left free between the halves
	ended   bool

	segs []*segment // in order of their chunks
	last int        // number of the newest one ever
	file *os.File   // of the newest, to append to

	read   reader
	marks  []*Chunk // empty ones between the halves
	ends   []*Chunk // empty ones at the very end
	window []*Chunk // handed out at least once and unacknowledged
	sent   int      // of them since the last Rewind
}

// New makes a spool below folder; nothing is there before something is printed.
func New(folder string, task int64, attempt int32, limit int64) *Spool {
	s := &Spool{folder: folder, task: task, attempt: attempt}
	s.setLimit(limit)
	return s
}

func (s *Spool) setLimit(n int64) {
	s.limit = n
	s.dir = filepath.Join(s.folder, name(s.task, s.attempt, n))
}

// Limit lowers what is kept at most. It is called before the first Write.
func (s *Spool) Limit(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setLimit(min(s.limit, n))
}

func (s *Spool) half() int64 { return s.limit / 2 }

// Write takes what was printed. It waits for the disk at most.
func (s *Spool) Write(stream int, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(p) > 0 {
		n := min(len(p), s.room(stream))
		if n == 0 {
			if c, err := s.seal(); err != nil {
				s.dropped += int64(len(c.Data))
			}
			if !s.inTail && s.head >= s.half() {
				s.inTail, s.mark = true, s.seq
				s.seq += streams
			}
			continue
		}
		if len(s.open.Data) == 0 {
			s.open = Chunk{Stream: stream, Offset: s.printed[stream]}
		}
		s.open.Data = append(s.open.Data, p[:n]...)
		s.printed[stream] += int64(n)
		p = p[n:]
	}
}

// room says how many bytes of the stream fit into the chunk that is being
// filled.
func (s *Spool) room(stream int) int {
	if len(s.open.Data) > 0 && s.open.Stream != stream {
		return 0
	}
	n := ChunkSize - len(s.open.Data)
	if !s.inTail {
		n = min(n, max(0, int(s.half()-s.head)-len(s.open.Data)))
	}
	return n
}

// seal ends the chunk that is being filled and writes it down. After an error it
// is kept nowhere.
func (s *Spool) seal() (*Chunk, error) {
	c := s.open
	s.open = Chunk{}
	if len(c.Data) == 0 {
		return &c, nil
	}
	c.Seq = s.seq
	s.seq++
	if !s.inTail {
		s.head += c.cost()
	}
	if err := s.append(&c); err != nil {
		return &c, err
	}
	s.stored[c.Stream] = c.end()
	if s.inTail {
		s.tail += c.cost()
		s.dropMiddle()
	}
	return &c, nil
}

// dropMiddle lets go of the oldest segments of the last half that it can do
// without.
func (s *Spool) dropMiddle() {
	for i := s.firstOfTail(); i < len(s.segs)-1 && s.tail-s.segs[i].cost >= s.half(); {
		g := s.segs[i]
		s.tail -= g.cost
		for stream, n := range g.bytes {
			s.drop(stream, n, g.ends[stream])
		}
		s.remove(i)
	}
}

// drop counts n bytes of the middle, the last of which was at end.
func (s *Spool) drop(stream int, n, end int64) {
	if n > 0 {
		s.dropped += n
		s.middle[stream] = end
	}
}

// End says that nothing more will be printed. It gives how many bytes were
// printed, and how many of them were dropped.
func (s *Spool) End() (printed, dropped int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.finish()
	}
	return s.printed[Stdout] + s.printed[Stderr], s.dropped
}

// finish fixes what is kept of the last half, to the byte, and marks what is
// missing at the end of a stream, where no later chunk shows it. The last chunk
// is kept in memory if the disk does not take it.
func (s *Spool) finish() {
	if c, err := s.seal(); err != nil {
		s.stored[c.Stream] = c.end()
		s.ends = append(s.ends, c)
	}
	if s.inTail {
		s.cut(s.tail - s.half())
		for stream, end := range s.middle {
			if end > 0 {
				s.marks = append(s.marks, &Chunk{Seq: s.mark + int32(stream), Stream: stream, Offset: end})
			}
		}
	}
	for stream, end := range s.printed {
		if max(s.stored[stream], s.middle[stream]) < end {
			s.ends = append(s.ends, &Chunk{Stream: stream, Offset: end})
		}
	}
	s.ended = true
}

// Next hands out the next chunk, nil while the window is full or there is none.
func (s *Spool) Next() *Chunk {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent < len(s.window) {
		s.sent++
		return s.window[s.sent-1]
	}
	if len(s.window) >= Window {
		return nil
	}
	c := s.take()
	if c != nil {
		s.window = append(s.window, c)
		s.sent++
	}
	return c
}

// Ack lets go of the chunks up to seq that were handed out.
func (s *Spool) Ack(seq int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < s.sent && s.window[n].Seq <= seq {
		s.window[n] = nil
		n++
	}
	s.window, s.sent = s.window[n:], s.sent-n
	for n > 0 && len(s.segs) > 0 && s.segs[0].no < s.read.no && s.segs[0].lastSeq <= seq {
		s.remove(0)
	}
	if n > 0 && len(s.window) == 0 && len(s.segs) == 1 && s.read.no == s.segs[0].no && s.read.pos >= s.segs[0].size {
		s.clear()
	}
}

// Rewind makes the first unacknowledged chunk the next one again.
func (s *Spool) Rewind() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = 0
}

// Drained says whether everything has been handed out since the last Rewind.
func (s *Spool) Drained() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent == len(s.window) && !s.more()
}

// Empty says whether everything has been acknowledged.
func (s *Spool) Empty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.window) == 0 && !s.more()
}

// Remove takes the files away.
func (s *Spool) Remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errors.Join(s.closeFile(), s.read.close())
	if s.last > 0 {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	s.segs, s.window, s.sent, s.open, s.marks, s.ends = nil, nil, 0, Chunk{}, nil, nil
	return err
}
