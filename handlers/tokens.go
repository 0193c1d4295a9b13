package handlers

import (
	"net/http"
	"time"

	"headgate/internal/auth"
)

// NewTokenBody is what POST /tokens takes.
type NewTokenBody struct {
	Name      string     `json:"name" example:"nightly-report"`
	Role      auth.Role  `json:"role" enums:"viewer,operator,admin,metrics"`
	ExpiresAt *time.Time `json:"expires_at"`
} //	@name	NewToken

// TokenBody is an API token without its secret.
type TokenBody struct {
	ID         string     `json:"id"`
	Name       string     `json:"name"`
	Role       auth.Role  `json:"role"`
	CreatedAt  time.Time  `json:"created_at"`
	CreatedBy  string     `json:"created_by"`
	ExpiresAt  *time.Time `json:"expires_at"`
	LastUsedAt *time.Time `json:"last_used_at"`
	RevokedAt  *time.Time `json:"revoked_at"`
} //	@name	Token

// MadeTokenBody is a new API token with its secret, which is shown once.
type MadeTokenBody struct {
	Token  TokenBody `json:"token"`
	Secret string    `json:"secret"`
} //	@name	MadeToken

// TokenPage is a list of tokens.
type TokenPage struct {
	Items      []TokenBody `json:"items"`
	NextCursor *string     `json:"next_cursor"`
} //	@name	TokenPage

func tokenBody(t auth.Token) TokenBody {
	return TokenBody{
		ID: t.ID.String(), Name: t.Name, Role: t.Role, CreatedAt: t.CreatedAt.UTC().Truncate(time.Microsecond), CreatedBy: t.CreatedBy,
		ExpiresAt: timeOrNil(t.ExpiresAt), LastUsedAt: timeOrNil(t.LastUsedAt), RevokedAt: timeOrNil(t.RevokedAt),
	}
}

// listTokens lists all tokens, newest first.
//
//	@Summary	List API tokens
//	@ID			listTokens
//	@Tags		tokens
//	@Produce	json
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Success	200	{object}	TokenPage
//	@Failure	400	{object}	Problem
//	@Failure	401	{object}	Problem
//	@Failure	403	{object}	Problem
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Failure	503	{object}	Problem
//	@Router		/api/v1/tokens [get]
func (s *server) listTokens(w http.ResponseWriter, r *http.Request) error {
	all, err := s.cfg.Auth.Tokens(r.Context())
	if err != nil {
		return err
	}
	page := TokenPage{Items: make([]TokenBody, len(all))}
	for i, t := range all {
		page.Items[i] = tokenBody(t)
	}
	return s.writeJSON(w, http.StatusOK, page)
}

// newToken makes a token.
//
//	@Summary		Make an API token
//	@Description	The secret is in this answer and nowhere else. Nobody can give a role that holds more than their own.
//	@ID				newToken
//	@Tags			tokens
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			body	body		NewTokenBody	true	"name, role and expiry"
//	@Success		201		{object}	MadeTokenBody
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		413		{object}	Problem
//	@Failure		415		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		422		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem
//	@Router			/api/v1/tokens [post]
func (s *server) newToken(w http.ResponseWriter, r *http.Request) error {
	var body NewTokenBody
	if err := s.decode(r, &body); err != nil {
		return err
	}
	var expires time.Time
	if body.ExpiresAt != nil {
		expires = *body.ExpiresAt
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	t, secret, err := s.cfg.Auth.NewToken(ctx, principal(r), body.Name, body.Role, expires)
	if err != nil {
		return err
	}
	return s.writeJSON(w, http.StatusCreated, MadeTokenBody{Token: tokenBody(t), Secret: secret})
}

// revokeToken ends a token.
//
//	@Summary		Revoke an API token
//	@Description	Takes effect within one second, also for sessions that were opened with it.
//	@ID				revokeToken
//	@Tags			tokens
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			id	path	string	true	"id of the token"
//	@Success		204
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Problem
//	@Router			/api/v1/tokens/{id} [delete]
func (s *server) revokeToken(w http.ResponseWriter, r *http.Request) error {
	id, err := pathUUID(r, "unknown_token", "token")
	if err != nil {
		return err
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	if err := s.cfg.Auth.RevokeToken(ctx, principal(r), id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
