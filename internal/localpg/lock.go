package localpg

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// LockedError says that another process, or another Cluster of this one, has
// started the same directory and still runs.
type LockedError struct {
	Dir string
	PID int // 0 if not known
}

// Error names the process that has it.
func (e *LockedError) Error() string {
	who := "another process"
	if e.PID > 0 {
		who = fmt.Sprintf("process %d", e.PID)
	}
	return fmt.Sprintf("the PostgreSQL cluster in %s is in use by %s; stop that first or use another directory", e.Dir, who)
}

// takeLock takes the lock of a place without waiting. The kernel gives it back
// when this process ends in whatever way; it is not inherited by the server.
func (p place) takeLock() (*os.File, error) {
	f, err := os.OpenFile(p.lock(), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of the PostgreSQL cluster: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock the PostgreSQL cluster: %w", err)
		}
		text, _ := io.ReadAll(io.LimitReader(f, 32)) // only to name the holder
		pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		return nil, &LockedError{Dir: p.dir, PID: pid}
	}
	// The server's user may be the one who starts it tomorrow, without root.
	if p.acc.drop {
		err = f.Chown(p.acc.uid, p.acc.gid)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		releaseLock(f)
		return nil, fmt.Errorf("write the lock of the PostgreSQL cluster: %w", err)
	}
	return f, nil
}

// releaseLock gives the lock back. It is unlocked by name, not by closing
// alone: a child that is being started at this moment holds a copy of the file
// until it runs its program, and with it the lock.
func releaseLock(f *os.File) {
	_ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) // closing does it too, a moment later
	f.Close()
}
