package ledger_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"headgate/internal/agent/ledger"
	"headgate/internal/fault"
)

// crashEnv makes the test binary a child that uses a ledger and kills itself
// at the point that the variable names.
const (
	crashEnv = "HEADGATE_LEDGER_TEST_CRASH"
	pathEnv  = "HEADGATE_LEDGER_TEST_PATH"
)

func TestMain(m *testing.M) {
	if point := os.Getenv(crashEnv); point != "" {
		crash(point, os.Getenv(pathEnv))
	}
	os.Exit(m.Run())
}

// crash runs one task of delivery once and kills its own process where told.
func crash(point, path string) {
	die := func(here string) {
		if point == here {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	l, err := ledger.Open(path, ledger.Limits{})
	must(err)
	die("before_accept")
	e := entry(7, true)
	must(l.Accept(e, time.Now(), nil))
	die("after_accept")
	must(l.Finish(e, ending("result of 7")))
	die("after_done")
	must(l.Forget([]int64{7}))
	die("after_forget")
	os.Exit(3)
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func entry(id int64, once bool) *ledger.Entry {
	return &ledger.Entry{TaskID: id, Attempt: 1, Epoch: 4, Kind: "core.echo", Once: once, Digest: [8]byte{byte(id)}}
}

func ending(result string) ledger.Ending {
	now := time.Now()
	return ledger.Ending{StartedAt: now, EndedAt: now, Outcome: "succeeded", Final: []byte(result)}
}

func open(t *testing.T, path string, limits ledger.Limits) *ledger.Ledger {
	t.Helper()
	l, err := ledger.Open(path, limits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// describe gives what a ledger holds in a form that can be compared.
func describe(l *ledger.Ledger) []string {
	var out []string
	for _, e := range l.Live() {
		out = append(out, fmt.Sprintf("%d/%d %s %s %q", e.TaskID, e.Attempt, e.State(), e.Outcome, e.Final()))
	}
	return out
}

func TestALedgerRemembersAcrossRestarts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	l := open(t, path, ledger.Limits{})
	id := l.ID()
	a, b, c := entry(1, true), entry(2, false), entry(3, true)
	must(l.Accept(a, time.Now(), nil))
	must(l.Finish(a, ending("one")))
	must(l.Accept(b, time.Now(), []int64{1, 99}))
	must(l.Finish(b, ending("two")))
	must(l.Accept(c, time.Now(), nil))
	must(l.Close())

	l = open(t, path, ledger.Limits{})
	if l.ID() != id {
		t.Errorf("the ledger's id changed from %s to %s", id, l.ID())
	}
	want := []string{`2/1 done succeeded "two"`, `3/1 accepted  ""`}
	if diff := cmp.Diff(want, describe(l)); diff != "" {
		t.Errorf("live entries (-want +got):\n%s", diff)
	}
	if e := l.Lookup(1); e == nil || e.State() != ledger.Forgotten || !e.Once || e.Final() != nil {
		t.Errorf("entry 1 is %+v, want a forgotten one without its result", e)
	}
	if l.Lookup(99) != nil {
		t.Error("an id that was never seen is known")
	}
	if e := l.Lookup(3); e.AcceptedOrder != 5 {
		t.Errorf("task 3 has order %d, want 5", e.AcceptedOrder)
	}
}

func TestASecondAttemptKeepsTheFirstAsInterrupted(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	l := open(t, path, ledger.Limits{})
	must(l.Accept(entry(1, false), time.Now(), nil))
	second := entry(1, false)
	second.Attempt = 2
	must(l.Accept(second, time.Now(), nil))
	must(l.Finish(second, ending("x")))
	_, all, err := ledger.Read(path)
	must(err)
	var got []string
	for _, e := range all {
		got = append(got, fmt.Sprintf("%d %s", e.Attempt, e.State()))
	}
	if diff := cmp.Diff([]string{"1 interrupted", "2 done"}, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// example makes a ledger file with every sort of record but those of
// compaction, and says where its records end.
func example(t *testing.T, path string) (data []byte, ends []int) {
	t.Helper()
	l := open(t, path, ledger.Limits{})
	mark := func() {
		info, err := os.Stat(path)
		must(err)
		ends = append(ends, int(info.Size()))
	}
	mark()
	for id := int64(1); id <= 3; id++ {
		e := entry(id, id == 2)
		must(l.Accept(e, time.Now(), nil))
		mark()
		must(l.Finish(e, ending(strings.Repeat("r", int(id)*10)+"\x00\x00")))
		mark()
	}
	must(l.Forget([]int64{1}))
	mark()
	must(l.Accept(entry(4, true), time.Now(), nil))
	mark()
	must(l.Close())
	data, err := os.ReadFile(path)
	must(err)
	return data, ends
}

func TestATornEndIsCutAtEveryOffset(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	data, ends := example(t, filepath.Join(dir, "whole"))
	for n := ends[0]; n <= len(data); n++ {
		good := ends[0]
		for _, end := range ends {
			if end <= n {
				good = end
			}
		}
		for _, zeros := range []int{0, 1, 600} {
			path := filepath.Join(dir, "torn")
			must(os.WriteFile(path, append(bytes.Clone(data[:n]), make([]byte, zeros)...), 0o600))
			l, err := ledger.Open(path, ledger.Limits{})
			if err != nil {
				t.Fatalf("cut at %d with %d zeros: %v", n, zeros, err)
			}
			if want := int64(n + zeros - good); l.CutBytes() != want {
				t.Fatalf("cut at %d with %d zeros: reports %d bytes cut, want %d", n, zeros, l.CutBytes(), want)
			}
			must(l.Accept(entry(50, true), time.Now(), nil))
			must(l.Close())
			l, err = ledger.Open(path, ledger.Limits{})
			if err != nil || l.CutBytes() != 0 || l.Lookup(50) == nil {
				t.Fatalf("cut at %d with %d zeros: not usable afterwards: %v", n, zeros, err)
			}
			must(l.Close())
		}
	}
}

func TestADamagedByteIsRefusedAtEveryOffset(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	data, _ := example(t, filepath.Join(dir, "whole"))
	for n := range data {
		for _, flip := range []byte{0x01, 0x80, 0xFF} {
			damaged := bytes.Clone(data)
			damaged[n] ^= flip
			path := filepath.Join(dir, "damaged")
			must(os.WriteFile(path, damaged, 0o600))
			l, err := ledger.Open(path, ledger.Limits{})
			if err == nil {
				t.Fatalf("byte %d of %d flipped by %#x: opened with %d bytes cut", n, len(data), flip, l.CutBytes())
			}
			if fault.CodeOf(err) != "ledger_damaged" {
				t.Fatalf("byte %d: %v", n, err)
			}
		}
	}
	for n := range 36 { // within the header, which is never torn
		path := filepath.Join(dir, "short")
		must(os.WriteFile(path, data[:n], 0o600))
		if _, err := ledger.Open(path, ledger.Limits{}); err == nil {
			t.Fatalf("a file of %d bytes was opened", n)
		}
	}
}

func TestCompactionKeepsAllThatCounts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	limits := ledger.Limits{Past: 50, Slack: 4 << 10}
	l := open(t, path, limits)
	must(l.Accept(entry(1_000_000, true), time.Now(), nil)) // interrupted, and never forgotten
	kept := entry(1_000_001, false)
	must(l.Accept(kept, time.Now(), nil))
	must(l.Finish(kept, ending("kept")))
	var largest int64
	for id := int64(1); id <= 2000; id++ {
		e := entry(id, false)
		must(l.Accept(e, time.Now(), []int64{id - 1}))
		must(l.Finish(e, ending(strings.Repeat("x", 100))))
		info, err := os.Stat(path)
		must(err)
		largest = max(largest, info.Size())
	}
	if largest > 32<<10 {
		t.Errorf("the file grew to %d bytes", largest)
	}
	check := func(l *ledger.Ledger) {
		t.Helper()
		want := []string{`1000000/1 accepted  ""`, `1000001/1 done succeeded "kept"`, fmt.Sprintf(`2000/1 done succeeded %q`, strings.Repeat("x", 100))}
		if diff := cmp.Diff(want, describe(l)); diff != "" {
			t.Errorf("live entries (-want +got):\n%s", diff)
		}
		if l.Lookup(1999) == nil || l.Lookup(1950) == nil || l.Lookup(1949) != nil {
			t.Error("not exactly the newest 50 forgotten entries are kept")
		}
	}
	check(l)
	must(l.Close())
	l = open(t, path, limits)
	check(l)
	next := entry(2001, false)
	must(l.Accept(next, time.Now(), nil))
	if next.AcceptedOrder != 4004 {
		t.Errorf("the order goes on with %d, want 4004", next.AcceptedOrder)
	}
}

func TestWhatACompactionLeftBehindIsRemoved(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	must(open(t, path, ledger.Limits{}).Close())
	must(os.WriteFile(path+".new", []byte("half"), 0o600))
	open(t, path, ledger.Limits{})
	if _, err := os.Stat(path + ".new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the left-over file is still there: %v", err)
	}
}

func TestAFullLedgerIsFullUntilSomethingIsForgotten(t *testing.T) {
	t.Parallel()
	l := open(t, filepath.Join(t.TempDir(), "ledger"), ledger.Limits{Live: 3, LiveBytes: 1000})
	for id := int64(1); id <= 3; id++ {
		if l.Full() {
			t.Fatalf("full with %d entries", id-1)
		}
		e := entry(id, false)
		must(l.Accept(e, time.Now(), nil))
		must(l.Finish(e, ending("x")))
	}
	if !l.Full() {
		t.Fatal("not full with three entries")
	}
	must(l.Forget([]int64{2}))
	if l.Full() {
		t.Fatal("full after one was forgotten")
	}
	e := entry(4, false)
	must(l.Accept(e, time.Now(), []int64{1, 3}))
	must(l.Finish(e, ending(strings.Repeat("x", 1000))))
	if !l.Full() {
		t.Fatal("not full with 1000 bytes of results")
	}
}

func TestAFailedWriteStartsNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	l := open(t, path, ledger.Limits{})
	must(l.Close()) // every write fails from now on
	if err := l.Accept(entry(1, true), time.Now(), nil); err == nil {
		t.Fatal("a task was accepted without a record")
	}
	if l.Lookup(1) != nil || l.Len() != 0 {
		t.Error("a task that was refused is known")
	}
}

func TestKilledAtEveryPointTheRecordTellsTheTruth(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		point string
		live  []string
		known bool
	}{
		{"before_accept", nil, false},
		{"after_accept", []string{`7/1 accepted  ""`}, true},
		{"after_done", []string{`7/1 done succeeded "result of 7"`}, true},
		{"after_forget", nil, true},
	} {
		t.Run(c.point, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "ledger")
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), crashEnv+"="+c.point, pathEnv+"="+path)
			err := cmd.Run()
			if cmd.ProcessState == nil || !strings.Contains(cmd.ProcessState.String(), "killed") {
				t.Fatalf("the child ended otherwise: %v", err)
			}
			l := open(t, path, ledger.Limits{})
			if diff := cmp.Diff(c.live, describe(l)); diff != "" {
				t.Errorf("live entries (-want +got):\n%s", diff)
			}
			if known := l.Lookup(7) != nil; known != c.known {
				t.Errorf("task known: %v, want %v", known, c.known)
			}
		})
	}
}

// FuzzOpen holds Open to: it never panics, and what it accepts it can read
// again with the same content.
func FuzzOpen(f *testing.F) {
	dir := f.TempDir()
	path := filepath.Join(dir, "seed")
	l, err := ledger.Open(path, ledger.Limits{})
	must(err)
	e := entry(1, true)
	must(l.Accept(e, time.Now(), nil))
	must(l.Finish(e, ending("x")))
	must(l.Forget([]int64{1}))
	must(l.Close())
	data, err := os.ReadFile(path)
	must(err)
	f.Add(data)
	f.Add(data[:50])
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "fuzzed")
		must(os.WriteFile(path, data, 0o600))
		l, err := ledger.Open(path, ledger.Limits{})
		if err != nil {
			return
		}
		first := describe(l)
		must(l.Close())
		l, err = ledger.Open(path, ledger.Limits{})
		if err != nil || l.CutBytes() != 0 {
			t.Fatalf("opened once, but not again: %v", err)
		}
		if diff := cmp.Diff(first, describe(l)); diff != "" {
			t.Fatal(diff)
		}
		must(l.Close())
	})
}

// BenchmarkRepeatable is what the ledger adds to a repeatable task.
func BenchmarkRepeatable(b *testing.B) {
	l, err := ledger.Open(filepath.Join(b.TempDir(), "ledger"), ledger.Limits{})
	must(err)
	defer l.Close()
	end := ending(strings.Repeat("r", 60))
	forget := []int64{0}
	id := int64(0)
	for b.Loop() {
		id++
		forget[0] = id - 1
		e := entry(id, false)
		must(l.Accept(e, time.Now(), forget))
		must(l.Finish(e, end))
	}
}

// BenchmarkOnce is the same with both records on disk.
func BenchmarkOnce(b *testing.B) {
	l, err := ledger.Open(filepath.Join(b.TempDir(), "ledger"), ledger.Limits{})
	must(err)
	defer l.Close()
	id := int64(0)
	for b.Loop() {
		id++
		e := entry(id, true)
		must(l.Accept(e, time.Now(), []int64{id - 1}))
		must(l.Finish(e, ending("r")))
	}
}
