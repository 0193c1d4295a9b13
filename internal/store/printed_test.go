package store

import (
	"bytes"
	"testing"
	"time"

	"headgate/tasks"
)

// Rows of all sizes in one turn are stored apart, and the empty ones that mark
// what is missing also when a turn has nothing else.
func TestEachChunkGetsItsOwnBytes(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	in := r.insert(r.agents[0], true)
	if _, err := r.tryTurn(&tasks.Turn{Inserts: []tasks.Insert{in}}); err != nil {
		t.Fatal(err)
	}
	var want [][]byte
	var end int64
	for _, parts := range [][]string{{""}, {"\x00", "", "\xff\\x41", `{"a",`}, {"", ""}, {string(bytes.Repeat([]byte{0, 0xfe}, 32<<10)), "x"}, {"after the long one"}} {
		turn := &tasks.Turn{}
		for _, part := range parts {
			turn.Output = append(turn.Output, tasks.OutputRow{Agent: in.Agent, OutputChunk: tasks.OutputChunk{
				Ref: tasks.Ref{ID: in.ID, Attempt: 1}, Seq: len(want), Stream: tasks.Stdout, Offset: end, At: time.Now(), Data: []byte(part),
			}})
			want = append(want, []byte(part))
			end += int64(len(part))
		}
		for range 2 { // the second time it is there already
			if _, err := r.tryTurn(turn); err != nil {
				t.Fatalf("%q: %v", parts, err)
			}
		}
	}
	got, err := r.Output(t.Context(), in.ID, 0, 100)
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d chunks, %v, want %d", len(got), err, len(want))
	}
	end = 0
	for i, c := range got {
		if c.Seq != i || c.Offset != end || !bytes.Equal(c.Data, want[i]) {
			t.Errorf("chunk %d at %d has %d bytes, want %d at %d", c.Seq, c.Offset, len(c.Data), len(want[i]), end)
		}
		end += int64(len(c.Data))
	}
}
