package handlers_test

import (
	"bytes"
	"io"
	"net/http/httptest"
	"testing"
	"testing/iotest"

	"headgate/handlers"
	"headgate/internal/fault"
)

// TestBodiesAreReadWhole reads bodies of many sizes whatever was said of them.
func TestBodiesAreReadWhole(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	for _, size := range []int{0, 1, 511, 4096, 65 << 10, 256<<10 - 1, 256 << 10, 256<<10 + 1, 700 << 10, limit} {
		for _, said := range []int64{-1, 0, int64(size), int64(size) / 2, int64(size) + 100, limit, 1 << 40} {
			want := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)[:size]
			r := httptest.NewRequest("POST", "/", iotest.HalfReader(bytes.NewReader(want)))
			r.ContentLength = said
			got, held, err := handlers.ReadBody(r, limit)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("size %d, said %d: read %d bytes, %v", size, said, len(got), err)
			}
			if most := 2*limit + 64<<10; held > most {
				t.Errorf("size %d, said %d: %d bytes were held, at most %d are right", size, said, held, most)
			}
		}
	}
}

// TestALyingContentLengthCostsLittle claims the most and sends nothing.
func TestALyingContentLengthCostsLittle(t *testing.T) {
	t.Parallel()
	for limit, most := range map[int64]int{64 << 10: 64<<10 + 1024, 16 << 20: 256<<10 + 1024} {
		for _, said := range []int64{16 << 20, 1 << 62} {
			r := httptest.NewRequest("POST", "/", bytes.NewReader([]byte("{}")))
			r.ContentLength = said
			got, held, err := handlers.ReadBody(r, limit)
			if err != nil || string(got) != "{}" || held > most {
				t.Errorf("limit %d, said %d: read %q, held %d bytes, at most %d are right: %v", limit, said, got, held, most, err)
			}
		}
	}
}

func TestABodyOverTheLimitIsRefused(t *testing.T) {
	t.Parallel()
	const limit = 1 << 20
	for _, said := range []int64{-1, 10, limit + 1} {
		r := httptest.NewRequest("POST", "/", bytes.NewReader(make([]byte, limit+1)))
		r.ContentLength = said
		if _, _, err := handlers.ReadBody(r, limit); fault.KindOf(err) != fault.TooLarge {
			t.Errorf("said %d: %v", said, err)
		}
	}
	broken := httptest.NewRequest("POST", "/", io.MultiReader(bytes.NewReader(make([]byte, 300<<10)), iotest.ErrReader(io.ErrUnexpectedEOF)))
	broken.ContentLength = 500 << 10
	if _, _, err := handlers.ReadBody(broken, limit); fault.CodeOf(err) != "body_incomplete" {
		t.Errorf("a body that breaks off: %v", err)
	}
}

// BenchmarkReadBody reads the body of a batch.
func BenchmarkReadBody(b *testing.B) {
	body := make([]byte, 3<<20)
	read := handlers.BodyReader(16 << 20)
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest("POST", "/", bytes.NewReader(body))
		if err := read(r); err != nil {
			b.Fatal(err)
		}
	}
}
