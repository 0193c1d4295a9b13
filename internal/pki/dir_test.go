package pki_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/pki"
)

func TestDirKeepsFilesPrivateAndWhole(t *testing.T) {
	t.Parallel()
	dir := must[*pki.Dir](t)(pki.OpenDir(filepath.Join(t.TempDir(), "a", "state")))
	defer dir.Close()
	name := filepath.Join(dir.Path(), "keys", "x.key")
	if _, err := dir.Read("keys/x.key"); !errors.Is(err, fs.ErrNotExist) || fault.KindOf(err) != fault.NotFound {
		t.Fatalf("got %v", err)
	}
	for _, content := range []string{"first and longer", "second"} {
		// What a crash may have left behind must not be in the way.
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(filepath.Join(filepath.Dir(name), ".x.key.tmp"), []byte("stale stale stale stale"), 0o644)); err != nil {
			t.Fatal(err)
		}
		if err := dir.Write("keys/x.key", []byte(content)); err != nil {
			t.Fatal(err)
		}
		if got, err := dir.ReadKey("keys/x.key"); err != nil || string(got) != content {
			t.Fatalf("%q, %v", got, err)
		}
	}
	for path, want := range map[string]fs.FileMode{name: 0o600, filepath.Dir(name): 0o700, dir.Path(): 0o700} {
		if info := must[fs.FileInfo](t)(os.Stat(path)); info.Mode().Perm() != want {
			t.Errorf("%s has mode %04o", path, info.Mode().Perm())
		}
	}
	if entries := must[[]os.DirEntry](t)(os.ReadDir(filepath.Dir(name))); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
	if err := errors.Join(dir.Remove("keys/x.key"), dir.Remove("keys/x.key")); err != nil {
		t.Error(err)
	}
}

func TestDirRefusesExposedKeys(t *testing.T) {
	t.Parallel()
	dir := must[*pki.Dir](t)(pki.OpenDir(t.TempDir()))
	defer dir.Close()
	if err := dir.Write("k", []byte("x")); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []fs.FileMode{0o640, 0o604, 0o620, 0o602, 0o610} {
		if err := os.Chmod(filepath.Join(dir.Path(), "k"), mode); err != nil {
			t.Fatal(err)
		}
		_, err := dir.ReadKey("k")
		if f, ok := errors.AsType[*fault.Error](err); !ok || f.Code != "key_file_exposed" || !strings.Contains(f.Hint, "chmod 600") {
			t.Errorf("%04o: %v", mode, err)
		}
		if _, err := dir.Read("k"); err != nil {
			t.Errorf("%04o: %v", mode, err)
		}
	}
}

func TestDirStaysInsideItself(t *testing.T) {
	t.Parallel()
	parent := t.TempDir()
	dir := must[*pki.Dir](t)(pki.OpenDir(filepath.Join(parent, "state")))
	defer dir.Close()
	if err := os.WriteFile(filepath.Join(parent, "secret"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		os.Symlink("../secret", filepath.Join(dir.Path(), "link")),
		syscall.Mkfifo(filepath.Join(dir.Path(), "pipe"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"../secret", "link", "/etc/passwd", "pipe", "."} {
		if _, err := dir.Read(name); err == nil {
			t.Errorf("%s was read", name)
		}
	}
	if err := dir.Write("../new", nil); fault.CodeOf(err) != "state_write_failed" {
		t.Errorf("got %v", err)
	}
	if err := dir.Write("link", []byte("y")); err != nil { // replaces the link, does not follow it
		t.Error(err)
	}
	if got := must[[]byte](t)(os.ReadFile(filepath.Join(parent, "secret"))); string(got) != "x" {
		t.Errorf("the link was followed: %q", got)
	}
}

func TestIdentityIsOneFileAndNeverHalf(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "fleet-a")
	dir := must[*pki.Dir](t)(pki.OpenDir(t.TempDir()))
	defer dir.Close()
	if _, err := pki.LoadIdentity(dir, "identity.pem"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
	if err := f.controller.Save(dir, "identity.pem"); err != nil {
		t.Fatal(err)
	}
	again := must[*pki.Identity](t)(pki.LoadIdentity(dir, "identity.pem"))
	d := f.dial()
	d.Identity = again
	if _, _, serverErr, err := shake(t, pki.AgentServer(f.agent, f.roots), pki.DialAgent(d)); err != nil || serverErr != nil {
		t.Fatal(err, serverErr)
	}
	if err := again.Set(newKey(t), f.controller.Leaf()); fault.CodeOf(err) != "certificate_key_mismatch" || again.SPKI() != f.controller.SPKI() {
		t.Errorf("got %v", err)
	}
	unpaired := must[*pki.Identity](t)(pki.NewAgentIdentity(uuid.New(), time.Now()))
	if err := unpaired.Save(dir, "agent.pem"); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"empty": nil, "certificates": f.roots.PEM(), "text": []byte("x")} {
		if err := dir.Write("bad.pem", content); err != nil {
			t.Fatal(err)
		}
		if _, err := pki.LoadIdentity(dir, "bad.pem"); fault.CodeOf(err) != "identity_unreadable" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := pki.ParseCertificates(must[[]byte](t)(dir.ReadKey("agent.pem"))); fault.CodeOf(err) != "certificate_unreadable" {
		t.Errorf("a key among certificates: %v", err)
	}
	if certs := must[int](t)(count(pki.ParseCertificates(f.roots.PEM()))); certs != 1 {
		t.Errorf("%d certificates", certs)
	}
}

func count[T any](list []T, err error) (int, error) { return len(list), err }
