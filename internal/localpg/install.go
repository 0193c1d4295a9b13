package localpg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// dropInDir is where Debian's postgresql-common reads settings for clusters
// that its packages make; dropInName sorts behind any other file there.
const (
	dropInDir  = "/etc/postgresql-common/createcluster.d"
	dropInName = "zz-headgate-install.conf"
)

// InstallHint gives the one command that installs the PostgreSQL server on
// this system.
func InstallHint() string {
	return installHintFor(osRelease())
}

func installHintFor(ids []string) string {
	for _, id := range ids {
		switch id {
		case "debian", "ubuntu":
			return "sudo apt-get install -y postgresql"
		case "fedora", "rhel", "centos":
			return "sudo dnf install -y postgresql-server"
		case "suse", "opensuse":
			return "sudo zypper install -y postgresql-server"
		case "alpine":
			return "sudo apk add postgresql"
		case "arch":
			return "sudo pacman -S --noconfirm postgresql"
		}
	}
	return fmt.Sprintf("the package manager of this system, for the PostgreSQL server, version %d or newer", MinMajor)
}

// InstallPackage installs the PostgreSQL server from the packages of a Debian
// system. It needs root. The package's habit of making and starting a cluster
// of its own is switched off for this one installation, so that nothing runs
// afterwards which did not run before. What the package manager prints goes
// to out.
func InstallPackage(ctx context.Context, out io.Writer) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("installing PostgreSQL needs root; run: %s", InstallHint())
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this system does not use Debian packages; run: %s", InstallHint())
	}
	restore, err := forbidMainCluster(dropInDir)
	if err != nil {
		return err
	}
	defer restore()
	// A failed update is not the end: the lists may be good enough already.
	updateErr := aptGet(ctx, out, "update", "-q")
	if err := aptGet(ctx, out, "install", "-q", "-y", "--no-install-recommends", "postgresql"); err != nil {
		return errors.Join(fmt.Errorf("install the package postgresql: %w", err), updateErr)
	}
	return nil
}

func aptGet(ctx context.Context, out io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("apt-get %s: %w", args[0], err)
	}
	return nil
}

// forbidMainCluster writes the drop-in that keeps the package from making a
// cluster; the function it returns removes what was written.
func forbidMainCluster(dir string) (restore func(), err error) {
	_, statErr := os.Stat(dir)
	made := errors.Is(statErr, fs.ErrNotExist)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("keep the package from making a cluster: %w", err)
	}
	path := filepath.Join(dir, dropInName)
	text := "# Written while headgate installs PostgreSQL; removed afterwards.\ncreate_main_cluster = false\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return nil, fmt.Errorf("keep the package from making a cluster: %w", err)
	}
	return func() {
		_ = os.Remove(path)
		if made {
			_ = os.Remove(dir) // stays if the package put something there
		}
	}, nil
}

// osRelease gives the names of this system, its own first and then those it
// is like.
func osRelease() []string {
	f, err := os.Open("/etc/os-release")
	if err != nil {
		return nil
	}
	defer f.Close()
	return parseOSRelease(f)
}

func parseOSRelease(r io.Reader) []string {
	var id, like []string
	for s := bufio.NewScanner(r); s.Scan(); {
		key, value, _ := strings.Cut(s.Text(), "=")
		value = strings.Trim(value, `"'`)
		switch key {
		case "ID":
			id = []string{value}
		case "ID_LIKE":
			like = strings.Fields(value)
		}
	}
	return append(id, like...)
}
