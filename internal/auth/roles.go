package auth

import (
	"fmt"
	"slices"

	"headgate/internal/fault"
)

// viewing, operating and administering build on each other; the roles of
// machines get exactly what they need.
func viewing() []Permission {
	return []Permission{ReadTasks, ReadAgents, ReadStatus, OwnSession}
}

func operating() []Permission {
	return append(viewing(), SubmitTasks, CancelTasks, PingAgents)
}

func administering() []Permission {
	return append(operating(), ManageAgents, PairAgents, ReadMetrics, ManageTokens)
}

// Permissions gives what a role may do; nothing for an unknown role.
func Permissions(r Role) []Permission {
	switch r {
	case Viewer:
		return viewing()
	case Operator:
		return operating()
	case Admin:
		return administering()
	case Metrics:
		return []Permission{ReadMetrics, OwnSession}
	case Peer:
		return []Permission{CallPeer, ReadMetrics, ReadStatus}
	default:
		return nil
	}
}

// TokenRoles lists the roles that an API token may have.
func TokenRoles() []Role { return []Role{Viewer, Operator, Admin, Metrics} }

// permitted is the table that Check reads on every request.
type permitted map[Role]map[Permission]bool

func newPermitted() permitted {
	p := permitted{}
	for _, r := range []Role{Viewer, Operator, Admin, Metrics, Peer} {
		p[r] = map[Permission]bool{}
		for _, perm := range Permissions(r) {
			p[r][perm] = true
		}
	}
	return p
}

// checkTokenRole refuses roles that a token cannot have, and roles that hold
// more than the one who makes the token: nobody grants what they do not hold.
func checkTokenRole(by Principal, role Role) error {
	if !slices.Contains(TokenRoles(), role) {
		return fault.Newf(fault.Invalid, "unknown_role", "There is no token role %q.", string(role)).
			WithHint("Use one of viewer, operator, admin, metrics.").
			WithField("/role", "must be one of viewer, operator, admin, metrics")
	}
	held := Permissions(by.Role)
	for _, perm := range Permissions(role) {
		if !slices.Contains(held, perm) {
			return fault.Newf(fault.Forbidden, "role_exceeds_own", "A %s cannot make a token with the role %s.", by.Role, role).
				WithHint("Ask somebody who holds that role.")
		}
	}
	return nil
}

// forbidden says which permission is missing, so that people know what to ask for.
func forbidden(p Principal, perm Permission) error {
	return fault.New(fault.Forbidden, "permission_missing",
		fmt.Sprintf("The role %s does not include the permission %s.", p.Role, perm)).
		WithHint("Use a token or sign in with a role that includes it.")
}
