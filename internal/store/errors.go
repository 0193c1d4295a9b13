package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"headgate/internal/fault"
)

// SQLSTATE codes that we branch on.
const (
	stateUniqueViolation  = "23505"
	stateForeignKey       = "23503"
	stateSerialization    = "40001"
	stateDeadlock         = "40P01"
	stateQueryCanceled    = "57014"
	stateLockNotAvailable = "55P03"
	stateReadOnly         = "25006"
	stateNoTable          = "42P01"
)

// sqlState gives the SQLSTATE of an error that the server sent, "" otherwise.
func sqlState(err error) string {
	if e, ok := errors.AsType[*pq.Error](err); ok {
		return string(e.Code)
	}
	return ""
}

// sqlClass gives the first two characters of the SQLSTATE.
func sqlClass(err error) string {
	if s := sqlState(err); len(s) == 5 {
		return s[:2]
	}
	return ""
}

// retryable says whether the server rolled back because of other transactions
// and the same one may simply be run again.
func retryable(err error) bool {
	s := sqlState(err)
	return s == stateSerialization || s == stateDeadlock
}

// poison says whether the server refused the data itself: a value it cannot
// hold (22), a constraint (23), or a size beyond its limits (54).
func poison(err error) bool {
	switch sqlClass(err) {
	case "22", "23", "54":
		return true
	}
	return false
}

// lostConnection says whether the error leaves open what the server did:
// everything that is not an answer of a server that goes on living.
func lostConnection(err error) bool {
	e, ok := errors.AsType[*pq.Error](err)
	if !ok {
		return true
	}
	return e.Severity == pqerror.SeverityFatal || e.Severity == pqerror.SeverityPanic || sqlClass(err) == "08"
}

// asFault gives an error a meaning; what says in a few words what was tried.
// An error that has one already is kept.
func asFault(ctx context.Context, err error, what string) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, sql.ErrNoRows) {
		return fault.Wrap(errors.Join(err, cause), fault.Deadline, "database_timeout", "the time to "+what+" ran out")
	}
	switch sqlState(err) {
	case stateUniqueViolation:
		return fault.Wrap(err, fault.Conflict, "already_exists", "it exists already: could not "+what)
	case stateForeignKey:
		return fault.Wrap(err, fault.Invalid, "reference_missing", "something that it refers to does not exist: could not "+what)
	case stateQueryCanceled:
		return fault.Wrap(err, fault.Deadline, "database_timeout", "the database took too long to "+what).
			WithHint("narrow the request, or try again when the database is less busy")
	case stateLockNotAvailable:
		return unavailable(err, "database_busy", "another transaction held up the attempt to "+what)
	case stateReadOnly:
		return unavailable(err, "database_read_only", "the database takes no writes now: could not "+what)
	}
	switch sqlClass(err) {
	case "22", "23", "54":
		return fault.Wrap(err, fault.Invalid, "data_refused", "the database refused a value: could not "+what)
	case "08", "53", "57", "58":
		return unavailable(err, "database_unavailable", "the database is not available: could not "+what)
	case "42", "3F":
		return fault.Wrap(err, fault.Internal, "database_schema", "the database's schema does not fit this program: could not "+what).
			WithHint("run `headgate migrate status`")
	case "28", "3D":
		return unavailable(err, "database_sign_in", "the database refused the sign-in: could not "+what)
	}
	if isNetwork(err) {
		return unavailable(err, "database_unavailable", "the database does not answer: could not "+what)
	}
	return fault.Wrap(err, fault.Internal, "database_error", "could not "+what)
}

func unavailable(err error, code, message string) *fault.Error {
	return fault.Wrap(err, fault.Unavailable, code, message).WithHint("try again in a few seconds")
}

func isNetwork(err error) bool {
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || errors.Is(err, sql.ErrConnDone)
}
