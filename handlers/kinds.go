package handlers

import (
	"encoding/json"
	"net/http"

	"headgate/internal/fleet"
	"headgate/internal/kinds"
)

// KindBody describes a kind of task.
type KindBody struct {
	Name       string          `json:"name"`
	Title      string          `json:"title"`
	Summary    string          `json:"summary"`
	Delivery   string          `json:"delivery" enums:"once,repeatable"`
	Timeout    string          `json:"timeout"`
	MaxTimeout string          `json:"max_timeout"`
	Streams    bool            `json:"streams"`
	Supersedes bool            `json:"supersedes"` // a newer task replaces those like it that have not started
	Schema     json.RawMessage `json:"schema"`
} //	@name	Kind

// KindPage is a list of kinds.
type KindPage struct {
	Items      []KindBody `json:"items"`
	NextCursor *string    `json:"next_cursor"`
} //	@name	KindPage

// AgentKindBody is a kind that an agent's policy allows.
type AgentKindBody struct {
	KindBody
	Programs []ProgramBody `json:"programs"`
} //	@name	AgentKind

// AgentKindPage is a list of kinds of an agent.
type AgentKindPage struct {
	Items      []AgentKindBody `json:"items"`
	NextCursor *string         `json:"next_cursor"`
} //	@name	AgentKindPage

// ProgramBody is a program that an agent's policy allows cmd.run to start.
type ProgramBody struct {
	Name         string          `json:"name"`
	Description  string          `json:"description"`
	ParamsSchema json.RawMessage `json:"params_schema"`
} //	@name	Program

func kindBody(k *kinds.Kind) KindBody {
	return KindBody{
		Name: k.Name, Title: k.Title, Summary: k.Summary, Delivery: string(k.Delivery), Timeout: durationText(k.Timeout),
		MaxTimeout: durationText(k.MaxTimeout), Streams: k.Streams, Supersedes: k.Supersedes, Schema: rawOrNull(k.Schema),
	}
}

// listKinds gives every kind that this controller knows.
//
//	@Summary	List the kinds of tasks
//	@ID			listKinds
//	@Tags		kinds
//	@Produce	json
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Success	200	{object}	KindPage
//	@Failure	400	{object}	Problem
//	@Failure	401	{object}	Problem
//	@Failure	403	{object}	Problem
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Router		/api/v1/kinds [get]
func (s *server) listKinds(w http.ResponseWriter, _ *http.Request) error {
	page := KindPage{Items: []KindBody{}}
	for _, k := range s.cfg.Kinds.All() {
		page.Items = append(page.Items, kindBody(k))
	}
	return s.writeJSON(w, http.StatusOK, page)
}

// agentKinds gives what one agent allows.
//
//	@Summary		List the kinds that an agent allows
//	@Description	As the agent said when it connected last; empty when it has not been heard of yet. The agent's own policy decides, never the controller.
//	@ID				agentKinds
//	@Tags			kinds
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id	path		string	true	"id or unique name of the agent"
//	@Success		200	{object}	AgentKindPage
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		409	{object}	Problem
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem
//	@Router			/api/v1/agents/{id}/kinds [get]
func (s *server) agentKinds(w http.ResponseWriter, r *http.Request) error {
	v, err := s.pathAgent(r)
	if err != nil {
		return err
	}
	page := AgentKindPage{Items: []AgentKindBody{}}
	for _, offer := range v.Live.Kinds {
		page.Items = append(page.Items, s.agentKindBody(offer))
	}
	return s.writeJSON(w, http.StatusOK, page)
}

// agentKindBody joins what the agent allows with what we know of the kind; of
// a kind that only the agent knows there is no more than its name.
func (s *server) agentKindBody(offer fleet.KindOffer) AgentKindBody {
	b := AgentKindBody{KindBody: KindBody{Name: offer.Name, Schema: rawOrNull(nil)}, Programs: []ProgramBody{}}
	if k, err := s.cfg.Kinds.Lookup(offer.Name); err == nil {
		b.KindBody = kindBody(k)
	}
	for _, p := range offer.Programs {
		b.Programs = append(b.Programs, ProgramBody{Name: p.Name, Description: p.Description, ParamsSchema: rawOrNull(p.ParamsSchema)})
	}
	return b
}
