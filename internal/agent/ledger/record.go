package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"uuid"
)

const (
	magic      = "HGLEDG01"
	headerSize = len(magic) + 16 + 8 + 4 // magic, id, made at, checksum
	headSize   = 12                      // length, checksum of payload, checksum of the head
	trailer    = 0xA5                    // any byte but zero
	// maxPayload is above the largest record (a result of 1 MiB and its
	// surroundings) and bounds what a damaged length makes us allocate.
	maxPayload = 8 << 20
)

// The sorts of records. Numbers are part of the file format.
const (
	recAccept  = 1 // a task was accepted
	recDone    = 2 // it has ended, with its result
	recForget  = 3 // results that the controller has stored
	recPast    = 4 // a whole entry without its result; written by compaction
	recCounter = 5 // the order reached so far; written by compaction
)

var errRecord = errors.New("the content of a record does not fit its sort")

func checksum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

func encodeHeader(id uuid.UUID, madeAt int64) []byte {
	b := append([]byte(magic), id[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(madeAt))
	return binary.BigEndian.AppendUint32(b, checksum(b))
}

func decodeHeader(b []byte) (uuid.UUID, error) {
	body := b[:headerSize-4]
	if string(b[:len(magic)]) != magic || checksum(body) != binary.BigEndian.Uint32(b[headerSize-4:headerSize]) {
		return uuid.UUID{}, errors.New("the header is not that of a ledger")
	}
	return uuid.UUID(b[len(magic) : len(magic)+16]), nil
}

// appendRecord frames what fill appends.
func appendRecord(b []byte, fill func([]byte) []byte) []byte {
	start := len(b)
	b = append(b, make([]byte, headSize)...)
	b = fill(b)
	payload := b[start+headSize:]
	head := b[start : start+headSize]
	binary.BigEndian.PutUint32(head, uint32(len(payload)))
	binary.BigEndian.PutUint32(head[4:], checksum(payload))
	binary.BigEndian.PutUint32(head[8:], checksum(head[:8]))
	return append(b, trailer)
}

// torn says that the file ends inside the record at hand.
var errTorn = errors.New("the record is incomplete")

// nextRecord takes the first record off data. The caller has cut trailing
// zeros off data, so that an end filled with zeros looks like a short file.
func nextRecord(data []byte) (payload, rest []byte, err error) {
	if len(data) < headSize {
		return nil, nil, errTorn
	}
	head := data[:headSize]
	if checksum(head[:8]) != binary.BigEndian.Uint32(head[8:]) {
		return nil, nil, errors.New("the checksum of a record's head is wrong")
	}
	n := int(binary.BigEndian.Uint32(head))
	if n > maxPayload {
		return nil, nil, fmt.Errorf("a record claims %d bytes", n)
	}
	if len(data) < headSize+n+1 {
		return nil, nil, errTorn
	}
	payload = data[headSize : headSize+n]
	if checksum(payload) != binary.BigEndian.Uint32(head[4:]) || data[headSize+n] != trailer {
		return nil, nil, errors.New("the checksum of a record is wrong")
	}
	return payload, data[headSize+n+1:], nil
}

func encodeAccept(b []byte, e *Entry) []byte {
	return appendRecord(b, func(b []byte) []byte { return appendAccept(append(b, recAccept), e) })
}

func appendAccept(b []byte, e *Entry) []byte {
	b = binary.AppendVarint(b, e.TaskID)
	b = binary.AppendVarint(b, int64(e.Attempt))
	b = binary.AppendVarint(b, e.Epoch)
	b = append(b, bit(e.Once))
	b = append(b, e.Digest[:]...)
	b = binary.AppendUvarint(b, e.AcceptedOrder)
	b = binary.AppendVarint(b, e.AcceptedAt)
	return appendString(b, e.Kind)
}

func encodeDone(b []byte, e *Entry) []byte {
	return appendRecord(b, func(b []byte) []byte {
		b = append(b, recDone)
		b = binary.AppendVarint(b, e.TaskID)
		b = appendDone(b, e)
		return append(b, e.final...)
	})
}

func appendDone(b []byte, e *Entry) []byte {
	b = binary.AppendVarint(b, int64(e.Attempt))
	b = binary.AppendUvarint(b, e.DoneOrder)
	b = binary.AppendVarint(b, e.StartedAt)
	b = binary.AppendVarint(b, e.EndedAt)
	b = appendString(b, e.Outcome)
	return appendString(b, e.Reason)
}

func encodeForget(b []byte, ids []int64) []byte {
	return appendRecord(b, func(b []byte) []byte {
		b = append(b, recForget)
		b = binary.AppendUvarint(b, uint64(len(ids)))
		for _, id := range ids {
			b = binary.AppendVarint(b, id)
		}
		return b
	})
}

func encodePast(b []byte, e *Entry) []byte {
	return appendRecord(b, func(b []byte) []byte {
		b = appendAccept(append(b, recPast), e)
		b = append(b, bit(e.Done))
		return appendDone(b, e)
	})
}

func encodeCounter(b []byte, order uint64) []byte {
	return appendRecord(b, func(b []byte) []byte {
		return binary.AppendUvarint(append(b, recCounter), order)
	})
}

func bit(v bool) byte {
	if v {
		return 1
	}
	return 0
}

func appendString(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// reader takes values off a payload; after the first that does not fit all
// further ones are zero and bad stays set.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.bad, r.b = true, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.bad, r.b = true, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) attempt() int32 {
	v := r.varint()
	if v < math.MinInt32 || v > math.MaxInt32 {
		r.bad = true
	}
	return int32(v)
}

func (r *reader) bytes(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.bad, r.b = true, nil
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) flag() bool {
	v := r.bytes(1)
	if len(v) != 1 || v[0] > 1 {
		r.bad = true
		return false
	}
	return v[0] == 1
}

func (r *reader) accept() *Entry {
	e := &Entry{TaskID: r.varint(), Attempt: r.attempt(), Epoch: r.varint(), Once: r.flag()}
	copy(e.Digest[:], r.bytes(uint64(len(e.Digest))))
	e.AcceptedOrder = r.uvarint()
	e.AcceptedAt = r.varint()
	e.Kind = string(r.bytes(r.uvarint()))
	return e
}

func (r *reader) done(e *Entry) {
	e.Attempt = r.attempt()
	e.DoneOrder = r.uvarint()
	e.StartedAt = r.varint()
	e.EndedAt = r.varint()
	e.Outcome = string(r.bytes(r.uvarint()))
	e.Reason = string(r.bytes(r.uvarint()))
}
