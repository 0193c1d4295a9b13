package store

import (
	"bytes"
	"database/sql/driver"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"headgate/tasks"
)

// sameText compares the last parameter with what lib/pq makes of the list.
func sameText(t *testing.T, a *turnArgs, want driver.Valuer) {
	t.Helper()
	a.seal()
	v, err := want.Value()
	if err != nil {
		t.Fatal(err)
	}
	if got := a.args[len(a.args)-1]; got != v {
		t.Errorf("got %q, want %q", got, v)
	}
}

func FuzzArrayText(f *testing.F) {
	for _, s := range []string{
		"", "\n", "\n\n", "a", "NULL", "null\nNULL\n", `"`, `\`, `\"`, `\\`, `{}`, `{"a":"b\\c","d":[1,2]}`, ",", "a,b\n{\n}",
		" a ", "\x00", "\xff\xfe", "\u00e9\u2028", `"` + "\n" + `\` + "\n" + `","`,
	} {
		f.Add(s, int64(len(s)))
	}
	f.Fuzz(func(t *testing.T, text string, n int64) {
		items := strings.Split(text, "\n")
		if text == "" {
			items = items[:0]
		}
		numbers, flags, blobs := pq.Int64Array{}, pq.BoolArray{}, pq.ByteaArray{}
		for i, s := range items {
			numbers = append(numbers, n*int64(i+1))
			flags = append(flags, (n>>i)&1 == 1)
			blobs = append(blobs, []byte(s))
		}
		a := &turnArgs{}
		for range 2 { // the second time in used memory
			addTexts(a, items, func(s *string) string { return *s })
			sameText(t, a, pq.StringArray(items))
			addTexts(a, blobs, func(b *[]byte) []byte { return *b })
			sameText(t, a, pq.StringArray(items))
			addBlobs(a, blobs, func(b *[]byte) []byte { return *b })
			sameText(t, a, blobs)
			addInts(a, numbers, func(n *int64) int64 { return *n })
			sameText(t, a, numbers)
			addBools(a, flags, func(b *bool) bool { return *b })
			sameText(t, a, flags)
			if !a.reset() {
				t.Fatal("memory of this size is kept")
			}
		}
	})
}

// TestArrayTextIsReadBack sends hard texts through PostgreSQL.
func TestArrayTextIsReadBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	want := []string{"", "NULL", "null", `"`, `\`, `\"`, `\\\"`, "{}", "{a,b}", ",", " ", "a\nb\tc", "\u00e9\u2028", `{"k":"v\\w","n":[1,null]}`}
	bytesWant := [][]byte{nil, {}, {0}, {0xff, 0, '"', '\\'}, []byte("\\x00")}
	a := &turnArgs{}
	addTexts(a, want, func(s *string) string { return *s })
	addBlobs(a, bytesWant, func(b *[]byte) []byte { return *b })
	a.seal()
	var texts pq.StringArray
	var blobs pq.ByteaArray
	if err := r.loops.QueryRowContext(t.Context(), `SELECT $1::text[], $2::bytea[]`, a.args...).Scan(&texts, &blobs); err != nil {
		t.Fatal(err)
	}
	for i := range want {
		if texts[i] != want[i] {
			t.Errorf("%q came back as %q", want[i], texts[i])
		}
	}
	for i := range bytesWant {
		if !bytes.Equal(blobs[i], bytesWant[i]) {
			t.Errorf("%q came back as %q", bytesWant[i], blobs[i])
		}
	}
}

// fullTurn is a turn of a busy loop: as many ends as new tasks.
func fullTurn(n int) *tasks.Turn {
	t := &tasks.Turn{Leases: make([]tasks.Lease, 16)}
	text := `{"text":"` + strings.Repeat(`hello \"world\" `, 12) + `"}`
	now := time.Now()
	for i := range n {
		t.Inserts = append(t.Inserts, tasks.Insert{
			ID: tasks.ID(1_000_000 + i), Agent: tasks.AgentNum(i), Epoch: 3, Kind: "core.echo", Args: text, Priority: 5,
			Timeout: time.Minute, CreatedAt: now, ExpiresAt: now.Add(time.Hour), Actor: "token:bench", Started: true,
		})
		t.Finishes = append(t.Finishes, tasks.Finish{
			Agent: tasks.AgentNum(n - i), Priority: 5, Ref: tasks.Ref{ID: tasks.ID(i), Attempt: 1}, Epoch: 3, StartedAt: now,
			Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(text)},
		})
	}
	return t
}

// BenchmarkTurnArgs makes the parameters of a turn, as the driver gets them.
func BenchmarkTurnArgs(b *testing.B) {
	turn := fullTurn(500)
	var s turnStatements
	b.ReportAllocs()
	for b.Loop() {
		a := s.args()
		if err := a.fill(turn); err != nil {
			b.Fatal(err)
		}
		s.reuse(a)
	}
}
