package tasks_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"headgate/tasks"
)

// drained gives what a subscription holds now, by type and task.
func drained(s *tasks.Subscription) []string {
	var out []string
	for {
		select {
		case e, ok := <-s.Events():
			if !ok {
				return append(out, "closed")
			}
			out = append(out, e.Type+" "+e.Task.String())
		default:
			return out
		}
	}
}

func TestEventsTravelOnceAndNotBack(t *testing.T) {
	t.Parallel()
	one, two := tasks.NewHub(), tasks.NewHub()
	reader, err := two.Subscribe([]string{tasks.TopicTasks, tasks.TopicTask(7)}, "")
	if err != nil {
		t.Fatal(err)
	}
	toTwo, toOne := one.SubscribePeer(""), two.SubscribePeer("")
	one.Publish(
		tasks.Event{Type: tasks.EventCreated, Task: 7}, tasks.Event{Type: tasks.EventOutput, Task: 7},
		tasks.Event{Type: tasks.EventOutput, Task: 8}, tasks.Event{Type: tasks.EventCompleted, Task: 7},
	)
	last := ""
	for range 4 {
		e := <-toTwo.Events()
		last = e.ID
		two.PublishFrom(tasks.PeerEventOf(e))
	}
	if d := cmp.Diff([]string{"task.created 7", "task.output 7", "task.completed 7"}, drained(reader)); d != "" {
		t.Error(d)
	}
	if got := drained(toOne); got != nil {
		t.Errorf("what one told went back to it: %v", got)
	}
	// The stream breaks and is opened again: nothing is missing.
	toTwo.Close()
	one.Publish(tasks.Event{Type: tasks.EventCreated, Task: 9})
	if d := cmp.Diff([]string{"task.created 9"}, drained(one.SubscribePeer(last))); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"reset 0"}, drained(one.SubscribePeer("elsewhere-1"))); d != "" {
		t.Error(d)
	}
}

// What was missed is said to those who follow now, and to those who come back.
func TestMissedEventsOfOthersMakeReadersReadAgain(t *testing.T) {
	t.Parallel()
	h := tasks.NewHub()
	h.Publish(tasks.Event{Type: tasks.EventCreated, Task: 1})
	before := h.LastEventID()
	var all []*tasks.Subscription
	for _, topic := range []string{tasks.TopicTasks, tasks.TopicTask(5), tasks.TopicController} {
		s, err := h.Subscribe([]string{topic}, "")
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	h.Missed()
	h.Publish(tasks.Event{Type: tasks.EventCreated, Task: 5})
	back, err := h.Subscribe([]string{tasks.TopicTasks}, before)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]string{{"reset 0", "task.created 5"}, {"reset 0", "task.created 5"}, {"reset 0"}} {
		if d := cmp.Diff(want, drained(all[i])); d != "" {
			t.Errorf("reader %d: %s", i, d)
		}
	}
	if d := cmp.Diff([]string{"reset 0", "task.created 5"}, drained(back)); d != "" {
		t.Error(d)
	}
}
