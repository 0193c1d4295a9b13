package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"headgate/internal/localpg"
	"headgate/internal/testkit"
	"headgate/migrations"
	"headgate/tasks"
)

// smallDisk gives a folder with room for a server and little more. Only root
// can make one.
func smallDisk(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("headgate-test", dir, "tmpfs", 0, "size=400m,mode=0777"); err != nil {
		t.Skipf("a small disk cannot be made here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("take the small disk away: %v", err)
		}
	})
}

// balloon takes what room there is.
func balloon(t *testing.T, file string) {
	t.Helper()
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 64<<10)
	for _, size := range []int{len(block), 4 << 10} {
		for err = nil; err == nil; {
			_, err = f.Write(block[:size])
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// TestAFullDiskRefusesTurnsUntilThereIsRoom: what was acknowledged is there, a
// turn that found no room has written nothing and is not taken for bad data, and
// the same turn goes through when there is room again.
func TestAFullDiskRefusesTurnsUntilThereIsRoom(t *testing.T) {
	t.Parallel()
	cfg := testkit.ClusterConfig(t)
	disk := filepath.Join(filepath.Dir(cfg.Dir), "small")
	smallDisk(t, disk)
	cfg.Dir = filepath.Join(disk, "pg")
	cluster, err := localpg.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Stop(context.Background()) })
	d := openDSN(t, cluster.DSN())
	if err := migrations.Up(t.Context(), d.SQL()); err != nil {
		t.Fatal(err)
	}
	r := rigOn(t, d, 1)
	next := func() *tasks.Turn {
		in := r.insert(r.agents[0], false)
		in.Args = `{"text":"` + strings.Repeat("0123456789", 150) + `"}`
		return &tasks.Turn{Inserts: []tasks.Insert{in}}
	}
	r.turn(next())
	balloon(t, filepath.Join(disk, "balloon"))
	acked := 1
	turn := next()
	for ; acked < 5000; acked++ {
		if _, err = r.tryTurn(turn); err != nil {
			break
		}
		turn = next()
	}
	if err == nil {
		t.Fatal("the disk is never full")
	}
	if _, ok := errors.AsType[*tasks.PoisonError](err); ok {
		t.Errorf("a full disk was taken for bad data: %v", err)
	}
	if n := r.count(`SELECT count(*) FROM agent_task`); n != acked {
		t.Errorf("%d tasks are there, %d were acknowledged", n, acked)
	}
	if err := os.Remove(filepath.Join(disk, "balloon")); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; {
		if _, err = r.tryTurn(turn); err == nil {
			break
		}
		if errors.Is(err, tasks.ErrFenced) { // it took longer than a lease
			r.leases = r.acquire(r.me)
		}
		if time.Now().After(end) {
			t.Fatalf("with room again: %v", err)
		}
	}
	if n := r.count(`SELECT count(*) FROM agent_task`); n != acked+1 {
		t.Errorf("%d tasks are there, want %d", n, acked+1)
	}
	checkInvariant(t, d)
	t.Logf("%d tasks until the disk was full", acked)
}
