package testkit

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// completeEnv is set by `make test`: nothing may be missing there, so that no
// test is skipped without anybody noticing.
const completeEnv = "HEADGATE_TEST_COMPLETE"

// Lacks ends a test for which this machine lacks something: it is skipped, or
// fails where everything has to be there.
func Lacks(t testing.TB, what string) {
	t.Helper()
	if os.Getenv(completeEnv) == "1" {
		t.Fatalf("%s (%s=1 allows no skip)", what, completeEnv)
	}
	t.Skip(what)
}

// debDir is where tools/fetch-deb.sh puts programs, below the repository.
const debDir = ".tools/deb"

// Program is a program of another project that tests run for real.
type Program struct {
	Path string
	libs string // folders of its libraries, for LD_LIBRARY_PATH; "" = the system's
}

// FindProgram finds a program on the system or among what tools/fetch-deb.sh
// has fetched; pkg is the Debian package that has it. Without it, the test
// ends as by Lacks.
func FindProgram(t testing.TB, name, pkg string) Program {
	t.Helper()
	for _, file := range []string{name, "/usr/sbin/" + name} {
		if path, err := exec.LookPath(file); err == nil {
			return Program{Path: path}
		}
	}
	if root, ok := fetched(); ok {
		for _, dir := range []string{"usr/bin", "usr/sbin", "bin", "sbin"} {
			if path, err := exec.LookPath(filepath.Join(root, dir, name)); err == nil {
				return Program{Path: path, libs: libraries(root)}
			}
		}
	}
	Lacks(t, "there is no "+name+" on this machine; fetch it by: tools/fetch-deb.sh "+pkg)
	return Program{}
}

// fetched gives the folder of fetched packages. Tests run in the folder of
// their package, which lies below the repository.
func fetched() (string, bool) {
	dir, err := os.Getwd()
	if err != nil {
		return "", false
	}
	for {
		root := filepath.Join(dir, debDir)
		if info, err := os.Stat(root); err == nil && info.IsDir() {
			return root, true
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", false
		}
		dir = up
	}
}

// libraries lists the folders of libraries below root.
func libraries(root string) string {
	var all []string
	for _, pattern := range []string{"usr/lib/*-linux-gnu*", "lib/*-linux-gnu*"} {
		found, _ := filepath.Glob(filepath.Join(root, pattern)) // the patterns are well formed
		all = append(all, found...)
	}
	return strings.Join(all, string(os.PathListSeparator))
}

// Command makes a command that runs the program with its libraries.
func (p Program) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.Path, args...)
	if p.libs != "" {
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+p.libs)
	}
	return cmd
}
