package handlers

import (
	"context"
	"encoding/json/v2"
	"net/http"
	"strconv"
	"time"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/tasks"
)

// Times of event streams.
const (
	DefaultHeartbeat = 15 * time.Second // below the idle limits of common proxies
	recheckEvery     = 4 * time.Second  // an ended session loses its streams within 5 s
	eventWriteTime   = 10 * time.Second // for one write; a reader that takes longer is gone
	retryMS          = 2000             // what a browser waits before it comes back
	maxTopics        = 64               // of one stream
)

// EventBody is the data of an event: what changed. Whoever cares reads the
// object anew.
type EventBody struct {
	Type    string `json:"type" enums:"task.created,task.started,task.requeued,task.cancelling,task.output,task.completed,task.late_result,agent.changed,controller.changed,reset"`
	ID      string `json:"id,omitempty"`      // of the task
	Agent   string `json:"agent,omitempty"`   // id of the agent
	State   string `json:"state,omitempty"`   // of the task; of an agent its health
	Outcome string `json:"outcome,omitempty"` // of a completed task
} //	@name	Event

// events streams what changes.
//
//	@Summary		Follow what changes
//	@Description	Server-sent events; the schema is that of each event's data. The stream begins with the event hello. After a lost connection send the last id that was seen as Last-Event-ID: the stream goes on without a gap, or begins with the event reset, which means: read everything again. A comment every 15 s keeps the connection open. The event restart, with a retry time, comes before the controller stops.
//	@ID				events
//	@Tags			events
//	@Produce		text/event-stream
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			topics			query		[]string	false	"tasks, task:ID, agents, agent:ID, controller; all three wide ones if missing"	collectionFormat(csv)
//	@Param			last_event_id	query		string		false	"as the header, for clients that cannot send it"
//	@Param			Last-Event-ID	header		string		false	"continue after this event"
//	@Success		200				{object}	EventBody	"stream of events"
//	@Failure		400				{object}	Problem
//	@Failure		401				{object}	Problem
//	@Failure		403				{object}	Problem
//	@Failure		421				{object}	Problem
//	@Failure		429				{object}	Problem	"too many streams"
//	@Failure		503				{object}	Problem
//	@Router			/api/v1/events [get]
func (s *server) events(w http.ResponseWriter, r *http.Request) error {
	p := principal(r)
	leave, err := s.streams.enter(p.Kind + p.ID.String())
	if err != nil {
		return err
	}
	defer leave()
	sub, hello, err := s.subscribe(r)
	if err != nil {
		return err
	}
	defer sub.Close()
	farewell, gone := s.cfg.Farewell.enter()
	defer gone()
	s.metrics.streams.Inc()
	defer s.metrics.streams.Dec()
	st := newEventStream(w)
	if err := st.begin(hello, s.cfg.Version.Version); err != nil {
		return nil //nolint:nilerr // the client is gone; there is nobody to tell
	}
	s.follow(r, st, sub, farewell)
	return nil
}

// subscribe opens the subscription. A new stream begins at the newest event
// and is told its id, so that it can be resumed before anything happened.
func (s *server) subscribe(r *http.Request) (sub *tasks.Subscription, hello string, err error) {
	q := r.URL.Query()
	last := r.Header.Get("Last-Event-ID")
	if last == "" {
		last = q.Get("last_event_id")
	}
	if last == "" {
		last = s.cfg.Hub.LastEventID()
		hello = last
	}
	topics := list(q, "topics")
	if len(topics) > maxTopics {
		return nil, "", badParameter("topics", "names more than "+strconv.Itoa(maxTopics)+" topics", "Use the wide ones: tasks, agents, controller.")
	}
	sub, err = s.cfg.Hub.Subscribe(topics, last)
	return sub, hello, err
}

// follow passes events on until the client or its right is gone, or the
// farewell comes.
func (s *server) follow(r *http.Request, st *eventStream, sub *tasks.Subscription, farewell <-chan struct{}) {
	beat := time.NewTicker(s.cfg.Heartbeat)
	defer beat.Stop()
	recheck := time.NewTicker(recheckEvery)
	defer recheck.Stop()
	for {
		var err error
		select {
		case <-r.Context().Done():
			return
		case <-farewell:
			_ = st.restart() // the client may be gone already
			return
		case <-beat.C:
			err = st.comment("heartbeat")
		case <-recheck.C:
			if !s.stillAllowed(r) {
				return
			}
		case e, ok := <-sub.Events():
			if !ok {
				return // it lagged and has been told so
			}
			err = st.events(e, sub.Events())
		}
		if err != nil {
			return
		}
	}
}

// stillAllowed asks again who the caller is: a revoked token or an ended
// session must not go on reading. A database that is away ends nothing.
func (s *server) stillAllowed(r *http.Request) bool {
	p, err := s.cfg.Auth.Authenticate(r)
	if err != nil {
		return !fault.Is(err, fault.Unauthenticated)
	}
	return s.cfg.Auth.Check(auth.WithPrincipal(context.WithoutCancel(r.Context()), p), auth.ReadTasks) == nil
}

// eventStream writes server-sent events.
type eventStream struct {
	w   http.ResponseWriter
	rc  *http.ResponseController
	buf []byte
}

func newEventStream(w http.ResponseWriter) *eventStream {
	return &eventStream{w: w, rc: http.NewResponseController(w)}
}

func (st *eventStream) begin(id, version string) error {
	h := st.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store, no-transform")
	h.Set("X-Accel-Buffering", "no") // a proxy must not collect
	_ = st.rc.SetReadDeadline(time.Time{})
	st.w.WriteHeader(http.StatusOK)
	st.buf = append(st.buf, "retry: "+strconv.Itoa(retryMS)+"\n"...)
	if id != "" {
		st.buf = append(st.buf, "id: "+id+"\n"...)
	}
	st.buf = append(st.buf, `event: hello`+"\n"+`data: {"version":`...)
	st.buf = append(appendString(st.buf, version), "}\n\n"...)
	return st.flush()
}

func (st *eventStream) comment(text string) error {
	st.buf = append(st.buf, ": "+text+"\n\n"...)
	return st.flush()
}

// events writes an event and those that have arrived since in one go.
func (st *eventStream) events(e tasks.Event, more <-chan tasks.Event) error {
	for {
		if err := st.add(e); err != nil {
			return err
		}
		select {
		case next, ok := <-more:
			if ok {
				e = next
				continue
			}
		default:
		}
		return st.flush()
	}
}

func (st *eventStream) add(e tasks.Event) error {
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if e.ID != "" {
		st.buf = append(st.buf, "id: "+e.ID+"\n"...)
	}
	st.buf = append(st.buf, "event: "+e.Type+"\ndata: "...)
	st.buf = append(append(st.buf, data...), "\n\n"...)
	return nil
}

// restart asks the client to come back after a while of its own.
func (st *eventStream) restart() error {
	retry := strconv.FormatInt(randomReturn().Milliseconds(), 10)
	st.buf = append(st.buf, "retry: "+retry+"\nevent: restart\ndata: {}\n\n"...)
	return st.flush()
}

func (st *eventStream) flush() error {
	_ = st.rc.SetWriteDeadline(time.Now().Add(eventWriteTime)) // not there in tests
	_, err := st.w.Write(st.buf)
	st.buf = st.buf[:0]
	if err != nil {
		return err
	}
	return st.rc.Flush()
}
