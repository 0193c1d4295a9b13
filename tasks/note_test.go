package tasks

import (
	"slices"
	"testing"
)

// TestNoteTellsMissingEndsFromReplacedOnes: as many ends are written as were
// asked for, but not the same.
func TestNoteTellsMissingEndsFromReplacedOnes(t *testing.T) {
	t.Parallel()
	moved := &op{kind: opFinish, fin: &Finish{Ref: Ref{ID: 1}}}
	insert := &op{kind: opInsert, sub: &submission{ins: Insert{ID: 9}}, older: []Finish{{Ref: Ref{ID: 2}}, {Ref: Ref{ID: 3}}}}
	note([]*op{moved, insert}, &TurnResult{Inserted: []ID{9}, Finished: []ID{2}})
	if moved.state != opMissing || insert.state != opDone || !slices.Equal(insert.ended, []ID{2}) {
		t.Errorf("states %d and %d, ended %v", moved.state, insert.state, insert.ended)
	}
}
