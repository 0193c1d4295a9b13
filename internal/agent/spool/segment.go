package spool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
)

const (
	// segmentSize is where a new segment is begun.
	segmentSize = 1 << 20
	// A record's head: length of the data, number, place, checksum of all that
	// and the data, stream.
	recordHead = 4 + 4 + 8 + 4 + 1
)

// segment is a file of records.
type segment struct {
	no      int
	tail    bool // of the last half
	size    int64
	cost    int64
	lastSeq int32
	bytes   [streams]int64 // kept in it
	ends    [streams]int64 // where the last piece of each stream in it ended

	from int64 // place of the first record that is kept
	cut  int64 // bytes to leave out at the beginning of that
}

// fileName says which half a segment belongs to, for the next start.
func (g *segment) fileName() string {
	half := "head"
	if g.tail {
		half = "tail"
	}
	return fmt.Sprintf("%s-%08d", half, g.no)
}

func (g *segment) add(c *Chunk) {
	g.size += c.recordSize()
	g.cost += c.cost()
	g.lastSeq = c.Seq
	g.bytes[c.Stream] += int64(len(c.Data))
	g.ends[c.Stream] = c.end()
}

func (s *Spool) path(g *segment) string { return filepath.Join(s.dir, g.fileName()) }

// newest gives the segment that the next record belongs into.
func (s *Spool) newest() (*segment, error) {
	if s.file != nil {
		if g := s.segs[len(s.segs)-1]; g.tail == s.inTail && g.size < segmentSize {
			return g, nil
		}
	}
	if err := s.closeFile(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, err
	}
	g := &segment{no: s.last + 1, tail: s.inTail}
	f, err := os.OpenFile(s.path(g), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	s.file, s.last, s.segs = f, g.no, append(s.segs, g)
	return g, nil
}

func (c *Chunk) recordSize() int64 { return int64(recordHead + len(c.Data)) }

// append writes a record. What an error has left behind the last whole record
// is written over by the next one.
func (s *Spool) append(c *Chunk) error {
	g, err := s.newest()
	if err != nil {
		return err
	}
	if _, err := s.file.WriteAt(encode(c), g.size); err != nil {
		return err
	}
	g.add(c)
	return nil
}

// clear empties the only segment when all of it was acknowledged, so that a
// restart finds only what was not.
func (s *Spool) clear() {
	g := s.segs[0]
	if os.Truncate(s.path(g), 0) == nil {
		g.size, g.from, s.read.pos = 0, 0, 0
	}
}

func (s *Spool) closeFile() error {
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	s.file = nil
	return err
}

// remove takes a segment away; a file that stays is removed with its folder.
func (s *Spool) remove(i int) {
	if i == len(s.segs)-1 {
		_ = s.closeFile()
	}
	_ = os.Remove(s.path(s.segs[i]))
	s.segs = slices.Delete(s.segs, i, i+1)
}

func (s *Spool) firstOfTail() int {
	for i, g := range s.segs {
		if g.tail {
			return i
		}
	}
	return len(s.segs)
}

func encode(c *Chunk) []byte {
	b := make([]byte, recordHead, recordHead+len(c.Data))
	binary.BigEndian.PutUint32(b, uint32(len(c.Data)))
	binary.BigEndian.PutUint32(b[4:], uint32(c.Seq))
	binary.BigEndian.PutUint64(b[8:], uint64(c.Offset))
	b[20] = byte(c.Stream)
	binary.BigEndian.PutUint32(b[16:], checksum(b, c.Data))
	return append(b, c.Data...)
}

// checksum is over a record without the checksum itself.
func checksum(head, data []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli) // made once by its package
	sum := crc32.Update(crc32.Checksum(head[:16], table), table, head[20:recordHead])
	return crc32.Update(sum, table, data)
}

var errDamaged = errors.New("a record of the spool is damaged")

// decode reads the record at pos.
func decode(f *os.File, pos int64) (*Chunk, error) {
	var b [recordHead]byte
	if f == nil {
		return nil, errDamaged
	}
	if _, err := f.ReadAt(b[:], pos); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(b[:])
	c := &Chunk{
		Seq: int32(binary.BigEndian.Uint32(b[4:])), Offset: int64(binary.BigEndian.Uint64(b[8:])), Stream: int(b[20]),
	}
	if n > ChunkSize || c.Stream >= streams || c.Seq < 0 || c.Offset < 0 {
		return nil, errDamaged
	}
	c.Data = make([]byte, n)
	if _, err := f.ReadAt(c.Data, pos+recordHead); err != nil {
		return nil, err
	}
	if binary.BigEndian.Uint32(b[16:]) != checksum(b[:], c.Data) {
		return nil, errDamaged
	}
	return c, nil
}
