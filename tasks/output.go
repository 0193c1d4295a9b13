package tasks

import (
	"context"
	"errors"
	"io"

	"headgate/internal/fault"
)

// The streams of a program.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// MaxGaps is how many gaps of an output are told one by one: the cut in the
// middle makes one or two, a full disk a few.
const MaxGaps = 20

// OutputFacts says what is kept of a task's output, of its newest attempt.
type OutputFacts struct {
	Attempt int // 0 = nothing was ever stored
	LastSeq int
	Stdout  StreamFacts
	Stderr  StreamFacts
	Gaps    []OutputGap // the first MaxGaps, by stream and place
}

// StreamFacts are the facts of one stream.
type StreamFacts struct {
	Bytes  int64 // printed, as far as the chunks say
	Stored int64
}

// OutputGap is a part of a stream that was not kept.
type OutputGap struct {
	Stream string
	Offset int64 // in the stream, as printed
	Bytes  int64
}

// Stored gives the bytes that are kept of a stream, or of both when it is "".
func (f *OutputFacts) Stored(stream string) int64 {
	switch stream {
	case Stdout:
		return f.Stdout.Stored
	case Stderr:
		return f.Stderr.Stored
	}
	return f.Stdout.Stored + f.Stderr.Stored
}

// Printed gives the bytes that were printed, of a stream or of both. A
// completed task knows its sum from the agent, also of what never arrived.
func (f *OutputFacts) Printed(stream string, e *Ending) int64 {
	switch stream {
	case Stdout:
		return max(f.Stdout.Bytes, f.Stdout.Stored)
	case Stderr:
		return max(f.Stderr.Bytes, f.Stderr.Stored)
	}
	return max(f.Printed(Stdout, e)+f.Printed(Stderr, e), e.OutputBytes)
}

// Missing gives the bytes that were printed and are not kept.
func (f *OutputFacts) Missing(stream string, e *Ending) int64 {
	return f.Printed(stream, e) - f.Stored(stream)
}

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

// OutputPart gives chunks of one attempt and of one stream, or of both ("").
func (s *Service) OutputPart(ctx context.Context, id ID, attempt int, stream string, fromSeq, limit int) ([]OutputChunk, error) {
	chunks, err := s.store.OutputPart(ctx, id, attempt, stream, fromSeq, limit)
	if err != nil {
		return nil, readFault(err)
	}
	return chunks, nil
}

// OutputFacts says what is kept of a task's output so far. It reads the sizes of
// its chunks, not the chunks.
func (s *Service) OutputFacts(ctx context.Context, id ID) (*OutputFacts, error) {
	f, err := s.store.OutputFacts(ctx, id)
	if err != nil {
		return nil, readFault(err)
	}
	return &f, nil
}

// Output gives what the task's newest attempt has printed up to now as a file.
// stream is stdout, stderr, or "" for both in the order printed. What is missing
// is left out.
func (s *Service) Output(ctx context.Context, id ID, stream string) (*OutputFile, error) {
	if stream != "" && stream != Stdout && stream != Stderr {
		return nil, fault.Newf(fault.Malformed, "invalid_stream", "stream is %.40q; it must be stdout or stderr.", stream).
			WithField("stream", "must be stdout or stderr")
	}
	t, err := s.store.Task(ctx, id)
	if err != nil {
		return nil, readFault(err)
	}
	facts, err := s.OutputFacts(ctx, id)
	if err != nil {
		return nil, err
	}
	return &OutputFile{Task: t, Facts: facts, Stream: stream, ctx: ctx, store: s.store, size: facts.Stored(stream)}, nil
}

// filePage is how many chunks a file reads at once: a reader holds half a
// megabyte, however large the output, and no transaction between two reads.
const filePage = 8

// OutputFile reads an output as it was when it was opened; a new attempt or
// more output does not change it.
type OutputFile struct {
	Task   *Task
	Facts  *OutputFacts
	Stream string // "" = both

	ctx   context.Context // of the one request that reads; io.Reader takes none
	store Reader
	size  int64

	pos    int64 // of the next byte
	seq    int   // of the chunk after those in page
	placed bool  // seq, page and rest stand at pos
	page   []OutputChunk
	rest   []byte
	err    error
}

// Size gives the bytes of the file.
func (f *OutputFile) Size() int64 { return f.size }

// Err gives the error of the store, if one ended the reading.
func (f *OutputFile) Err() error { return f.err }

// Seek implements io.Seeker.
func (f *OutputFile) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.pos
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return 0, errors.New("seek before the beginning of an output")
	}
	f.placed = f.placed && offset == f.pos
	f.pos = offset
	return offset, nil
}

// Read implements io.Reader.
func (f *OutputFile) Read(p []byte) (int, error) {
	if f.pos >= f.size {
		return 0, io.EOF
	}
	if err := f.fill(); err != nil {
		f.err = err
		return 0, err
	}
	n := copy(p, f.rest[:min(int64(len(f.rest)), f.size-f.pos)])
	f.rest, f.pos = f.rest[n:], f.pos+int64(n)
	return n, nil
}

// Fill reads the first page, so that an error can still be answered.
func (f *OutputFile) Fill() error {
	if f.pos >= f.size {
		return nil
	}
	return f.fill()
}

// fill makes rest hold something.
func (f *OutputFile) fill() error {
	if !f.placed {
		if err := f.place(); err != nil {
			return err
		}
	}
	for len(f.rest) == 0 {
		if len(f.page) == 0 {
			page, err := f.store.OutputPart(f.ctx, f.Task.ID, f.Facts.Attempt, f.Stream, f.seq, filePage)
			if err != nil {
				return readFault(err)
			}
			if len(page) == 0 {
				return io.ErrUnexpectedEOF // dropped with its task meanwhile
			}
			f.page, f.seq = page, page[len(page)-1].Seq+1
		}
		f.rest = f.page[0].Data
		f.page = f.page[1:]
	}
	return nil
}

// place finds the chunk that has the byte at pos.
func (f *OutputFile) place() error {
	f.page, f.rest, f.seq, f.placed = nil, nil, 0, true
	if f.pos == 0 {
		return nil
	}
	seq, start, err := f.store.OutputAt(f.ctx, f.Task.ID, f.Facts.Attempt, f.Stream, f.pos)
	if err != nil {
		f.placed = false
		return readFault(err)
	}
	f.seq = seq
	for skip := f.pos - start; skip > 0; {
		if err := f.fill(); err != nil {
			f.placed = false
			return err
		}
		n := min(skip, int64(len(f.rest)))
		f.rest, skip = f.rest[n:], skip-n
	}
	return nil
}
