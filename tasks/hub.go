package tasks

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"uuid"

	"headgate/internal/fault"
)

// Types of events. Other packages add their own about agents and the
// controller; readers ignore what they do not know.
const (
	EventCreated    = "task.created"
	EventStarted    = "task.started"
	EventRequeued   = "task.requeued"
	EventCancelling = "task.cancelling"
	EventOutput     = "task.output" // on task:<id> alone
	EventCompleted  = "task.completed"
	EventLate       = "task.late_result" // an answer came after the completion: kept beside, it changes nothing
	EventReset      = "reset"            // events were missed: read everything again

	EventAgent      = "agent.changed"
	EventController = "controller.changed"
)

// Topics of subscriptions; TopicTask and TopicAgent give those of one object.
const (
	TopicTasks      = "tasks"
	TopicAgents     = "agents"
	TopicController = "controller"
)

// TopicTask names the topic of one task.
func TopicTask(id ID) string { return "task:" + id.String() }

// TopicAgent names the topic of one agent; it carries its tasks' events too.
func TopicAgent(id uuid.UUID) string { return "agent:" + id.String() }

// Sizes of the Hub.
const (
	hubRing   = 4096 // recent events kept for readers that come back
	hubBuffer = 64   // events that a reader may lag behind before it is dropped
)

// Event says that something changed; whoever cares reads the object anew.
type Event struct {
	ID      string    // "<controller start>-<n>", set by Publish; empty in a reset
	Type    string    // one of the Event constants
	Task    ID        // 0 = not about a task
	Agent   uuid.UUID // Nil = not about an agent
	State   State     // of the task, or "" (agents: their health)
	Outcome Outcome

	end     *completion // for waiters alone: streams and the ring never hold it
	foreign bool        // of another controller
}

// completion is what the write loop knows of an end that is on disk: with it a
// task that was read before needs not be read again.
type completion struct {
	attempt     int
	startedAt   time.Time // zero = never started
	completedAt time.Time
	cancelledAt time.Time // when somebody asked for its end, zero = nobody
	cancelActor string
	ending      Ending
}

// waiter is somebody who waits for the end of one task. It is told once; nil
// means that the task is completed and must be read.
type waiter struct {
	told chan *completion
	id   ID   // 0 = its task is not on disk yet; guarded by Hub.mu
	left bool // guarded by Hub.mu
}

func newWaiter() *waiter { return &waiter{told: make(chan *completion, 1)} }

// MarshalJSON gives the small payload {type, id, agent, state, outcome}.
func (e Event) MarshalJSON() ([]byte, error) {
	p := struct {
		Type    string  `json:"type"`
		ID      string  `json:"id,omitempty"`
		Agent   string  `json:"agent,omitempty"`
		State   State   `json:"state,omitempty"`
		Outcome Outcome `json:"outcome,omitempty"`
	}{Type: e.Type, State: e.State, Outcome: e.Outcome}
	if e.Task != 0 {
		p.ID = e.Task.String()
	}
	if e.Agent != uuid.Nil() {
		p.Agent = e.Agent.String()
	}
	return json.Marshal(p)
}

// Hub tells event streams and waiters of what happened, always after the
// commit. It never waits for a reader: one that lags is dropped with a reset.
type Hub struct {
	mu      sync.Mutex
	start   string
	n       uint64 // number of the last event
	ring    [hubRing]Event
	topics  map[string]map[*Subscription]struct{} // tasks, agents, controller
	tasks   map[ID]map[*Subscription]struct{}
	agents  map[uuid.UUID]map[*Subscription]struct{}
	peers   map[*Subscription]struct{} // other controllers
	waiters map[ID][]*waiter
	waiting atomic.Int64 // how many are in waiters
}

// NewHub makes a Hub whose event ids no earlier Hub has used.
func NewHub() *Hub {
	return &Hub{
		start:  strconv.FormatInt(time.Now().UnixNano(), 36),
		topics: map[string]map[*Subscription]struct{}{}, tasks: map[ID]map[*Subscription]struct{}{},
		agents: map[uuid.UUID]map[*Subscription]struct{}{}, waiters: map[ID][]*waiter{}, peers: map[*Subscription]struct{}{},
	}
}

// Subscription is one reader's stream of events.
type Subscription struct {
	hub    *Hub
	events chan Event
	topics []string
	peer   bool   // another controller: all that happens here, on no topic
	seen   uint64 // number of the last event put into events
	lost   bool
}

// Events gives the stream. After an event of type reset it is closed, if the
// reader was too slow; the reset of a resumed stream is followed by more.
func (s *Subscription) Events() <-chan Event { return s.events }

// Close ends the subscription. It may be called more than once.
func (s *Subscription) Close() {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	s.hub.remove(s)
}

// Subscribe opens a stream for topics. lastEventID continues after an event
// seen before: without a gap, or with a reset first when that is impossible.
// An unknown topic is a fault (Malformed, unknown_topic).
func (h *Hub) Subscribe(topics []string, lastEventID string) (*Subscription, error) {
	if len(topics) == 0 {
		topics = []string{TopicTasks, TopicAgents, TopicController}
	}
	for _, t := range topics {
		if _, _, err := parseTopic(t); err != nil {
			return nil, err
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &Subscription{hub: h, topics: slices.Clone(topics), seen: h.n}
	missed, ok := h.missed(s, lastEventID)
	s.events = make(chan Event, max(hubBuffer, len(missed))+1) // one place for a last reset
	if !ok {
		s.events <- Event{Type: EventReset}
	}
	for _, e := range missed {
		s.events <- e
	}
	for _, t := range s.topics {
		h.add(s, t)
	}
	return s, nil
}

// missed gives what a returning reader has not seen; false when the Hub cannot
// know.
func (h *Hub) missed(s *Subscription, last string) ([]Event, bool) {
	if last == "" {
		return nil, true
	}
	start, num, ok := strings.Cut(last, "-")
	n, err := strconv.ParseUint(num, 10, 64)
	if !ok || err != nil || start != h.start || n > h.n || h.n-n > hubRing {
		return nil, false
	}
	var missed []Event
	for i := n + 1; i <= h.n; i++ {
		if e := h.ring[i%hubRing]; s.wants(e) {
			e.ID = h.id(i)
			missed = append(missed, e)
		}
	}
	return missed, true
}

// wants says whether an event is on one of the topics.
func (s *Subscription) wants(e Event) bool {
	if s.peer {
		return !e.foreign
	}
	if e.Type == EventReset {
		return true
	}
	for _, t := range s.topics {
		id, agent, _ := parseTopic(t)
		switch {
		case id != 0:
			if e.Task == id {
				return true
			}
		case agent != uuid.Nil():
			if e.Agent == agent && e.Type != EventOutput {
				return true
			}
		case t == topicOf(e):
			return true
		}
	}
	return false
}

// topicOf gives the wide topic of an event, "" for output.
func topicOf(e Event) string {
	switch {
	case e.Type == EventOutput:
		return ""
	case e.Task != 0:
		return TopicTasks
	case e.Agent != uuid.Nil():
		return TopicAgents
	}
	return TopicController
}

func parseTopic(t string) (ID, uuid.UUID, error) {
	switch t {
	case TopicTasks, TopicAgents, TopicController:
		return 0, uuid.Nil(), nil
	}
	if s, ok := strings.CutPrefix(t, "task:"); ok {
		if n, err := strconv.ParseInt(s, 10, 64); err == nil && n > 0 {
			return ID(n), uuid.Nil(), nil
		}
	}
	if s, ok := strings.CutPrefix(t, "agent:"); ok {
		if id, err := uuid.Parse(s); err == nil && id != uuid.Nil() {
			return 0, id, nil
		}
	}
	return 0, uuid.Nil(), fault.Newf(fault.Malformed, "unknown_topic", "There is no topic %.60q.", t).
		WithHint("Topics are tasks, task:<id>, agents, agent:<id> and controller.")
}

func (h *Hub) add(s *Subscription, topic string) {
	id, agent, _ := parseTopic(topic)
	switch {
	case id != 0:
		put(h.tasks, id, s)
	case agent != uuid.Nil():
		put(h.agents, agent, s)
	default:
		put(h.topics, topic, s)
	}
}

func put[K comparable](m map[K]map[*Subscription]struct{}, k K, s *Subscription) {
	if m[k] == nil {
		m[k] = map[*Subscription]struct{}{}
	}
	m[k][s] = struct{}{}
}

func drop[K comparable](m map[K]map[*Subscription]struct{}, k K, s *Subscription) {
	delete(m[k], s)
	if len(m[k]) == 0 {
		delete(m, k)
	}
}

// remove ends a subscription; the caller holds mu.
func (h *Hub) remove(s *Subscription) {
	if s.lost {
		return
	}
	s.lost = true
	delete(s.hub.peers, s)
	for _, t := range s.topics {
		id, agent, _ := parseTopic(t)
		switch {
		case id != 0:
			drop(h.tasks, id, s)
		case agent != uuid.Nil():
			drop(h.agents, agent, s)
		default:
			drop(h.topics, t, s)
		}
	}
	close(s.events)
}

// Publish tells of events in the order given. It numbers them and never waits.
func (h *Hub) Publish(events ...Event) {
	if len(events) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range events {
		end := e.end
		e.end = nil
		h.n++
		if h.listening() {
			e.ID = h.id(h.n)
		}
		h.ring[h.n%hubRing] = e
		h.deliver(e)
		if e.Type == EventCompleted {
			h.release(e.Task, end)
		}
	}
}

// release tells everybody who waits for a task; the caller holds mu.
func (h *Hub) release(id ID, end *completion) {
	ws, ok := h.waiters[id]
	if !ok {
		return
	}
	for _, w := range ws {
		w.told <- end // has room for the one end of its one task
	}
	delete(h.waiters, id)
	h.waiting.Add(-int64(len(ws)))
}

func (h *Hub) id(n uint64) string { return h.start + "-" + strconv.FormatUint(n, 10) }

// listening says whether anybody could see an id now. Ids of events that
// nobody has seen are made when they are.
func (h *Hub) listening() bool { return len(h.topics)+len(h.tasks)+len(h.agents)+len(h.peers) > 0 }

func (h *Hub) deliver(e Event) {
	if !e.foreign {
		for s := range h.peers {
			h.send(s, e)
		}
	} else if e.Type == EventReset {
		h.deliverToAll(e)
		return
	}
	if t := topicOf(e); t != "" {
		for s := range h.topics[t] {
			h.send(s, e)
		}
		if e.Agent != uuid.Nil() {
			for s := range h.agents[e.Agent] {
				h.send(s, e)
			}
		}
	}
	if e.Task == 0 {
		return
	}
	for s := range h.tasks[e.Task] {
		h.send(s, e)
	}
}

// send gives an event to a reader, once. A reader that lags gets a reset in
// the place that was kept for it, and is let go.
func (h *Hub) send(s *Subscription, e Event) {
	if s.seen == h.n {
		return // on two of its topics
	}
	s.seen = h.n
	if len(s.events) >= cap(s.events)-1 {
		s.events <- Event{Type: EventReset}
		h.remove(s)
		return
	}
	s.events <- e
}

// join lets a waiter wait for a task. One that joins before the commit of the
// end is told of it; whoever joins later must read the task afterwards.
func (h *Hub) join(w *waiter, id ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w.left {
		return
	}
	w.id = id
	h.waiters[id] = append(h.waiters[id], w)
	h.waiting.Add(1)
}

// leave takes a waiter back that has had enough.
func (h *Hub) leave(w *waiter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w.left = true
	ws := h.waiters[w.id]
	i := slices.Index(ws, w)
	if i < 0 {
		return
	}
	h.waiting.Add(-1)
	if len(ws) == 1 {
		delete(h.waiters, w.id)
		return
	}
	h.waiters[w.id] = slices.Delete(ws, i, i+1)
}

// awaited says whether anybody waits for any task. Asked after a commit, no is
// final for its tasks: who comes later reads what was committed.
func (h *Hub) awaited() bool { return h.waiting.Load() > 0 }

// LastEventID gives the id of the newest event, for a page that is rendered
// now and subscribes afterwards without a gap.
func (h *Hub) LastEventID() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.id(h.n)
}
