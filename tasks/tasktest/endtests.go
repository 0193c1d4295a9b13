package tasktest

import (
	"encoding/json"
	"errors"
	"time"

	"headgate/tasks"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func (b *bench) finish(agent int, id tasks.ID, attempt int, change ...func(*tasks.Finish)) tasks.Finish {
	f := tasks.Finish{
		Agent: b.agents[agent], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: id, Attempt: attempt},
		StartedAt: time.Now(), Ending: tasks.Ending{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"ok":true}`)},
	}
	if attempt > 0 {
		f.Epoch = b.epoch(agent)
	}
	for _, c := range change {
		c(&f)
	}
	return f
}

func testFinish(b *bench) {
	id := b.put(b.insert(0, started))[0]
	for what, f := range map[string]tasks.Finish{
		"old attempt":   b.finish(0, id, 2),
		"other agent":   b.finish(1, id, 1),
		"other epoch":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Epoch++ }),
		"not started":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Epoch = 0 }),
		"other place":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Later = true }),
		"other order":   b.finish(0, id, 1, func(f *tasks.Finish) { f.Priority-- }),
		"other task id": b.finish(0, b.id(), 1),
	} {
		sameIDs(b, what, b.turn(tasks.Turn{Finishes: []tasks.Finish{f}}).Finished)
		b.state(id, tasks.StateWaiting, 1)
	}
	sameIDs(b, "finished", b.turn(tasks.Turn{Finishes: []tasks.Finish{b.finish(0, id, 1)}}).Finished, id)
	done := b.state(id, tasks.StateCompleted, 1)
	if done.CompletedAt.IsZero() || done.StartedAt.IsZero() || done.Ending.Outcome != tasks.Succeeded {
		b.Errorf("completed task: %+v", done)
	}
	again := b.finish(0, id, 1, func(f *tasks.Finish) { f.Ending.Outcome = tasks.Failed })
	sameIDs(b, "finished again", b.turn(tasks.Turn{Finishes: []tasks.Finish{again}}).Finished)
	if d := cmp.Diff(done, b.task(id)); d != "" {
		b.Errorf("a completed task changed:\n%s", d)
	}
}

func testFinishUnstarted(b *bench) {
	cancelled := func(f *tasks.Finish) {
		f.Ending = tasks.Ending{Outcome: tasks.Cancelled, Reason: tasks.ReasonCancelled, Detail: "Cancelled by user:a."}
		f.StartedAt = time.Time{}
	}
	later := func(x *tasks.Insert) { x.NotBefore = x.CreatedAt.Add(30 * time.Minute) }
	ids := b.put(b.insert(0), b.insert(0, later))
	r := b.turn(tasks.Turn{Finishes: []tasks.Finish{
		b.finish(0, ids[0], 0, cancelled),
		b.finish(0, ids[1], 0, cancelled, func(f *tasks.Finish) { f.Later = true }),
	}})
	sameIDs(b, "cancelled", r.Finished, ids...)
	for _, id := range ids {
		got := b.state(id, tasks.StateCompleted, 0)
		if got.Ending.Outcome != tasks.Cancelled || !got.StartedAt.IsZero() || got.Ending.Reason != tasks.ReasonCancelled {
			b.Errorf("cancelled task: %+v", got)
		}
	}
}

func testEnding(b *bench) {
	code := 3
	endings := []tasks.Ending{
		{Outcome: tasks.Succeeded, Result: json.RawMessage(`{"a": [1, 2.50, "\u0000", "é"], "a": null}`), OutputBytes: 1 << 40},
		{
			Outcome: tasks.Failed, Reason: "exit_code", Detail: "It ended with 3.",
			Exit: &tasks.Exit{Code: &code, UserMS: 1, SystemMS: 2, MaxRSSBytes: 3}, OutputBytes: 12,
		},
		{Outcome: tasks.TimedOut, Reason: "timeout", Detail: "Too long.", Exit: &tasks.Exit{
			Signal: "SIGKILL", KilledBy: tasks.KilledByKill, GraceMS: 5000, Released: true,
			LeftBehind: []tasks.Process{{PID: 7, Name: "daemon"}}, Survivors: []tasks.Process{{PID: 8, Name: `"nfs<\n`}},
		}},
		{Outcome: tasks.Rejected, Reason: "policy", Detail: "Not allowed.", Exit: &tasks.Exit{SpawnError: "no such file"}},
		{Outcome: tasks.Unknown, Reason: tasks.ReasonNoWord, Detail: "No word.", ResultBytes: []byte{0, 255, 1}},
	}
	var fs []tasks.Finish
	for _, e := range endings {
		id := b.put(b.insert(0, started))[0]
		fs = append(fs, b.finish(0, id, 1, func(f *tasks.Finish) { f.Ending = e }))
	}
	b.turn(tasks.Turn{Finishes: fs})
	for i, f := range fs {
		if d := cmp.Diff(endings[i], b.task(f.ID).Ending, cmpopts.EquateEmpty()); d != "" {
			b.Errorf("ending %d (-want +got):\n%s", i, d)
		}
	}
}

func testOutput(b *bench) {
	id := b.put(b.insert(0, started))[0]
	chunk := func(seq int, stream string, off int64, data string) tasks.OutputRow {
		return tasks.OutputRow{Agent: b.agents[0], OutputChunk: tasks.OutputChunk{
			Ref: tasks.Ref{ID: id, Attempt: 1}, Seq: seq, Stream: stream, Offset: off,
			At: time.Now().UTC().Truncate(time.Millisecond), Data: []byte(data),
		}}
	}
	rows := []tasks.OutputRow{chunk(0, "stdout", 0, "a\x00\xff"), chunk(1, "stderr", 0, "warn"), chunk(2, "stdout", 3, "b")}
	b.turn(tasks.Turn{Output: rows[:2]})
	b.turn(tasks.Turn{Output: rows[1:]})
	b.turn(tasks.Turn{Output: rows, Finishes: []tasks.Finish{b.finish(0, id, 1)}})
	got, err := b.e.Output(b.ctx, id, 0, 10)
	if err != nil {
		b.Fatal(err)
	}
	want := []tasks.OutputChunk{rows[0].OutputChunk, rows[1].OutputChunk, rows[2].OutputChunk}
	if d := cmp.Diff(want, got, cmpopts.EquateApproxTime(time.Millisecond)); d != "" {
		b.Errorf("output (-want +got):\n%s", d)
	}
	if part, err := b.e.Output(b.ctx, id, 1, 1); err != nil || len(part) != 1 || part[0].Seq != 1 {
		b.Errorf("from 1, at most 1: %v, %v", part, err)
	}
	if part, err := b.e.OutputPart(b.ctx, id, 1, "stdout", 1, 5); err != nil || len(part) != 1 || part[0].Seq != 2 {
		b.Errorf("stdout from 1: %v, %v", part, err)
	}
	testOutputFacts(b, id, chunk)
	if none, err := b.e.Output(b.ctx, b.id(), 0, 10); err != nil || len(none) != 0 {
		b.Errorf("of no task: %v, %v", none, err)
	}
}

// testOutputFacts adds a gap and an attempt; three chunks are there.
func testOutputFacts(b *bench, id tasks.ID, chunk func(seq int, stream string, off int64, data string) tasks.OutputRow) {
	later := []tasks.OutputRow{chunk(7, "stdout", 10, "last"), chunk(8, "stderr", 9, "")}
	b.turn(tasks.Turn{Output: later})
	want := tasks.OutputFacts{
		Attempt: 1, LastSeq: 8, Stdout: tasks.StreamFacts{Bytes: 14, Stored: 8}, Stderr: tasks.StreamFacts{Bytes: 9, Stored: 4},
		Gaps: []tasks.OutputGap{{Stream: "stdout", Offset: 4, Bytes: 6}, {Stream: "stderr", Offset: 4, Bytes: 5}},
	}
	if f, err := b.e.OutputFacts(b.ctx, id); err != nil || cmp.Diff(want, f) != "" {
		b.Errorf("facts, %v (-want +got):\n%s", err, cmp.Diff(want, f))
	}
	for _, c := range []struct {
		stream     string
		pos, start int64
		seq        int
	}{{"", 0, 0, 0}, {"", 2, 0, 0}, {"", 3, 3, 1}, {"", 7, 7, 2}, {"", 11, 8, 7}, {"stdout", 3, 3, 2}, {"stdout", 4, 4, 7}, {"stderr", 3, 0, 1}} {
		if seq, start, err := b.e.OutputAt(b.ctx, id, 1, c.stream, c.pos); err != nil || seq != c.seq || start != c.start {
			b.Errorf("byte %d of %q is in chunk %d from %d, %v; want %d from %d", c.pos, c.stream, seq, start, err, c.seq, c.start)
		}
	}
	if seq, _, err := b.e.OutputAt(b.ctx, id, 1, "", 12); err != nil || seq <= 8 {
		b.Errorf("behind the end is chunk %d, %v", seq, err)
	}
	again := chunk(0, "stdout", 0, "new")
	again.Attempt = 2
	b.turn(tasks.Turn{Output: []tasks.OutputRow{again}})
	if f, err := b.e.OutputFacts(b.ctx, id); err != nil || f.Attempt != 2 || f.Stored("") != 3 || len(f.Gaps) != 0 {
		b.Errorf("facts of a new attempt: %+v, %v", f, err)
	}
	if f, err := b.e.OutputFacts(b.ctx, b.id()); err != nil || f.Attempt != 0 {
		b.Errorf("facts of no task: %+v, %v", f, err)
	}
}

func testLate(b *bench) {
	ids := b.put(b.insert(0, started), b.insert(1, started), b.insert(2, started))
	b.turn(tasks.Turn{Finishes: []tasks.Finish{
		b.finish(0, ids[0], 1),
		b.finish(1, ids[1], 1, func(f *tasks.Finish) { f.Ending = tasks.Ending{Outcome: tasks.Unknown, Reason: tasks.ReasonNoWord} }),
	}})
	before := []*tasks.Task{b.task(ids[0]), b.task(ids[1]), b.task(ids[2])}
	late := []tasks.Finish{
		b.finish(0, ids[0], 1), // the very one that is stored
		b.finish(1, ids[1], 1), // its stored outcome is ours, not the agent's
		b.finish(2, ids[2], 1), // not completed
		b.finish(2, ids[1], 1), // of another agent
		b.finish(0, b.id(), 1), // of no task
	}
	for _, want := range [][]tasks.ID{{ids[1]}, nil} {
		kept, err := b.e.RecordLate(b.ctx, late)
		if err != nil {
			b.Fatalf("record late: %v", err)
		}
		sameIDs(b, "kept", kept, want...)
	}
	shown, err := b.e.LateResults(b.ctx, ids[1])
	if err != nil || len(shown) != 1 || shown[0].Attempt != 1 || shown[0].ReceivedAt.IsZero() {
		b.Fatalf("late answers: %+v, %v", shown, err)
	}
	if d := cmp.Diff(late[1].Ending, shown[0].Ending, cmpopts.EquateEmpty()); d != "" {
		b.Errorf("the late answer (-want +got):\n%s", d)
	}
	if none, err := b.e.LateResults(b.ctx, ids[0]); err != nil || len(none) != 0 {
		b.Errorf("late answers of a task without any: %+v, %v", none, err)
	}
	for i, t := range before {
		if d := cmp.Diff(t, b.task(ids[i])); d != "" {
			b.Errorf("a late answer changed task %d:\n%s", ids[i], d)
		}
	}
	odd := tasks.Finish{Agent: b.agents[0], Ref: tasks.Ref{ID: ids[0], Attempt: 100_000}, Ending: tasks.Ending{Outcome: tasks.Succeeded}}
	_, err = b.e.RecordLate(b.ctx, []tasks.Finish{odd})
	if _, ok := errors.AsType[*tasks.PoisonError](err); !ok {
		b.Error("an answer of attempt 100,000 was not refused for its data")
	}
	if b.e.Late == nil {
		return
	}
	for i, want := range []int{0, 1, 0} {
		if n := b.e.Late(ids[i]); n != want {
			b.Errorf("%d late answers kept for task %d of the list, want %d", n, i, want)
		}
	}
}

func testCancelMark(b *bench) {
	ids := b.put(b.insert(0, started), b.insert(0))
	mark := func(id tasks.ID, attempt int) tasks.CancelMark {
		return tasks.CancelMark{Agent: b.agents[0], Priority: tasks.DefaultPriority, Ref: tasks.Ref{ID: id, Attempt: attempt}, Actor: "user:a"}
	}
	sameIDs(b, "marked", b.turn(tasks.Turn{Cancels: []tasks.CancelMark{mark(ids[0], 1), mark(ids[1], 0)}}).Marked, ids[0])
	sameIDs(b, "old attempt", b.turn(tasks.Turn{Cancels: []tasks.CancelMark{mark(ids[0], 2)}}).Marked)
	got := b.state(ids[0], tasks.StateWaiting, 1)
	if got.CancelRequestedAt.IsZero() || !b.task(ids[1]).CancelRequestedAt.IsZero() {
		b.Error("the mark is missing or on the wrong task")
	}
	l, err := b.e.Load(b.ctx, allShards())
	if err != nil || len(l.Started) != 1 || l.Started[0].CancelRequestedAt.IsZero() {
		b.Errorf("load after a cancel: %+v, %v", l, err)
	}
}

func testPoison(b *bench) {
	id := b.put(b.insert(0, started))[0]
	good := b.insert(1)
	bad := b.finish(0, id, 1, func(f *tasks.Finish) { f.Ending.Detail = "a\x00b" })
	_, err := b.tryTurn(tasks.Turn{Inserts: []tasks.Insert{good}, Finishes: []tasks.Finish{bad}})
	if _, ok := errors.AsType[*tasks.PoisonError](err); !ok {
		b.Fatalf("a turn with NUL in a text: %v, want a PoisonError", err)
	}
	b.state(id, tasks.StateWaiting, 1)
	if _, err := b.e.Task(b.ctx, good.ID); !errors.Is(err, tasks.ErrNoTask) {
		b.Errorf("half of a refused turn was stored: %v", err)
	}
	b.turn(tasks.Turn{Inserts: []tasks.Insert{good}})
}
