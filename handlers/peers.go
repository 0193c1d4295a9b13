package handlers

import (
	"encoding/json"
	"net/http"
	"time"
	"uuid"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/tasks"
)

// What controllers ask of each other over the controller port, each with the
// certificate of a controller. It is no part of the API: both ends are this
// program. A field that one of them does not know is passed over, so that two
// versions work together.
const (
	peerBase      = "/peer/v1"
	PeerTasks     = peerBase + "/tasks"   // store tasks
	PeerCancel    = peerBase + "/cancel"  // end a task
	PeerExplain   = peerBase + "/explain" // why tasks wait
	PeerPing      = peerBase + "/ping"    // ping an agent
	PeerEvents    = peerBase + "/events"  // follow what changes
	PeerAfter     = "after"               // query parameter of PeerEvents: the last event seen
	PeerHeartbeat = 5 * time.Second       // of PeerEvents
)

// maxPeerBody is the largest body of a peer, in bytes: tasks are passed on in
// parts of 4 MiB of arguments, which quoting may double.
const maxPeerBody = 16 << 20

// PeerTasksBody is what PeerTasks takes.
type PeerTasksBody struct {
	Tasks []tasks.PeerInsert `json:"tasks"`
}

// PeerTasksAnswer is what it gives.
type PeerTasksAnswer struct {
	Items []tasks.PeerStored `json:"items"`
}

// PeerCancelBody is what PeerCancel takes; it gives nothing.
type PeerCancelBody struct {
	ID    tasks.ID `json:"id"`
	Actor string   `json:"actor"`
}

// PeerExplainBody is what PeerExplain takes.
type PeerExplainBody struct {
	Tasks []tasks.PeerTask `json:"tasks"`
}

// PeerExplainAnswer is what it gives.
type PeerExplainAnswer struct {
	Items []*tasks.Waiting `json:"items"`
}

// PeerPingBody is what PeerPing takes.
type PeerPingBody struct {
	Agent uuid.UUID `json:"agent"`
}

// PeerPingAnswer is what it gives.
type PeerPingAnswer struct {
	Pong fleet.Pong `json:"pong"`
}

func (s *server) peerRoutes() []route {
	all := []route{
		{method: "POST", pattern: PeerTasks, handle: s.peerTasks, body: maxPeerBody},
		{method: "POST", pattern: PeerCancel, handle: s.peerCancel, body: maxSmallBody},
		{method: "POST", pattern: PeerExplain, handle: s.peerExplain, body: maxBody},
		{method: "POST", pattern: PeerPing, handle: s.peerPing, body: maxSmallBody},
		{method: "GET", pattern: PeerEvents, handle: s.peerEvents, query: []string{PeerAfter}, stream: true},
	}
	for i := range all {
		all[i].perm, all[i].controllerOnly, all[i].usesTasks, all[i].page = auth.CallPeer, true, true, true
	}
	return all
}

// peerBody reads the body of a peer.
func (s *server) peerBody(r *http.Request, into any) error {
	buf, err := s.readBody(r)
	if err != nil {
		return err
	}
	defer s.bodies.put(buf)
	if err := json.Unmarshal(buf.Bytes(), into); err != nil {
		return fault.Wrap(err, fault.Malformed, "malformed_json", "The other controller's request cannot be read.")
	}
	return nil
}

func (s *server) peerTasks(w http.ResponseWriter, r *http.Request) error {
	var body PeerTasksBody
	if err := s.peerBody(r, &body); err != nil {
		return err
	}
	items, err := s.cfg.Tasks.StoreForPeer(r.Context(), body.Tasks)
	if err != nil {
		return err
	}
	return s.writePeer(w, PeerTasksAnswer{Items: items})
}

func (s *server) peerCancel(w http.ResponseWriter, r *http.Request) error {
	var body PeerCancelBody
	if err := s.peerBody(r, &body); err != nil {
		return err
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	if err := s.cfg.Tasks.CancelForPeer(ctx, body.ID, body.Actor); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *server) peerExplain(w http.ResponseWriter, r *http.Request) error {
	var body PeerExplainBody
	if err := s.peerBody(r, &body); err != nil {
		return err
	}
	return s.writePeer(w, PeerExplainAnswer{Items: s.cfg.Tasks.ExplainForPeer(body.Tasks)})
}

func (s *server) peerPing(w http.ResponseWriter, r *http.Request) error {
	var body PeerPingBody
	if err := s.peerBody(r, &body); err != nil {
		return err
	}
	pong, err := s.cfg.Fleet.PingHere(r.Context(), body.Agent)
	if err != nil {
		return err
	}
	return s.writePeer(w, PeerPingAnswer{Pong: pong})
}

func (s *server) writePeer(w http.ResponseWriter, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	s.writeBody(w, http.StatusOK, body)
	return nil
}

// peerEvents streams what changes here, one JSON object a line, to a
// controller that tells its own readers and waiters of it. An empty line is a
// sign of life. The stream goes on behind the event that the other one saw
// last, or begins with a reset.
func (s *server) peerEvents(w http.ResponseWriter, r *http.Request) error {
	sub := s.cfg.Hub.SubscribePeer(r.URL.Query().Get(PeerAfter))
	defer sub.Close()
	farewell, gone := s.cfg.Farewell.enter()
	defer gone()
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // not there in tests
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	beat := time.NewTicker(PeerHeartbeat)
	defer beat.Stop()
	buf := []byte("\n")
	for {
		_ = rc.SetWriteDeadline(time.Now().Add(eventWriteTime))
		if _, err := w.Write(buf); err != nil {
			return nil //nolint:nilerr // the other controller is gone; there is nobody to tell
		}
		if err := rc.Flush(); err != nil {
			return nil //nolint:nilerr // likewise
		}
		buf = buf[:0]
		select {
		case <-r.Context().Done():
			return nil
		case <-farewell:
			return nil
		case <-beat.C:
			buf = append(buf, '\n')
		case e, ok := <-sub.Events():
			if !ok {
				return nil // it lagged; it comes back and is told to reset
			}
			buf = appendPeerEvents(buf, e, sub.Events())
		}
	}
}

// maxPeerWrite bounds what is written in one go, in bytes.
const maxPeerWrite = 64 << 10

// appendPeerEvents adds an event and those that have arrived since.
func appendPeerEvents(buf []byte, e tasks.Event, more <-chan tasks.Event) []byte {
	for {
		line, err := json.Marshal(tasks.PeerEventOf(e))
		if err == nil { // numbers and short texts: cannot fail
			buf = append(append(buf, line...), '\n')
		}
		if len(buf) > maxPeerWrite {
			return buf
		}
		select {
		case next, ok := <-more:
			if !ok {
				return buf
			}
			e = next
		default:
			return buf
		}
	}
}
