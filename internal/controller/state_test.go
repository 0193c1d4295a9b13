package controller

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestOneControllerADirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, err := openState(dir, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openState(dir, nil, time.Now()); err == nil || !strings.Contains(err.Error(), "another controller uses") {
		t.Fatalf("second: %v", err)
	}
	if err := first.close(); err != nil {
		t.Fatal(err)
	}
	second, err := openState(dir, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	defer second.close()
	if second.id != first.id {
		t.Errorf("controller id changed from %s to %s", first.id, second.id)
	}
	if second.owner == first.owner || len(second.former) != 1 || second.former[0] != first.owner {
		t.Errorf("former owners %v, want the first start's %s", second.former, first.owner)
	}
}

// A child that is being started holds copies of all open files until it runs
// its own program; here such a copy is made by hand.
func TestTheDirectoryIsFreeThoughAChildHoldsACopyOfTheLock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, err := openState(dir, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	copied, err := syscall.Dup(int(first.lock.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(copied)
	if err := first.close(); err != nil {
		t.Fatal(err)
	}
	second, err := openState(dir, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := second.close(); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyTheLastOwnersAreKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for range keptOwners + 5 {
		s, err := openState(dir, nil, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if len(s.former) > keptOwners {
			t.Fatalf("%d former owners", len(s.former))
		}
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
	}
}
