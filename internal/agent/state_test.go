package agent

import (
	"syscall"
	"testing"
	"time"
)

// A program that is being started holds copies of all open files until it
// runs; here such a copy is made by hand.
func TestTheDataDirectoryIsFreeThoughAProgramHoldsACopyOfTheLock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, err := openState(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	copied, err := syscall.Dup(int(first.lock.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(copied)
	if second, err := openState(dir, time.Now()); err == nil {
		second.close()
		t.Fatal("two agents hold one data directory")
	}
	if err := first.close(); err != nil {
		t.Fatal(err)
	}
	second, err := openState(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := second.close(); err != nil {
		t.Fatal(err)
	}
}
