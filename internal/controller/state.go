package controller

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"uuid"

	"headgate/internal/pki"
)

// state is the controller's directory: keys and certificates, the lock that
// proves that no other controller uses it, and who we were at earlier starts.
// It is opened before the database and needs none.
type state struct {
	path   string
	dir    *pki.Dir
	lock   *os.File
	id     uuid.UUID   // of this controller, kept over starts; in its certificates
	owner  uuid.UUID   // of this start; owns leases
	former []uuid.UUID // owners of earlier starts from this directory
	port   *pki.Identity
	roots  *pki.Roots
}

// Names inside the directory.
const (
	lockName       = "controller.lock"
	controllerFile = "controller-id"
	ownersFile     = "owners"
	portIdentity   = "controller-port"
	caFile         = "ca.pem"

	// keptOwners bounds the list of earlier starts. Leases of older ones have
	// long expired by the database's clock.
	keptOwners = 64
)

// openState locks and reads the directory, making it when it is new.
func openState(path string, listening []netip.Addr, now time.Time) (*state, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // key files inside are 0600; others must reach a cluster in it
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	s := &state{path: path, owner: uuid.NewV4(), roots: pki.NewRoots()}
	if err := s.takeLock(); err != nil {
		return nil, err
	}
	if err := s.read(listening, now); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// takeLock holds the directory for this process; the system gives it back
// when the process ends, however it ends.
func (s *state) takeLock() error {
	f, err := os.OpenFile(filepath.Join(s.path, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("open the state directory's lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return fmt.Errorf("another controller uses %s; stop it, or give this one a directory of its own with --data", s.path)
	}
	s.lock = f
	return nil
}

func (s *state) read(listening []netip.Addr, now time.Time) error {
	var err error
	if s.dir, err = pki.OpenDir(s.path); err != nil {
		return err
	}
	if s.id, err = s.readID(); err != nil {
		return err
	}
	if s.former, err = s.noteOwner(); err != nil {
		return err
	}
	s.port, err = pki.LoadIdentity(s.dir, portIdentity)
	if errors.Is(err, os.ErrNotExist) {
		s.port, err = pki.NewPortIdentity(s.id, listening, now)
	}
	if err != nil {
		return err
	}
	return s.readRoots()
}

func (s *state) readRoots() error {
	pem, err := s.dir.Read(caFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil // the first start: nobody has a certificate of ours yet
	}
	if err != nil {
		return err
	}
	certs, err := pki.ParseCertificates(pem)
	if err != nil {
		return err
	}
	s.roots.Set(certs...)
	return nil
}

func (s *state) readID() (uuid.UUID, error) {
	data, err := s.dir.Read(controllerFile)
	if errors.Is(err, os.ErrNotExist) {
		id := uuid.NewV4()
		return id, s.dir.Write(controllerFile, []byte(id.String()+"\n"))
	}
	if err != nil {
		return uuid.Nil(), err
	}
	id, err := uuid.Parse(strings.TrimSpace(string(data)))
	if err != nil {
		return uuid.Nil(), fmt.Errorf("%s holds no controller id: %w", filepath.Join(s.path, controllerFile), err)
	}
	return id, nil
}

// noteOwner adds this start to the list of owners before it can own anything
// and gives the earlier ones. The lock proves that none of them lives.
func (s *state) noteOwner() ([]uuid.UUID, error) {
	data, err := s.dir.Read(ownersFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	var former []uuid.UUID
	for line := range strings.Lines(string(data)) {
		if id, err := uuid.Parse(strings.TrimSpace(line)); err == nil {
			former = append(former, id)
		}
	}
	if len(former) >= keptOwners {
		former = former[len(former)-keptOwners+1:]
	}
	var text strings.Builder
	for _, id := range append(former, s.owner) {
		text.WriteString(id.String() + "\n")
	}
	return former, s.dir.Write(ownersFile, []byte(text.String()))
}

// adopt puts the fleet's CA and a certificate from it in place of what was
// served before.
func (s *state) adopt(authority *pki.Authority, listening []netip.Addr, now time.Time) error {
	key, err := pki.NewKey()
	if err != nil {
		return err
	}
	cert, err := authority.IssueControllerPort(&key.PublicKey, s.id, listening, now)
	if err != nil {
		return err
	}
	if err := s.port.Set(key, cert, authority.Certificate()); err != nil {
		return err
	}
	if err := s.port.Save(s.dir, portIdentity); err != nil {
		return err
	}
	s.roots.Set(authority.Certificate())
	return s.dir.Write(caFile, s.roots.PEM())
}

func (s *state) close() error {
	var errs []error
	if s.dir != nil {
		errs = append(errs, s.dir.Close())
	}
	if s.lock != nil {
		// Unlocked by name: a child that is being started at this moment holds
		// a copy of the file until it runs its program, and with it the lock.
		errs = append(errs, syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
	}
	return errors.Join(errs...)
}
