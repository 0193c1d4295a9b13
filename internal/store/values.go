package store

import (
	"database/sql"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
	"uuid"

	"github.com/lib/pq"
)

// uid scans a UUID column; NULL becomes the nil UUID.
type uid uuid.UUID

// Scan implements sql.Scanner.
func (u *uid) Scan(src any) error {
	var text string
	switch v := src.(type) {
	case nil:
		*u = uid{}
		return nil
	case string:
		text = v
	case []byte:
		text = string(v)
	default:
		return fmt.Errorf("scan a UUID from %T", src)
	}
	id, err := uuid.Parse(text)
	*u = uid(id)
	return err
}

// uuidOrNull gives the text of a UUID, or NULL for the nil one.
func uuidOrNull(id uuid.UUID) any {
	if id == uuid.Nil() {
		return nil
	}
	return id.String()
}

// timeOrNull gives NULL for the zero time.
func timeOrNull(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t
}

// instant gives the zero time for NULL, and UTC otherwise.
func instant(t sql.NullTime) time.Time {
	if !t.Valid {
		return time.Time{}
	}
	return t.Time.UTC()
}

// micros gives a time as the turn's arrays carry it; 0 means none.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// plain makes any text storable: PostgreSQL's text holds neither NUL nor
// invalid UTF-8. It is for sentences and names; results and output are kept
// exactly, as json or bytes.
func plain(s string) string {
	if strings.IndexByte(s, 0) < 0 && utf8.ValidString(s) {
		return s
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// jsonOrNull gives JSON as text, because lib/pq would send bytes as bytea.
func jsonOrNull(b []byte) any {
	if len(b) == 0 {
		return nil
	}
	return string(b)
}

func hash32(b []byte) (h [32]byte, err error) {
	if len(b) != len(h) {
		return h, fmt.Errorf("a stored hash has %d bytes, want %d", len(b), len(h))
	}
	copy(h[:], b)
	return h, nil
}

func uuidText(id uuid.UUID) string {
	if id == uuid.Nil() {
		return ""
	}
	return id.String()
}

// ints and texts make one array parameter out of a list.
func ints[T any](items []T, of func(T) int64) pq.Int64Array {
	a := make(pq.Int64Array, len(items))
	for i, x := range items {
		a[i] = of(x)
	}
	return a
}

func texts[T any](items []T, of func(T) string) pq.StringArray {
	a := make(pq.StringArray, len(items))
	for i, x := range items {
		a[i] = of(x)
	}
	return a
}
