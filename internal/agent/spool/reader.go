package spool

import "os"

// reader is the place up to which the segments were handed out.
type reader struct {
	no   int   // number of the segment
	pos  int64 // in it
	cut  int64 // bytes to leave out at the beginning of the next record
	file *os.File
}

func (r *reader) close() error {
	if r.file == nil {
		return nil
	}
	err := r.file.Close()
	r.file = nil
	return err
}

// take gives the next chunk that was never handed out.
func (s *Spool) take() *Chunk {
	for i := 0; i < len(s.segs); i++ {
		g := s.segs[i]
		if g.no < s.read.no || g.no == s.read.no && s.read.pos >= g.size || g.from >= g.size {
			continue
		}
		if g.tail && !s.ended {
			return nil
		}
		if g.tail && len(s.marks) > 0 {
			break
		}
		if c := s.next(g); c != nil {
			return c
		}
	}
	if len(s.open.Data) > 0 && !s.inTail {
		return s.takeOpen()
	}
	return s.takeMark()
}

// takeOpen hands out what is being filled: the controller waits for it. It is
// written down, too, so that a restart finds it, and is not read again.
func (s *Spool) takeOpen() *Chunk {
	c, err := s.seal()
	if err != nil {
		s.stored[c.Stream] = c.end()
		return c
	}
	g := s.segs[len(s.segs)-1]
	if g.no != s.read.no {
		_ = s.read.close()
	}
	s.read.no, s.read.pos = g.no, g.size
	return c
}

// takeMark gives the empty chunks that are due.
func (s *Spool) takeMark() *Chunk {
	if !s.ended {
		return nil
	}
	if len(s.marks) > 0 {
		c := s.marks[0]
		s.marks = s.marks[1:]
		return c
	}
	if len(s.ends) > 0 {
		c := s.ends[0]
		s.ends = s.ends[1:]
		c.Seq, s.seq = s.seq, s.seq+1
		return c
	}
	return nil
}

// next reads a record of a segment. What cannot be read is passed over; the
// next chunk then shows that it is missing.
func (s *Spool) next(g *segment) *Chunk {
	r := &s.read
	if g.no != r.no {
		_ = r.close()
		r.no, r.pos, r.cut = g.no, g.from, g.cut
	}
	if r.file == nil {
		r.file, _ = os.Open(s.path(g)) // decode tells that there is none
	}
	c, err := decode(r.file, r.pos)
	if err != nil {
		r.pos = g.size
		return nil
	}
	r.pos += c.recordSize()
	c.Data, c.Offset = c.Data[r.cut:], c.Offset+r.cut
	r.cut = 0
	return c
}

// cut leaves out as much at the beginning of the last half as is too much: less
// than a segment.
func (s *Spool) cut(over int64) {
	for i := s.firstOfTail(); over > 0 && i < len(s.segs); i++ {
		g := s.segs[i]
		f, err := os.Open(s.path(g))
		if err != nil {
			return // what cannot be read is passed over anyway
		}
		over = s.cutSegment(g, f, over)
		_ = f.Close() // it was only read
	}
}

// cutSegment gives what is still too much after a segment.
func (s *Spool) cutSegment(g *segment, f *os.File, over int64) int64 {
	for over > 0 && g.from < g.size {
		c, err := decode(f, g.from)
		if err != nil {
			return 0
		}
		if n := int64(len(c.Data)); over < n {
			g.cut = over
			s.drop(c.Stream, over, c.Offset+over)
			return 0
		}
		over -= c.cost()
		s.drop(c.Stream, int64(len(c.Data)), c.end())
		g.from += c.recordSize()
	}
	return over
}

// more says whether something was never handed out.
func (s *Spool) more() bool {
	if len(s.open.Data) > 0 || len(s.marks) > 0 || len(s.ends) > 0 {
		return true
	}
	if len(s.segs) == 0 {
		return false
	}
	g := s.segs[len(s.segs)-1]
	return g.no > s.read.no && g.from < g.size || g.no == s.read.no && s.read.pos < g.size
}
