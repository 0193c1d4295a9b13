package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"time"
	"uuid"

	"headgate/internal/fault"
)

const (
	// agentLife bounds how long a stolen agent key can pose as that agent.
	agentLife = 30 * 24 * time.Hour
	// controllerLife is shorter, since a controller's key opens every agent.
	controllerLife = 7 * 24 * time.Hour
	// selfMadeLife is that of certificates which nobody verifies (an agent
	// before pairing, a controller port before a CA): long enough that a wrong
	// clock or a long outage does not matter.
	selfMadeLife = 10 * 365 * 24 * time.Hour
	// renewSpread is the part of a certificate's life over which renewals are
	// spread, so that a fleet enrolled at once does not renew at once.
	renewSpread = 0.2
)

// Request is the usable part of a certificate signing request. Names, usages
// and extensions in it decide nothing: the authority writes its own.
type Request struct {
	Key     *ecdsa.PublicKey
	Ignored []string // what else the request asked for, for the log
}

// NewRequest makes the signing request that proves possession of the key.
func NewRequest(key crypto.Signer) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "csr_failed", "The certificate signing request cannot be made.")
	}
	return der, nil
}

// ParseRequest checks a signing request: its signature by its own key, and
// that the key is P-256.
func ParseRequest(der []byte) (Request, error) {
	csr, err := x509.ParseCertificateRequest(der)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return Request{}, fault.Wrap(err, fault.Invalid, "csr_invalid", "The certificate signing request is damaged or not signed by its own key.")
	}
	key, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return Request{}, fault.New(fault.Invalid, "csr_invalid", "The key in the certificate signing request is not ECDSA P-256.")
	}
	r := Request{Key: key}
	if subject := csr.Subject.String(); subject != "" {
		r.Ignored = append(r.Ignored, "subject "+subject)
	}
	for _, e := range csr.Extensions {
		r.Ignored = append(r.Ignored, "extension "+e.Id.String())
	}
	return r, nil
}

// IssueAgent signs the certificate by which an agent serves, and can do
// nothing else.
func (a *Authority) IssueAgent(pub *ecdsa.PublicKey, id uuid.UUID, now time.Time) (*x509.Certificate, error) {
	return a.issue(pub, leaf{role: RoleAgent, id: id, usage: x509.ExtKeyUsageServerAuth, life: agentLife}, now)
}

// IssueController signs the certificate by which a controller dials, and can
// do nothing else.
func (a *Authority) IssueController(pub *ecdsa.PublicKey, id uuid.UUID, now time.Time) (*x509.Certificate, error) {
	return a.issue(pub, leaf{role: RoleController, id: id, usage: x509.ExtKeyUsageClientAuth, life: controllerLife}, now)
}

// IssueControllerPort signs the server certificate of a controller port: valid
// for the controller's name, for loopback and for the addresses it listens on.
func (a *Authority) IssueControllerPort(pub *ecdsa.PublicKey, id uuid.UUID, listening []netip.Addr, now time.Time) (*x509.Certificate, error) {
	return a.issue(pub, leaf{role: RoleController, id: id, usage: x509.ExtKeyUsageServerAuth, life: controllerLife, ips: portAddresses(listening)}, now)
}

// leaf is what distinguishes the sorts of certificates.
type leaf struct {
	role  Role
	id    uuid.UUID
	usage x509.ExtKeyUsage
	life  time.Duration
	ips   []net.IP
}

func (l leaf) template(now time.Time) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: string(l.role) + " " + l.id.String()}, // for people; never read
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              now.Add(l.life),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{l.usage},
		BasicConstraintsValid: true,
		DNSNames:              []string{dnsName(l.role, l.id)},
		IPAddresses:           l.ips,
	}
}

func (a *Authority) issue(pub *ecdsa.PublicKey, l leaf, now time.Time) (*x509.Certificate, error) {
	if pub == nil || pub.Curve != elliptic.P256() || l.id == uuid.Nil() {
		return nil, fault.New(fault.Invalid, "certificate_not_issued", "A certificate needs a P-256 key and an id that is not zero.")
	}
	if !now.Before(a.cert.NotAfter) {
		return nil, fault.Newf(fault.Unavailable, "ca_expired", "The fleet's CA expired on %s.", a.cert.NotAfter.Format(time.DateOnly)).
			WithHint("Check this machine's clock; if it is right, the CA has to be rotated.")
	}
	t := l.template(now)
	t.URIs = []*url.URL{spiffeURI(a.Fleet(), l.role, l.id)}
	if t.NotAfter.After(a.cert.NotAfter) {
		t.NotAfter = a.cert.NotAfter
	}
	return sign(t, a.cert, pub, a.key)
}

// NewAgentIdentity makes a key and a self-made certificate for an agent that
// has not been paired. The key stays when the certificate is replaced.
func NewAgentIdentity(id uuid.UUID, now time.Time) (*Identity, error) {
	return selfMade(leaf{role: RoleAgent, id: id, usage: x509.ExtKeyUsageServerAuth, life: selfMadeLife}, now)
}

// NewPortIdentity makes a key and a self-made stop-gap certificate for a
// controller port, to be served until the fleet's CA is at hand.
func NewPortIdentity(id uuid.UUID, listening []netip.Addr, now time.Time) (*Identity, error) {
	return selfMade(leaf{role: RoleController, id: id, usage: x509.ExtKeyUsageServerAuth, life: selfMadeLife, ips: portAddresses(listening)}, now)
}

func selfMade(l leaf, now time.Time) (*Identity, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	t := l.template(now)
	cert, err := sign(t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return NewIdentity(key, cert)
}

// portAddresses adds loopback and leaves out what nobody can dial.
func portAddresses(listening []netip.Addr) []net.IP {
	all := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	for _, addr := range listening {
		addr = addr.Unmap().WithZone("")
		if addr.IsValid() && !addr.IsUnspecified() && !slices.Contains(all, addr) {
			all = append(all, addr)
		}
	}
	ips := make([]net.IP, len(all))
	for i, addr := range all {
		ips[i] = addr.AsSlice()
	}
	return ips
}

// RenewAt says when a certificate is to be replaced: an agent's at two thirds
// of its life, a controller's at half, each spread by a tenth either way. The
// spread comes from the serial number, so that the answer does not change.
func RenewAt(cert *x509.Certificate) time.Time {
	part := 0.5
	if p, err := PeerOf(cert); err == nil && p.Role == RoleAgent {
		part = 2.0 / 3
	}
	step := new(big.Int).And(cert.SerialNumber, big.NewInt(255)).Int64()
	part += renewSpread * (float64(step)/255 - 0.5)
	life := cert.NotAfter.Sub(cert.NotBefore)
	return cert.NotBefore.Add(time.Duration(part * float64(life)))
}
