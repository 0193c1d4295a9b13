package ledger

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
	"uuid"

	"headgate/internal/fault"
)

// Limits of a ledger; zero values mean the defaults.
type Limits struct {
	Live      int   // entries not forgotten; beyond it new tasks are refused
	LiveBytes int64 // of their results
	Past      int   // forgotten entries kept
	// Slack is how far the file may grow beyond what it held after the last
	// compaction before it is rewritten.
	Slack int64
}

// The defaults of Limits.
const (
	// DefaultLive is far above what a controller leaves unforgotten (one task
	// in flight, a few results on their way), and a Welcome can still carry it.
	DefaultLive = 1000
	// DefaultLiveBytes bounds the memory for results not yet taken.
	DefaultLiveBytes = 64 << 20
	// DefaultPast is explained in the package comment.
	DefaultPast = 100_000
	// DefaultSlack makes a rewrite (some 50 ms for a full history) rare: once
	// in about 100,000 tasks.
	DefaultSlack = 16 << 20
)

func (l Limits) withDefaults() Limits {
	if l.Live == 0 {
		l.Live = DefaultLive
	}
	if l.LiveBytes == 0 {
		l.LiveBytes = DefaultLiveBytes
	}
	if l.Past == 0 {
		l.Past = DefaultPast
	}
	if l.Slack == 0 {
		l.Slack = DefaultSlack
	}
	return l
}

const fileMode = 0o600

// Ledger is an open ledger. It is not safe for concurrent use: the agent's
// slot serializes all that happens to tasks, and the ledger with it.
type Ledger struct {
	path   string
	limits Limits
	id     uuid.UUID
	file   *os.File
	size   int64 // up to here the file is good
	base   int64 // size after the last compaction
	broken error // the file can no longer be trusted; nothing is accepted
	index  *index
	buf    []byte
	cut    int64
}

// Open reads the ledger and makes one when the file does not exist. That only
// one process has it open is for the caller to ensure.
func Open(path string, limits Limits) (*Ledger, error) {
	l := &Ledger{path: path, limits: limits.withDefaults()}
	l.index = newIndex(l.limits.Past)
	// What a crash during compaction left behind is worth nothing.
	if err := os.Remove(path + ".new"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fault.Wrap(err, fault.Internal, "ledger_unusable", "The left-over file "+path+".new cannot be removed.")
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return l, l.create()
	}
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "ledger_unusable", "The ledger "+path+" cannot be read.")
	}
	good, id, err := load(data, l.index)
	if err != nil {
		return nil, damaged(path, err)
	}
	l.id, l.size, l.base, l.cut = id, good, good, int64(len(data))-good
	if l.file, err = os.OpenFile(path, os.O_RDWR, fileMode); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "ledger_unusable", "The ledger "+path+" cannot be opened for writing.")
	}
	if l.cut > 0 {
		if err := errors.Join(l.file.Truncate(good), l.file.Sync()); err != nil {
			return nil, errors.Join(fault.Wrap(err, fault.Internal, "ledger_unusable", "The torn end of the ledger "+path+" cannot be cut off."), l.file.Close())
		}
	}
	return l, nil
}

func damaged(path string, err error) error {
	return fault.Wrap(err, fault.Conflict, "ledger_damaged",
		"The ledger "+path+" is damaged, so this agent can no longer know which tasks it has run.").
		WithHint("Restore the file from a backup of this very machine, or move it away: the agent then starts with a new ledger, " +
			"and the controller keeps it in quarantine until an operator has looked at its last tasks.")
}

// load replays data into the index and says how much of it is good.
func load(data []byte, x *index) (good int64, id uuid.UUID, err error) {
	if len(data) < headerSize {
		// The header is on disk before the file gets its name, so this is not
		// the trace of a crash.
		return 0, id, errors.New("the file is shorter than its header")
	}
	if id, err = decodeHeader(data); err != nil {
		return 0, id, err
	}
	rest := bytes.TrimRight(data[headerSize:], "\x00")
	end := headerSize + len(rest)
	for len(rest) > 0 {
		at := end - len(rest)
		payload, next, err := nextRecord(rest)
		if errors.Is(err, errTorn) {
			return int64(at), id, nil
		}
		if err == nil {
			err = x.apply(payload)
		}
		if err != nil {
			return 0, id, fmt.Errorf("at byte %d: %w", at, err)
		}
		rest = next
	}
	return int64(end), id, nil
}

func (l *Ledger) create() error {
	l.id = uuid.NewV4()
	if err := l.rewrite(); err != nil {
		return fault.Wrap(err, fault.Internal, "ledger_unusable", "The ledger "+l.path+" cannot be made.")
	}
	return nil
}

// Close releases the file.
func (l *Ledger) Close() error { return l.file.Close() }

// ID names the ledger; a ledger made anew has another one, by which the
// controller sees that the agent has lost its memory.
func (l *Ledger) ID() uuid.UUID { return l.id }

// CutBytes says how many bytes of a torn end Open has cut off.
func (l *Ledger) CutBytes() int64 { return l.cut }

// Live gives the entries not yet forgotten, in the order of acceptance.
func (l *Ledger) Live() []*Entry { return l.index.liveEntries() }

// Len says how many entries are not yet forgotten.
func (l *Ledger) Len() int { return len(l.index.live) }

// Lookup finds the latest attempt of a task, nil when it was never seen or is
// long past.
func (l *Ledger) Lookup(id int64) *Entry { return l.index.lookup(id) }

// Full says whether no further task can be accepted before some are forgotten.
func (l *Ledger) Full() bool {
	return len(l.index.live) >= l.limits.Live || l.index.held >= l.limits.LiveBytes
}

// Accept records that a task is about to start and that the results of forget
// are stored. The caller fills in the first block of the entry's fields. For
// delivery once the record is on disk when Accept returns. On an error nothing
// has been recorded and the task must not start.
func (l *Ledger) Accept(e *Entry, now time.Time, forget []int64) error {
	e.AcceptedOrder, e.AcceptedAt = l.index.order+1, now.UnixNano()
	l.buf = l.buf[:0]
	known := l.known(forget)
	if len(known) > 0 {
		l.buf = encodeForget(l.buf, known)
	}
	l.buf = encodeAccept(l.buf, e)
	if err := l.append(e.Once); err != nil {
		return err
	}
	l.retire(known)
	l.index.accept(e)
	return nil
}

// Finish records the end of a task with its result. For delivery once the
// record is on disk when Finish returns. On an error the entry counts as done
// in memory all the same: the result is known, only a restart would lose it,
// and the task would then be reported as interrupted, which is never wrong.
func (l *Ledger) Finish(e *Entry, end Ending) error {
	e.DoneOrder = l.index.order + 1
	e.StartedAt, e.EndedAt = end.StartedAt.UnixNano(), end.EndedAt.UnixNano()
	e.Outcome, e.Reason, e.final = end.Outcome, end.Reason, end.Final
	l.buf = encodeDone(l.buf[:0], e)
	err := l.append(e.Once)
	l.index.done(e)
	return errors.Join(err, l.compactIfGrown())
}

// Ending is how a task ended.
type Ending struct {
	StartedAt, EndedAt time.Time
	Outcome, Reason    string
	Final              []byte // the result; kept until forgotten
}

// Forget releases entries whose results the controller has stored. Unknown ids
// are ignored.
// An entry that never ended, because the agent was restarted, is released too.
func (l *Ledger) Forget(ids []int64) error {
	known := l.known(ids)
	if len(known) == 0 {
		return nil
	}
	l.buf = encodeForget(l.buf[:0], known)
	if err := l.append(false); err != nil {
		return err // they stay live and will be forgotten another time
	}
	l.retire(known)
	return l.compactIfGrown()
}

func (l *Ledger) known(ids []int64) []int64 {
	var known []int64
	for _, id := range ids {
		if l.index.live[id] != nil && !slices.Contains(known, id) {
			known = append(known, id)
		}
	}
	return known
}

func (l *Ledger) retire(ids []int64) {
	for _, id := range ids {
		l.index.retire(l.index.live[id])
	}
}

// append writes the buffer at the end of the file. After an error the file is
// as it was before, or the ledger is broken.
func (l *Ledger) append(durable bool) error {
	if l.broken != nil {
		return l.broken
	}
	if _, err := l.file.WriteAt(l.buf, l.size); err != nil {
		if terr := l.file.Truncate(l.size); terr != nil {
			l.broken = errors.Join(err, terr)
		}
		return fmt.Errorf("write to the ledger: %w", err)
	}
	if durable {
		if err := l.sync(); err != nil {
			// After a failed sync nobody knows what is on disk, and a second
			// sync would wrongly succeed.
			l.broken = fmt.Errorf("sync the ledger: %w", err)
			return l.broken
		}
	}
	l.size += int64(len(l.buf))
	if cap(l.buf) > maxPayload/4 {
		l.buf = nil // a large result passed; do not keep its buffer
	}
	return nil
}

// sync makes the content and the length of the file durable.
func (l *Ledger) sync() error {
	for {
		err := syscall.Fdatasync(int(l.file.Fd()))
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

func (l *Ledger) compactIfGrown() error {
	if l.size < 2*l.base+l.limits.Slack || l.broken != nil {
		return nil
	}
	if err := l.rewrite(); err != nil {
		l.base = l.size // try again only after it has grown once more
		return fmt.Errorf("compact the ledger: %w", err)
	}
	return nil
}

// rewrite stores the content of the index in a new file and puts it in place
// of the old one, so that a crash leaves either of them whole.
func (l *Ledger) rewrite() (err error) {
	tmp := l.path + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, fileMode)
	if err != nil {
		return err
	}
	size, err := l.writeAll(f)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(tmp, l.path)
	}
	if err != nil {
		return errors.Join(err, f.Close(), os.Remove(tmp))
	}
	// From here on the new file is the ledger, whatever else fails.
	if l.file != nil {
		err = l.file.Close()
	}
	l.file, l.size, l.base = f, size, size
	if err = errors.Join(err, syncDir(filepath.Dir(l.path))); err != nil {
		l.broken = err
	}
	return err
}

func (l *Ledger) writeAll(f io.Writer) (int64, error) {
	w := bufio.NewWriterSize(f, 256<<10)
	var size int64
	put := func(b []byte) {
		n, _ := w.Write(b) // the error stays in w until Flush
		size += int64(n)
	}
	put(encodeHeader(l.id, time.Now().UnixNano()))
	put(encodeCounter(nil, l.index.order))
	var b []byte
	for _, e := range l.index.past[l.index.head:] {
		b = encodePast(b[:0], e)
		put(b)
	}
	for _, e := range l.index.liveEntries() {
		b = encodeAccept(b[:0], e)
		if e.Done {
			b = encodeDone(b, e)
		}
		put(b)
	}
	return size, w.Flush()
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Read gives the id and all entries of a ledger in the order of acceptance. It
// may be used beside the agent that has the ledger open.
func Read(path string) (uuid.UUID, []*Entry, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return uuid.UUID{}, nil, fault.Wrap(err, fault.NotFound, "ledger_unusable", "The ledger "+path+" cannot be read.")
	}
	x := newIndex(DefaultPast)
	_, id, err := load(data, x)
	if err != nil {
		return id, nil, damaged(path, err)
	}
	return id, x.entries(), nil
}
