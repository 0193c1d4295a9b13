package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"io/fs"
	"math/big"
	"net/netip"
	"strings"
	"time"

	"headgate/internal/fault"
)

const (
	// authorityLife is how long a fleet CA lives; rotation is staged half a
	// year before the end.
	authorityLife = 5 * 365 * 24 * time.Hour
	// clockSkew is how far the clocks of two machines may differ without a
	// fresh certificate being "not yet valid" on one of them.
	clockSkew = 5 * time.Minute
	// serialBits: 127 bits fit 16 octets with the sign bit clear and cannot
	// collide by chance.
	serialBits = 127
	// authorityIDBytes of the key's fingerprint name an authority in file
	// names and messages; 64 bits are plenty to tell the few of a fleet apart.
	authorityIDBytes = 8
	// maxFleetName is the longest DNS label.
	maxFleetName = 63
)

// Authority is the certificate authority of one fleet, together with its
// private key. Its methods may be called by several goroutines.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// NewAuthority makes the authority of a fleet. Nothing is stored: the caller
// first calls SaveKey and then puts PEM where all controllers find it.
//
// Name constraints bind it to names below headgate.internal and to the fleet's
// own trust domain, so that its key is worthless against anything else. IP
// addresses stay free because the certificate of a controller port carries them.
func NewAuthority(fleet string, now time.Time) (*Authority, error) {
	if err := checkFleetName(fleet); err != nil {
		return nil, err
	}
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: "Headgate fleet " + fleet},
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              now.Add(authorityLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true, // it issues leaves only
		// Without a leading dot: in the form that RFC 5280 gives for DNS names
		// this covers everything below the domain.
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         []string{domain},
		PermittedURIDomains:         []string{fleet},
	}
	cert, err := sign(template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &Authority{cert: cert, key: key}, nil
}

// checkFleetName admits what is a SPIFFE trust domain and a DNS name at once;
// an IP address is not usable as a name constraint of URIs.
func checkFleetName(fleet string) error {
	ok := len(fleet) <= maxFleetName
	for label := range strings.SplitSeq(fleet, ".") {
		ok = ok && label != "" && label[0] != '-' && label[len(label)-1] != '-' &&
			strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
	}
	if _, err := netip.ParseAddr(fleet); err == nil || !ok {
		return fault.Newf(fault.Invalid, "invalid_fleet_name", "%q cannot be the name of a fleet.", fleet).
			WithHint("Use up to 63 lower-case letters, digits, hyphens and dots, like a DNS name, and not an IP address.")
	}
	return nil
}

// CodeCAKeyMissing is the code of the fault of an authority whose private key is
// not in the folder.
const CodeCAKeyMissing = "ca_key_missing"

// LoadAuthority joins the certificate of an authority with its key from the
// folder. When the key is not there, the fault names the file to copy.
func LoadAuthority(dir *Dir, certPEM []byte) (*Authority, error) {
	certs, err := ParseCertificates(certPEM)
	if err != nil {
		return nil, err
	}
	cert := certs[0]
	if len(certs) != 1 || !cert.IsCA {
		return nil, fault.New(fault.Internal, "ca_certificate_unusable", "The stored certificate of the fleet's CA is not that of one CA.")
	}
	file := keyFile(cert)
	data, err := dir.ReadKey(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Wrap(err, fault.Unavailable, CodeCAKeyMissing,
			"The fleet has a CA whose private key is not on this controller: the file "+dir.file(file)+" is missing.").
			WithHint("Copy " + file + " from the data folder of a controller that is already running to the same place here, with mode 0600.")
	}
	if err != nil {
		return nil, err
	}
	defer clear(data)
	key, _, err := parsePEM(data)
	if err != nil || key == nil || !sameKey(cert, key) {
		return nil, fault.Wrap(err, fault.Internal, "ca_key_mismatch",
			"The file "+dir.file(file)+" does not hold the private key of the fleet's CA.").
			WithHint("Copy " + file + " again from a controller that works.")
	}
	return &Authority{cert: cert, key: key}, nil
}

// SaveKey stores the private key in the folder, under a name made from the
// key's fingerprint, so that keys of several authorities lie side by side.
func (a *Authority) SaveKey(dir *Dir) error {
	data, err := encodeKey(a.key)
	if err != nil {
		return err
	}
	defer clear(data)
	return dir.Write(keyFile(a.cert), data)
}

// ID names the authority; it is made from its key.
func (a *Authority) ID() string { return authorityID(a.cert) }

// Fleet gives the name of the fleet, its SPIFFE trust domain.
func (a *Authority) Fleet() string { return a.cert.PermittedURIDomains[0] }

// Certificate gives the authority's own certificate; callers must not change it.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// PEM gives the authority's own certificate for storage.
func (a *Authority) PEM() []byte { return EncodeCertificates(a.cert) }

// KeyFile gives the name of the key's file within a Dir.
func (a *Authority) KeyFile() string { return keyFile(a.cert) }

func authorityID(cert *x509.Certificate) string {
	sum := SPKI(cert)
	return hex.EncodeToString(sum[:authorityIDBytes])
}

func keyFile(cert *x509.Certificate) string { return "keys/ca-" + authorityID(cert) + ".key" }

func newSerial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // documented never to fail
	n := new(big.Int).SetBytes(b[:])
	n.Rsh(n, uint(8*len(b)-serialBits))
	if n.Sign() == 0 {
		return n.SetInt64(1) // RFC 5280 asks for a positive number
	}
	return n
}

func sign(template, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, key)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "certificate_not_issued", "The certificate cannot be signed.")
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "certificate_not_issued", "The certificate just signed cannot be read back.")
	}
	return cert, nil
}
