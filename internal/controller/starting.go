package controller

import (
	"context"
	"net/http"
	"runtime"
	"runtime/debug"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/internal/fault"
)

// startingHandler serves until the controller has joined: the root endpoints
// and the not-ready page, which need no database.
func (c *Controller) startingHandler() (http.Handler, error) {
	service, err := auth.New(auth.Config{Store: startingStore{}, Logger: c.log, AllowedHosts: c.cfg.AllowedHosts})
	if err != nil {
		return nil, err
	}
	cfg := c.handlersConfig()
	cfg.Auth = service
	cfg.Web = c.notReadyPage()
	return handlers.New(cfg), nil
}

// handlersConfig gives what both handlers share, before and after joining.
func (c *Controller) handlersConfig() handlers.Config {
	return handlers.Config{
		Ready:    c.ready.report,
		Status:   c.status,
		Listener: c.listener.Status,
		Version:  c.version(),
		Metrics:  c.metricsHandler(),
		Farewell: c.farewell,
		BasePath: c.cfg.BasePath, TrustedProxies: c.cfg.TrustedProxies,
		Logger: c.opts.Logger.With("component", "http"),
	}
}

func (c *Controller) version() handlers.Version {
	v := handlers.Version{Version: c.opts.Version, Go: runtime.Version()}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	return v
}

// startingStore stands for the database before there is one: nobody can be
// recognised, and nothing else of auth.Store is reached before joining.
type startingStore struct{ auth.Store }

func errStarting() error {
	return fault.New(fault.Unavailable, "starting", "The controller is starting and cannot check credentials yet.").
		WithHint("/readyz names what it waits for; try again in a second.")
}

// TokenByHash knows no token yet.
func (startingStore) TokenByHash(context.Context, [32]byte) (auth.Token, error) {
	return auth.Token{}, errStarting()
}

// SessionByHash knows no session yet.
func (startingStore) SessionByHash(context.Context, [32]byte) (auth.Session, error) {
	return auth.Session{}, errStarting()
}

// UseSignInLink spends no link yet.
func (startingStore) UseSignInLink(context.Context, [32]byte) (auth.User, error) {
	return auth.User{}, errStarting()
}
