// Package fault provides the one error type of Headgate that carries a meaning
// beyond its text: a kind that callers branch on, a stable code for programs,
// a sentence that is safe to show to users, and the hidden cause for the log.
// It does not know HTTP or gRPC; those mappings live in one file of each
// adapter (handlers/errors.go, internal/fleet/errors.go, internal/agent/errors.go).
package fault

import (
	"errors"
	"fmt"
)

// Kind says what sort of failure it was; adapters map it to their own codes.
type Kind uint8

// The kinds. The zero value is Internal, so that a forgotten kind is never
// shown to a user as their own mistake.
const (
	Internal        Kind = iota // a defect or an unexpected state of ours
	Malformed                   // the request could not be read (HTTP 400)
	Invalid                     // readable, but a value is not acceptable (HTTP 422)
	Unauthenticated             // no or unusable credential (HTTP 401)
	Forbidden                   // credential known, permission missing (HTTP 403)
	NotFound                    // the named thing does not exist (HTTP 404)
	Conflict                    // the state of the thing forbids it now (HTTP 409)
	Precondition                // an If-Match or expected value differs (HTTP 412)
	TooLarge                    // a size limit was passed (HTTP 413)
	Unsupported                 // media type or method not supported (HTTP 415)
	Exhausted                   // a rate or capacity limit was reached (HTTP 429)
	Unavailable                 // a part we need does not answer; try again (HTTP 503)
	Deadline                    // it took longer than allowed (HTTP 504 inside, 503 outside)
)

// Field names one wrong part of a request by RFC 6901 JSON pointer or by the
// name of a query parameter.
type Field struct {
	Pointer string `json:"pointer"`
	Detail  string `json:"detail"`
}

// Error is an error with a meaning. Message and Hint are shown to users and
// must never hold a secret, an SQL text or an address that the user did not
// give; Err is for the log alone.
type Error struct {
	Kind    Kind
	Code    string // stable, snake_case, documented in docs/errors.md
	Message string // one sentence: the cause
	Hint    string // one sentence: what to do next; may be empty
	Fields  []Field
	Err     error
}

// New makes an Error with a code and a sentence for the user.
func New(kind Kind, code, message string) *Error {
	return &Error{Kind: kind, Code: code, Message: message}
}

// Newf is New with a formatted message.
func Newf(kind Kind, code, format string, args ...any) *Error {
	return &Error{Kind: kind, Code: code, Message: fmt.Sprintf(format, args...)}
}

// Wrap makes an Error around a cause that only the log shall show.
func Wrap(err error, kind Kind, code, message string) *Error {
	return &Error{Kind: kind, Code: code, Message: message, Err: err}
}

// WithHint returns a copy that also says what to do next.
func (e *Error) WithHint(hint string) *Error {
	c := *e
	c.Hint = hint
	return &c
}

// WithField returns a copy that also names a wrong part of the request.
func (e *Error) WithField(pointer, detail string) *Error {
	c := *e
	c.Fields = append(append([]Field(nil), e.Fields...), Field{Pointer: pointer, Detail: detail})
	return &c
}

// Error gives code, message and cause, for logs.
func (e *Error) Error() string {
	if e.Err != nil {
		return e.Code + ": " + e.Message + ": " + e.Err.Error()
	}
	return e.Code + ": " + e.Message
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// KindOf gives the kind of the first Error in the chain, Internal otherwise.
func KindOf(err error) Kind {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	return Internal
}

// CodeOf gives the stable code of the first Error in the chain, "internal"
// otherwise.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return "internal"
}

// Is says whether err carries an Error of that kind.
func Is(err error, kind Kind) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Kind == kind
}
