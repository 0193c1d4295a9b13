package handlers

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"headgate/internal/fault"
	"headgate/tasks"
)

// The headers that say what a download leaves out.
const (
	headerPrinted = "Output-Printed-Bytes"
	headerMissing = "Output-Missing-Bytes"
)

// taskOutput gives what a task printed.
//
//	@Summary		Output of a task
//	@Description	The bytes as they were printed, of the newest attempt; without stream both streams in the order of their arrival. While the task runs it is what has come so far. What was dropped is left out; Output-Missing-Bytes says how much that is, and the task's output.gaps where. One range of bytes is served; several at once, and what is no range, are ignored. HEAD tells the size.
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
//	@Header			200,206	{string}	Output-Printed-Bytes	"bytes that were printed"
//	@Header			200,206	{string}	Output-Missing-Bytes	"of them those that are not kept"
//	@Header			200,206	{string}	ETag	"of a completed task: its output changes no more"
//	@Success		304		"not changed"
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
	stream, err := oneStream(r)
	if err != nil {
		return err
	}
	out, err := s.cfg.Tasks.Output(r.Context(), id, stream)
	if err != nil {
		return err
	}
	h, ending := w.Header(), &out.Task.Ending
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	h.Set(headerPrinted, strconv.FormatInt(out.Facts.Printed(stream, ending), 10))
	h.Set(headerMissing, strconv.FormatInt(out.Facts.Missing(stream, ending), 10))
	if out.Task.State == tasks.StateCompleted {
		h.Set("ETag", fmt.Sprintf(`"%s-%d-%s-%d"`, id, out.Facts.Attempt, stream, out.Size()))
	}
	return sendOutput(w, r, out)
}

func oneStream(r *http.Request) (string, error) {
	stream, err := oneOf(r.URL.Query(), "stream", tasks.Stdout, tasks.Stderr)
	if err != nil || len(stream) == 0 {
		return "", err
	}
	return stream[0], nil
}

// sendOutput sends the whole or one range of it, as fast as the reader reads.
func sendOutput(w http.ResponseWriter, r *http.Request, out *tasks.OutputFile) error {
	if !oneRange(r) {
		r = r.Clone(r.Context())
		r.Header.Del("Range")
		if r.Method == http.MethodGet {
			if err := out.Fill(); err != nil { // it can still be answered
				return err
			}
		}
	}
	rw := &rangeWriter{ResponseWriter: w, rc: http.NewResponseController(w)}
	http.ServeContent(rw, r, "", time.Time{}, out)
	if rw.refused {
		return fault.New(fault.Malformed, codeRange, "The Range header asks for bytes that the output does not have.").
			WithHint("Ask for bytes from 0 on; Content-Range tells the size.")
	}
	if err := out.Err(); err != nil {
		return errors.Join(errors.New("send output"), err)
	}
	return nil
}

// oneRange says whether the request asks for exactly one range of bytes.
// Anything else is ignored, as RFC 9110 wants it or allows it.
func oneRange(r *http.Request) bool {
	spec, ok := strings.CutPrefix(r.Header.Get("Range"), "bytes=")
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok || !dash || r.Method != http.MethodGet || first == "" && last == "" {
		return false
	}
	from, err1 := strconv.ParseInt(first, 10, 64)
	to, err2 := strconv.ParseInt(last, 10, 64)
	if first == "" && err2 == nil && to == 0 {
		return false // the last no bytes: no range can say that
	}
	return (first == "" || err1 == nil && from >= 0) && (last == "" || err2 == nil && to >= 0) && (first == "" || last == "" || from <= to)
}

// outputWriteTime is for one write of an output, not for the whole: a large
// one may take long, a reader that takes nothing may not.
const outputWriteTime = 30 * time.Second

// rangeWriter gives each write its own time, and keeps http.ServeContent from
// answering 416 in its own words.
type rangeWriter struct {
	http.ResponseWriter
	rc      *http.ResponseController
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
	_ = w.rc.SetWriteDeadline(time.Now().Add(outputWriteTime)) // not there in tests
	return w.ResponseWriter.Write(b)
}
