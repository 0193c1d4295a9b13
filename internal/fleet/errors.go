package fleet

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/internal/fault"
)

// Codes of faults that this package gives.
const (
	CodeUnknownAgent    = "unknown_agent"
	CodeAmbiguousAgent  = "ambiguous_agent"
	CodeAgentOffline    = "agent_unreachable"
	CodeAgentElsewhere  = "agent_elsewhere"
	CodeNotQuarantined  = "agent_not_quarantined"
	CodeInvalidChange   = "invalid_agent_change"
	CodeFleetNotReady   = "fleet_not_ready"
	CodeAgentAnswer     = "agent_answer_invalid"
	CodeNoPairingMode   = "no_agent_in_pairing_mode"
	CodeWrongToken      = "wrong_enrolment_token"
	CodePairingLocked   = "pairing_locked"
	CodePairingBusy     = "pairing_busy"
	CodePairingBroken   = "pairing_failed"
	CodePairingRate     = "pairing_rate_limited"
	CodePairingPending  = "pairing_unconfirmed"
	CodeForeignToken    = "token_of_another_fleet"
	CodeInvalidLifetime = "invalid_token_limits"
)

// faultOf is the mirror of the table in internal/agent: what a status of an
// agent means here. The cause stays for the log; its text is never shown,
// because a stranger may have chosen it.
func faultOf(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fault.Wrap(err, fault.Deadline, CodeAgentOffline, "The agent did not answer in time.")
	}
	kind, message := fault.Unavailable, "The agent cannot be reached now."
	switch status.Code(err) {
	case codes.DeadlineExceeded:
		kind, message = fault.Deadline, "The agent did not answer in time."
	case codes.InvalidArgument, codes.OutOfRange:
		kind, message = fault.Invalid, "The agent does not accept the request."
	case codes.Unauthenticated:
		kind, message = fault.Unauthenticated, "The agent does not accept this controller."
	case codes.PermissionDenied:
		kind, message = fault.Forbidden, "The agent does not allow this."
	case codes.NotFound:
		kind, message = fault.NotFound, "The agent does not know what was asked for."
	case codes.AlreadyExists, codes.Aborted:
		kind, message = fault.Conflict, "The state of the agent does not allow this now."
	case codes.FailedPrecondition:
		kind, message = fault.Precondition, "The agent expected something else."
	case codes.ResourceExhausted:
		kind, message = fault.Exhausted, "The agent has too much to do."
	case codes.Unimplemented:
		kind, message = fault.Unsupported, "The agent is too old for this, or it is not a Headgate agent."
	case codes.Internal, codes.DataLoss, codes.Unknown:
		kind, message = fault.Internal, "The agent failed."
	}
	return fault.Wrap(err, kind, codeOf(kind), message)
}

// codeOf keeps the code of the most frequent case stable and names the others
// by kind.
func codeOf(kind fault.Kind) string {
	switch kind {
	case fault.Unavailable, fault.Deadline:
		return CodeAgentOffline
	default:
		return "agent_refused"
	}
}

// staleEpoch reads the agent's refusal of our epoch from its status.
func staleEpoch(err error) (highest string, stale bool) {
	s := status.Convert(err)
	if s.Code() != codes.FailedPrecondition {
		return "", false
	}
	rest, ok := strings.CutPrefix(s.Message(), "STALE_EPOCH")
	return strings.TrimSpace(rest), ok
}
