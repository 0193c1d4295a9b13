package agent

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

// Names within the data directory.
const (
	lockFile     = "lock"
	identityFile = "identity.pem"
	fleetDir     = "fleet"
	fleetNewDir  = "fleet.new" // becomes fleet by a rename
	bundleFile   = "bundle.pem"
	pairingFile  = "pairing.json"
	epochsFile   = "epochs.json"
	ledgerFile   = "ledger"
	spoolDir     = "output"
	infoFile     = "agent.json"
	programFile  = "program.json"
)

// state is what the data directory holds, the ledger apart.
type state struct {
	dir      *pki.Dir
	lock     *os.File
	id       uuid.UUID
	identity *pki.Identity
	roots    *pki.Roots // of the fleet; trusts nobody before pairing
	paired   bool
}

// openState locks the directory and reads the identity, which is made at the
// first start.
func openState(path string, now time.Time) (*state, error) {
	if path == "" {
		return nil, fault.New(fault.Invalid, "data_dir_missing", "No data directory was given.").WithHint("Use --data DIR.")
	}
	dir, err := pki.OpenDir(path)
	if err != nil {
		return nil, err
	}
	s := &state{dir: dir, roots: pki.NewRoots()}
	if err = s.acquire(); err == nil {
		err = s.load(now)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *state) acquire() error {
	name := filepath.Join(s.dir.Path(), lockFile)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fault.Wrap(err, fault.Internal, "data_dir_unusable", "The file "+name+" cannot be opened.")
	}
	s.lock = f
	if err := lockWithin(f, lockPatience); err != nil {
		return fault.Wrap(err, fault.Conflict, "data_dir_locked", "Another headgate-agent is running with the data directory "+s.dir.Path()+".").
			WithHint("Stop it, or give this one a directory of its own: one process an identity.")
	}
	return nil
}

// lockPatience is how long the lock of an agent that was killed may be held by
// the copy of a program that it was starting at that moment.
const lockPatience = time.Second

func lockWithin(f *os.File, d time.Duration) error {
	end := time.NewTimer(d)
	defer end.Stop()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		select {
		case <-again.C:
		case <-end.C:
			return err
		}
	}
}

func (s *state) close() error {
	var err error
	if s.lock != nil {
		// Unlocked by name: a program that is being started at this moment holds
		// a copy of the file until it runs, and with it the lock.
		err = errors.Join(syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
	}
	return errors.Join(err, s.dir.Close())
}

func (s *state) load(now time.Time) error {
	if err := s.removeHalfPaired(); err != nil {
		return err
	}
	identity, err := pki.LoadIdentity(s.dir, fleetDir+"/"+identityFile)
	switch {
	case err == nil:
		s.paired = true
		err = s.loadBundle()
	case errors.Is(err, fs.ErrNotExist):
		identity, err = s.ownIdentity(now)
	}
	if err != nil {
		return err
	}
	s.identity = identity
	peer, err := pki.PeerOf(identity.Leaf())
	if err != nil || peer.Role != pki.RoleAgent {
		return fault.Wrap(err, fault.Internal, "identity_unreadable", "The certificate in "+s.dir.Path()+" is not that of an agent.")
	}
	s.id = peer.ID
	return nil
}

// removeHalfPaired takes away what a pairing that did not reach its rename has
// left: the agent is either paired or not.
func (s *state) removeHalfPaired() error {
	if err := os.RemoveAll(filepath.Join(s.dir.Path(), fleetNewDir)); err != nil {
		return fault.Wrap(err, fault.Internal, "data_dir_unusable", "The left-over folder "+fleetNewDir+" cannot be removed.")
	}
	return nil
}

func (s *state) loadBundle() error {
	data, err := s.dir.Read(fleetDir + "/" + bundleFile)
	if err != nil {
		return err
	}
	certs, err := pki.ParseCertificates(data)
	if err != nil {
		return err
	}
	s.roots.Set(certs...)
	return nil
}

func (s *state) ownIdentity(now time.Time) (*pki.Identity, error) {
	identity, err := pki.LoadIdentity(s.dir, identityFile)
	if !errors.Is(err, fs.ErrNotExist) {
		return identity, err
	}
	if identity, err = pki.NewAgentIdentity(uuid.NewV4(), now); err != nil {
		return nil, err
	}
	return identity, identity.Save(s.dir, identityFile)
}

// saveJSON stores a small document durably.
func (s *state) saveJSON(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fault.Wrap(err, fault.Internal, "state_write_failed", "The file "+name+" cannot be encoded.")
	}
	return s.dir.Write(name, append(data, '\n'))
}

// loadJSON reads what saveJSON stored; v stays as it is when there is nothing.
func (s *state) loadJSON(name string, v any) error {
	data, err := s.dir.Read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		return fault.Wrap(err, fault.Internal, "state_read_failed", "The file "+filepath.Join(s.dir.Path(), name)+" is damaged.").
			WithHint("Restore it from a backup; removing epochs.json lets controllers back in that have lost their lease.")
	}
	return nil
}

// epochs holds the highest epoch seen of each shard. The slot's lock guards it.
type epochs struct {
	state   *state
	highest map[int32]int64
}

func loadEpochs(s *state) (*epochs, error) {
	e := &epochs{state: s, highest: map[int32]int64{}}
	return e, s.loadJSON(epochsFile, &e.highest)
}

// raise stores a higher epoch; when it returns, the epoch is on disk.
func (e *epochs) raise(shard int32, epoch int64) error {
	old := e.highest[shard]
	if epoch <= old {
		return nil
	}
	e.highest[shard] = epoch
	if err := e.state.saveJSON(epochsFile, e.highest); err != nil {
		e.highest[shard] = old
		return err
	}
	return nil
}

// info is the content of agent.json, by which whoever started an agent finds
// out where it listens.
type info struct {
	ID       string `json:"id"`
	Instance string `json:"instance_id"` // of this process
	Name     string `json:"name"`
	Address  string `json:"address"`
	Version  string `json:"version"`
	PID      int    `json:"pid"`
	Paired   bool   `json:"paired"`
}

// hostname gives the host's name, or "" when it has none.
func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// osName gives the system's name for people.
func osName() string {
	data, err := os.ReadFile("/etc/os-release")
	if err == nil {
		for line := range strings.Lines(string(data)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
				return strings.Trim(v, `"'`)
			}
		}
	}
	return "Linux"
}
