package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"uuid"
)

// Role is what a program of the fleet is; it is part of its names and of what
// the pairing proof covers.
type Role string

// The roles.
const (
	RoleController Role = "controller"
	RoleAgent      Role = "agent"
)

// domain is the parent of every name; it is reserved for private use, so no
// public authority can issue for it.
const domain = "headgate.internal"

// AgentName is the DNS name by which an agent is dialled and verified.
func AgentName(id uuid.UUID) string { return dnsName(RoleAgent, id) }

// ControllerName is the DNS name of a controller.
func ControllerName(id uuid.UUID) string { return dnsName(RoleController, id) }

func dnsName(role Role, id uuid.UUID) string {
	return id.String() + "." + string(role) + "." + domain
}

func spiffeURI(fleet string, role Role, id uuid.UUID) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: fleet, Path: "/" + string(role) + "/" + id.String()}
}

// Peer is what a certificate says about its holder. It is worth as much as
// the verification that the certificate has passed.
type Peer struct {
	Role  Role
	ID    uuid.UUID
	Fleet string // empty in a self-made certificate, which belongs to no fleet yet
}

// PeerOf reads role and id of a Headgate certificate. Names that contradict
// each other, more than one identity or any other form are an error: a decision
// about access must not depend on which of two names somebody looks at.
func PeerOf(cert *x509.Certificate) (Peer, error) {
	if len(cert.DNSNames) != 1 || len(cert.URIs) > 1 {
		return Peer{}, errors.New("the certificate does not carry exactly one Headgate name")
	}
	p, err := peerOfName(cert.DNSNames[0])
	if err != nil {
		return Peer{}, err
	}
	if len(cert.URIs) == 1 {
		p.Fleet = cert.URIs[0].Host
		if want := spiffeURI(p.Fleet, p.Role, p.ID).String(); p.Fleet == "" || cert.URIs[0].String() != want {
			return Peer{}, fmt.Errorf("the names in the certificate contradict each other: %q, %q", cert.DNSNames[0], cert.URIs[0])
		}
	}
	return p, nil
}

func peerOfName(name string) (Peer, error) {
	label, rest, _ := strings.Cut(name, ".")
	role, _ := strings.CutSuffix(rest, "."+domain)
	id, err := uuid.Parse(label)
	p := Peer{Role: Role(role), ID: id}
	if err != nil || (p.Role != RoleAgent && p.Role != RoleController) || dnsName(p.Role, id) != name {
		return Peer{}, fmt.Errorf("%q is not the name of a Headgate program", name)
	}
	return p, nil
}

// peerWithRole is PeerOf for a place that admits one role of a known fleet.
func peerWithRole(cert *x509.Certificate, role Role) (Peer, error) {
	p, err := PeerOf(cert)
	if err != nil {
		return Peer{}, err
	}
	if p.Role != role || p.Fleet == "" {
		return Peer{}, fmt.Errorf("the certificate is not that of a fleet's %s", role)
	}
	return p, nil
}
