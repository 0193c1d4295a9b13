package program

import (
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestAProcessThatCannotBeReadIsNotTakenForAnother: number 0 would mean our own
// group for a signal, and that of the kernel in what can be read.
func TestAProcessThatCannotBeReadIsNotTakenForAnother(t *testing.T) {
	t.Parallel()
	const nobody = 1 << 30 // above all numbers that a process can have
	tree := &tree{k: &Keeper{}, mark: MarkName + "=of nobody"}
	if err := tree.started(nobody, ""); err == nil {
		t.Fatal("a process that does not exist could be read")
	}
	if tree.main.PID != nobody {
		t.Fatalf("its number became %d", tree.main.PID)
	}
	if list := tree.members(true); len(list) != 0 {
		t.Errorf("%v are said to be of its tree", named(list))
	}
}

// TestAUmaskWhereNoThreadMayHaveItsOwn, as in containers that are not allowed
// unshare: the program has its umask all the same, and we have ours again.
func TestAUmaskWhereNoThreadMayHaveItsOwn(t *testing.T) {
	denied := make(chan error)
	masks := make(chan [2]int, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its filter
		err := forbid(unix.SYS_UNSHARE)
		if denied <- err; err != nil {
			return
		}
		before := unix.Umask(0o027)
		unix.Umask(before)
		restore := (&Keeper{}).withUmask(0o077)
		during := unix.Umask(0o077)
		restore()
		after := unix.Umask(before)
		if after != before {
			during = -1
		}
		masks <- [2]int{during, int(uintOf(unix.Unshare(unix.CLONE_FS)))}
	}()
	if err := <-denied; err != nil {
		t.Skipf("this machine cannot forbid a system call: %v", err)
	}
	if got := <-masks; got != [2]int{0o077, int(unix.EPERM)} {
		t.Errorf("umask %#o, unshare answers %d", got[0], got[1])
	}
}

func uintOf(err error) syscall.Errno {
	n, _ := err.(syscall.Errno) //nolint:errorlint // of a system call
	return n
}

// forbid lets a system call of this thread, and of what it starts, fail.
func forbid(call uint32) error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the number of the call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jt: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}
