package tasks

import "uuid"

// PeerEvent is an Event on its way to another controller.
type PeerEvent struct {
	ID      string    `json:"id,omitempty"`
	Type    string    `json:"type"`
	Task    ID        `json:"task,omitzero"`
	Agent   uuid.UUID `json:"agent,omitzero"`
	State   State     `json:"state,omitempty"`
	Outcome Outcome   `json:"outcome,omitempty"`
}

// PeerEventOf gives the form that travels.
func PeerEventOf(e Event) PeerEvent {
	return PeerEvent{ID: e.ID, Type: e.Type, Task: e.Task, Agent: e.Agent, State: e.State, Outcome: e.Outcome}
}

// SubscribePeer opens a stream of everything that happens at this controller,
// for another one; what that one told of itself, or others, is left out, so that
// no event goes in circles. after continues it as Subscribe does. There is no
// NOTIFY for it in the turns: the server would put all commits in a row for it.
func (h *Hub) SubscribePeer(after string) *Subscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &Subscription{hub: h, peer: true, seen: h.n}
	missed, ok := h.missed(s, after)
	s.events = make(chan Event, hubRing+1) // a turn may have thousands of events
	if !ok {
		s.events <- Event{Type: EventReset}
	}
	for _, e := range missed {
		s.events <- e
	}
	h.peers[s] = struct{}{}
	return s
}

// PublishFrom tells of what happened at another controller, which has told us.
// Its ids mean nothing here; the events are numbered anew.
func (h *Hub) PublishFrom(events ...PeerEvent) {
	list := make([]Event, len(events))
	for i, e := range events {
		list[i] = Event{Type: e.Type, Task: e.Task, Agent: e.Agent, State: e.State, Outcome: e.Outcome, foreign: true}
	}
	h.Publish(list...)
}

// Missed says that events of another controller were missed, or may have been:
// everybody who follows is told to read everything again, also those who come
// back later.
func (h *Hub) Missed() { h.Publish(Event{Type: EventReset, foreign: true}) }

// deliverToAll sends an event to every reader of this controller.
func (h *Hub) deliverToAll(e Event) {
	for _, subs := range h.topics {
		for s := range subs {
			h.send(s, e)
		}
	}
	for _, subs := range h.tasks {
		for s := range subs {
			h.send(s, e)
		}
	}
	for _, subs := range h.agents {
		for s := range subs {
			h.send(s, e)
		}
	}
}
