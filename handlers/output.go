package handlers

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"headgate/internal/fault"
	"headgate/tasks"
)

// outputPage is how many chunks are read at once: 16 of at most 64 KiB, so
// that a download holds 1 MiB whatever its size.
const outputPage = 16

// taskOutput gives what a task printed.
//
//	@Summary		Output of a task
//	@Description	The bytes as they were printed, of the newest attempt; without stream both streams in the order of their arrival. It may grow until the task is completed. Ranges of bytes are served.
//	@ID				taskOutput
//	@Tags			tasks
//	@Produce		plain
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id		path		string	true	"id of the task"	example(1001)
//	@Param			stream	query		string	false	"only this one"	Enums(stdout,stderr)
//	@Param			Range	header		string	false	"part of the bytes"	example(bytes=0-1023)
//	@Success		200		{string}	string	"the bytes"
//	@Success		206		{string}	string	"the part asked for"
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		404		{object}	Problem
//	@Failure		416		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem
//	@Router			/api/v1/tasks/{id}/output [get]
func (s *server) taskOutput(w http.ResponseWriter, r *http.Request) error {
	id, err := pathTask(r)
	if err != nil {
		return err
	}
	stream, err := oneOf(r.URL.Query(), "stream", "stdout", "stderr")
	if err != nil {
		return err
	}
	if _, err := s.cfg.Tasks.Get(r.Context(), id); err != nil {
		return err
	}
	out := &output{ctx: r.Context(), fetch: s.cfg.Tasks.OutputChunks, id: id}
	if len(stream) == 1 {
		out.stream = stream[0]
	}
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	return s.sendOutput(w, r, out)
}

// sendOutput streams the whole in one pass, or a range of it in two.
func (s *server) sendOutput(w http.ResponseWriter, r *http.Request, out *output) error {
	if r.Header.Get("Range") != "" {
		rw := &rangeWriter{ResponseWriter: w}
		http.ServeContent(rw, r, "", time.Time{}, out)
		if rw.refused {
			return fault.New(fault.Malformed, codeRange, "The Range header asks for bytes that the output does not have.").
				WithHint("Ask for bytes from 0 on; Content-Range tells the size.")
		}
		return out.failure
	}
	w.Header().Set("Accept-Ranges", "bytes")
	if r.Method == http.MethodHead {
		return nil
	}
	if err := out.peek(); err != nil {
		return err
	}
	if _, err := io.Copy(&patientWriter{w: w, rc: http.NewResponseController(w)}, out); err != nil {
		return errors.Join(errors.New("send output"), err)
	}
	return nil
}

// outputWriteTime is for one write of an output, not for the whole: a large
// one may take long, a reader that takes nothing may not.
const outputWriteTime = 30 * time.Second

// patientWriter gives each write its own time.
type patientWriter struct {
	w  io.Writer
	rc *http.ResponseController
}

// Write implements io.Writer.
func (p *patientWriter) Write(b []byte) (int, error) {
	_ = p.rc.SetWriteDeadline(time.Now().Add(outputWriteTime)) // not there in tests
	return p.w.Write(b)
}

// rangeWriter keeps http.ServeContent from answering 416 in its own words.
type rangeWriter struct {
	http.ResponseWriter
	refused bool
}

// WriteHeader implements http.ResponseWriter.
func (w *rangeWriter) WriteHeader(status int) {
	if w.refused = status >= http.StatusBadRequest; !w.refused {
		w.ResponseWriter.WriteHeader(status)
	}
}

// Write implements http.ResponseWriter.
func (w *rangeWriter) Write(b []byte) (int, error) {
	if w.refused {
		return len(b), nil
	}
	return w.ResponseWriter.Write(b)
}

// output reads the chunks of a task as one file.
type output struct {
	ctx    context.Context // of the request that reads it
	fetch  func(ctx context.Context, id tasks.ID, fromSeq, limit int) ([]tasks.OutputChunk, error)
	id     tasks.ID
	stream string // "" = both

	seq    int // next chunk to ask for
	chunks []tasks.OutputChunk
	rest   []byte // of the chunk being read
	skip   int64  // bytes to leave out, after a Seek
	ended  bool

	failure error // of fetch, for a caller that sees only the io interfaces
}

// peek reads the first page, so that an error can still be answered.
func (o *output) peek() error { return o.fill() }

func (o *output) fill() error {
	if len(o.chunks) > 0 || o.ended {
		return nil
	}
	page, err := o.fetch(o.ctx, o.id, o.seq, outputPage)
	if err != nil {
		o.failure = err
		return err
	}
	o.chunks, o.ended = page, len(page) == 0
	if !o.ended {
		o.seq = page[len(page)-1].Seq + 1
	}
	return nil
}

// next moves to the next chunk of the stream; false at the end.
func (o *output) next() (bool, error) {
	for {
		if err := o.fill(); err != nil || o.ended && len(o.chunks) == 0 {
			return false, err
		}
		c := o.chunks[0]
		o.chunks = o.chunks[1:]
		if o.stream == "" || c.Stream == o.stream {
			o.rest = c.Data
			return true, nil
		}
	}
}

// Read implements io.Reader.
func (o *output) Read(p []byte) (int, error) {
	for {
		if n := min(o.skip, int64(len(o.rest))); n > 0 {
			o.rest, o.skip = o.rest[n:], o.skip-n
		}
		if len(o.rest) > 0 {
			n := copy(p, o.rest)
			o.rest = o.rest[n:]
			return n, nil
		}
		more, err := o.next()
		if err != nil {
			return 0, err
		}
		if !more {
			return 0, io.EOF
		}
	}
}

// Seek implements io.Seeker from the start and to the end, which is what
// http.ServeContent needs. The size is found by reading.
func (o *output) Seek(offset int64, whence int) (int64, error) {
	if whence == io.SeekCurrent {
		return 0, errors.New("seek from the current place is not supported")
	}
	*o = output{ctx: o.ctx, fetch: o.fetch, id: o.id, stream: o.stream}
	if whence == io.SeekStart {
		o.skip = offset
		return offset, nil
	}
	size, err := io.Copy(io.Discard, o)
	return size + offset, err
}
