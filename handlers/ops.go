package handlers

import (
	"net/http"
	"strings"

	"headgate/listener"
)

// Readiness is the answer of /readyz.
type Readiness struct {
	Ready bool             `json:"ready"`
	Phase string           `json:"phase" enums:"bind,database,join,open public,serving,drain"`
	Unmet []UnmetCondition `json:"unmet"`
} //	@name	Readiness

// UnmetCondition names one thing that the controller is waiting for.
type UnmetCondition struct {
	Condition string `json:"condition" enums:"database,migrations,shards,first_sweep,reconcile,self_call,descriptors,memory,scheduler,outbound,public_port,draining"`
	Detail    string `json:"detail"`
} //	@name	UnmetCondition

// Version is the answer of /version.
type Version struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
} //	@name	Version

// Health is the answer of /healthz and /livez.
type Health struct {
	Status string `json:"status" enums:"ok"`
} //	@name	Health

// healthz says that the process answers, and nothing else.
//
//	@Summary	Is the process there?
//	@ID			healthz
//	@Tags		operations
//	@Produce	json
//	@Success	200	{object}	Health
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Router		/healthz [get]
func (s *server) healthz(w http.ResponseWriter, _ *http.Request) error {
	return s.writeJSON(w, http.StatusOK, Health{Status: "ok"})
}

// livez says whether the process is sound; a supervisor restarts it if not.
//
//	@Summary	Should the process be left running?
//	@ID			livez
//	@Tags		operations
//	@Produce	json
//	@Success	200	{object}	Health
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Failure	503	{object}	Problem
//	@Router		/livez [get]
func (s *server) livez(w http.ResponseWriter, r *http.Request) error {
	if s.cfg.Live != nil {
		if err := s.cfg.Live(r.Context()); err != nil {
			return err
		}
	}
	return s.writeJSON(w, http.StatusOK, Health{Status: "ok"})
}

// readyz names the conditions that are not met.
//
//	@Summary		Does the controller serve?
//	@Description	Answers 200 while the controller serves and the public port is open, and 503 with the unmet conditions before that, while a check of the stability gate fails, and while draining. The body is the same in both cases.
//	@ID				readyz
//	@Tags			operations
//	@Produce		json
//	@Success		200	{object}	Readiness
//	@Failure		421	{object}	Problem
//	@Failure		429	{object}	Problem
//	@Failure		503	{object}	Readiness
//	@Router			/readyz [get]
func (s *server) readyz(w http.ResponseWriter, _ *http.Request) error {
	ready := s.cfg.Ready()
	if ready.Unmet == nil {
		ready.Unmet = []UnmetCondition{}
	}
	status := http.StatusOK
	if !ready.Ready {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Cache-Control", "no-store")
	return s.writeJSON(w, status, ready)
}

// version names the program.
//
//	@Summary	Which version runs?
//	@ID			version
//	@Tags		operations
//	@Produce	json
//	@Success	200	{object}	Version
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Router		/version [get]
func (s *server) version(w http.ResponseWriter, _ *http.Request) error {
	return s.writeJSON(w, http.StatusOK, s.cfg.Version)
}

// ListenerStatus is the listener in full, with what decides whether it opens
// the public port.
type ListenerStatus struct {
	listener.Status
	Checks []Check `json:"checks"` // of the stability gate; none until the controller has joined
} //	@name	ListenerStatus

// listenerStatus shows the two ports in full.
//
//	@Summary		The two ports in full
//	@Description	On the controller port only.
//	@ID				listenerStatus
//	@Tags			operations
//	@Produce		json
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Success		200	{object}	ListenerStatus
//	@Failure		401	{object}	Problem
//	@Failure		403	{object}	Problem
//	@Failure		404	{object}	Problem	"on the public port"
//	@Failure		421	{object}	Problem
//	@Router			/status/listener [get]
func (s *server) listenerStatus(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Cache-Control", "no-store")
	st := ListenerStatus{Status: s.cfg.Listener()}
	if s.cfg.Checks != nil {
		st.Checks = s.cfg.Checks()
	}
	st.Checks = notNil(st.Checks)
	return s.writeJSON(w, http.StatusOK, st)
}

// prometheus serves the metrics.
//
//	@Summary		Metrics for Prometheus
//	@Description	On the controller port only.
//	@ID				metrics
//	@Tags			operations
//	@Produce		plain
//	@Security		BearerAuth
//	@Security		CookieAuth
//	@Param			name[]	query		string	false	"only the metric of this name"
//	@Success		200		{string}	string	"text exposition format"
//	@Failure		401		{object}	Problem
//	@Failure		403		{object}	Problem
//	@Failure		404		{object}	Problem	"on the public port"
//	@Failure		421		{object}	Problem
//	@Router			/metrics [get]
func (s *server) prometheus(w http.ResponseWriter, r *http.Request) error {
	return pass(s.cfg.Metrics, w, r)
}

// contractJSON serves the OpenAPI document.
//
//	@Summary	This document as JSON
//	@ID			contractJSON
//	@Tags		contract
//	@Produce	json
//	@Success	200	{object}	map[string]any	"OpenAPI 3.1"
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Router		/api/v1/openapi.json [get]
func (s *server) contractJSON(w http.ResponseWriter, r *http.Request) error {
	return pass(s.cfg.OpenAPI, w, r)
}

// contractYAML serves the OpenAPI document.
//
//	@Summary	This document as YAML
//	@ID			contractYAML
//	@Tags		contract
//	@Produce	application/yaml
//	@Success	200	{string}	string	"OpenAPI 3.1"
//	@Failure	421	{object}	Problem
//	@Failure	429	{object}	Problem
//	@Router		/api/v1/openapi.yaml [get]
func (s *server) contractYAML(w http.ResponseWriter, r *http.Request) error {
	return pass(s.cfg.OpenAPI, w, r)
}

func (s *server) swagger(w http.ResponseWriter, r *http.Request) error {
	return pass(s.cfg.Swagger, w, r)
}

func (s *server) reference(w http.ResponseWriter, r *http.Request) error {
	return pass(s.cfg.Reference, w, r)
}

// pass serves a path by a handler that was given in Config.
func pass(h http.Handler, w http.ResponseWriter, r *http.Request) error {
	if h == nil {
		return noSuchPath(r)
	}
	h.ServeHTTP(w, r)
	return nil
}

// problemPage explains the type address of a problem document in plain text.
func (s *server) problemPage(w http.ResponseWriter, r *http.Request) error {
	code := strings.TrimPrefix(r.URL.Path, "/problems/")
	if code == "" || strings.ContainsFunc(code, notCode) {
		return noSuchPath(r)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte("Problem type " + code + "\n\n" +
		"An answer with this type carries in detail what went wrong, in errors the parts of\n" +
		"the request that are wrong, and in hint what to do next. The code is stable: programs\n" +
		"may rely on it. Its request_id finds the request in the controller's log.\n"))
	return nil
}

func notCode(c rune) bool { return c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9') }
