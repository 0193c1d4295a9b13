package controller

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/web"
)

// startingHandler serves until the controller has joined: the root endpoints
// and the not-ready page, which need no database.
func (c *Controller) startingHandler() (http.Handler, error) {
	service, err := auth.New(auth.Config{Store: startingStore{}, Logger: c.log, AllowedHosts: c.cfg.AllowedHosts})
	if err != nil {
		return nil, err
	}
	c.keepTokenFiles(service)
	cfg := c.handlersConfig()
	cfg.Auth = service
	cfg.Web = c.notReadyPage()
	return handlers.New(cfg), nil
}

// keepTokenFiles lets this controller's own tokens read status and metrics
// while the database has not yet answered, which is when operators need them.
// A file that is no good is reported when the controller joins.
func (c *Controller) keepTokenFiles(service *auth.Service) {
	file := c.cfg.AdminTokenFile
	if file == "" {
		file = filepath.Join(c.state.path, firstTokenFile)
		if _, err := os.Stat(file); err != nil {
			return // made by the first join, if it is needed
		}
	}
	if err := service.KeepTokenFile(file, adminToken, auth.Admin); err != nil {
		c.log.Warn("the token file cannot be used yet", "file", file, "err", err)
	}
}

// handlersConfig gives what both handlers share, before and after joining.
func (c *Controller) handlersConfig() handlers.Config {
	return handlers.Config{
		OnePort:  !c.cfg.TwoPhase,
		Ready:    c.readiness,
		Status:   c.status,
		Checks:   c.checks,
		Listener: c.listener.Status,
		Version:  c.version(),
		Metrics:  c.metricsHandler(),
		Farewell: c.farewell, Overloaded: web.Overloaded(c.cfg.BasePath),
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
