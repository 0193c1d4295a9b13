package tasks_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"uuid"

	"headgate/tasks"
)

func subscribe(t *testing.T, h *tasks.Hub, last string, topics ...string) *tasks.Subscription {
	t.Helper()
	s, err := h.Subscribe(topics, last)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// read takes what has arrived.
func read(s *tasks.Subscription) (types []string, last tasks.Event) {
	for {
		select {
		case e, ok := <-s.Events():
			if !ok {
				return append(types, "closed"), last
			}
			types, last = append(types, e.Type), e
		default:
			return types, last
		}
	}
}

func same(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestHubDeliversByTopicAndOnce(t *testing.T) {
	t.Parallel()
	h := tasks.NewHub()
	a, b := uuid.NewV4(), uuid.NewV4()
	all := subscribe(t, h, "", tasks.TopicTasks, tasks.TopicTask(1), tasks.TopicAgent(a))
	one := subscribe(t, h, "", tasks.TopicTask(1))
	agent := subscribe(t, h, "", tasks.TopicAgent(b))
	agents := subscribe(t, h, "", tasks.TopicAgents)
	ctl := subscribe(t, h, "", tasks.TopicController)
	every := subscribe(t, h, "")
	h.Publish(
		tasks.Event{Type: tasks.EventCreated, Task: 1, Agent: a, State: tasks.StateNew},
		tasks.Event{Type: tasks.EventOutput, Task: 1, Agent: a},
		tasks.Event{Type: tasks.EventCompleted, Task: 2, Agent: b, State: tasks.StateCompleted, Outcome: tasks.Failed},
		tasks.Event{Type: tasks.EventAgent, Agent: b},
		tasks.Event{Type: tasks.EventController},
	)
	got, _ := read(all)
	same(t, "three topics", got, tasks.EventCreated, tasks.EventOutput, tasks.EventCompleted)
	got, _ = read(one)
	same(t, "one task", got, tasks.EventCreated, tasks.EventOutput)
	got, _ = read(agent)
	same(t, "one agent", got, tasks.EventCompleted, tasks.EventAgent)
	got, _ = read(agents)
	same(t, "agents", got, tasks.EventAgent)
	got, _ = read(ctl)
	same(t, "controller", got, tasks.EventController)
	got, last := read(every)
	same(t, "everything", got, tasks.EventCreated, tasks.EventCompleted, tasks.EventAgent, tasks.EventController)
	if last.ID != h.LastEventID() {
		t.Errorf("last id %s, want %s", last.ID, h.LastEventID())
	}
}

func TestHubEventPayload(t *testing.T) {
	t.Parallel()
	id := uuid.NewV4()
	b, err := json.Marshal(tasks.Event{ID: "x-1", Type: tasks.EventCompleted, Task: 12, Agent: id, State: tasks.StateCompleted, Outcome: tasks.TimedOut})
	want := `{"type":"task.completed","id":"12","agent":"` + id.String() + `","state":"completed","outcome":"timed-out"}`
	if err != nil || string(b) != want {
		t.Errorf("payload %s, %v; want %s", b, err, want)
	}
}

func TestHubResumesWithoutAGapOrSaysReset(t *testing.T) {
	t.Parallel()
	h := tasks.NewHub()
	publish := func(from, to int) {
		for i := from; i <= to; i++ {
			h.Publish(tasks.Event{Type: fmt.Sprint(i), Task: tasks.ID(i)})
		}
	}
	publish(1, 10) // nobody listens
	at := h.LastEventID()
	publish(11, 300) // more than a live buffer holds
	got, last := read(subscribe(t, h, at, tasks.TopicTasks))
	if len(got) != 290 || got[0] != "11" || last.Type != "300" || last.ID != h.LastEventID() {
		t.Errorf("resumed with %d events from %v to %v", len(got), got[:1], last)
	}
	got, _ = read(subscribe(t, h, at, tasks.TopicTask(200)))
	same(t, "one task", got, "200")
	got, _ = read(subscribe(t, h, h.LastEventID(), tasks.TopicTasks))
	same(t, "up to date", got)
	publish(301, 4500)
	s := subscribe(t, h, at, tasks.TopicTasks)
	got, _ = read(s)
	same(t, "too old", got, tasks.EventReset)
	publish(4501, 4501)
	got, _ = read(s)
	same(t, "after a reset it goes on", got, "4501")
	for _, bad := range []string{"other-3", "x", "-", at + "9999999"} {
		got, _ = read(subscribe(t, h, bad, tasks.TopicTasks))
		same(t, "unknown id "+bad, got, tasks.EventReset)
	}
}

func TestHubDropsSlowReaders(t *testing.T) {
	t.Parallel()
	h := tasks.NewHub()
	slow, quick := subscribe(t, h, "", tasks.TopicTasks), subscribe(t, h, "", tasks.TopicTasks)
	for i := range 200 {
		h.Publish(tasks.Event{Type: tasks.EventCreated, Task: tasks.ID(i + 1)})
		if got, _ := read(quick); len(got) != 1 {
			t.Fatalf("a quick reader got %v", got)
		}
	}
	got, _ := read(slow)
	if n := len(got); n != 66 || got[n-2] != tasks.EventReset || got[n-1] != "closed" {
		t.Errorf("a slow reader got %d events, at last %v", n, got[max(0, n-2):])
	}
	slow.Close()
	slow.Close()
}

func TestHubRefusesUnknownTopics(t *testing.T) {
	t.Parallel()
	h := tasks.NewHub()
	for _, bad := range []string{"", "task", "task:", "task:0", "task:-1", "task:x", "agent:", "agent:1", "Tasks"} {
		_, err := h.Subscribe([]string{bad}, "")
		wantFault(t, err, "unknown_topic")
	}
}
