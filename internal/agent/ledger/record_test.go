package ledger

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzApply feeds payloads that have passed their checksum.
func FuzzApply(f *testing.F) {
	e := &Entry{TaskID: 5, Attempt: 1, Kind: "core.echo", Done: true, Outcome: "succeeded", final: []byte("x")}
	for _, rec := range [][]byte{encodeAccept(nil, e), encodeDone(nil, e), encodeForget(nil, []int64{5}), encodePast(nil, e), encodeCounter(nil, 9)} {
		payload, rest, err := nextRecord(rec)
		if err != nil || len(rest) != 0 {
			f.Fatalf("an encoded record is not read back: %v", err)
		}
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		x := newIndex(10)
		x.accept(&Entry{TaskID: 5, Attempt: 1})
		if err := x.apply(payload); err != nil {
			return
		}
		if x.held < 0 || len(x.past)-x.head > 10 {
			t.Fatalf("held %d bytes, %d past entries", x.held, len(x.past)-x.head)
		}
	})
}

func TestEveryFieldSurvivesItsRecord(t *testing.T) {
	t.Parallel()
	e := &Entry{
		TaskID: -5, Attempt: 7, Epoch: 1 << 60, Kind: "cmd.run", Once: true, Digest: [8]byte{1, 2, 3, 4, 5, 6, 7, 8},
		AcceptedOrder: 11, DoneOrder: 12, AcceptedAt: 13, StartedAt: 14, EndedAt: 15,
		Done: true, Outcome: "failed", Reason: "exit_nonzero", past: true,
	}
	payload, _, err := nextRecord(encodePast(nil, e))
	if err != nil {
		t.Fatal(err)
	}
	x := newIndex(10)
	if err := x.apply(payload); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(e, x.lookup(-5), cmp.AllowUnexported(Entry{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
