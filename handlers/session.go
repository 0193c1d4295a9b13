package handlers

import (
	"net/http"
	"time"

	"headgate/internal/auth"
	"headgate/internal/fault"
)

// SignInBody is what POST /session takes: one of the two.
type SignInBody struct {
	Code  string `json:"code" example:""`
	Token string `json:"token" example:""`
} //	@name	SignIn

// SessionBody says who is calling.
type SessionBody struct {
	Kind        string            `json:"kind" enums:"user,token,controller"`
	Name        string            `json:"name"`
	Role        auth.Role         `json:"role"`
	Permissions []auth.Permission `json:"permissions"`
	ExpiresAt   *time.Time        `json:"expires_at"`
} //	@name	Session

func sessionBody(p auth.Principal) SessionBody {
	return SessionBody{Kind: p.Kind, Name: p.Name, Role: p.Role, Permissions: auth.Permissions(p.Role)}
}

// getSession tells callers who they are.
//
//	@Summary	Who am I?
//	@ID			getSession
//	@Tags		session
//	@Produce	json
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Success	200	{object}	SessionBody
//	@Failure	401	{object}	Problem
//	@Failure	403	{object}	Problem
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Failure	503	{object}	Problem
//	@Router		/api/v1/session [get]
func (s *server) getSession(w http.ResponseWriter, r *http.Request) error {
	return s.writeJSON(w, http.StatusOK, sessionBody(principal(r)))
}

// signIn opens a session for a browser.
//
//	@Summary		Sign in
//	@Description	Takes a one-time code (of a sign-in link) or an API token and sets the session cookie.
//	@ID				signIn
//	@Tags			session
//	@Accept			json
//	@Produce		json
//	@Param			body	body		SignInBody	true	"one of code and token"
//	@Success		200		{object}	SessionBody
//	@Header			200		{string}	Set-Cookie	"headgate_session, HttpOnly"
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		413		{object}	Problem
//	@Failure		415		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		422		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem
//	@Router			/api/v1/session [post]
func (s *server) signIn(w http.ResponseWriter, r *http.Request) error {
	var body SignInBody
	if err := s.decode(r, &body); err != nil {
		return err
	}
	if (body.Code == "") == (body.Token == "") {
		return fault.New(fault.Invalid, "one_of_code_and_token", "Exactly one of code and token is needed.").
			WithField("/code", "give this or token")
	}
	open, secret := s.cfg.Auth.SignInWithCode, body.Code
	if body.Token != "" {
		open, secret = s.cfg.Auth.SignInWithToken, body.Token
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	value, sess, err := open(ctx, secret)
	if err != nil {
		return err
	}
	s.cfg.Auth.SetCookie(w, r, value, sess)
	return s.writeSignedIn(w, r, value, sess)
}

// writeSignedIn tells who the new session belongs to.
func (s *server) writeSignedIn(w http.ResponseWriter, r *http.Request, value string, sess auth.Session) error {
	p, err := s.cfg.Auth.SessionPrincipal(r.Context(), value)
	if err != nil {
		return err
	}
	body := sessionBody(p)
	body.ExpiresAt = timeOrNil(sess.ExpiresAt)
	return s.writeJSON(w, http.StatusOK, body)
}

// SignInLinkBody is what POST /session/links takes.
type SignInLinkBody struct {
	User string `json:"user" example:"admin"` // who the link signs in; admin when left out
} //	@name	SignInLinkRequest

// MadeSignInLinkBody is a new sign-in link; it is shown once.
type MadeSignInLinkBody struct {
	Code      string    `json:"code"`
	Path      string    `json:"path" example:"/sign-in?code=..."` // on the host of the dashboard, base path included
	ExpiresAt time.Time `json:"expires_at"`
} //	@name	SignInLink

// defaultLinkUser is the person that `headgate up` signs in.
const defaultLinkUser = "admin"

// newSignInLink makes a one-time link for a person's browser.
//
//	@Summary		Make a one-time sign-in link
//	@Description	The link signs the user in once, within ten minutes. It is spent by a click on the page that it opens, not by opening it. A user who does not exist yet is made with the role admin.
//	@ID				newSignInLink
//	@Tags			session
//	@Accept			json
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			body	body		SignInLinkBody	true	"for whom"
//	@Success		201		{object}	MadeSignInLinkBody
//	@Failure		400		{object}	Problem
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		413		{object}	Problem
//	@Failure		415		{object}	Problem
//	@Failure		421		{object}	Problem
//	@Failure		422		{object}	Problem
//	@Failure		429		{object}	Problem
//	@Failure		503		{object}	Problem
//	@Router			/api/v1/session/links [post]
func (s *server) newSignInLink(w http.ResponseWriter, r *http.Request) error {
	var body SignInLinkBody
	if err := s.decode(r, &body); err != nil {
		return err
	}
	if body.User == "" {
		body.User = defaultLinkUser
	}
	ctx, cancel := writeContext(r)
	defer cancel()
	user, err := s.cfg.Auth.EnsureUser(ctx, body.User, auth.Admin)
	if err != nil {
		return err
	}
	code, expires, err := s.cfg.Auth.NewSignInLink(ctx, user)
	if err != nil {
		return err
	}
	return s.writeJSON(w, http.StatusCreated, MadeSignInLinkBody{
		Code: code, Path: s.at("/sign-in?code=" + code), ExpiresAt: expires.UTC().Truncate(time.Microsecond),
	})
}

// signOut ends the session of the cookie.
//
//	@Summary	Sign out
//	@ID			signOut
//	@Tags		session
//	@Security	BearerAuth
//	@Security	CookieAuth
//	@Success	204
//	@Failure	401	{object}	Problem
//	@Failure	403	{object}	Problem
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Failure	503	{object}	Problem
//	@Router		/api/v1/session [delete]
func (s *server) signOut(w http.ResponseWriter, r *http.Request) error {
	if c, err := r.Cookie(auth.CookieName); err == nil {
		ctx, cancel := writeContext(r)
		defer cancel()
		if err := s.cfg.Auth.SignOut(ctx, c.Value); err != nil {
			return err
		}
	}
	s.cfg.Auth.ClearCookie(w, r)
	w.WriteHeader(http.StatusNoContent)
	return nil
}
