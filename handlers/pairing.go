package handlers

import (
	"net/http"
	"time"

	"headgate/internal/fault"
)

// PairBody says where a waiting agent listens and the token that it was given.
type PairBody struct {
	Address string `json:"address" example:"192.0.2.10:7442"`
	Token   string `json:"token"`
} //	@name	PairRequest

// EnrolmentTokenBody asks for a token for new agents.
type EnrolmentTokenBody struct {
	ExpiresIn string `json:"expires_in" example:"1h"`
	MaxUses   int    `json:"max_uses" example:"1" minimum:"1"`
} //	@name	NewEnrolmentToken

// MadeEnrolmentTokenBody is a new enrolment token; it is shown once.
type MadeEnrolmentTokenBody struct {
	Token     string    `json:"token"`
	ExpiresAt time.Time `json:"expires_at"`
	MaxUses   int       `json:"max_uses"`
} //	@name	EnrolmentToken

// pairAgent enrols a waiting agent.
//
//	@Summary		Pair with an agent
//	@Description	The controller dials the agent, which was started with the same enrolment token. Both prove that they know it, bound to the connection, without sending it; then the agent gets its certificate.
//	@ID				pairAgent
//	@Tags			agents
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			body	body		PairBody	true	"address and token"
//	@Success		201		{object}	AgentBody
//	@Header			201		{string}	Location	"path of the agent"
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		404		{object}	Problem	"unknown enrolment token"
//	@Failure		409		{object}	Problem
//	@Failure		413		{object}	Problem
//	@Failure		415		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		422		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem	"the agent does not answer"
//	@Router			/api/v1/agents/pair [post]
func (s *server) pairAgent(w http.ResponseWriter, r *http.Request) error {
	var body PairBody
	if err := s.decode(r, &body); err != nil {
		return err
	}
	var wrong []fault.Field
	note := func(field, detail string) { wrong = append(wrong, fault.Field{Pointer: "/" + field, Detail: detail}) }
	checkName(note, "address", body.Address)
	checkName(note, "token", body.Token)
	if wrong != nil {
		return invalidFields(wrong)
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	v, err := s.cfg.Fleet.Pair(ctx, principal(r).Actor(), body.Address, body.Token)
	if err != nil {
		return err
	}
	w.Header().Set("Location", at(r, base+"/agents/"+v.ID.String()))
	return s.writeAgent(w, http.StatusCreated, &v)
}

// newEnrolmentToken makes a token for new agents.
//
//	@Summary		Make an enrolment token
//	@Description	Start an agent with it (headgate-agent --enrol-token-file FILE), then call /agents/pair. It is in this answer and nowhere else.
//	@ID				newEnrolmentToken
//	@Tags			agents
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			body	body		EnrolmentTokenBody	true	"limits; {} for the usual ones"
//	@Success		201		{object}	MadeEnrolmentTokenBody
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		413		{object}	Problem
//	@Failure		415		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		422		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem
//	@Router			/api/v1/enrolment-tokens [post]
func (s *server) newEnrolmentToken(w http.ResponseWriter, r *http.Request) error {
	var body EnrolmentTokenBody
	if err := s.decode(r, &body); err != nil {
		return err
	}
	var term time.Duration
	if body.ExpiresIn != "" {
		d, err := time.ParseDuration(body.ExpiresIn)
		if err != nil || d <= 0 {
			return invalidFields([]fault.Field{{Pointer: "/expires_in", Detail: "must be a positive duration such as 1h"}})
		}
		term = d
	}
	if body.MaxUses < 0 {
		return invalidFields([]fault.Field{{Pointer: "/max_uses", Detail: "must be a whole number from 1"}})
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	text, expires, err := s.cfg.Fleet.CreateEnrolmentToken(ctx, principal(r).Actor(), term, body.MaxUses)
	if err != nil {
		return err
	}
	made := MadeEnrolmentTokenBody{Token: text, ExpiresAt: expires.UTC().Truncate(time.Microsecond), MaxUses: max(body.MaxUses, 1)}
	return s.writeJSON(w, http.StatusCreated, made)
}
