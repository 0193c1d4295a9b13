package handlers

import (
	"encoding/hex"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"uuid"

	"github.com/go-chi/chi/v5"

	"headgate/internal/fault"
	"headgate/internal/fleet"
)

// AgentBody is an agent with its connection.
type AgentBody struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Addresses  []string          `json:"addresses"`
	Labels     map[string]string `json:"labels"`
	Status     fleet.Status      `json:"status" enums:"enrolling,active,quarantined,removed"`
	StatusWhy  *string           `json:"status_why"`
	PausedAt   *time.Time        `json:"paused_at"`
	PausedBy   *string           `json:"paused_by"`
	Connection ConnectionBody    `json:"connection"`
	Hostname   *string           `json:"hostname"`
	OS         *string           `json:"os"`
	Version    *string           `json:"version"`
	Facts      json.RawMessage   `json:"facts"`
	FactsAt    *time.Time        `json:"facts_at"`
	Identity   IdentityBody      `json:"identity"`
	PairedAt   *time.Time        `json:"paired_at"`
	PairedBy   *string           `json:"paired_by"`
	Revision   int64             `json:"revision"`
} //	@name	Agent

// ConnectionBody says how the connection to an agent stands.
type ConnectionBody struct {
	Health      fleet.Health `json:"health" enums:"connecting,connected,unreachable,quarantined,elsewhere"`
	Since       *time.Time   `json:"since"`
	Address     *string      `json:"address"`
	Cause       *string      `json:"cause"`
	Sentence    *string      `json:"sentence"`
	Failures    int          `json:"failures"`
	NextTryAt   *time.Time   `json:"next_try_at"`
	RTTMS       *float64     `json:"rtt_ms"`
	ClockSkewMS *float64     `json:"clock_skew_ms"` // how far the agent's clock is before the controller's; null: not known
	LastHeardAt *time.Time   `json:"last_heard_at"`
} //	@name	Connection

// IdentityBody is the key that an agent is known by.
type IdentityBody struct {
	SPKISHA256       string     `json:"spki_sha256"`
	CertSerial       *string    `json:"certificate_serial"`
	CertificateEndAt *time.Time `json:"certificate_expires_at"`
	LedgerID         *string    `json:"ledger_id"`
} //	@name	Identity

// AgentPage is a list of agents.
type AgentPage struct {
	Items      []AgentBody `json:"items"`
	NextCursor *string     `json:"next_cursor"`
} //	@name	AgentPage

// ChangeAgentBody is a partial change; what is missing or null stays.
type ChangeAgentBody struct {
	Name      *string            `json:"name"`
	Addresses *[]string          `json:"addresses"`
	Labels    *map[string]string `json:"labels"`
	Paused    *bool              `json:"paused"`
} //	@name	AgentChange

// PingBody is the answer of a ping.
type PingBody struct {
	RTTMS   float64   `json:"rtt_ms"`   // of this round trip
	Version string    `json:"version"`  // of the agent's program
	ClockAt time.Time `json:"clock_at"` // the agent's clock
	Running *string   `json:"running"`  // the task in its slot
} //	@name	Ping

func pingBody(p *fleet.Pong) PingBody {
	b := PingBody{RTTMS: milliseconds(p.RTT), Version: p.Version, ClockAt: p.Clock.UTC().Truncate(time.Microsecond)}
	if p.Running != nil {
		b.Running = textOrNil(p.Running.ID.String())
	}
	return b
}

func agentBody(v *fleet.View) AgentBody {
	return AgentBody{
		ID: v.ID.String(), Name: v.Name, Addresses: notNil(v.Addresses), Labels: v.Labels,
		Status: v.Status, StatusWhy: textOrNil(v.StatusWhy), PausedAt: timeOrNil(v.PausedAt), PausedBy: textOrNil(v.PausedBy),
		Connection: connectionBody(&v.Live),
		Hostname:   textOrNil(v.Hostname), OS: textOrNil(v.OS), Version: textOrNil(v.Version), Facts: rawOrNull(v.Facts), FactsAt: timeOrNil(v.FactsAt),
		Identity: IdentityBody{
			SPKISHA256: hex.EncodeToString(v.SPKI[:]), CertSerial: textOrNil(v.CertSerial),
			CertificateEndAt: timeOrNil(v.CertExpires), LedgerID: uuidOrNil(v.LedgerID),
		},
		PairedAt: timeOrNil(v.PairedAt), PairedBy: textOrNil(v.PairedBy), Revision: v.Revision,
	}
}

func connectionBody(l *fleet.Live) ConnectionBody {
	b := ConnectionBody{
		Health: l.Health, Since: timeOrNil(l.Since), Address: textOrNil(l.Address), Cause: textOrNil(l.Cause), Sentence: textOrNil(l.Sentence),
		Failures: l.Failures, NextTryAt: timeOrNil(l.NextTry), LastHeardAt: timeOrNil(l.LastHeard),
	}
	if l.RTT > 0 {
		ms := milliseconds(l.RTT)
		b.RTTMS = &ms
	}
	if l.ClockSkew != nil {
		ms := milliseconds(*l.ClockSkew)
		b.ClockSkewMS = &ms
	}
	return b
}

// listAgents gives a page of agents.
//
//	@Summary		List agents
//	@Description	By name. Without a filter all that are not removed.
//	@ID				listAgents
//	@Tags			agents
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			health	query		[]string	false	"how the connection stands"	Enums(connecting,connected,unreachable,quarantined,elsewhere)	collectionFormat(csv)
//	@Param			q		query		string		false	"beginning of a name, an id or an address"
//	@Param			label.*	query		string		false	"value of a label, for example label.env=prod"
//	@Param			limit	query		int			false	"page size; larger ones are cut to 500"	minimum(1)	default(50)
//	@Param			cursor	query		string		false	"next_cursor of the page before"
//	@Success		200		{object}	AgentPage
//	@Header			200		{string}	Link	"the next page, rel=next"
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem
//	@Router			/api/v1/agents [get]
func (s *server) listAgents(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	f := fleet.Filter{Query: q.Get("q"), Labels: labels(q)}
	var err error
	if f.After, err = readCursor(q); err != nil {
		return err
	}
	if f.Limit, err = limitOf(q); err != nil {
		return err
	}
	f.Health, err = oneOf(q, "health", fleet.HealthConnecting, fleet.HealthConnected, fleet.HealthUnreachable, fleet.HealthQuarantined, fleet.HealthElsewhere)
	if err != nil {
		return err
	}
	views, err := s.cfg.Fleet.List(f)
	if err != nil {
		return err
	}
	page := AgentPage{Items: make([]AgentBody, len(views))}
	for i := range views {
		page.Items[i] = agentBody(&views[i])
	}
	if len(views) == f.Limit {
		cursor := makeCursor(q, fleet.Cursor(views[len(views)-1]))
		page.NextCursor = &cursor
		setNext(w, r, q, cursor)
	}
	return s.writeJSON(w, http.StatusOK, page)
}

// getAgent gives one agent.
//
//	@Summary	Read an agent
//	@ID			getAgent
//	@Tags		agents
//	@Produce	json
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Param		id	path		string	true	"id or unique name of the agent"
//	@Success	200	{object}	AgentBody
//	@Header		200	{string}	ETag	"revision, for If-Match"
//	@Failure	401	{object}	Problem
//	@Failure	403	{object}	Problem
//	@Failure	404	{object}	Problem
//	@Failure	409	{object}	Problem	"several agents have this name"
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Failure	503	{object}	Problem
//	@Router		/api/v1/agents/{id} [get]
func (s *server) getAgent(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	return s.writeAgent(w, http.StatusOK, v)
}

// changeAgent changes what an operator may change.
//
//	@Summary		Change an agent
//	@Description	Fields that are missing stay. Labels and addresses are replaced as a whole. A paused agent is given no new task; the one that runs goes on.
//	@ID				changeAgent
//	@Tags			agents
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id			path		string			true	"id or unique name of the agent"
//	@Param			If-Match	header		string			false	"ETag of the version that shall be changed"
//	@Param			body		body		ChangeAgentBody	true	"the change"
//	@Success		200			{object}	AgentBody
//	@Header			200			{string}	ETag	"revision, for If-Match"
//	@Failure		400			{object}	Problem
//	@Failure		401			{object}	Problem
//	@Failure		403			{object}	Problem
//	@Failure		404			{object}	Problem
//	@Failure		409			{object}	Problem
//	@Failure		412			{object}	Problem	"changed by somebody else"
//	@Failure		413			{object}	Problem
//	@Failure		415			{object}	Problem
//	@Failure		421			{object}	Problem
//	@Failure		422			{object}	Problem
//	@Failure		429			{object}	Problem
//	@Failure		503			{object}	Problem
//	@Router			/api/v1/agents/{id} [patch]
func (s *server) changeAgent(w http.ResponseWriter, r *http.Request) error {
	var body ChangeAgentBody
	if err := s.decode(r, &body); err != nil {
		return err
	}
	if err := body.check(); err != nil {
		return err
	}
	revision, err := ifMatch(r)
	if err != nil {
		return err
	}
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	change := fleet.Change{Name: body.Name, Addresses: body.Addresses, Labels: body.Labels, Paused: body.Paused, Revision: revision}
	ctx, cancel := writeContext(r)
	defer cancel()
	changed, err := s.cfg.Fleet.Update(ctx, v.ID, change, principal(r).Actor())
	if err != nil {
		return err
	}
	return s.writeAgent(w, http.StatusOK, &changed)
}

func (b *ChangeAgentBody) check() error {
	var wrong []fault.Field
	note := func(field, detail string) { wrong = append(wrong, fault.Field{Pointer: "/" + field, Detail: detail}) }
	if b.Name != nil {
		checkName(note, "name", *b.Name)
	}
	if b.Labels != nil {
		for k, v := range *b.Labels {
			if k == "" || strings.ContainsRune(k+v, 0) {
				note("labels", "holds an empty name or a NUL character")
			}
		}
	}
	if wrong != nil {
		return invalidFields(wrong)
	}
	return nil
}

// removeAgent ends the membership of an agent.
//
//	@Summary		Remove an agent
//	@Description	It is disconnected at once and its certificate is refused from then on. Its tasks that have not started end with outcome cancelled; its history stays.
//	@ID				removeAgent
//	@Tags			agents
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id			path	string	true	"id or unique name of the agent"
//	@Param			If-Match	header	string	false	"ETag of the version that shall be removed"
//	@Success		204
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		409	{object}	Problem
//	@Failure		412	{object}	Problem	"changed by somebody else"
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem
//	@Router			/api/v1/agents/{id} [delete]
func (s *server) removeAgent(w http.ResponseWriter, r *http.Request) error {
	revision, err := ifMatch(r)
	if err != nil {
		return err
	}
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	if revision != 0 && revision != v.Revision {
		return fault.New(fault.Precondition, "revision_changed", "The agent was changed since that version was read.").
			WithHint("Read it again.")
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	if err := s.cfg.Fleet.Remove(ctx, v.ID, principal(r).Actor()); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// approveAgent ends a quarantine.
//
//	@Summary		Approve a quarantined agent
//	@Description	Says that the agent may go on as it is now, with the ledger that it has now. Tasks that its lost ledger would have known of end with outcome unknown.
//	@ID				approveAgent
//	@Tags			agents
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id	path		string	true	"id or unique name of the agent"
//	@Success		200	{object}	AgentBody
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		409	{object}	Problem	"not quarantined"
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem
//	@Router			/api/v1/agents/{id}/approve [post]
func (s *server) approveAgent(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	approved, err := s.cfg.Fleet.Approve(ctx, v.ID, principal(r).Actor())
	if err != nil {
		return err
	}
	return s.writeAgent(w, http.StatusOK, &approved)
}

// pingAgent measures a round trip.
//
//	@Summary		Ping an agent
//	@Description	A round trip to the agent beside its task; it waits for no queue.
//	@ID				pingAgent
//	@Tags			agents
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id	path		string	true	"id or unique name of the agent"
//	@Success		200	{object}	PingBody
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		409	{object}	Problem
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem	"the agent does not answer"
//	@Router			/api/v1/agents/{id}/ping [post]
func (s *server) pingAgent(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	pong, err := s.cfg.Fleet.Ping(r.Context(), v.ID)
	if err != nil {
		return err
	}
	return s.writeJSON(w, http.StatusOK, pingBody(&pong))
}

func (s *server) writeAgent(w http.ResponseWriter, status int, v *fleet.View) error {
	w.Header().Set("ETag", agentETag(v.Revision))
	return s.writeJSON(w, status, agentBody(v))
}

func agentETag(revision int64) string { return `"r` + strconv.FormatInt(revision, 10) + `"` }

// ifMatch reads the revision of an If-Match header; 0 means whatever it is.
func ifMatch(r *http.Request) (int64, error) {
	text := r.Header.Get("If-Match")
	if text == "" || text == "*" {
		return 0, nil
	}
	inner, ok := strings.CutPrefix(text, `"r`)
	inner, closed := strings.CutSuffix(inner, `"`)
	n, err := strconv.ParseInt(inner, 10, 64)
	if !ok || !closed || err != nil || n < 1 {
		return 0, fault.New(fault.Precondition, "revision_changed", "The If-Match header holds no version of this agent.").
			WithHint(`Send the ETag that the agent was read with, such as "r3".`)
	}
	return n, nil
}

// pathAgent finds the agent of the path, by id or unique name. In a path an
// unknown one is 404.
func (s *server) pathAgent(r *http.Request) (*fleet.View, error) {
	ref := chi.URLParam(r, "id")
	if r.URL.RawPath != "" { // the router then matches, and gives, escaped text
		plain, err := url.PathUnescape(ref)
		if err != nil {
			return nil, noSuchPath(r)
		}
		ref = plain
	}
	a, err := s.cfg.Fleet.Lookup(ref)
	if fault.CodeOf(err) == fleet.CodeUnknownAgent {
		return nil, notFoundInPath(err)
	}
	if err != nil {
		return nil, err
	}
	v, err := s.cfg.Fleet.Get(a.ID)
	if err != nil {
		return nil, err
	}
	return &v, nil
}

// notFoundInPath turns "no such agent" from a wrong value into a wrong path.
func notFoundInPath(err error) error {
	f := *meaning(err)
	f.Kind, f.Fields = fault.NotFound, nil
	return &f
}

func pathUUID(r *http.Request, code, what string) (uuid.UUID, error) {
	id, err := uuid.Parse(chi.URLParam(r, "id"))
	if err != nil {
		return uuid.Nil(), fault.Newf(fault.NotFound, code, "There is no %s %q; ids are UUIDs.", what, clip(chi.URLParam(r, "id")))
	}
	return id, nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func textOrNil(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

func uuidOrNil(id uuid.UUID) *string {
	if id == uuid.Nil() {
		return nil
	}
	return textOrNil(id.String())
}

func notNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func rawOrNull(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return raw
}
