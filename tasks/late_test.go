package tasks_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headgate/tasks"
	"headgate/tasks/tasktest"
)

// TestLateAnswersAreKeptAndShown freezes an agent for longer than its task may
// take. Until the forced end that is told as silence and not as failure;
// afterwards its answer is kept beside the outcome, an event says so, and
// nothing has run twice.
//
// Cases P16.
func TestLateAnswersAreKeptAndShown(t *testing.T) {
	for name, cut := range map[string]bool{"on the same session": false, "after the connection was lost": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) { answerLate(t, cut) })
		})
	}
}

func answerLate(t *testing.T, cut bool) {
	r := newRig(t, 1)
	num := r.agents[0].Num
	r.script(0, func(tasks.Assignment) tasktest.Answer { return tasktest.Answer{Silent: true, Deaf: true} })
	id := r.submit(0, func(s *tasks.Submission) { s.Timeout = 30 * time.Second }).ID
	behind := r.submit(0).ID
	if cut {
		r.runner.Disconnect(num, "no word for 25 s")
	}
	for _, silent := range []time.Duration{15 * time.Second, time.Minute} {
		r.pass(silent)
		w := r.is(id, tasks.StateWaiting, 1, "", "").Waiting
		if !strings.Contains(w.Sentence, " ago") && !strings.Contains(w.Sentence, "longer than its timeout") {
			t.Errorf("its silence is told as %+v", w)
		}
	}
	if got := r.get(id).Late; got == nil || len(got) != 0 {
		t.Errorf("late answers before the end: %#v", got)
	}
	r.pass(10 * time.Minute)
	r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonNoWord)
	r.isNew(behind)
	events := subscribe(t, r.manager.Hub(), "", tasks.TopicTask(id))
	if cut {
		r.runner.Connect(num)
		synctest.Wait()
		r.isNew(behind) // the agent still runs the first
	}
	r.script(0, nil2())
	r.runner.Finish(num, tasks.Ending{Outcome: tasks.Succeeded, Result: []byte(`{"took":"long"}`)})
	synctest.Wait()
	got := r.is(id, tasks.StateCompleted, 1, tasks.Unknown, tasks.ReasonNoWord)
	if len(got.Late) != 1 || got.Late[0].Attempt != 1 || got.Late[0].Ending.Outcome != tasks.Succeeded ||
		string(got.Late[0].Ending.Result) != `{"took":"long"}` || !got.Late[0].ReceivedAt.Equal(time.Now()) {
		t.Errorf("late answers: %+v", got.Late)
	}
	types, _ := read(events)
	same(t, "events", types, tasks.EventLate)
	r.isDone(behind)
	if n := len(r.runner.Starts(num)); n != 2 {
		t.Errorf("%d starts of two tasks", n)
	}

	// Said once more, as by an agent that was not told to forget it: it is the
	// same answer, and no news.
	late := tasks.Final{Ref: tasks.Ref{ID: id, Attempt: 1}, Epoch: r.store.Late()[0].Epoch, Ending: tasks.Ending{Outcome: tasks.Failed}}
	r.runner.Say(func(s tasks.Sessions) { s.Final(num, late) })
	synctest.Wait()
	if again := r.get(id); len(again.Late) != 1 || again.Late[0].Ending.Outcome != tasks.Succeeded {
		t.Errorf("late answers in the end: %+v", again.Late)
	}
	types, _ = read(events)
	same(t, "more events", types)
	r.check()
}
