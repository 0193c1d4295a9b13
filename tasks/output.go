package tasks

import (
	"context"
	"io"

	"headgate/internal/fault"
)

// outputPage is how many chunks (of at most 64 KiB) one read fetches.
const outputPage = 64

// OutputChunks gives what the task's newest attempt printed, from chunk seq on
// and at most limit chunks, for followers. Both streams come in the order in
// which they were printed.
func (s *Service) OutputChunks(ctx context.Context, id ID, fromSeq, limit int) ([]OutputChunk, error) {
	chunks, err := s.store.Output(ctx, id, fromSeq, limit)
	if err != nil {
		return nil, readFault(err)
	}
	return chunks, nil
}

// Output reads what the task's newest attempt printed so far, as printed.
// stream is stdout, stderr, or "" for both in the order printed. The reader
// fetches as it is read, so that no output is ever whole in memory.
func (s *Service) Output(ctx context.Context, id ID, stream string) (io.Reader, error) {
	if stream != "" && stream != "stdout" && stream != "stderr" {
		return nil, fault.Newf(fault.Malformed, "invalid_stream", "stream is %.40q; it must be stdout or stderr.", stream).
			WithField("stream", "must be stdout or stderr")
	}
	if _, err := s.store.Task(ctx, id); err != nil {
		return nil, readFault(err)
	}
	return &outputReader{ctx: ctx, s: s, id: id, stream: stream}, nil
}

// outputReader pages through chunks. It keeps ctx because io.Reader takes none.
type outputReader struct {
	ctx     context.Context // of the one request that reads
	s       *Service
	id      ID
	stream  string
	next    int
	attempt int
	rest    []byte
	page    []OutputChunk
	last    bool
}

// Read implements io.Reader.
func (r *outputReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if len(r.page) == 0 {
			if r.last {
				return 0, io.EOF
			}
			if err := r.fetch(); err != nil {
				return 0, err
			}
			continue
		}
		c := r.page[0]
		r.page = r.page[1:]
		r.next = c.Seq + 1
		if r.stream == "" || c.Stream == r.stream {
			r.rest = c.Data
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *outputReader) fetch() error {
	page, err := r.s.OutputChunks(r.ctx, r.id, r.next, outputPage)
	if err != nil {
		return err
	}
	if len(page) > 0 {
		if r.attempt == 0 {
			r.attempt = page[0].Attempt
		}
		if page[0].Attempt != r.attempt {
			page = nil // a new attempt prints from the beginning: this one is over
		}
	}
	r.page, r.last = page, len(page) < outputPage
	return nil
}
