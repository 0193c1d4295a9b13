package handlers

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"headgate/tasks"
)

const (
	// outputPoll is how often a follower looks for itself: hints may be lost,
	// and those of other controllers tell of ends only.
	outputPoll = time.Second
	// outputPage is how many chunks of at most 64 KiB one look reads.
	outputPage = 8
)

// OutputEventBody is the data of an output event.
type OutputEventBody struct {
	Attempt int    `json:"attempt"`
	Seq     int    `json:"seq"`
	Stream  string `json:"stream" enums:"stdout,stderr"`
	Offset  int64  `json:"offset"` // of the first byte in its stream; more than the end of the chunk before means that bytes between are missing
	Bytes   []byte `json:"bytes"`  // in base64
} //	@name	OutputEvent

// OutputEndBody is the data of the event end.
type OutputEndBody struct {
	Outcome      string `json:"outcome"`
	PrintedBytes int64  `json:"printed_bytes"`
	MissingBytes int64  `json:"missing_bytes"` // of them those that are not kept
} //	@name	OutputEnd

// outputEvents streams what a task prints.
//
//	@Summary		Follow the output of a task
//	@Description	Server-sent events, from the beginning of the output. output brings a chunk, its id is its place: after a lost connection send the last one seen as Last-Event-ID, and the stream goes on behind it without a gap and without a repetition. reset means that a new attempt has begun and prints from its beginning. end is the last event, after the task is completed and everything that is kept was sent. A comment every 15 s keeps the connection open. It works at every controller.
//	@ID				taskOutputEvents
//	@Tags			tasks
//	@Produce		text/event-stream
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id				path		string	true	"id of the task"	example(1001)
//	@Param			stream			query		string	false	"only this one"	Enums(stdout,stderr)
//	@Param			last_event_id	query		string	false	"as the header, for clients that cannot send it"
//	@Param			Last-Event-ID	header		string	false	"continue after this event"
//	@Success		200				{object}	OutputEventBody	"stream of events"
//	@Failure		400				{object}	Problem
//	@Failure		401				{object}	Problem
//	@Failure		403				{object}	Problem
//	@Failure		404				{object}	Problem
//	@Failure		421				{object}	Problem
//	@Failure		429				{object}	Problem	"too many streams"
//	@Failure		503				{object}	Problem
//	@Router			/api/v1/tasks/{id}/output/events [get]
func (s *server) outputEvents(w http.ResponseWriter, r *http.Request) error {
	id, err := pathTask(r)
	if err != nil {
		return err
	}
	f := &outputFollower{s: s, id: id}
	if f.stream, err = oneStream(r); err != nil {
		return err
	}
	if f.attempt, f.next, err = outputPlace(r); err != nil {
		return err
	}
	if _, err := s.cfg.Tasks.Get(r.Context(), id); err != nil {
		return err
	}
	p := principal(r)
	leave, err := s.streams.enter(p.Kind + p.ID.String())
	if err != nil {
		return err
	}
	defer leave()
	sub, err := s.cfg.Hub.Subscribe([]string{tasks.TopicTask(id)}, s.cfg.Hub.LastEventID())
	if err != nil {
		return err
	}
	defer sub.Close()
	farewell, gone := s.cfg.Farewell.enter()
	defer gone()
	s.metrics.streams.Inc()
	defer s.metrics.streams.Dec()
	f.st = newEventStream(w)
	if err := f.st.begin("", s.cfg.Version.Version); err != nil {
		return nil //nolint:nilerr // the client is gone; there is nobody to tell
	}
	f.follow(r, sub.Events(), farewell)
	return nil
}

// outputPlace reads the place behind which a stream goes on.
func outputPlace(r *http.Request) (attempt, next int, err error) {
	last := r.Header.Get("Last-Event-ID")
	if last == "" {
		last = r.URL.Query().Get("last_event_id")
	}
	if last == "" {
		return 0, 0, nil
	}
	a, b, _ := strings.Cut(last, ".")
	attempt, err1 := strconv.Atoi(a)
	seq, err2 := strconv.Atoi(b)
	if err1 != nil || err2 != nil || attempt < 1 || seq < 0 {
		return 0, 0, badParameter("last_event_id", "is not the id of an output event", "Leave it out to begin at the beginning.")
	}
	return attempt, seq + 1, nil
}

// outputFollower sends one task's output as it comes.
type outputFollower struct {
	s       *server
	st      *eventStream
	id      tasks.ID
	stream  string
	attempt int // 0 = none has printed anything yet
	next    int // seq of the next chunk
}

// follow returns when the end was sent, or the client or its right is gone, or
// the farewell comes.
func (f *outputFollower) follow(r *http.Request, events <-chan tasks.Event, farewell <-chan struct{}) {
	beat := time.NewTicker(f.s.cfg.Heartbeat)
	defer beat.Stop()
	recheck := time.NewTicker(recheckEvery)
	defer recheck.Stop()
	poll := time.NewTicker(outputPoll)
	defer poll.Stop()
	look := true // at the task, not at the next chunks alone
	for {
		over, err := f.send(r.Context(), look)
		if over || err != nil {
			return
		}
		look = false
		select {
		case <-r.Context().Done():
			return
		case <-farewell:
			_ = f.st.restart() // the client may be gone already
			return
		case <-beat.C:
			err = f.st.comment("heartbeat")
		case <-recheck.C:
			if !f.s.stillAllowed(r) {
				return
			}
		case <-poll.C:
			look = true
		case e, ok := <-events:
			if !ok {
				events = nil // it lagged; the poll goes on
			}
			look = f.attempt == 0 || e.Type != tasks.EventOutput
		}
		if err != nil {
			return
		}
	}
}

// send brings the client up to date; over when the end was sent. Whether the
// task is completed is asked first: all of its output is then there. A database
// that is away is asked again.
func (f *outputFollower) send(ctx context.Context, look bool) (over bool, err error) {
	var t *tasks.Task
	var facts *tasks.OutputFacts
	if look {
		var failed error
		if t, failed = f.s.cfg.Tasks.Get(ctx, f.id); failed == nil {
			facts, failed = f.s.cfg.Tasks.OutputFacts(ctx, f.id)
		}
		if failed != nil {
			return false, nil //nolint:nilerr // the next poll asks again
		}
		if err := f.change(facts.Attempt); err != nil {
			return false, err
		}
	}
	for f.attempt > 0 {
		chunks, failed := f.s.cfg.Tasks.OutputPart(ctx, f.id, f.attempt, f.stream, f.next, outputPage)
		if failed != nil {
			return false, nil //nolint:nilerr // as above
		}
		if err := f.chunks(chunks); err != nil {
			return false, err
		}
		if len(chunks) < outputPage {
			break
		}
	}
	if t == nil || t.State != tasks.StateCompleted {
		return false, nil
	}
	return true, f.event("", "end", OutputEndBody{
		Outcome: string(t.Ending.Outcome), PrintedBytes: facts.Printed(f.stream, &t.Ending), MissingBytes: facts.Missing(f.stream, &t.Ending),
	})
}

// change goes over to a newer attempt.
func (f *outputFollower) change(newest int) error {
	if newest <= f.attempt {
		return nil
	}
	old := f.attempt
	f.attempt, f.next = newest, 0
	if old == 0 {
		return nil
	}
	return f.event("", "reset", struct {
		Attempt int `json:"attempt"`
	}{newest})
}

func (f *outputFollower) chunks(chunks []tasks.OutputChunk) error {
	for i := range chunks {
		c := &chunks[i]
		body := OutputEventBody{Attempt: c.Attempt, Seq: c.Seq, Stream: c.Stream, Offset: c.Offset, Bytes: c.Data}
		if err := f.event(fmt.Sprintf("%d.%d", c.Attempt, c.Seq), "output", body); err != nil {
			return err
		}
		f.next = c.Seq + 1
	}
	return nil
}

func (f *outputFollower) event(id, what string, body any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if id != "" {
		f.st.buf = append(f.st.buf, "id: "+id+"\n"...)
	}
	f.st.buf = append(f.st.buf, "event: "+what+"\ndata: "...)
	f.st.buf = append(append(f.st.buf, data...), "\n\n"...)
	return f.st.flush()
}
