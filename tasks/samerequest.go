package tasks

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json/jsontext"
	"strings"
	"time"
)

// hashOf tells requests under one idempotency key apart by what they ask for,
// and not by how it is written: the order of names and the white space of a
// body may differ each time that a client builds it. Defaults stay out, since
// some depend on the time of the request.
func hashOf(subs []Submission) [32]byte {
	h := sha256.New()
	var b []byte
	text := func(s string) {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	moment := func(t time.Time) {
		if t.IsZero() {
			b = append(b, 0)
			return
		}
		b = binary.AppendVarint(append(b, 1), t.UnixMicro())
	}
	for i := range subs {
		x := &subs[i]
		b = b[:0]
		text(x.Agent)
		text(x.Kind)
		text(sameArgs(x.Args))
		text(string(x.Delivery))
		b = binary.AppendVarint(b, int64(x.Timeout))
		if x.Priority == nil {
			b = append(b, 0)
		} else {
			b = binary.AppendVarint(append(b, 1), int64(*x.Priority))
		}
		moment(x.NotBefore)
		moment(x.ExpiresAt)
		h.Write(b)
	}
	return [32]byte(h.Sum(nil))
}

// sameArgs writes arguments in one way. Numbers stay as they are written: two
// large ones must not become one by being rounded.
func sameArgs(args []byte) string {
	if len(args) == 0 {
		return "{}"
	}
	v := jsontext.Value(strings.Clone(string(args)))
	if err := v.Format(jsontext.ReorderRawObjects(true)); err != nil {
		return string(args) // it is refused soon
	}
	return string(v)
}
