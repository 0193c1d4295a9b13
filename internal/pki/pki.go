// Package pki provides the identities of Headgate's programs: the fleet's
// certificate authority, the certificates it issues, the holders that keep
// them swappable at run time, every tls.Config of the product, the
// cryptography of pairing (HG-PAIR/1 with long tokens) and the state folder
// that keys lie in.
//
// It knows neither gRPC nor the database: certificates of the authority live
// where the caller puts them, only private keys are bound to a [Dir].
//
// Identity is by name and key, never by address. An agent is
// <uuid>.agent.headgate.internal and may only serve; a controller is
// <uuid>.controller.headgate.internal and may only dial, so that a stolen agent
// key opens nothing. The port of a controller has a third sort of certificate.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"

	"headgate/internal/fault"
)

const (
	pemKey         = "PRIVATE KEY"
	pemCertificate = "CERTIFICATE"
)

// Fingerprint is the SHA-256 of a public key in its SubjectPublicKeyInfo form.
// It names a key independently of the certificate around it, so it survives a
// renewal of the certificate and changes with the key.
type Fingerprint = [sha256.Size]byte

// SPKI gives the fingerprint of the certificate's key.
func SPKI(cert *x509.Certificate) Fingerprint {
	return sha256.Sum256(cert.RawSubjectPublicKeyInfo)
}

// NewKey makes a private key of the only sort that Headgate uses, ECDSA P-256:
// it is allowed under FIPS 140 and kept by every TPM.
func NewKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "key_generation_failed", "A new private key cannot be made.")
	}
	return key, nil
}

// EncodeCertificates gives the certificates as concatenated PEM blocks.
func EncodeCertificates(certs ...*x509.Certificate) []byte {
	var out []byte
	for _, c := range certs {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: c.Raw})...)
	}
	return out
}

// ParseCertificates reads concatenated PEM certificates and refuses anything
// else among them, an empty list included.
func ParseCertificates(data []byte) ([]*x509.Certificate, error) {
	key, certs, err := parsePEM(data)
	if err == nil && key != nil {
		err = errors.New("a private key lies among the certificates")
	}
	if err == nil && len(certs) == 0 {
		err = errors.New("no certificate found")
	}
	if err != nil {
		return nil, fault.Wrap(err, fault.Invalid, "certificate_unreadable", "The text is not a list of PEM certificates.")
	}
	return certs, nil
}

func encodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "key_not_exportable", "The private key cannot be written to a file.")
	}
	defer clear(der)
	return pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), nil
}

// parsePEM reads at most one P-256 key and any number of certificates.
func parsePEM(data []byte) (key *ecdsa.PrivateKey, certs []*x509.Certificate, err error) {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		switch block.Type {
		case pemCertificate:
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, nil, err
			}
			certs = append(certs, cert)
		case pemKey:
			if key != nil {
				return nil, nil, errors.New("more than one private key")
			}
			parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
			if err != nil {
				return nil, nil, err
			}
			ec, ok := parsed.(*ecdsa.PrivateKey)
			if !ok || ec.Curve != elliptic.P256() {
				return nil, nil, errors.New("the private key is not ECDSA P-256")
			}
			key = ec
		default:
			return nil, nil, errors.New("unexpected PEM block " + block.Type)
		}
	}
	return key, certs, nil
}

// sameKey says whether the certificate was made for the key.
func sameKey(cert *x509.Certificate, key crypto.Signer) bool {
	pub, ok := key.Public().(*ecdsa.PublicKey)
	return ok && pub.Equal(cert.PublicKey)
}
