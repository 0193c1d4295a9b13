package localpg

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MinMajor is the oldest PostgreSQL that Headgate's schema and lib/pq support.
const MinMajor = 14

// probeTimeout bounds one call of `postgres -V` or `pg_config --bindir`, which
// take milliseconds; a program that hangs must not hang the start.
const probeTimeout = 10 * time.Second

// Binaries is one installation of the PostgreSQL server.
type Binaries struct {
	Dir     string // holds postgres and initdb
	Version string // as printed, for example "15.18"
	Major   int
}

// Postgres gives the path of the server program.
func (b Binaries) Postgres() string { return filepath.Join(b.Dir, "postgres") }

// Initdb gives the path of the program that makes a cluster.
func (b Binaries) Initdb() string { return filepath.Join(b.Dir, "initdb") }

// NotFoundError says that no usable PostgreSQL server is installed; its text
// names the one command that changes that.
type NotFoundError struct {
	TooOld []Binaries // installations below MinMajor, if that is all there is
	Hint   string     // from InstallHint
}

// Error gives the cause and the command to run.
func (e *NotFoundError) Error() string {
	cause := fmt.Sprintf("no PostgreSQL server %d or newer is installed", MinMajor)
	if len(e.TooOld) > 0 {
		cause += fmt.Sprintf(" (found only %s in %s)", e.TooOld[0].Version, e.TooOld[0].Dir)
	}
	return cause + "; run: " + e.Hint
}

// VersionError says that the data directory belongs to another major version
// than every installed server. Nothing was changed.
type VersionError struct {
	Dir       string
	DataMajor int
	Installed []Binaries // newest first, at least one
}

// Error names both versions and the ways out.
func (e *VersionError) Error() string {
	have := make([]string, 0, len(e.Installed))
	for _, b := range e.Installed {
		have = append(have, b.Version+" in "+b.Dir)
	}
	return fmt.Sprintf("the data in %s was written by PostgreSQL %d, installed is %s; the data was not touched. "+
		"Either install PostgreSQL %d beside it (on Debian: apt-get install postgresql-%d), or start once where version %d is "+
		"installed, save with pg_dumpall, and load that into a new directory",
		e.Dir, e.DataMajor, strings.Join(have, ", "), e.DataMajor, e.DataMajor, e.DataMajor)
}

// FindBinaries looks for PostgreSQL servers in PATH, where pg_config points,
// and in the folders of the distributions. If dataDir holds a cluster, the
// installation of the same major version is chosen (VersionError if there is
// none), otherwise the newest.
func FindBinaries(dataDir string) (Binaries, error) {
	return chooseBinaries(installed(candidateDirs()), dataDir)
}

// binariesFor honours a folder that was given explicitly.
func binariesFor(binDir, dataDir string) (Binaries, error) {
	if binDir == "" {
		return FindBinaries(dataDir)
	}
	found := installed([]string{binDir})
	if len(found) == 0 {
		return Binaries{}, fmt.Errorf("no usable postgres and initdb in %s: %w", binDir, &NotFoundError{Hint: InstallHint()})
	}
	return chooseBinaries(found, dataDir)
}

func chooseBinaries(found []Binaries, dataDir string) (Binaries, error) {
	slices.SortStableFunc(found, func(a, b Binaries) int { return b.Major - a.Major })
	var usable, tooOld []Binaries
	for _, b := range found {
		if b.Major >= MinMajor {
			usable = append(usable, b)
		} else {
			tooOld = append(tooOld, b)
		}
	}
	if len(usable) == 0 {
		return Binaries{}, &NotFoundError{TooOld: tooOld, Hint: InstallHint()}
	}
	major, err := dataMajor(dataDir)
	if errors.Is(err, fs.ErrNotExist) {
		return usable[0], nil
	}
	if err != nil {
		return Binaries{}, err
	}
	for _, b := range usable {
		if b.Major == major {
			return b, nil
		}
	}
	return Binaries{}, &VersionError{Dir: dataDir, DataMajor: major, Installed: usable}
}

// dataMajor reads PG_VERSION of a data directory; fs.ErrNotExist if it holds
// no cluster.
func dataMajor(dir string) (int, error) {
	text, err := os.ReadFile(filepath.Join(dir, "PG_VERSION"))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
		return 0, fmt.Errorf("read the version of the data directory: %w", err)
	}
	major, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		// Before version 10 the file held two numbers; nothing of ours is that old.
		return 0, fmt.Errorf("the file PG_VERSION in %s does not hold a version that is supported; the data was not touched", dir)
	}
	return major, nil
}

// candidateDirs lists folders that may hold a server, in order of preference
// among equal versions.
func candidateDirs() []string {
	var dirs []string
	if p, err := exec.LookPath("postgres"); err == nil {
		// A lone link such as /usr/local/bin/postgres has no initdb or no
		// share folder beside it; what it points to has.
		if real, err := filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	if out, err := probe("pg_config", "--bindir"); err == nil {
		dirs = append(dirs, strings.TrimSpace(out))
	}
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/libexec/postgresql*", "/usr/local/pgsql/bin"} {
		match, _ := filepath.Glob(pattern) // the only error is a bad pattern
		dirs = append(dirs, match...)
	}
	return dirs
}

// installed keeps the folders that hold a server which tells its version.
func installed(dirs []string) []Binaries {
	var found []Binaries
	seen := map[string]bool{}
	for _, dir := range dirs {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil || seen[real] {
			continue
		}
		seen[real] = true
		b := Binaries{Dir: real}
		if _, err := os.Stat(b.Initdb()); err != nil {
			continue
		}
		out, err := probe(b.Postgres(), "-V")
		if err != nil {
			continue
		}
		if b.Version, b.Major = parseVersion(out); b.Major > 0 {
			found = append(found, b)
		}
	}
	return found
}

// parseVersion reads "postgres (PostgreSQL) 15.18 (Debian ...)", also in the
// form "18beta1"; major 0 if it is something else.
func parseVersion(out string) (version string, major int) {
	_, rest, ok := strings.Cut(out, "(PostgreSQL)")
	fields := strings.Fields(rest)
	if !ok || len(fields) == 0 {
		return "", 0
	}
	digits := fields[0]
	if i := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		digits = digits[:i]
	}
	major, err := strconv.Atoi(digits)
	if err != nil {
		return "", 0
	}
	return fields[0], major
}

func probe(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).Output()
	return string(out), err
}
