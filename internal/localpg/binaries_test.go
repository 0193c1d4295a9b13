package localpg

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fakeInstall makes a folder whose postgres prints that version.
func fakeInstall(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\necho 'postgres (PostgreSQL) %s'\n", version)
	for _, name := range []string{"postgres", "initdb"} {
		writeProgram(t, filepath.Join(dir, name), []byte(script))
	}
	return dir
}

func TestInstallationIsChosenByTheDataElseTheNewest(t *testing.T) {
	t.Parallel()
	dirs := []string{
		fakeInstall(t, "15.18 (Debian 15.18-0+deb12u1)"), fakeInstall(t, "13.4"), fakeInstall(t, "18beta1"),
		fakeInstall(t, "not a version"), filepath.Join(t.TempDir(), "missing"), t.TempDir(),
	}
	for data, want := range map[string]string{"": "18beta1", "15\n": "15.18", "18": "18beta1"} {
		dir := t.TempDir()
		if data != "" {
			if err := os.WriteFile(filepath.Join(dir, "PG_VERSION"), []byte(data), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got, err := chooseBinaries(installed(dirs), dir)
		if err != nil || got.Version != want {
			t.Errorf("data %q: %+v, %v, want %s", data, got, err, want)
		}
	}
	_, err := chooseBinaries(installed(dirs[1:2]), "")
	missing, ok := errors.AsType[*NotFoundError](err)
	if !ok || !strings.Contains(missing.Error(), InstallHint()) || !strings.Contains(missing.Error(), "13.4") {
		t.Errorf("only an old one: %v", err)
	}
}

func TestFindBinariesFindsThisMachinesServer(t *testing.T) {
	t.Parallel()
	b, err := FindBinaries(filepath.Join(t.TempDir(), "missing"))
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(b.Postgres(), "-V").Output()
	if err != nil || !strings.Contains(string(out), b.Version) || b.Major < MinMajor {
		t.Errorf("%+v: %s, %v", b, out, err)
	}
}

func TestParseVersion(t *testing.T) {
	t.Parallel()
	for out, want := range map[string]int{
		"postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n": 15,
		"postgres (PostgreSQL) 18beta1":                          18,
		"postgres (PostgreSQL) 9.6.24":                           9,
		"postgres (PostgreSQL) ":                                 0,
		"initdb 3":                                               0,
		"":                                                       0,
	} {
		if _, got := parseVersion(out); got != want {
			t.Errorf("%q: major %d, want %d", out, got, want)
		}
	}
}

func TestInstallHintFitsTheSystem(t *testing.T) {
	t.Parallel()
	for release, want := range map[string]string{
		"ID=debian\n": "apt-get install",
		"NAME=x\nID=linuxmint\nID_LIKE=\"ubuntu debian\"\n": "apt-get install",
		"ID=\"rocky\"\nID_LIKE=\"rhel centos\"\n":           "dnf install",
		"ID=alpine\n": "apk add",
		"ID=plan9\n":  "package manager",
	} {
		if got := installHintFor(parseOSRelease(strings.NewReader(release))); !strings.Contains(got, want) {
			t.Errorf("%q: %q", release, got)
		}
	}
}

func TestPackageIsKeptFromMakingACluster(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "createcluster.d")
	restore, err := forbidMainCluster(dir)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, dropInName)
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	// The tool that the package's installation script asks, where it exists.
	if tool, err := exec.LookPath("pg_conftool"); err == nil {
		out, err := exec.Command(tool, file, "show", "-bs", "create_main_cluster").Output()
		if err != nil || strings.TrimSpace(string(out)) != "off" {
			t.Errorf("the package's tool reads %q, %v", out, err)
		}
	}
	restore()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the folder that we made is still there: %v", err)
	}
}

func TestServerLogIsPassedOnByLine(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	l := newServerLog(logger)
	for _, piece := range []string{
		"[1] LOG:  one\n[2] ERR", "OR:  secret data\n", strings.Repeat("x", 3*maxLine), "\n",
		"[1] FATAL:  the reason\n[1] PANIC:  worse\nno end",
	} {
		if n, err := l.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("Write: %d, %v", n, err)
		}
	}
	if diff := cmp.Diff("[1] LOG:  one; [1] FATAL:  the reason; [1] PANIC:  worse", l.tail()); diff != "" {
		t.Error(diff)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 5 || !strings.Contains(lines[4], "level=ERROR") || len(lines[2]) > maxLine+200 {
		t.Errorf("%d lines: %.300s", len(lines), out.String())
	}
	for i := range 3 * tailLines {
		fmt.Fprintf(l, "[1] LOG:  %d\n", i)
	}
	if n := strings.Count(l.tail(), ";"); n != tailLines-1 {
		t.Errorf("%d separators in the tail", n)
	}
}
