package spool

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// collected is what a controller makes of chunks.
type collected struct {
	data  [streams][]byte // what is missing is zeros
	known [streams][]bool
	seq   int32
}

func (c *collected) take(t *testing.T, k *Chunk) {
	t.Helper()
	if k.Seq < c.seq {
		return // sent again
	}
	c.seq = k.Seq + 1
	if n := int64(len(c.data[k.Stream])); k.Offset < n {
		t.Fatalf("chunk %d begins at %d, the stream is at %d", k.Seq, k.Offset, n)
	} else {
		c.data[k.Stream] = append(c.data[k.Stream], make([]byte, k.Offset-n)...)
		c.known[k.Stream] = append(c.known[k.Stream], make([]bool, k.Offset-n)...)
	}
	c.data[k.Stream] = append(c.data[k.Stream], k.Data...)
	for range k.Data {
		c.known[k.Stream] = append(c.known[k.Stream], true)
	}
}

// missing says how many bytes of a stream did not come, and fails when one of
// those that came is wrong.
func (c *collected) missing(t *testing.T, stream int, want []byte) (n int) {
	t.Helper()
	if len(c.data[stream]) != len(want) {
		t.Fatalf("stream %d ends at %d, %d bytes were printed", stream, len(c.data[stream]), len(want))
	}
	for i, b := range want {
		if !c.known[stream][i] {
			n++
		} else if b != c.data[stream][i] {
			t.Fatalf("byte %d of stream %d is wrong", i, stream)
		}
	}
	return n
}

// drain hands everything out and acknowledges it.
func (c *collected) drain(t *testing.T, s *Spool) {
	t.Helper()
	for k := s.Next(); k != nil; k = s.Next() {
		c.take(t, k)
		s.Ack(k.Seq)
	}
}

func noise(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(1 + r.IntN(255))
	}
	return b
}

// Cases P19.
func TestWhatIsPrintedComesBackWhateverTheControllerDoes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1))
			limit := int64(1) << (10 + r.IntN(13))
			s := New(t.TempDir(), 7, 1, limit)
			var want [streams][]byte
			var got collected
			var unacked []int32
			for range 20 + r.IntN(200) {
				stream := r.IntN(streams)
				p := noise(r, 1+r.IntN(1<<r.IntN(17)))
				want[stream] = append(want[stream], p...)
				s.Write(stream, p)
				for range r.IntN(4) {
					switch r.IntN(5) {
					case 0:
						s.Rewind()
					case 1:
						if len(unacked) > 0 {
							s.Ack(unacked[0])
							unacked = unacked[1:]
						}
					default:
						if k := s.Next(); k != nil {
							got.take(t, k)
							unacked = append(unacked, k.Seq)
						}
					}
				}
			}
			printed, dropped := s.End()
			s.Rewind()
			got.drain(t, s)
			if !s.Drained() || !s.Empty() {
				t.Error("it is not empty")
			}
			total := len(want[0]) + len(want[1])
			missing := got.missing(t, Stdout, want[Stdout]) + got.missing(t, Stderr, want[Stderr])
			if int(printed) != total || int(dropped) != missing {
				t.Errorf("%d of %d bytes are missing, it counts %d of %d", missing, total, dropped, printed)
			}
			if kept := int64(total - missing); kept > limit {
				t.Errorf("%d bytes are kept, the limit is %d", kept, limit)
			}
			if int64(total) <= limit/2 && missing > 0 {
				t.Errorf("%d bytes are missing below the limit", missing)
			}
			if err := s.Remove(); err != nil {
				t.Error(err)
			}
			if left, _ := os.ReadDir(s.folder); len(left) > 0 {
				t.Errorf("%v is left", left)
			}
		})
	}
}

// used gives the bytes of all segments.
func used(s *Spool) (n int64) {
	for _, g := range s.segs {
		n += g.size
	}
	return n
}

// Cases P22, P47.
func TestTheFirstAndTheLastHalfAreKeptToTheByte(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	const limit, total = 4 << 20, 11_000_003
	all := noise(r, total)
	s := New(t.TempDir(), 7, 1, limit)
	s.Write(Stderr, []byte("first"))
	for p := all; len(p) > 0; {
		n := min(len(p), 1+r.IntN(200_000))
		s.Write(Stdout, p[:n])
		p = p[n:]
	}
	if n := used(s); n > limit+2*segmentSize {
		t.Errorf("%d bytes are on disk, the limit is %d", n, limit)
	}
	s.End()
	var got collected
	got.drain(t, s)
	missing := got.missing(t, Stdout, all)
	if want := total + 128 - limit; missing != want { // "first" counts for 128
		t.Errorf("%d bytes are missing, want %d", missing, want)
	}
	for i, known := range got.known[Stdout] {
		if (i < limit/2-128 || i >= total-limit/2) != known {
			t.Fatalf("byte %d: kept is %v", i, known)
		}
	}
}

// A stream of which nothing follows the gap says where it ended all the same.
//
// Cases P4.
func TestAStreamThatWasDroppedWholeShowsItsSize(t *testing.T) {
	t.Parallel()
	s := New(t.TempDir(), 7, 1, 2<<20)
	s.Write(Stdout, make([]byte, 1<<20))
	s.Write(Stderr, make([]byte, 100_000))
	s.Write(Stdout, make([]byte, 9<<20))
	s.End()
	var got collected
	got.drain(t, s)
	if missing := got.missing(t, Stderr, make([]byte, 100_000)); missing != 100_000 {
		t.Errorf("%d bytes of it are missing", missing)
	}
}

func TestSingleBytesByTurnsAreBounded(t *testing.T) {
	t.Parallel()
	s := New(t.TempDir(), 7, 1, 1<<20)
	for range 20_000 {
		s.Write(Stdout, []byte("a"))
		s.Write(Stderr, []byte("b"))
	}
	s.End()
	chunks := 0
	for k := s.Next(); k != nil; k = s.Next() {
		chunks++
		s.Ack(k.Seq)
	}
	if most := 1<<20/leastCost + 10; chunks > most {
		t.Errorf("%d chunks, want at most %d", chunks, most)
	}
}

func TestAFullDiskDropsAndCounts(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(folder, nil, 0o600); err != nil { // nothing can be made below it
		t.Fatal(err)
	}
	s := New(folder, 7, 1, 1<<20)
	all := noise(rand.New(rand.NewPCG(3, 4)), 300_000)
	s.Write(Stdout, all)
	var got collected
	got.drain(t, s) // what is in memory is handed out as ever
	s.Write(Stdout, all)
	printed, dropped := s.End()
	got.drain(t, s)
	if missing := got.missing(t, Stdout, append(all, all...)); missing == 0 || int64(missing) != dropped || printed != 600_000 {
		t.Errorf("%d bytes are missing, it counts %d of %d", missing, dropped, printed)
	}
}

func TestARestartFindsWhatWasNotAcknowledged(t *testing.T) {
	t.Parallel()
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 5))
		folder := t.TempDir()
		s := New(folder, 7, 2, 8<<20)
		s.Limit(3 << 20)
		var want [streams][]byte
		var got collected
		for range 1 + r.IntN(60) {
			stream := r.IntN(streams)
			p := noise(r, 1+r.IntN(120_000))
			want[stream] = append(want[stream], p...)
			s.Write(stream, p)
			if k := s.Next(); k != nil && r.IntN(2) == 0 {
				got.take(t, k)
				s.Ack(k.Seq)
			}
		}
		s.End() // fixes nothing on disk; what is open in memory is lost with the process
		found, err := Find(folder)
		if err != nil || len(found) != 1 || found[0].Task != 7 || found[0].Attempt != 2 {
			t.Fatalf("seed %d: found %v, %v", seed, found, err)
		}
		again, err := found[0].Open()
		if err != nil {
			t.Fatal(err)
		}
		got.drain(t, again)
		for stream := range want {
			end := len(got.data[stream])
			if end < len(want[stream])-ChunkSize {
				t.Errorf("seed %d: stream %d ends at %d of %d", seed, stream, end, len(want[stream]))
			}
			got.missing(t, stream, want[stream][:end])
		}
		if err := again.Remove(); err != nil {
			t.Error(err)
		}
		if left, _ := os.ReadDir(folder); len(left) > 0 {
			t.Errorf("%v is left", left)
		}
	}
}

func TestATornRecordEndsWhatIsFound(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	s := New(folder, 7, 1, 8<<20)
	s.Write(Stdout, bytes.Repeat([]byte("x"), 5*ChunkSize))
	s.End()
	g := s.segs[0]
	if err := os.Truncate(s.path(g), g.size-10); err != nil {
		t.Fatal(err)
	}
	found, _ := Find(folder)
	again, err := found[0].Open()
	if err != nil {
		t.Fatal(err)
	}
	var got collected
	got.drain(t, again)
	if n := len(got.data[Stdout]); n != 4*ChunkSize {
		t.Errorf("%d bytes come back, want %d", n, 4*ChunkSize)
	}
}
