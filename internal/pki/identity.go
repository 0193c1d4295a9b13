package pki

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"sync/atomic"

	"headgate/internal/fault"
)

// Identity holds the key and the certificate chain of one program. The pair
// can be replaced while connections are made: each handshake sees either the
// old or the new one. An Identity is made by NewIdentity and never empty.
type Identity struct {
	cert atomic.Pointer[tls.Certificate]
}

// NewIdentity joins a key with its chain, the leaf first.
func NewIdentity(key crypto.Signer, chain ...*x509.Certificate) (*Identity, error) {
	i := &Identity{}
	if err := i.Set(key, chain...); err != nil {
		return nil, err
	}
	return i, nil
}

// Set replaces key and chain for all handshakes from now on. A leaf that was
// not made for the key is refused and changes nothing.
func (i *Identity) Set(key crypto.Signer, chain ...*x509.Certificate) error {
	if len(chain) == 0 || !sameKey(chain[0], key) {
		return fault.New(fault.Invalid, "certificate_key_mismatch", "The certificate was not made for this private key.")
	}
	c := &tls.Certificate{PrivateKey: key, Leaf: chain[0]}
	for _, cert := range chain {
		c.Certificate = append(c.Certificate, cert.Raw)
	}
	i.cert.Store(c)
	return nil
}

// Key gives the private key, to sign requests with.
func (i *Identity) Key() crypto.Signer {
	return i.cert.Load().PrivateKey.(crypto.Signer) // Set stores nothing else
}

// Leaf gives the certificate now in use; callers must not change it.
func (i *Identity) Leaf() *x509.Certificate { return i.cert.Load().Leaf }

// SPKI gives the fingerprint of the key now in use.
func (i *Identity) SPKI() Fingerprint { return SPKI(i.Leaf()) }

// Save stores key and chain in one file, so that a crash never leaves a
// certificate beside the key of another.
func (i *Identity) Save(dir *Dir, name string) error {
	c := i.cert.Load()
	data, err := encodeKey(c.PrivateKey.(crypto.Signer))
	if err != nil {
		return err
	}
	for _, der := range c.Certificate {
		data = append(data, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: der})...)
	}
	defer clear(data)
	return dir.Write(name, data)
}

// LoadIdentity reads what Save has stored. A missing file matches
// fs.ErrNotExist.
func LoadIdentity(dir *Dir, name string) (*Identity, error) {
	data, err := dir.ReadKey(name)
	if err != nil {
		return nil, err
	}
	defer clear(data)
	key, chain, err := parsePEM(data)
	if err != nil || key == nil {
		return nil, fault.Wrap(err, fault.Internal, "identity_unreadable",
			"The file "+dir.file(name)+" does not hold a private key with its certificates.").
			WithHint("Restore it from a backup, or remove it to start with a new identity, which then has to be enrolled.")
	}
	return NewIdentity(key, chain...)
}

// forServer is the GetCertificate of a tls.Config.
func (i *Identity) forServer(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return i.cert.Load(), nil
}

// forClient offers the certificate whatever authorities the server names: a
// peer of another fleet shall refuse it with a clear alert.
func (i *Identity) forClient(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return i.cert.Load(), nil
}

// Roots holds the authorities that are trusted, replaceable while connections
// are made. The zero Roots trusts nobody.
type Roots struct {
	set atomic.Pointer[rootSet]
}

type rootSet struct {
	pool  *x509.CertPool
	certs []*x509.Certificate
}

// NewRoots trusts the given authorities.
func NewRoots(certs ...*x509.Certificate) *Roots {
	r := &Roots{}
	r.Set(certs...)
	return r
}

// Set replaces the authorities for all handshakes from now on.
func (r *Roots) Set(certs ...*x509.Certificate) {
	s := &rootSet{pool: x509.NewCertPool(), certs: slices.Clone(certs)}
	for _, c := range certs {
		s.pool.AddCert(c)
	}
	r.set.Store(s)
}

// Certificates gives the authorities now trusted.
func (r *Roots) Certificates() []*x509.Certificate {
	if s := r.set.Load(); s != nil {
		return slices.Clone(s.certs)
	}
	return nil
}

// PEM gives the authorities now trusted as concatenated PEM blocks.
func (r *Roots) PEM() []byte { return EncodeCertificates(r.Certificates()...) }

// pool is never nil: a nil pool would make crypto/tls trust the system's.
func (r *Roots) pool() *x509.CertPool {
	if s := r.set.Load(); s != nil {
		return s.pool
	}
	return x509.NewCertPool()
}
