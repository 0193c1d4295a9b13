package handlers

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"reflect"
	"strings"
	"sync"

	"headgate/internal/fault"
)

// Body limits, in bytes.
const (
	maxBody      = 1 << 20  // one task with the largest args fits
	maxBatchBody = 16 << 20 // 10,000 tasks of 1.6 KiB
	maxSmallBody = 64 << 10 // sign-in, tokens, agents
)

// Sizes of the buffers that are used again, in bytes. Small and large ones are
// kept apart, so that a buffer that held a batch does not serve sign-ins. The
// garbage collector takes those that lie idle.
const (
	smallBuffer = 64 << 10 // all requests but batches and large args
	maxPooled   = 24 << 20 // the answer to the largest batch of ordinary tasks
)

// maxTrusted is how much memory a request gets on its Content-Length alone, in
// bytes. Whoever claims more must have sent this much first: a flood of lying
// headers must not cost the limit of a batch each.
const maxTrusted = 256 << 10

// bodies are buffers for request bodies and answers.
type bodies struct{ small, large sync.Pool }

// get gives an empty buffer with room for size bytes.
func (b *bodies) get(size int) *bytes.Buffer {
	pool, least := &b.small, 4<<10
	if size > smallBuffer {
		pool, least = &b.large, size
	}
	buf, ok := pool.Get().(*bytes.Buffer)
	if !ok {
		return bytes.NewBuffer(make([]byte, 0, max(size, least)))
	}
	buf.Reset()
	buf.Grow(size)
	return buf
}

func (b *bodies) put(buf *bytes.Buffer) {
	switch {
	case buf.Cap() <= smallBuffer+bytes.MinRead:
		b.small.Put(buf)
	case buf.Cap() <= maxPooled:
		b.large.Put(buf)
	}
}

// checkContentType lets JSON through and nothing else, above all no form that
// a foreign page could send without asking.
func checkContentType(r *http.Request) error {
	if r.Header.Get("Content-Encoding") != "" {
		return fault.New(fault.Unsupported, "content_encoding", "A compressed request body is not accepted.").
			WithHint("Send it without Content-Encoding.")
	}
	given := r.Header.Get("Content-Type")
	if given == "application/json" {
		return nil
	}
	media, params, err := mime.ParseMediaType(given)
	if charset := params["charset"]; err != nil || media != "application/json" || charset != "" && !strings.EqualFold(charset, "utf-8") {
		return fault.New(fault.Unsupported, "content_type", "The request body must be JSON in UTF-8.").
			WithHint("Send the header Content-Type: application/json.")
	}
	return nil
}

// readBody reads the whole body into a pooled buffer; the caller puts it back.
// The body is limited already; its Content-Length is only what a client says.
func (s *server) readBody(r *http.Request) (*bytes.Buffer, error) {
	said := int(min(max(r.ContentLength, 0), callOf(r.Context()).body))
	buf := s.bodies.get(min(said, maxTrusted) + bytes.MinRead)
	err := readSaid(buf, r.Body, said)
	if err == nil {
		callOf(r.Context()).bodyRead()
		return buf, nil
	}
	s.bodies.put(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, fault.Newf(fault.Malformed, "body_too_slow", "The request body did not arrive within %s.", s.cfg.BodyTimeout).
			WithHint("Send it in one go.")
	}
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, bodyTooLarge(tooLong.Limit)
	}
	return nil, fault.Wrap(err, fault.Malformed, "body_incomplete", "The request body ended too early.")
}

// readSaid reads to the end without growing the buffer step by step when the
// size was said truly.
func readSaid(buf *bytes.Buffer, body io.Reader, said int) error {
	if said > maxTrusted {
		n, err := buf.ReadFrom(&io.LimitedReader{R: body, N: maxTrusted})
		if err != nil || n < maxTrusted {
			return err
		}
		buf.Grow(said - maxTrusted + bytes.MinRead)
	}
	_, err := buf.ReadFrom(body)
	return err
}

// decode reads a small JSON body into v.
func (s *server) decode(r *http.Request, v any) error {
	buf, err := s.readBody(r)
	if err != nil {
		return err
	}
	defer s.bodies.put(buf)
	return decodeJSON(buf.Bytes(), v)
}

// decodeJSON reads a JSON object strictly: unknown and doubled names, wrong
// types, invalid UTF-8 and anything after the object are refused. What v keeps
// does not point into body.
func decodeJSON(body []byte, v any) error {
	trimmed := bytes.TrimLeft(body, " \t\r\n")
	if len(trimmed) == 0 {
		return fault.New(fault.Malformed, "malformed_json", "The request body is empty; a JSON object is expected.")
	}
	err := json.Unmarshal(body, v, json.RejectUnknownMembers(true))
	if err == nil && trimmed[0] != '{' { // null
		err = &json.SemanticError{JSONKind: jsontext.Kind(trimmed[0]), GoType: reflect.TypeOf(v).Elem()}
	}
	if err == nil {
		return nil
	}
	return decodeError(body, v, err)
}

func decodeError(body []byte, v any, err error) error {
	if f, ok := errors.AsType[*fault.Error](err); ok {
		return f
	}
	if syn, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		return syntaxError(body, syn)
	}
	sem, ok := errors.AsType[*json.SemanticError](err)
	if !ok {
		return fmt.Errorf("decode body: %w", err)
	}
	pointer := string(sem.JSONPointer)
	if errors.Is(sem.Err, json.ErrUnknownName) {
		name := sem.JSONPointer.LastToken()
		f := fault.Newf(fault.Invalid, "unknown_field", "The field %q is not known here.", clip(name)).
			WithField(pointer, "unknown field")
		return f.WithHint(suggest(name, fieldNames(reflect.TypeOf(v)), "field"))
	}
	want := jsonName(sem.GoType)
	where := pointer
	if where == "" {
		where = "the body"
	}
	return fault.Newf(fault.Invalid, "wrong_type", "%s must be %s, not %s.", where, want, kindName(sem.JSONKind, want)).
		WithHint("The fields and their types are listed in the API reference, docs/api below the address of the dashboard.").
		WithField(pointer, "must be "+want)
}

func syntaxError(body []byte, err *jsontext.SyntacticError) error {
	line, column := position(body, err.ByteOffset)
	cause := "is not valid JSON"
	switch {
	case errors.Is(err.Err, jsontext.ErrDuplicateName):
		cause = "has the same name twice in one object"
	case errors.Is(err.Err, io.ErrUnexpectedEOF):
		cause = "ends in the middle of a JSON value"
	case strings.Contains(err.Error(), "UTF-8"):
		cause = "holds bytes that are not UTF-8"
	}
	return fault.Newf(fault.Malformed, "malformed_json", "The request body %s, at line %d, column %d (byte %d).", cause, line, column, err.ByteOffset).
		WithHint("Send one JSON object in UTF-8.").
		WithField(string(err.JSONPointer), fmt.Sprintf("line %d, column %d", line, column))
}

// position gives line and column, both from 1, of a byte offset.
func position(body []byte, offset int64) (line, column int) {
	before := body[:min(max(offset, 0), int64(len(body)))]
	line = 1 + bytes.Count(before, []byte("\n"))
	return line, len(before) - bytes.LastIndexByte(before, '\n')
}

func kindName(k jsontext.Kind, want string) string {
	switch k {
	case 'n':
		return "null"
	case 't', 'f':
		return "a boolean"
	case '"':
		return "a string"
	case '0':
		if want == wholeNumber {
			return "such a number" // a fraction, or one that is too large
		}
		return "a number"
	case '{':
		return "an object"
	case '[':
		return "an array"
	}
	return "something else"
}

const wholeNumber = "a whole number"

// jsonName says in JSON's words what a Go type expects.
func jsonName(t reflect.Type) string {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil {
		return "another type"
	}
	if t.Name() == "Time" {
		return "a time such as 2026-01-31T12:00:00Z"
	}
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64, reflect.Int32:
		return wholeNumber
	case reflect.Slice, reflect.Array:
		return "an array"
	default:
		return "an object"
	}
}

// fieldNames collects the JSON names of a type and of the types inside it.
func fieldNames(t reflect.Type) []string {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t.Name() == "Time" {
		return nil
	}
	var names []string
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "-" {
			names = append(names, name)
		}
		names = append(names, fieldNames(f.Type)...)
	}
	return names
}
