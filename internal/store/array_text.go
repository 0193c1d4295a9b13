package store

import (
	"encoding/hex"
	"strconv"
)

// arrayText collects PostgreSQL's text of all arrays of a statement in one
// buffer. A turn of a thousand tasks has thirty arrays: building each by
// itself copies every argument and result four times.
type arrayText struct {
	buf   []byte
	spans []span
}

// span is where the text of one parameter lies.
type span struct{ arg, from, to int }

func (t *arrayText) reset() { t.buf, t.spans = t.buf[:0], t.spans[:0] }

// begin opens the array of the next parameter.
func (a *turnArgs) begin() {
	a.lists.spans = append(a.lists.spans, span{arg: len(a.args), from: len(a.lists.buf)})
	a.lists.buf = append(a.lists.buf, '{')
	a.args = append(a.args, nil) // seal fills it in
}

// end closes the array, over the comma behind its last item.
func (a *turnArgs) end() {
	t := &a.lists
	if last := len(t.buf) - 1; t.buf[last] == ',' {
		t.buf[last] = '}'
	} else {
		t.buf = append(t.buf, '}')
	}
	t.spans[len(t.spans)-1].to = len(t.buf)
}

// seal makes the texts into parameters. They are strings, since lib/pq sends
// bytes as bytea; all are parts of one, so that there is one copy.
func (a *turnArgs) seal() {
	all := string(a.lists.buf)
	for _, s := range a.lists.spans {
		a.args[s.arg] = all[s.from:s.to]
	}
}

// addInts, addTexts, addBools and addBlobs add one array parameter made out of
// a list.
func addInts[T any](a *turnArgs, items []T, of func(*T) int64) {
	a.begin()
	b := a.lists.buf
	for i := range items {
		b = strconv.AppendInt(b, of(&items[i]), 10)
		b = append(b, ',')
	}
	a.lists.buf = b
	a.end()
}

func addTexts[T any, S ~string | ~[]byte](a *turnArgs, items []T, of func(*T) S) {
	a.begin()
	b := a.lists.buf
	for i := range items {
		b = append(appendQuoted(b, of(&items[i])), ',')
	}
	a.lists.buf = b
	a.end()
}

func addBools[T any](a *turnArgs, items []T, of func(*T) bool) {
	a.begin()
	b := a.lists.buf
	for i := range items {
		if of(&items[i]) {
			b = append(b, "t,"...)
		} else {
			b = append(b, "f,"...)
		}
	}
	a.lists.buf = b
	a.end()
}

func addBlobs[T any](a *turnArgs, items []T, of func(*T) []byte) {
	a.begin()
	b := a.lists.buf
	for i := range items {
		b = append(b, `"\\x`...)
		b = hex.AppendEncode(b, of(&items[i]))
		b = append(b, `",`...)
	}
	a.lists.buf = b
	a.end()
}

// appendQuoted appends an item of an array. Between quotes only the quote and
// the backslash mean something; braces, commas and the word NULL do not.
func appendQuoted[S ~string | ~[]byte](b []byte, s S) []byte {
	b = append(b, '"')
	from := 0
	for i := range len(s) {
		if c := s[i]; c == '"' || c == '\\' {
			b = append(b, s[from:i]...)
			b = append(b, '\\')
			from = i
		}
	}
	b = append(b, s[from:]...)
	return append(b, '"')
}
