package fleet

import (
	"context"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

// EnsureCA loads the fleet's certificate authority, or makes it when the
// database has none, and issues the certificate that this controller dials
// with. A fleet whose CA key is not in our folder is a fault that names the
// file to copy. It must succeed before Run and pairing.
func (f *Fleet) EnsureCA(ctx context.Context) (*pki.Authority, error) {
	authority, err := f.loadCA(ctx)
	if err != nil {
		return nil, err
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	cert, err := authority.IssueController(&key.PublicKey, f.cfg.ControllerID, time.Now())
	if err != nil {
		return nil, err
	}
	// The chain carries the CA, which an agent that is being paired checks
	// against the fingerprint in its token.
	identity, err := pki.NewIdentity(key, cert, authority.Certificate())
	if err != nil {
		return nil, err
	}
	f.authority, f.identity = authority, identity
	f.roots = pki.NewRoots(authority.Certificate())
	return authority, nil
}

// Identity gives the certificate that this controller dials with; nil before
// EnsureCA. It stays the same object when the certificate is renewed.
func (f *Fleet) Identity() *pki.Identity { return f.identity }

// Roots gives the authorities that agents are checked against; nil before
// EnsureCA.
func (f *Fleet) Roots() *pki.Roots { return f.roots }

func (f *Fleet) loadCA(ctx context.Context) (*pki.Authority, error) {
	row, err := f.cfg.Store.ActiveCA(ctx)
	if err != nil {
		return nil, err
	}
	if row == nil {
		return f.makeCA(ctx)
	}
	return pki.LoadAuthority(f.cfg.Dir, []byte(row.CertPEM))
}

// makeCA first puts the key on disk and then the certificate into the
// database, so that no certificate is ever known whose key nobody has.
func (f *Fleet) makeCA(ctx context.Context) (*pki.Authority, error) {
	authority, err := pki.NewAuthority(f.cfg.FleetName, time.Now())
	if err != nil {
		return nil, err
	}
	if err := authority.SaveKey(f.cfg.Dir); err != nil {
		return nil, err
	}
	first, err := f.cfg.Store.InsertCA(ctx, CA{
		ID: uuid.New(), Fleet: f.cfg.FleetName, CertPEM: string(authority.PEM()), State: "active", CreatedAt: time.Now(),
	})
	if err != nil {
		return nil, err // whether it was stored shows at the next attempt, so the key stays
	}
	if first {
		f.log.Info("made the certificate authority of a new fleet", "fleet", f.cfg.FleetName, "ca", authority.ID())
		return authority, nil
	}
	if err := f.cfg.Dir.Remove(authority.KeyFile()); err != nil {
		f.log.Warn("cannot remove the key of an authority that lost the race", "err", err)
	}
	row, err := f.cfg.Store.ActiveCA(ctx)
	if err != nil {
		return nil, err
	}
	if row == nil {
		return nil, fault.New(fault.Internal, "ca_vanished", "The fleet's CA was there and is gone.")
	}
	return pki.LoadAuthority(f.cfg.Dir, []byte(row.CertPEM))
}

// renewIdentity issues a new certificate for our key when half of the life of
// the old one is over. Connections that stand are not touched.
func (f *Fleet) renewIdentity(now time.Time) {
	if now.Before(pki.RenewAt(f.identity.Leaf())) {
		return
	}
	key, err := pki.NewKey()
	if err == nil {
		cert, ierr := f.authority.IssueController(&key.PublicKey, f.cfg.ControllerID, now)
		if err = ierr; err == nil {
			err = f.identity.Set(key, cert, f.authority.Certificate())
		}
	}
	if err != nil {
		f.log.Error("cannot renew this controller's certificate", "err", err)
		return
	}
	f.log.Info("renewed this controller's certificate", "expires", f.identity.Leaf().NotAfter)
}
