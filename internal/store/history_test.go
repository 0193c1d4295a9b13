package store

import (
	"path/filepath"
	"testing"
	"time"

	"headgate/internal/testkit/history"
	"headgate/tasks"
)

// The shadow table sees every change that turns make, and the dump every task:
// what a correct life leaves is judged to be correct.
func TestHistoryOfTheQueue(t *testing.T) {
	t.Parallel()
	r := newRig(t, 1)
	if _, err := r.general.ExecContext(t.Context(), history.ShadowSQL); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "history.jsonl")
	w, err := history.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	agent := r.agents[0]
	one, two, later := r.insert(agent, true), r.insert(agent, false), r.insert(agent, false)
	later.NotBefore = later.CreatedAt.Add(time.Minute)
	list := []tasks.Insert{one, two, later}
	first := w.SubmitAll([]history.Submission{{Agent: agent.ID.String()}, {Agent: agent.ID.String()}, {Agent: agent.ID.String(), Free: true}}...)
	r.turn(&tasks.Turn{Inserts: list})
	w.AckedAll(first, []int64{int64(one.ID), int64(two.ID), int64(later.ID)}, 202)
	r.turn(&tasks.Turn{Requeues: []tasks.Requeue{{Agent: agent.Num, Priority: 5, Ref: tasks.Ref{ID: one.ID, Attempt: 1}, Epoch: one.Epoch}}})
	r.turn(&tasks.Turn{Claims: []tasks.Claim{{Agent: agent.Num, Priority: 5, ID: one.ID, Epoch: one.Epoch, Attempt: 2}}})
	run := history.Run{Agent: agent.ID.String(), ID: int64(one.ID), Attempt: 2, Epoch: one.Epoch}
	w.Start(run)
	w.End(run, "succeeded")
	end := r.finish(two, 0)
	end.Ending.Outcome = tasks.Cancelled
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(one, 2), end}})

	judge := func(o history.Options) history.Report {
		report, err := history.Check([]string{path}, o)
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	if err := history.Dump(t.Context(), r.general.DB, w); err != nil {
		t.Fatal(err)
	}
	if report := judge(history.Options{Open: true}); report.Err() != nil || report.Dumped != 3 || report.Acked != 3 {
		t.Errorf("got %s", report)
	}
	if report := judge(history.Options{}); len(report.Violations) != 1 || report.Violations[0].Rule != "lost" {
		t.Errorf("one task is not completed; got %s", report)
	}

	// What must never happen is seen, too.
	for _, q := range []string{`DELETE FROM agent_later`, `INSERT INTO agent_queue (task_id, expires_at, agent_num, priority) SELECT task_id, now(), agent_num, 5 FROM agent_result`} {
		if _, err := r.general.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	if err := history.Dump(t.Context(), r.general.DB, w); err != nil {
		t.Fatal(err)
	}
	report := judge(history.Options{Open: true})
	want := map[string]bool{}
	for _, rule := range report.Broken() {
		want[rule] = true
	}
	if !want["final"] || !want["doubled"] {
		t.Errorf("rows that were lost and that came back are not noticed: %s", report)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}
