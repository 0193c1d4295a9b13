package localpg

import (
	"path/filepath"
	"syscall"
	"testing"
)

// A child that is being started holds copies of all open files until it runs
// its own program; here such a copy is made by hand.
func TestAReleasedLockIsFreeThoughAChildHoldsACopy(t *testing.T) {
	t.Parallel()
	p := place{dir: filepath.Join(t.TempDir(), "pg")}
	lock, err := p.takeLock()
	if err != nil {
		t.Fatal(err)
	}
	copied, err := syscall.Dup(int(lock.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(copied)
	if _, err := p.takeLock(); !isLocked(err) {
		t.Fatalf("second: %v", err)
	}
	releaseLock(lock)
	again, err := p.takeLock()
	if err != nil {
		t.Fatal(err)
	}
	releaseLock(again)
}
