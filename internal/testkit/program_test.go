package testkit_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"headgate/internal/testkit"
)

// A fetched program is found from any folder below, and runs with the
// libraries that came with it.
func TestFindProgramThatWasFetched(t *testing.T) {
	root := t.TempDir()
	bin, lib, deep := filepath.Join(root, ".tools/deb/usr/sbin"), filepath.Join(root, ".tools/deb/usr/lib/x86_64-linux-gnu"), filepath.Join(root, "a/b")
	for _, dir := range []string{bin, lib, deep} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const name = "headgate-test-program"
	if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\necho \"$LD_LIBRARY_PATH|$1\"\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Chdir(deep)
	out, err := testkit.FindProgram(t, name, "some-package").Command(t.Context(), "word").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.TrimSpace(string(out)), lib+"|word"; got != want {
		t.Errorf("the program saw %q, want %q", got, want)
	}
}

// What is missing is a skip on somebody's machine and a failure where
// everything has to be there.
func TestFindProgramThatIsMissing(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, c := range []struct {
		complete        string
		skipped, failed bool
	}{{"", true, false}, {"1", false, true}} {
		t.Setenv("HEADGATE_TEST_COMPLETE", c.complete)
		var inner recordingTB
		func() {
			defer func() { _ = recover() }()
			testkit.FindProgram(&inner, "headgate-no-such-program", "some-package")
		}()
		if inner.skipped != c.skipped || inner.failed != c.failed || !strings.Contains(inner.text, "tools/fetch-deb.sh some-package") {
			t.Errorf("with %q: skipped %v, failed %v, said %q", c.complete, inner.skipped, inner.failed, inner.text)
		}
	}
}

// recordingTB remembers how a test was ended.
type recordingTB struct {
	testing.TB
	skipped, failed bool
	text            string
}

func (r *recordingTB) Helper() {}

func (r *recordingTB) Skip(args ...any) {
	r.skipped, r.text = true, args[0].(string)
	panic(r)
}

func (r *recordingTB) Fatalf(_ string, args ...any) {
	r.failed, r.text = true, args[0].(string)
	panic(r)
}
