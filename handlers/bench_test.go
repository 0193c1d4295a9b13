package handlers_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"headgate/internal/auth"
)

// benchServe sends one prepared request again and again.
func benchServe(b *testing.B, rig *rig, method, path, body string, want int) {
	b.Helper()
	proto := rig.request(b, method, path, body, auth.Operator, nil)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			r := proto.Clone(proto.Context())
			r.Body = http.NoBody
			if body != "" {
				r.Body = readCloser{strings.NewReader(body)}
			}
			w := httptest.NewRecorder()
			rig.handler.ServeHTTP(w, r)
			if w.Code != want {
				b.Errorf("%d: %s", w.Code, w.Body)
				return
			}
		}
	})
}

type readCloser struct{ *strings.Reader }

func (readCloser) Close() error { return nil }

// BenchmarkSubmit is the whole way of one submission but for the network:
// credential, router, decoding, Service, Manager's turn in memory, encoding.
func BenchmarkSubmit(b *testing.B) {
	rig := newRig(b)
	b.SetParallelism(32)
	benchServe(b, rig, "POST", "/api/v1/tasks", `{"agent":"alpha","kind":"core.echo","args":{"hello":"world"},"timeout":"30s"}`, http.StatusAccepted)
}

// BenchmarkKnownPath is the same without the queue.
func BenchmarkKnownPath(b *testing.B) {
	benchServe(b, newRig(b), "GET", "/healthz", "", http.StatusOK)
}

// BenchmarkRefusedSubmit decodes and refuses: the interface's own share of a
// submission.
func BenchmarkRefusedSubmit(b *testing.B) {
	benchServe(b, newRig(b), "POST", "/api/v1/tasks", `{"agent":"alpha","kind":"core.echo","args":{"hello":"world"},"timeout":"0s"}`, http.StatusUnprocessableEntity)
}

// nowhere is a client that costs nothing.
type nowhere struct {
	header http.Header
	status int
}

func (w *nowhere) Header() http.Header         { return w.header }
func (w *nowhere) WriteHeader(status int)      { w.status = status }
func (w *nowhere) Write(b []byte) (int, error) { return len(b), nil }

// BenchmarkBatch submits 1,000 tasks in one call.
func BenchmarkBatch(b *testing.B) {
	rig := newRig(b)
	body := batchOf(1000, names()[:3]...)
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		w := &nowhere{header: http.Header{}}
		rig.handler.ServeHTTP(w, rig.request(b, "POST", "/api/v1/tasks/batch", body, auth.Operator, nil))
		if w.status != http.StatusAccepted && w.status != http.StatusTooManyRequests {
			b.Fatal(w.status)
		}
	}
	b.ReportMetric(1000*float64(b.N)/b.Elapsed().Seconds(), "tasks/s")
}
